"""Pipelines that go through the queue in packs: which ones, and that nobody notices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from forebay.service.pipelines import SplitRange
from forebay.service.pipelines.tf_data.element_packs import (
    MAX_PACK_ELEMENTS,
    calls_functions,
    elements_per_pack,
)
from forebay.service.pipelines.tf_data.element_specs import component_specs
from forebay.service.pipelines.tf_data.graphs import Graph
from forebay.service.pipelines.tf_data.imports import graph_of
from forebay.service.pipelines.tf_data.pipeline import TfDataPipeline
from forebay.service.pipelines.tf_data.run import TfDataRun

from .pipelines import OneSource

Dataset = tf.data.Dataset


def pack_of(dataset: Any) -> int:
    if calls_functions(Graph(graph_of(dataset))):
        return 1
    return elements_per_pack(component_specs(dataset.element_spec))


@pytest.mark.parametrize(
    ("dataset", "elements"),
    [
        (lambda: Dataset.range(10), MAX_PACK_ELEMENTS),
        (lambda: Dataset.range(10).shuffle(3).repeat().take(5), MAX_PACK_ELEMENTS),
        (lambda: Dataset.from_tensor_slices(tf.zeros([9, 1024], tf.uint8)), 64),
        (
            lambda: Dataset.from_tensor_slices(["a"]).interleave(
                tf.data.TFRecordDataset, num_parallel_calls=2
            ),
            1,
        ),
        (lambda: Dataset.zip(Dataset.range(9), tf.data.TextLineDataset("a")), 1),
        (lambda: Dataset.from_tensor_slices(["a", "b"]), 1),
        (lambda: Dataset.zip(Dataset.range(9), Dataset.range(9)), MAX_PACK_ELEMENTS),
        # Functions are called, and may take their time; shapes differ; elements are large.
        (lambda: Dataset.range(10).map(lambda x: x + 1), 1),
        (lambda: Dataset.range(10).filter(lambda x: x > 1), 1),
        (lambda: Dataset.range(9).flat_map(lambda x: Dataset.from_tensors(x * 2)), 1),
        (lambda: Dataset.range(9).interleave(lambda x: Dataset.range(x).map(tf.square)), 1),
        (lambda: Dataset.range(10).batch(3), 1),
        (lambda: Dataset.from_tensors(tf.zeros([1 << 20])).repeat(3), 1),
        (lambda: Dataset.from_tensors(tf.zeros([0])).repeat(3), 1),
        (lambda: Dataset.from_tensor_slices(tf.ragged.constant([[[1], [2, 3]], [[4]]])), 1),
    ],
)  # fmt: skip
def test_only_pipelines_that_call_no_function_are_packed(
    dataset: Callable[[], Any], elements: int
) -> None:
    assert pack_of(dataset()) == elements


@pytest.mark.parametrize("made", [Dataset.from_tensors, Dataset.from_tensor_slices])
@pytest.mark.parametrize(
    "dtype", ["int4", "uint4", "qint16", "quint16", "qint8", "float8_e4m3fn", "float8_e5m2"]
)
def test_dtypes_that_tensorflow_cannot_batch_are_read(
    dtype: str, made: Callable[[Any], Any]
) -> None:
    narrow = {"int4": np.int8, "uint4": np.int8}.get(dtype, np.float32)
    kind = tf.as_dtype(dtype)
    if kind.is_quantized:
        kept = {"qint8": tf.int8, "qint16": tf.int16, "quint16": tf.uint16}[dtype]
        values = tf.bitcast(tf.constant([1, 2, 3], kept), kind)
    else:
        values = tf.cast(tf.constant([1, 2, 3], narrow), kind)
    dataset = made(values)
    pipeline = TfDataPipeline(graph_of(dataset), element_spec=dataset.element_spec)
    blocks = pipeline.run(None).blocks()
    found = [np.asarray(block.components[0].values).astype(int).ravel() for block in blocks]
    assert np.concatenate(found).tolist() == [1, 2, 3]


def test_what_is_there_when_splits_run_dry_waits_for_no_more_than_a_pack() -> None:
    dry, more = threading.Event(), threading.Event()

    class Feed(OneSource):
        def next_range(self, source: int, opening: int, endless: bool) -> SplitRange | None:
            if not dry.is_set():
                dry.set()
                return SplitRange(0, 10 * MAX_PACK_ELEMENTS + 7, 0)
            more.wait()
            return None

    dataset = Dataset.range(10**6)
    executor = TfDataPipeline(graph_of(dataset), element_spec=dataset.element_spec).run(Feed())
    blocks = executor.blocks()
    seen = 0
    while seen < 10 * MAX_PACK_ELEMENTS:
        seen += next(blocks).count
    assert dry.is_set()
    more.set()
    assert seen + sum(block.count for block in blocks) == 10 * MAX_PACK_ELEMENTS + 7


def test_variants_are_never_packed() -> None:
    """As a stock client registers ragged tensors without their spec: TensorFlow's own variants."""
    rows = tf.ragged.constant([[1], [2, 3], [], [4]])
    dataset = Dataset.from_tensor_slices(rows)
    blocks = list(TfDataPipeline(graph_of(dataset)).run(None).blocks())
    assert sum(block.count for block in blocks) == 4
    assert elements_per_pack([tf.TensorSpec([], tf.variant)]) == 1


def test_the_first_element_travels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for it does not wait for others to be copied, however many there are by then."""
    ready = TfDataRun._ready

    def ready_with_several(run: TfDataRun) -> int:
        while (found := ready(run)) < 2:
            time.sleep(0.001)
        return found

    monkeypatch.setattr(TfDataRun, "_ready", ready_with_several)
    images = Dataset.from_tensors(np.zeros((224, 224, 3), np.uint8)).repeat()
    run = TfDataPipeline(graph_of(images), element_spec=images.element_spec).run(None)
    with closing(run.blocks()) as blocks:
        assert next(blocks).count == 1
        assert next(blocks).count > 1

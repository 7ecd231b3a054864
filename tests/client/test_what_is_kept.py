"""Datasets of blocks come and go, and what was kept for them goes with them: not before."""

from __future__ import annotations

import gc
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from forebay import service
from forebay.service.blocks import Block, Component
from forebay.service.client import block_sources, tf_elements
from forebay.service.client.tf_elements import dataset_of_blocks

SPEC = tf.TensorSpec([], tf.int64)


@pytest.fixture(autouse=True)
def little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sources, "DROPPED", 3)
    monkeypatch.setattr(tf_elements, "MAKERS", 2)
    monkeypatch.setattr(tf_elements, "makers", {})
    monkeypatch.setattr(tf_elements, "sources", block_sources.BlockSources())


def blocks(numbers: Any) -> Generator[Block, None, None]:
    for number in numbers:
        yield Block(1, (Component(np.array([number], np.int64)),))


def dataset(first: int, spec: Any = SPEC) -> Any:
    return dataset_of_blocks(lambda: blocks(range(first, first + 3)), spec)


def read(of: Any) -> list[int]:
    return [int(number) for number in of]


def others(number: int = 10) -> None:
    """Make, read and drop other datasets."""
    for first in range(number):
        assert read(dataset(first)) == [first, first + 1, first + 2]
    gc.collect()


def graph_of(of: Any) -> Any:
    """The same dataset without its Python object, as tf.distribute clones it."""
    return dataset_ops._VariantDataset(of._variant_tensor, of.element_spec)


def test_dropped_datasets_are_kept_in_an_lru() -> None:
    cloned = graph_of(dataset(100))
    for _ in range(10):
        others(2)
        assert read(cloned) == [100, 101, 102], "the ones used last are kept"
    assert len(tf_elements.sources) <= 3 + 1
    others()
    with pytest.raises(tf.errors.UnknownError, match="the program dropped this dataset, and 3 oth"):
        read(cloned)


def test_referenced_datasets_are_kept() -> None:
    held = [dataset(first) for first in range(10)]
    behind = [dataset(first).map(lambda i: i).batch(1).unbatch() for first in range(10)]
    others()
    for some in (held, behind):
        assert [read(each) for each in some] == [[i, i + 1, i + 2] for i in range(10)]


def test_an_iteration_outlives_its_dataset() -> None:
    """Neither its dataset nor another one of the same spec is kept."""
    iterator = iter(graph_of(dataset(100)))
    assert int(next(iterator)) == 100
    others()
    for dtype in (tf.int32, tf.int16, tf.int8):
        dataset(0, tf.TensorSpec([], dtype))
    gc.collect()
    assert read(iterator) == [101, 102]
    del iterator
    assert not tf_elements.under_way


def test_a_tf_function_keeps_its_datasets() -> None:
    def of_all() -> Any:
        return dataset(100).reduce(tf.constant(0, tf.int64), lambda a, b: a + b)

    total = tf.function(of_all, autograph=False)  # which users' datasets never meet
    for _ in range(3):
        assert int(total()) == 303
        others()
    with_it = len(tf_elements.sources)
    del total
    gc.collect()
    others()
    assert len(tf_elements.sources) == with_it - 1


def makers() -> list[Any]:
    return [each for each in gc.get_objects() if isinstance(each, tf_elements.Maker)]


def test_kinds_of_datasets_are_bounded() -> None:
    before = makers()  # of other tests
    kinds = [tf.TensorSpec([None] * rank, tf.int64) for rank in range(1, 7)]
    held = [dataset(0, spec) for spec in kinds]
    assert len(tf_elements.makers) == 2
    del held
    others()
    made = [each for each in makers() if not any(each is one for one in before)]
    assert len(made) <= 2 + 3 + 1


def test_ids_that_functions_have_read_are_bounded() -> None:
    with (
        service.DispatchServer() as dispatcher,
        service.WorkerServer(service.WorkerConfig(dispatcher.address)),
    ):
        ids = [
            service.register_dataset(dispatcher.target, tf.data.Dataset.range(number))
            for number in range(1, 11)
        ]

        def of(dataset_id: tf.Tensor) -> tf.data.Dataset:
            return service.from_dataset_id("parallel_epochs", dispatcher.target, dataset_id, SPEC)

        found = tf.data.Dataset.from_tensor_slices(ids).flat_map(of)
        for _ in range(2):
            assert read(found) == [i for number in range(1, 11) for i in range(number)]
        assert len(tf_elements.sources) <= 3 + 1

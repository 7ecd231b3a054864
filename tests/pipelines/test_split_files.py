"""An error about a file's content names the file."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from forebay.service.errors import PipelineError
from forebay.service.pipelines import SplitRange
from forebay.service.pipelines.tf_data.imports import graph_of
from forebay.service.pipelines.tf_data.pipeline import TfDataPipeline
from forebay.service.pipelines.tf_data.split_sources import split_sources

from .pipelines import Dataset, Leases, write_records

Read = Callable[[TfDataPipeline, Leases], Any]


def of_names(paths: list[str], compression: str = "") -> Dataset:
    return tf.data.TFRecordDataset(paths, compression)


def of_dicts(paths: list[str]) -> Dataset:
    """As TensorFlow Datasets' are registered."""
    named = {"a": ["shard"] * len(paths), "path": paths}
    files = tf.data.Dataset.from_tensor_slices(named)
    return files.flat_map(lambda file: tf.data.TFRecordDataset(file["path"])).batch(2)


def of_pairs(paths: list[str]) -> Dataset:
    files = tf.data.Dataset.from_tensor_slices(paths).shuffle(9, seed=1)
    pairs = tf.data.Dataset.zip(tf.data.Dataset.range(len(paths)), files)
    return pairs.interleave(lambda _, path: tf.data.TFRecordDataset(path), cycle_length=4)


def leased(pipeline: TfDataPipeline, leases: Leases) -> Any:
    return pipeline.run(leases)


def whole(pipeline: TfDataPipeline, _: Leases) -> Any:
    return pipeline.run(None)


def bundled(pipeline: TfDataPipeline, _: Leases) -> Any:
    return pipeline.bundle(SplitRange(2, 1, 0), number=2, seed=1)


@pytest.mark.parametrize("read", [leased, whole, bundled])
@pytest.mark.parametrize("dataset", [of_names, of_dicts, of_pairs])
def test_a_damaged_file_is_named(
    tmp_path: Path, dataset: Callable[[list[str]], Dataset], read: Read
) -> None:
    paths = write_records(tmp_path, files=4, records=9)
    damaged = bytearray(Path(paths[2]).read_bytes())
    damaged[40] ^= 1
    Path(paths[2]).write_bytes(damaged)
    error = failure(dataset(paths), read)
    assert error.code == "DATA_LOSS"
    assert error.message == f"corrupted record at 36 (while it read {paths[2]})"


@pytest.mark.parametrize("files", [3, 10])
def test_where_it_is_not_known_all_files_are_named_that_it_may_be(
    tmp_path: Path, files: int
) -> None:
    paths = write_records(tmp_path, files=files, records=9)
    for path in map(Path, paths):
        path.write_bytes(gzip.compress(path.read_bytes()))
    Path(paths[1]).write_bytes(b"no gzip")
    all_of_them = " or ".join(paths) if files < 9 else f"one of 10 files, {paths[0]} to {paths[-1]}"
    error = failure(of_names(paths, "GZIP"), leased, at_once=files)
    assert error.message.endswith(f" (while it read {all_of_them})")


def test_strings_that_are_no_files_are_not_named() -> None:
    words = tf.data.Dataset.from_tensor_slices(["a", "b"]).map(tf.strings.to_number)
    assert "while it read" not in failure(words, leased).message


def failure(dataset: Dataset, read: Read, at_once: int = 1) -> PipelineError:
    graph = graph_of(dataset)
    sources = split_sources(graph)
    pipeline = TfDataPipeline(graph, sources, element_spec=dataset.element_spec)
    with pytest.raises(PipelineError) as raised:
        list(read(pipeline, Leases(sources, at_once)).blocks())
    pipeline.close()
    return raised.value

"""--data-root: what a worker reads lies below it, whoever computes the name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from forebay.journal.proto import events_pb2 as ev
from forebay.service.errors import PermissionDenied
from forebay.service.pipelines import PythonRules, open_pipeline, open_saved
from forebay.service.pipelines.tf_data.data_roots import confined, pattern_of
from forebay.service.proto import tf_service_pb2 as tf_pb

from ..record_files import Register

Dataset = Any


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("data/a.txt", "data/..b.txt", "secret/token", "data-2/token"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{name}\n")
    return tmp_path / "data"


def lines(root: Path, dataset: Dataset) -> list[bytes]:
    """What a worker with this root reads."""
    graph = confined(dataset._as_serialized_graph().numpy(), [str(root)])
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph)
    read = dataset_ops._VariantDataset(variant, dataset.element_spec)
    return [bytes(element) for element in read.as_numpy_iterator()]


COMPUTED: dict[str, Callable[[Dataset], Dataset]] = {
    "lines": lambda names: names.flat_map(tf.data.TextLineDataset),
    "interleaved": lambda names: names.interleave(tf.data.TextLineDataset, 2, num_parallel_calls=2),
    "joined": lambda names: names.flat_map(
        lambda x: tf.data.TextLineDataset(tf.strings.join(["", x]))
    ),
    "within a function": lambda names: names.flat_map(
        lambda x: tf.data.Dataset.from_tensors(x).flat_map(tf.data.TextLineDataset)
    ),
    "several": lambda names: names.batch(1).flat_map(tf.data.TextLineDataset),
    "read whole": lambda names: names.map(tf.io.read_file).map(tf.strings.strip),
    "fixed length": lambda names: names.flat_map(lambda x: tf.data.FixedLengthRecordDataset(x, 1)),
}


@pytest.mark.parametrize("how", COMPUTED)
def test_computed_names_are_compared_as_they_are_read(how: str, root: Path) -> None:
    def read(*names: str) -> list[bytes]:
        made = tf.data.Dataset.from_tensor_slices([f"{root}/{name}" for name in names])
        return lines(root, COMPUTED[how](made))

    assert read("a.txt", "..b.txt", ".//a.txt")
    for name in ("../secret/token", "../data-2/token", "x/../../secret/token", "..", "./../a.txt"):
        with pytest.raises(tf.errors.OpError, match=r"not below --data-root|Not a directory"):
            read(name)


def test_constant_names_are_compared_at_once(root: Path) -> None:
    def read(name: str) -> list[bytes]:
        return lines(root, tf.data.Dataset.range(1).map(lambda _: tf.io.read_file(name)))

    assert read(f"{root}/a.txt") == [b"data/a.txt\n"]
    for name in (f"{root}/../secret/token", "/etc/passwd", "a.txt", ""):
        with pytest.raises(PermissionDenied, match=r"reads files below .*--data-root"):
            read(name)


def test_globbed_names_stay_below_the_root(root: Path) -> None:
    def found(pattern: str) -> list[bytes]:
        patterns = tf.data.Dataset.from_tensors(pattern)
        return lines(root, patterns.map(tf.io.matching_files).unbatch())

    assert found(f"{root}/a*") == [f"{root}/a.txt".encode()]
    assert found(f"{root}/../secret/*") == []
    assert found(f"{root}/*/../secret/*") == []


@pytest.mark.parametrize("path", ["", "/", "/a/..", "/..", "/./../x", "/x/..", "//../x"])
def test_a_pattern_is_a_directory_s(path: str) -> None:
    pattern = re.compile(pattern_of(["/r.t", "gs://b/"]))
    assert bool(pattern.fullmatch(f"/r.t{path}")) == (".." not in path.split("/"))
    assert not pattern.fullmatch(f"/r.t{path}\n/../x/..")
    assert not pattern.fullmatch(f"/rat{path}x") and not pattern.fullmatch(f"file:///r.t{path}")


def test_files_of_records_lie_below_the_root(root: Path, register: Register) -> None:
    rules = PythonRules(allowed=False, data_roots=(str(root),))
    for directory in (root, root.parent / "secret"):
        with tf.io.TFRecordWriter(str(directory / "r.tfrecord")) as writer:
            writer.write(b"x")
    for path, how, fits in (
        (root, {}, True),
        (root.parent / "secret", {}, False),
        (root, {"index_dir": str(root.parent / "indexes")}, False),
        (root, {"storage_options": {"endpoint": "http://127.0.0.1", "anonymous": True}}, False),
    ):
        request = register(str(path / "r.tfrecord"), **how)
        definition = ev.DatasetDefinition(
            python_function=ev.PythonFunction(no_code=True), structure=request.structure,
            sources=request.sources,
        )  # fmt: skip
        if fits:
            open_pipeline(definition, request.python, python=rules).close()
        else:
            with pytest.raises(PermissionDenied, match="reads files below"):
                open_pipeline(definition, request.python, python=rules)


def test_graphs_and_saved_datasets_are_confined_where_they_are_opened(root: Path) -> None:
    rules = PythonRules(data_roots=(str(root),))
    reading = tf.data.Dataset.range(1).map(lambda _: tf.io.read_file("/etc/hostname"))
    graph = reading._as_serialized_graph().numpy()
    definition = ev.DatasetDefinition(tf_data_graph=ev.TfDataGraph(blob="b"))
    metadata = tf_pb.DataServiceMetadata()
    definition.metadata = metadata.SerializeToString()
    with pytest.raises(PermissionDenied, match="reads '/etc/hostname'"):
        open_pipeline(definition, graph, python=rules)
    with pytest.raises(PermissionDenied, match="reads '/etc/hostname'"):
        open_saved(graph, [], rules.data_roots)
    definition.sources.add(saved_chunks=ev.SavedChunks(path="/save"))
    harmless = tf.data.Dataset.range(3)._as_serialized_graph().numpy()
    with pytest.raises(PermissionDenied, match="reads '/save'"):
        open_pipeline(definition, harmless, python=rules)

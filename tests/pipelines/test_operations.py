"""What a graph may do that the role `trainer` registers: what is usual; of files, records alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.ops import gen_debug_ops

from forebay.service.pipelines.tf_data.operations import forbidden

from .pipelines import ELEMENTS

ROOT = Path(__file__).parents[2]


def test_the_list_is_that_of_the_installed_tensorflow() -> None:
    path = ROOT / "scripts" / "operations.py"
    spec = importlib.util.spec_from_file_location("operations", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PATH.read_text() == script.text(), "run scripts/operations.py, and look at it"


def graph(dataset: Any) -> bytes:
    return dataset._as_serialized_graph(strip_device_assignment=True).numpy()


PARSED = {"image": tf.io.FixedLenFeature([], tf.string), "n": tf.io.VarLenFeature(tf.int64)}


def table(x: Any) -> Any:
    keys, values = tf.constant(["a", "b"]), tf.constant([1, 2], tf.int64)
    initializer = tf.lookup.KeyValueTensorInitializer(keys, values)
    return tf.lookup.StaticHashTable(initializer, -1).lookup(tf.strings.as_string(x))


def image(record: Any) -> Any:
    decoded = tf.io.decode_jpeg(tf.io.parse_single_example(record, PARSED)["image"], channels=3)
    cropped = tf.image.random_crop(tf.image.random_flip_left_right(decoded), [8, 8, 3])
    resized = tf.image.resize(tf.image.random_brightness(cropped, 0.1), [4, 4], antialias=True)
    return tf.image.rgb_to_grayscale(tf.cast(resized, tf.float32) / 255.0)


def words(line: Any) -> Any:
    split = tf.strings.split(tf.strings.lower(tf.strings.regex_replace(line, r"[^a-z]", " ")))
    return tf.strings.to_hash_bucket_fast(split, 100), tf.strings.unicode_decode(line, "UTF-8")


def loop(x: Any) -> Any:
    total = tf.constant(0, tf.int64)
    for i in tf.range(x):
        if i % 2 == 0:
            total += i
    tf.debugging.assert_non_negative(total)
    return tf.map_fn(lambda y: y + total, tf.range(3, dtype=tf.int64))


RANGE = tf.data.Dataset.range(9)
FILES = tf.data.Dataset.from_tensor_slices(["/data/a", "/data/b"])
RNG = tf.random.Generator.from_seed(1)
USUAL: dict[str, Callable[[], Any]] = {
    "images of records": lambda: FILES.interleave(tf.data.TFRecordDataset, 2).map(image),
    "lines": lambda: tf.data.TextLineDataset(FILES).map(words),
    "csv": lambda: tf.data.experimental.CsvDataset(["/data/a"], [tf.int32]),
    "fixed length": lambda: tf.data.FixedLengthRecordDataset(["/data/a"], 8),
    "globbed": lambda: tf.data.Dataset.list_files(str(ROOT / "*.md"), shuffle=True, seed=1),
    "tables": lambda: RANGE.map(table),
    "loops": lambda: RANGE.map(loop).filter(lambda x: tf.reduce_all(x >= 0)),
    "random": lambda: RANGE.map(lambda x: (tf.random.normal([3]), tf.random.shuffle([x, x]))),
    "a generator": lambda: RANGE.map(lambda _: RNG.uniform([2])),
    "transformations": lambda: (
        RANGE.cache().shuffle(9).repeat(2).window(2).flat_map(lambda w: w.batch(2)).prefetch(2)
    ),
    "buckets": lambda: RANGE.map(lambda x: tf.range(x)).bucket_by_sequence_length(
        tf.size, [3, 6], [2, 2, 2]
    ),
    "groups": lambda: RANGE.group_by_window(lambda x: x % 2, lambda _, w: w.batch(3), 3),
    "a scan": lambda: RANGE.scan(tf.constant(0, tf.int64), lambda s, x: (s + x, s)).unique(),
    "mixed": lambda: tf.data.Dataset.sample_from_datasets([RANGE, RANGE.skip(2)], [0.5, 0.5]),
    "zipped": lambda: tf.data.Dataset.zip((RANGE, RANGE)).concatenate(
        tf.data.Dataset.zip((RANGE, RANGE)).take(1)
    ),
    "ragged": lambda: RANGE.map(lambda x: tf.range(x)).ragged_batch(3),
    "sparse": lambda: RANGE.map(lambda x: tf.sparse.from_dense([x, 0])).batch(2),
    "another dataset": lambda: RANGE.map(lambda x: RANGE.reduce(x, lambda a, b: a + b)),
    "matrices": lambda: RANGE.map(lambda x: tf.linalg.matvec(tf.eye(9), tf.one_hot(x, 9))),
}


@pytest.mark.parametrize("name", USUAL)
def test_usual_pipelines_are_allowed(name: str) -> None:
    assert forbidden(graph(USUAL[name]())) == ""


@pytest.mark.parametrize("name", [name for name in ELEMENTS if "unknown rank" not in name])
def test_each_kind_of_element_is_allowed(name: str) -> None:
    """But for what from_generator gives, which is a function in Python."""
    assert forbidden(graph(ELEMENTS[name]())) == ""


def raw(call: Callable[[Any], Any]) -> Callable[[], Any]:
    def mapped(x: Any) -> Any:
        with tf.control_dependencies(
            [op for op in [call(tf.strings.as_string(x))] if op is not None]
        ):
            return tf.identity(x)

    return lambda: RANGE.map(mapped)


ATTACKS: dict[str, Callable[[], Any]] = {
    "ReadFile": raw(tf.io.read_file),
    "WriteFile": raw(lambda x: tf.io.write_file("/tmp/x", x)),
    "SaveV2": raw(lambda x: tf.raw_ops.SaveV2(
        prefix=x, tensor_names=["a"], shape_and_slices=[""], tensors=[x])),
    "RestoreV2": raw(lambda x: tf.raw_ops.RestoreV2(
        prefix=x, tensor_names=["a"], shape_and_slices=[""], dtypes=[tf.string])[0]),
    "WholeFileReaderV2": raw(lambda _: tf.raw_ops.WholeFileReaderV2()),
    "ImmutableConst": raw(lambda _: tf.raw_ops.ImmutableConst(
        dtype=tf.int8, shape=[1], memory_region_name="/etc/passwd")),
    "EagerPyFunc": raw(lambda x: tf.py_function(lambda y: y, [x], tf.string)),
    "PyFunc": raw(lambda x: tf.numpy_function(lambda y: y, [x], tf.string)),
    "Print": raw(lambda x: tf.raw_ops.Print(input=x, data=[x])),
    "PrintV2": raw(tf.print),
    "DebugIdentity": raw(lambda x: gen_debug_ops.debug_identity(
        x, debug_urls=["file:///tmp/x"])),
    "DecodeProtoV2": raw(lambda x: tf.io.decode_proto(
        x, "m", ["a"], [tf.int32], descriptor_source="/etc/passwd").sizes),
    "InitializeTableFromTextFileV2": raw(lambda x: tf.lookup.StaticHashTable(
        tf.lookup.TextFileInitializer("/etc/passwd", tf.string, 0, tf.int64, 1), -1).lookup(x)),
    "RemoteCall": raw(lambda x: tf.raw_ops.RemoteCall(
        target="/job:a", args=[x], Tout=[tf.string],
        f=tf.function(lambda y: y).get_concrete_function(tf.TensorSpec([], tf.string)))[0]),
    "DatasetFromGraph": raw(lambda x: tf.raw_ops.DatasetFromGraph(graph_def=x)),
    "CacheDatasetV2": lambda: RANGE.cache("/tmp/x"),
    "SnapshotDatasetV2": lambda: RANGE.snapshot("/tmp/x"),
    "SqlDataset": lambda: tf.data.experimental.SqlDataset("sqlite", "/x", "select", (tf.string,)),
}  # fmt: skip


@pytest.mark.parametrize("op", ATTACKS)
def test_what_reads_or_writes_files_opens_sockets_or_runs_code_is_not(op: str) -> None:
    found = forbidden(graph(ATTACKS[op]()))
    assert f"({op})" in found, found


def test_a_cache_whose_file_is_computed_is_refused() -> None:
    computed = tf.data.Dataset.from_tensors("").flat_map(
        lambda name: RANGE.cache(tf.strings.join([name, "/tmp", "/x"]))
    )
    assert "(CacheDatasetV2)" in forbidden(graph(computed))
    parsed = graph_pb2.GraphDef.FromString(graph(RANGE.cache()))
    (cache,) = [node for node in parsed.node if node.op == "CacheDatasetV2"]
    (name,) = [node for node in parsed.node if node.name == cache.input[1]]
    name.attr["value"].tensor.tensor_content = b"\x06/tmp/x"  # which TensorFlow reads, too
    assert "(CacheDatasetV2)" in forbidden(parsed.SerializeToString())
    name.attr["value"].tensor.ClearField("tensor_content")
    assert forbidden(parsed.SerializeToString()) == ""
    name.op = "StringJoin"
    assert "(CacheDatasetV2)" in forbidden(parsed.SerializeToString())
    del cache.input[1:]
    assert "(CacheDatasetV2)" in forbidden(parsed.SerializeToString())
    within = tf.data.Dataset.from_tensors("").flat_map(lambda _: RANGE.cache())
    assert forbidden(graph(within)) == ""


@pytest.mark.parametrize(
    "op",
    [
        *(
            "LMDBDataset",
            "CreateSummaryFileWriter",
            "RpcClient",
            "RpcServer",
            "DataServiceDatasetV4",
        ),
        *("SaveDatasetV2", "FileSystemSetConfiguration", "XlaCallModule", "CollectiveReduceV2"),
        *("_Send", "_HostRecv", "DumpTensor", "RecordInput", "Abort", "IteratorFromStringHandle"),
        "AnOperationOfALibrary",
    ],
)
def test_other_operations_are_not_either(op: str) -> None:
    parsed = graph_pb2.GraphDef.FromString(graph(RANGE))
    parsed.node.add(name="door", op=op)
    assert f"'door' ({op})" in forbidden(parsed.SerializeToString())


def test_functions_that_are_not_called_and_such_with_an_operation_s_name_count() -> None:
    parsed = graph_pb2.GraphDef.FromString(graph(RANGE.map(lambda x: x + 1)))
    function = parsed.library.function.add()
    function.signature.name = "ReadFile"
    node = parsed.node.add(name="door", op="ReadFile")
    assert "'door' (ReadFile)" in forbidden(parsed.SerializeToString())
    parsed.node.remove(node)
    assert forbidden(parsed.SerializeToString()) == ""
    function.node_def.add(name="door", op="WriteFile")
    assert "'door' (WriteFile) in function 'ReadFile'" in forbidden(parsed.SerializeToString())

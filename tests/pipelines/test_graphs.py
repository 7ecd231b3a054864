"""Graphs as data: split sources, sanitizing, what is wrong with the rest, and what the role
`trainer` may register: what is usual; of files, records alone.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.ops import gen_debug_ops

from forebay.service.pipelines.definitions import evaluate_in_subprocess
from forebay.service.pipelines.tf_data.canonical import fingerprint, sanitize
from forebay.service.pipelines.tf_data.constants import TensorFacts
from forebay.service.pipelines.tf_data.evaluate import evaluate
from forebay.service.pipelines.tf_data.graphs import InvalidGraph
from forebay.service.pipelines.tf_data.imports import graph_of
from forebay.service.pipelines.tf_data.operations import forbidden
from forebay.service.pipelines.tf_data.source_walk import NotSplittable
from forebay.service.pipelines.tf_data.split_sources import split_sources
from forebay.service.proto import graph_pb2 as pb

from ..tfds_digits import prepared
from .pipelines import ELEMENTS, Dataset, count, slices

zipped = tf.data.Dataset.zip


def sources(dataset: Dataset) -> list[str]:
    return [" ".join(str(source).split()) for source in split_sources(graph_of(dataset))]


def test_what_sources_yield() -> None:
    assert sources(count(5, 50, 5)) == ["arithmetic { start: 5 stop: 50 step: 5 }"]
    assert sources(slices([1, 2, 3]).repeat().batch(2)) == ["count: 3"]
    assert sources(slices([count(1), count(2)]).flat_map(lambda d: d)) == ["count: 2"]
    assert sources(tf.data.Dataset.from_tensors((1, 2))) == ["count: 1"]
    assert sources(tf.data.experimental.from_list([(1, 2), (3, 4)])) == ["count: 2"]
    assert sources(tf.data.Dataset.random()) == ["endless { }"]
    assert sources(count(2).concatenate(count(3)))[1] == "arithmetic { stop: 3 step: 1 }"
    assert len(sources(count(2).enumerate())) == 2
    assert sources(tf.data.Dataset.sample_from_datasets([count(1), count(2)]))[0] == "endless { }"


def test_a_source_that_cannot_be_split_is_named(tmp_path: Path) -> None:
    snapshot = count(3).snapshot(str(tmp_path))
    with pytest.raises(NotSplittable, match=r"Splitting is not .* snapshot datasets") as error:
        sources(snapshot.map(lambda i: i))
    assert "Cannot create split providers for dataset of type SnapshotDatasetV2" in str(error.value)
    graph = pb.GraphDef.FromString(graph_of(count(3).map(lambda i: i)))
    (source,) = [node for node in graph.node if node.op == "RangeDataset"]
    source.op = "TFRecordDatasetV2"
    with pytest.raises(NotSplittable, match=rf"of type TFRecordDatasetV2, .* '{source.name}'"):
        split_sources(graph.SerializeToString())


def test_inputs_that_may_be_left_early_are_leased_singly() -> None:
    def singly(dataset: Dataset) -> list[bool]:
        return [source.singly for source in split_sources(graph_of(dataset))]

    inputs = [zipped((count(3), count(3))), zipped((count(4), count(4)))]
    selector = slices(np.zeros(3, np.int64))
    choose, sample = tf.data.Dataset.choose_from_datasets, tf.data.Dataset.sample_from_datasets
    assert singly(choose(inputs, selector)) == [False, *[True] * 4]
    assert singly(sample(inputs, stop_on_empty_dataset=True)) == [False, *[True] * 4]
    assert singly(sample(inputs)) == [False] * 5  # ends when all have ended
    assert singly(count(3).concatenate(count(3))) == [False] * 2


def test_what_reduces_all_elements_cannot_be_split() -> None:
    """Each worker would reduce its own."""
    total = tf.data.experimental.Reducer(
        lambda _: 0, lambda total, _: total + 1, lambda total: total
    )
    dataset = count(9).apply(tf.data.experimental.group_by_reducer(lambda i: i % 3, total))
    with pytest.raises(NotSplittable, match=r"dataset of type .*GroupByReducerDataset"):
        sources(dataset)


@pytest.mark.long
def test_sizes_that_must_be_evaluated() -> None:
    """The same answer in this process and in one of its own."""
    graph = pb.GraphDef.FromString(graph_of(slices([1, 2, 3])))
    (const,) = [node for node in graph.node if node.op == "Const"]
    for node in graph.node:
        node.input[:] = ["reversed" if name == const.name else name for name in node.input]
    axis = graph.node.add(name="axis", op="Const")
    axis.attr["dtype"].type = 3
    axis.attr["value"].tensor.CopyFrom(pb.TensorProto(dtype=3, int_val=[0]))
    axis.attr["value"].tensor.tensor_shape.dim.add(size=1)
    reverse = graph.node.add(name="reversed", op="ReverseV2", input=[const.name, "axis"])
    reverse.attr["T"].type, reverse.attr["Tidx"].type = 3, 3
    data = graph.SerializeToString()

    with pytest.raises(NotSplittable, match="'reversed' is not a constant"):
        split_sources(data)
    assert evaluate(data, ["reversed"]) == [TensorFacts((3,), None)]
    for function in (evaluate, evaluate_in_subprocess):
        assert split_sources(data, function)[0].count == 3
        with pytest.raises(InvalidGraph, match="missing"):
            function(data, ["missing"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xff\xff", "the 3 bytes .* are not a GraphDef"),
        (b"", "0 _Retval nodes among its 0 nodes"),
        (
            pb.GraphDef(node=[pb.NodeDef(name="r", op="_Retval", input=["x"])]).SerializeToString(),
            "refers to a node 'x'",
        ),
    ],
)
def test_what_is_no_dataset_graph(data: bytes, message: str) -> None:
    for function in (split_sources, sanitize, fingerprint):
        with pytest.raises(InvalidGraph, match=message):
            function(data)


def test_the_fingerprint_of_a_loop_and_of_a_long_graph() -> None:
    """Loops of TensorFlow 1 are cycles. Shared nodes are walked once."""
    graph = pb.GraphDef(node=[pb.NodeDef(name="0", op="Const")])
    for n in range(5000):
        graph.node.add(name=f"{n + 1}", op="AddV2", input=[f"{n}", f"{n}", "^again"])
    graph.node.add(name="again", op="NextIteration", input=["5000:0"])
    graph.node.add(name="Dataset", op="RangeDataset", input=["5000"])
    graph.node.add(name="result", op="_Retval", input=["Dataset"])
    before = fingerprint(graph.SerializeToString())
    graph.node.sort(key=lambda node: node.name)
    assert fingerprint(sanitize(graph.SerializeToString())) == before
    graph.node[0].op = "Placeholder"
    assert fingerprint(graph.SerializeToString()) != before


def test_cycles_are_found() -> None:
    for op in ("Identity", "MapDataset"):
        nodes = [
            pb.NodeDef(name="a", op=op, input=["b"]),
            pb.NodeDef(name="b", op=op, input=["a"]),
            pb.NodeDef(name="r", op="_Retval", input=["a"]),
        ]
        with pytest.raises(InvalidGraph, match="cycle"):
            split_sources(pb.GraphDef(node=nodes).SerializeToString())


def sorted_by_name(proto: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    for nodes in (proto.node, *(function.node_def for function in proto.library.function)):
        nodes.sort(key=lambda node: node.name)
    return proto


def test_sanitizing_changes_devices_tables_and_the_nodes_order_only() -> None:
    keys = tf.constant([1, 2])
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, keys), -1)
    dataset = slices([1, 2]).map(table.lookup)
    proto = graph_pb2.GraphDef.FromString(graph_of(dataset))
    for node in (*proto.node, *proto.library.function[0].node_def):
        node.device = "/device:CPU:0"
    clean = graph_pb2.GraphDef.FromString(sanitize(proto.SerializeToString()))

    for node in (*proto.node, *proto.library.function[0].node_def):
        node.device = ""
        if node.op == "HashTableV2":
            node.attr["use_node_name_sharing"].b = True
    assert sorted_by_name(clean) == sorted_by_name(proto)


def looked_up(keys: list[int], values: list[int]) -> Dataset:
    initializer = tf.lookup.KeyValueTensorInitializer(keys, values)
    return slices([1, 2]).map(tf.lookup.StaticHashTable(initializer, -1).lookup)


def with_functions(addend: int) -> Dataset:
    @tf.function  # type: ignore[untyped-decorator]
    def add(x: Any) -> Any:
        return x + addend

    def body(x: Any) -> Any:
        less = tf.cond(x > 3, lambda: x - addend, lambda: x)
        return tf.map_fn(lambda y: add(y) * less, tf.range(x))

    pairs = count(9).map(body).interleave(lambda row: slices(row).map(lambda x: x + 1))
    return pairs.filter(lambda x: x > 0).shuffle(5).cache().batch(2)


def shuffled_twice(seed: int | None, buffer: int = 8) -> Dataset:
    return count(9).shuffle(buffer, seed=seed).shuffle(buffer)


def with_captured(*captured: int) -> Dataset:
    one, two = (tf.constant([value, value], tf.int64) for value in captured)
    return count(9).map(lambda x: tf.cond(x > 3, lambda: x - one, lambda: one * two))


def looping(*captured: int) -> Dataset:
    one, two = (tf.constant(value, tf.int64) for value in captured)
    return count(9).map(lambda x: tf.while_loop(lambda y: y < 9, lambda y: y * one + two, [x]))


def grouped(*captured: int) -> Dataset:
    one, two = (tf.constant(value, tf.int64) for value in captured)
    return count(9).group_by_window(lambda x: x // one % two, lambda _, window: window, 3)


def drawn(*, once: bool) -> Dataset:
    def draw(x: Any) -> Any:
        first = tf.random.uniform([])
        return first, first if once else tf.random.uniform([])

    return count(9).map(draw)


PIPELINES: list[Callable[[], Dataset]] = [
    lambda: count(9),
    lambda: count(8),
    lambda: count(9).shuffle(8),
    lambda: shuffled_twice(3),
    lambda: shuffled_twice(4),
    lambda: shuffled_twice(3, 7),
    lambda: with_functions(1),
    lambda: with_functions(2),
    lambda: looked_up([1, 2], [5, 6]),
    lambda: looked_up([1, 2], [5, 7]),
    lambda: count(9).map(lambda x: x + 1).map(lambda x: x * 2),
    lambda: count(9).map(lambda x: x * 2).map(lambda x: x + 1),
    lambda: count(9).map(lambda x: (x - 1, x)),
    lambda: count(9).map(lambda x: (x, x - 1)),
    lambda: count(9).map(lambda _: tf.random.uniform([], seed=1)),
    lambda: count(9).map(lambda _: tf.random.uniform([], seed=2)),
    lambda: count(9).map(lambda x: tf.ensure_shape(x, [])),
    lambda: tf.data.Dataset.zip(count(2), count(3)),
    lambda: tf.data.Dataset.zip(count(3), count(2)),
    lambda: with_captured(1, 2),
    lambda: with_captured(2, 1),
    lambda: looping(2, 3),
    lambda: looping(3, 2),
    lambda: grouped(2, 3),
    lambda: grouped(3, 2),
    lambda: drawn(once=True),
    lambda: drawn(once=False),
    lambda: zipped(count(3), count(3)).map(lambda x, y: x - y),
    lambda: zipped(count(3), count(3)).map(lambda x, y: y - x),
    lambda: count(9).map(lambda x: tf.while_loop(lambda y: y < 5, lambda y: y + x, [x])),
    lambda: count(9).map(lambda x: tf.while_loop(lambda y: y < x, lambda y: y + 5, [x])),
]


def test_pipelines_built_twice_have_one_fingerprint_and_others_have_others() -> None:
    def fingerprints() -> list[str]:
        ignore = tf.data.experimental.ExternalStatePolicy.IGNORE
        return [fingerprint(sanitize(graph_of(build(), ignore))) for build in PIPELINES]

    first = fingerprints()
    assert fingerprints() == first
    assert len(set(first)) == len(PIPELINES)


def test_sets_that_are_iterated_in_any_order_change_no_fingerprint(tmp_path: Path) -> None:
    """TFDS traces its decoding in the order of a set of features' names."""
    prepared(tmp_path)
    programs = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.pipelines.traced_in_any_order", tmp_path],
            env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True,
        )
        for seed in ("1", "2")
    ]  # fmt: skip
    one, two = (program.communicate(timeout=120)[0] for program in programs)
    assert one == two
    found = [line.split()[1] for line in one.splitlines()]
    assert len(set(found)) == len(found) == 14


@pytest.mark.parametrize(
    "change",
    [
        lambda graph: graph.library.function[0].signature.input_arg[0].MergeFromString(b"\x18\x09"),
        lambda graph: graph.library.function[0].ret.update({"identity": "mul:z:0"}),
        lambda graph: graph.node[-2].input.append("^" + graph.node[0].name),
        lambda graph: graph.node[0].attr["dtype"].ClearField("value"),
        lambda graph: graph.library.function.add().signature.MergeFromString(b"\x0a\x01f"),
        lambda graph: graph.library.gradient.add(function_name="f"),
    ],
)
def test_what_is_no_generated_name_counts(change: Callable[[pb.GraphDef], object]) -> None:
    graph = pb.GraphDef.FromString(graph_of(count(9).map(lambda x: x * 2)))
    before = fingerprint(graph.SerializeToString())
    change(graph)
    assert fingerprint(graph.SerializeToString()) != before


def test_a_captured_variable_is_not_another_one_of_its_shape() -> None:
    """Its handle looks like those of a dataset's own resources."""
    graphs = []
    for name in ("weights_1", "weights_2"):
        graph = pb.GraphDef.FromString(graph_of(count(9).shuffle(3)))
        (handle,) = [h for n in graph.node for h in n.attr["value"].tensor.resource_handle_val]
        handle.name = name
        graphs.append(graph.SerializeToString())
    assert fingerprint(graphs[0]) != fingerprint(graphs[1])


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

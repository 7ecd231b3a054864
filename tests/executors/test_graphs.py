"""Graphs as data: split sources, sanitizing, and what is wrong with the rest."""

from __future__ import annotations

import pathlib

import pytest
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from forebay.service.client.tf_elements import graph_of
from forebay.service.executors.evaluate import evaluate
from forebay.service.graphs import (
    InvalidGraph,
    NotSplittable,
    TensorFacts,
    evaluate_in_subprocess,
    sanitize,
    split_sources,
)
from forebay.service.proto import graph_pb2 as pb

from .pipelines import Dataset, count, slices


def sources(dataset: Dataset) -> list[str]:
    return [" ".join(str(s.splits).split()) for s in split_sources(graph_of(dataset))]


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


def test_a_source_that_cannot_be_split_is_named(tmp_path: pathlib.Path) -> None:
    snapshot = count(3).snapshot(str(tmp_path))
    with pytest.raises(NotSplittable, match=r"'SnapshotDatasetV2/\S+' \(SnapshotDatasetV2\)"):
        sources(snapshot.map(lambda i: i))
    graph = pb.GraphDef.FromString(graph_of(count(3).map(lambda i: i)))
    (source,) = [node for node in graph.node if node.op == "RangeDataset"]
    source.op = "TFRecordDatasetV2"
    with pytest.raises(NotSplittable, match=rf"'{source.name}' \(TFRecordDatasetV2\)"):
        split_sources(graph.SerializeToString())


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
    for function in (evaluate, evaluate_in_subprocess):
        assert function(data, ["reversed"]) == [TensorFacts((3,), None)]
        assert split_sources(data, function)[0].splits.count == 3
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
    for function in (split_sources, sanitize):
        with pytest.raises(InvalidGraph, match=message):
            function(data)


def test_cycles_are_found() -> None:
    for op in ("Identity", "MapDataset"):
        nodes = [
            pb.NodeDef(name="a", op=op, input=["b"]),
            pb.NodeDef(name="b", op=op, input=["a"]),
            pb.NodeDef(name="r", op="_Retval", input=["a"]),
        ]
        with pytest.raises(InvalidGraph, match="cycle"):
            split_sources(pb.GraphDef(node=nodes).SerializeToString())


def test_sanitizing_changes_devices_and_tables_only() -> None:
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
    assert clean == proto

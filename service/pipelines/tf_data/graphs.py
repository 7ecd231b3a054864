"""Reads and changes tf.data graphs as data, without TensorFlow.

A registered dataset is a serialized GraphDef whose `_Retval` is a dataset. split_sources.py finds
where its splits come from.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from ...errors import InvalidArgument
from ...proto import graph_pb2 as pb
from .constants import INT32, INT64, STRING, VARIANT, constant


class InvalidGraph(InvalidArgument):
    """The bytes are not a GraphDef that ends in a dataset."""


# Dataset inputs by op: how many of the first inputs are datasets. All other ops have one.
_INPUTS: dict[str, Callable[[pb.NodeDef], slice]] = {
    "ConcatenateDataset": lambda node: slice(0, 2),
    "ZipDataset": lambda node: slice(0, node.attr["N"].i),
    # The selector comes first.
    "DirectedInterleaveDataset": lambda node: slice(0, 1 + node.attr["N"].i),
    "ExperimentalDirectedInterleaveDataset": lambda node: slice(0, 1 + node.attr["N"].i),
}

TABLES = {
    prefix + suffix
    for prefix in ("HashTable", "MutableHashTable", "MutableHashTableOfTensors")
    for suffix in ("", "V2")
} | {"MutableDenseHashTable", "MutableDenseHashTableV2"}

_VALUES = {INT32: "int_val", INT64: "int64_val", STRING: "string_val"}
"""The field of a TensorProto that has the values of a dtype."""


class Graph:
    """A parsed graph that ends in a dataset. Raises InvalidGraph for anything else."""

    def __init__(self, data: bytes) -> None:
        try:
            self.proto = pb.GraphDef.FromString(data)
        except DecodeError as error:
            raise InvalidGraph(
                f"the {len(data)} bytes registered as a dataset are not a GraphDef ({error}); "
                "register what Dataset._as_serialized_graph returns"
            ) from error
        self.nodes = {node.name: node for node in self.proto.node}
        results = [node for node in self.proto.node if node.op == "_Retval"]
        if len(results) != 1 or len(results[0].input) != 1:
            raise InvalidGraph(
                f"the graph has {len(results)} _Retval nodes among its {len(self.nodes)} nodes, "
                "where a dataset graph has exactly one, with one input"
            )
        self.result = results[0]
        self.dataset = self.producer(self.result.input[0])

    def node(self, tensor: str) -> pb.NodeDef:
        """The node that a tensor or a control input comes from."""
        node = self.nodes.get(node_name(tensor))
        if node is None:
            raise InvalidGraph(
                f"the graph refers to a node {node_name(tensor)!r} that it does not have"
            )
        return node

    def producer(self, tensor: str) -> pb.NodeDef:
        """The node that computes a tensor, skipping Identity."""
        seen = set()
        while True:
            node = self.node(tensor)
            if node.op != "Identity" or not node.input:
                return node
            if node.name in seen:
                raise InvalidGraph(f"the graph has a cycle through node {node.name!r}")
            seen.add(node.name)
            tensor = node.input[0]

    def value_of(self, tensor: str) -> int | None:
        """The value of a tensor that is a constant integer scalar."""
        facts = constant(self.producer(tensor))
        return None if facts is None else facts.value

    def dataset_inputs(self, node: pb.NodeDef) -> list[pb.NodeDef]:
        """The datasets that a dataset node reads; none for a source."""
        which = _INPUTS[node.op](node) if node.op in _INPUTS else slice(0, 1)
        inputs = [self.producer(name) for name in node.input[which]]
        return [child for child in inputs if "Dataset" in child.op]


def graph_without_compression(graph: bytes) -> bytes:
    """The graph without its last map, which compresses each element; TensorFlow's workers drop it
    too. Raises InvalidGraph if the graph doesn't end in that map.
    """
    parsed = Graph(graph)
    function = parsed.dataset.attr["f"].func.name
    bodies = {f.signature.name: f.node_def for f in parsed.proto.library.function}
    if not any(node.op == "CompressElement" for node in bodies.get(function, ())):
        raise InvalidGraph(
            f"the graph is registered as one that compresses its elements, and ends in "
            f"{parsed.dataset.op} {parsed.dataset.name!r}, which does not: register it again"
        )
    parsed.result.input[0] = parsed.dataset.input[0]
    return parsed.proto.SerializeToString()


def isolate(graph: bytes, prefix: str) -> tuple[pb.GraphDef, str, list[str]]:
    """Prepare a graph for import into a process that runs other graphs as well.

    Library functions, tables and the handles of caches and seeds get names that begin with
    `prefix` (letters and digits). Otherwise datasets of different clients would share them. Returns
    the graph without its `_Retval`, the name of the tensor that holds the dataset, and the names of
    the table handles.
    """
    parsed = Graph(graph)
    proto = parsed.proto
    functions = [function.signature.name for function in proto.library.function]
    _rename_functions(proto, {name: f"{prefix}_{name}" for name in functions})
    _reshape_packs_of_one(parsed)
    for node in all_nodes(proto):
        if node.op in TABLES:
            node.attr["container"].s = prefix.encode()
        for handle in handles_of(node):
            handle.name = f"{prefix}_{handle.name}"  # a new name, so the dataset makes its own
    tables = [f"{node.name}:0" for node in proto.node if node.op in TABLES]
    proto.node.remove(parsed.result)
    return proto, f"{parsed.dataset.name}:0", tables


def _reshape_packs_of_one(graph: Graph) -> None:
    """Replace a Pack of one tensor by Reshape. TensorFlow's optimizer would make it an ExpandDims,
    which does not support datasets.
    """
    nodes = graph.nodes.values()
    packs = [node for node in nodes if node.op == "Pack" and node.attr["T"].type == VARIANT]
    shapes = {node.name: _packed_shape(graph, node) for node in packs}
    body = Body(graph.proto.node, function=False)
    for node in packs:
        if node.attr["N"].i == 1:
            node.op = "Reshape"
            node.input.insert(1, body.constant(shapes[node.name], INT32))
            node.attr.pop("N")
            node.attr.pop("axis", None)
            node.attr["Tshape"].type = INT32


def _packed_shape(graph: Graph, node: pb.NodeDef) -> list[int]:
    """The shape of scalars that are packed, and packed again."""
    if node.op != "Pack":
        return []
    return [node.attr["N"].i, *_packed_shape(graph, graph.producer(node.input[0]))]


def called_functions(
    nodes: Iterable[pb.NodeDef], bodies: Mapping[str, Iterable[pb.NodeDef]]
) -> list[str]:
    """The functions that these nodes call, directly or indirectly, in the order of first use.
    `bodies` are the nodes of all functions, by name."""
    called: dict[str, None] = {}
    waiting = [nodes]
    for body in waiting:  # grows in the loop
        for node in body:
            for name in (node.op, *(reference.name for reference in references(node.attr))):
                if name in bodies and name not in called:
                    called[name] = None
                    waiting.append(bodies[name])
    return list(called)


def _rename_functions(proto: pb.GraphDef, names: Mapping[str, str]) -> None:
    """Rename library functions and all references to them."""
    for node in all_nodes(proto):
        node.op = names.get(node.op, node.op)
        for reference in references(node.attr):
            reference.name = names.get(reference.name, reference.name)
    for function in proto.library.function:
        signature = function.signature
        signature.name = names.get(signature.name, signature.name)
    for gradient in proto.library.gradient:
        gradient.function_name = names.get(gradient.function_name, gradient.function_name)
        gradient.gradient_func = names.get(gradient.gradient_func, gradient.gradient_func)


def references(attrs: Mapping[str, pb.AttrValue]) -> Iterator[pb.NameAttrList]:
    """References to functions in attributes, ordered by the attributes' names."""
    for _, attr in sorted(attrs.items()):
        match attr.WhichOneof("value"):
            case "func":
                found: Sequence[pb.NameAttrList] = [attr.func]
            case "list":
                found = attr.list.func
            case _:
                continue
        for reference in found:
            yield reference
            yield from references(reference.attr)


def handles_of(node: pb.NodeDef) -> Sequence[pb.ResourceHandle]:
    """The resources that a constant refers to."""
    return node.attr["value"].tensor.resource_handle_val if node.op == "Const" else ()


def node_name(tensor: str) -> str:
    """The node, or the function's argument, that a tensor or a control input comes from."""
    return tensor.removeprefix("^").partition(":")[0]


def bodies(proto: pb.GraphDef) -> Iterator[tuple[str, Any]]:
    """The nodes of the graph, under the name "", and those of each function."""
    yield "", proto.node
    for function in proto.library.function:
        yield function.signature.name, function.node_def


def all_nodes(proto: pb.GraphDef) -> Iterator[pb.NodeDef]:
    """The graph's nodes, and those of its functions."""
    return itertools.chain.from_iterable(nodes for _, nodes in bodies(proto))


def where(function: str) -> str:
    """In words, where a node of this body is."""
    return f" in function {function!r}" if function else ""


class Body:
    """The nodes of a graph or of a function; the two name tensors differently."""

    def __init__(self, nodes: Any, *, function: bool) -> None:
        self.nodes = nodes
        self._function = function
        self._names = {node.name for node in nodes}

    def add(self, op: str, inputs: Iterable[str], output: str, **attrs: pb.AttrValue) -> str:
        """Add a node; return its only tensor."""
        name = f"forebay_{len(self.nodes)}"
        while name in self._names:
            name += "_"
        self._names.add(name)
        node = self.nodes.add(name=name, op=op, input=list(inputs))
        for attr, value in attrs.items():
            node.attr[attr].CopyFrom(value)
        return f"{name}:{output}:0" if self._function else f"{name}:0"

    def constant(self, value: Any, dtype: int = INT64) -> str:
        """Add a scalar, or the vector of a list."""
        tensor = pb.TensorProto(dtype=dtype, tensor_shape=pb.TensorShape())
        if isinstance(value, list):
            tensor.tensor_shape.dim.add(size=len(value))
        getattr(tensor, _VALUES[dtype]).extend(value if isinstance(value, list) else [value])
        attrs = {"dtype": pb.AttrValue(type=dtype), "value": pb.AttrValue(tensor=tensor)}
        return self.add("Const", [], "output", **attrs)

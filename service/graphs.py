"""tf.data graphs as data: where their splits come from, read without TensorFlow.

A registered dataset is a serialized GraphDef whose `_Retval` is a dataset. Walking back from
there, each dataset node passes on the sources of its dataset input, and a few have several
inputs, until nodes are reached that have none: the *sources*, one split provider each. What
they yield is mostly a constant in the graph; the rest needs TensorFlow, and is left to an
`Evaluate` function (see executors/evaluate.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError

from ..journal.proto import events_pb2 as ev
from .errors import InvalidArgument, Unimplemented
from .proto import graph_pb2 as pb


class InvalidGraph(InvalidArgument):
    """The bytes are not a GraphDef that ends in a dataset."""


class NotSplittable(Unimplemented):
    """The dataset has a source that cannot be divided among workers."""


class TensorFacts(NamedTuple):
    """What is asked about a tensor: its shape, and its value if it is an integer scalar."""

    shape: tuple[int, ...]
    value: int | None


Evaluate = Callable[[bytes, Sequence[str]], list[TensorFacts]]
"""(serialized GraphDef, tensor names) → what each tensor is. May raise ForebayError."""


class Source(NamedTuple):
    """A source node of a graph, and what its split provider yields."""

    node: str
    op: str
    splits: ev.SplitSource


# Dataset inputs by op: how many of the first inputs are datasets. All other ops have one.
_INPUTS: dict[str, Callable[[pb.NodeDef], slice]] = {
    "ConcatenateDataset": lambda node: slice(0, 2),
    "ZipDataset": lambda node: slice(0, node.attr["N"].i),
    # The selector comes first.
    "DirectedInterleaveDataset": lambda node: slice(0, 1 + node.attr["N"].i),
    "ExperimentalDirectedInterleaveDataset": lambda node: slice(0, 1 + node.attr["N"].i),
}

_REFUSED = {
    "ChooseFastestDataset": "it picks one of several inputs by their speed",
    "ExperimentalChooseFastestDataset": "it picks one of several inputs by their speed",
    "ChooseFastestBranchDataset": "it picks one of several branches by their speed",
    "WeightedFlatMapDataset": "it reads its inputs by index",
    "SnapshotDataset": "a snapshot is read and written whole",
    "SnapshotDatasetV2": "a snapshot is read and written whole",
    "GeneratorDataset": "a Python generator can only be run from its start",
}

_TABLES = {
    prefix + suffix
    for prefix in ("HashTable", "MutableHashTable", "MutableHashTableOfTensors")
    for suffix in ("", "V2")
} | {"MutableDenseHashTable", "MutableDenseHashTableV2"}

_INT32, _INT64 = 3, 9


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

    def producer(self, tensor: str) -> pb.NodeDef:
        """The node that computes a tensor, seen through Identity."""
        seen = set()
        while True:
            name = tensor.removeprefix("^").split(":")[0]
            node = self.nodes.get(name)
            if node is None:
                raise InvalidGraph(f"the graph refers to a node {name!r} that it does not have")
            if node.op != "Identity" or not node.input:
                return node
            if name in seen:
                raise InvalidGraph(f"the graph has a cycle through node {name!r}")
            seen.add(name)
            tensor = node.input[0]

    def sources(self) -> Iterator[pb.NodeDef]:
        """The source nodes, in the order of their split providers.

        Raises NotSplittable at a node that cannot pass splits on.
        """
        path: set[str] = set()
        visited: set[str] = set()

        def walk(node: pb.NodeDef) -> Iterator[pb.NodeDef]:
            if node.name in path:
                raise InvalidGraph(f"the graph has a cycle through node {node.name!r}")
            if node.op in _REFUSED:
                raise _not_splittable(node, _REFUSED[node.op])
            inputs = self.dataset_inputs(node)
            if not inputs:
                # TensorFlow writes a tree. Were a source shared, its two readers would have to
                # be told apart.
                if node.name in visited:
                    raise _not_splittable(node, "it is the input of two datasets")
                visited.add(node.name)
                yield node
            path.add(node.name)
            for child in inputs:
                yield from walk(child)
            path.remove(node.name)

        return walk(self.dataset)

    def dataset_inputs(self, node: pb.NodeDef) -> list[pb.NodeDef]:
        """The datasets that a dataset node reads; none for a source."""
        which = _INPUTS[node.op](node) if node.op in _INPUTS else slice(0, 1)
        inputs = [self.producer(name) for name in node.input[which]]
        return [child for child in inputs if "Dataset" in child.op]


def split_sources(graph: bytes, evaluate: Evaluate | None = None) -> list[Source]:
    """The split sources of a serialized dataset graph, one a split provider, in order.

    `evaluate` is called, once, if the graph does not say everything by itself. Raises
    InvalidGraph, and NotSplittable with the node, its op and the reason.
    """
    parsed = Graph(graph)
    nodes = list(parsed.sources())
    wanted: dict[str, TensorFacts | None] = {
        name: _constant(parsed.producer(name)) for node in nodes for name in _decisive(node)
    }
    unknown = [name for name, facts in wanted.items() if facts is None]
    if unknown:
        if evaluate is None:
            raise NotSplittable(
                f"the size of tensor {unknown[0]!r} is not a constant of the graph, and nothing "
                "here can evaluate it; register the dataset from a client with TensorFlow"
            )
        wanted.update(zip(unknown, evaluate(graph, unknown), strict=True))
    return [Source(node.name, node.op, _splits(node, wanted)) for node in nodes]


def _decisive(node: pb.NodeDef) -> Sequence[str]:
    """The tensors on which a source's splits depend."""
    match node.op:
        case "RangeDataset":
            return node.input[:3]
        case "TensorSliceDataset":
            return node.input[:1]
        case "TensorDataset" | "ListDataset" | "RandomDataset" | "RandomDatasetV2":
            return ()
    raise _not_splittable(node, "only ranges, slices of tensors, lists and tensors can be")


def _splits(node: pb.NodeDef, facts: dict[str, TensorFacts | None]) -> ev.SplitSource:
    known = [fact for name in _decisive(node) if (fact := facts[name]) is not None]
    match node.op:
        case "RangeDataset":
            values = [fact.value for fact in known if fact.value is not None]
            if len(values) != 3 or not values[2]:
                raise _not_splittable(node, f"start, stop and step are {values}")
            start, stop, step = values
            return ev.SplitSource(arithmetic=ev.Arithmetic(start=start, stop=stop, step=step))
        case "TensorSliceDataset":
            if not known or not known[0].shape:
                raise _not_splittable(node, "its first component is no tensor with a length")
            return ev.SplitSource(count=known[0].shape[0])
        case "TensorDataset":
            return ev.SplitSource(count=1)
        case "ListDataset":
            components = len(node.attr["output_types"].list.type)
            return ev.SplitSource(count=len(node.input) // max(1, components))
        case _:
            return ev.SplitSource(endless=ev.Endless())


def _constant(node: pb.NodeDef) -> TensorFacts | None:
    if node.op == "Pack" and node.attr["axis"].i == 0:
        return TensorFacts((node.attr["N"].i,), None)  # the other dimensions matter to nobody
    if node.op != "Const":
        return None
    tensor = node.attr["value"].tensor
    shape = tuple(dim.size for dim in tensor.tensor_shape.dim)
    if shape or tensor.dtype not in (_INT32, _INT64):
        return TensorFacts(shape, None)
    if tensor.tensor_content:
        return TensorFacts((), int.from_bytes(tensor.tensor_content, "little", signed=True))
    values = tensor.int64_val if tensor.dtype == _INT64 else tensor.int_val
    return TensorFacts((), values[0] if values else 0)


def _not_splittable(node: pb.NodeDef, reason: str) -> NotSplittable:
    return NotSplittable(
        f"the dataset cannot be split: its source {node.name!r} ({node.op}) is not splittable, "
        f"{reason}. Read it with sharding policy OFF, or start it from Dataset.range or "
        "Dataset.from_tensor_slices, for example of file names"
    )


def evaluate_in_subprocess(
    graph: bytes, names: Sequence[str], timeout_s: float = 120
) -> list[TensorFacts]:
    """An `Evaluate` that runs TensorFlow in a process of its own, and waits for it.

    Raises InvalidGraph if the tensors cannot be computed there.
    """
    command = [sys.executable, "-m", "forebay.service.executors.evaluate", *names]
    try:
        done = subprocess.run(command, input=graph, capture_output=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise InvalidGraph(
            f"the tensors {list(names)} of the graph were not computed within {timeout_s:g} s"
        ) from error
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise InvalidGraph(
            f"the tensors {list(names)} of the graph could not be computed: "
            f"{last[0] if last else f'exit code {done.returncode}'}"
        )
    return [TensorFacts(tuple(shape), value) for shape, value in json.loads(done.stdout)]


def sanitize(graph: bytes) -> bytes:
    """The graph as workers get it: bound to no device, its hash tables named by their nodes.

    Raises InvalidGraph.
    """
    proto = Graph(graph).proto
    for node in _all_nodes(proto):
        node.device = ""
        if node.op in _TABLES:
            node.attr["use_node_name_sharing"].b = True
    return proto.SerializeToString()


def isolate(graph: bytes, prefix: str) -> tuple[pb.GraphDef, str, list[str]]:
    """Prepare a graph for import into a process that runs other graphs as well.

    Library functions, tables and the handles of caches and seeds get names that begin with
    `prefix` (letters and digits): two datasets from two clients would otherwise use each
    other's. Returns the graph without its `_Retval`, the name of the tensor that holds the
    dataset, and the names of the table handles.
    """
    parsed = Graph(graph)
    proto = parsed.proto
    names = {f.signature.name: f"{prefix}_{f.signature.name}" for f in proto.library.function}

    def rename(attr: pb.AttrValue) -> None:
        match attr.WhichOneof("value"):
            case "func":
                references = [attr.func]
            case "list":
                references = list(attr.list.func)
            case _:
                return
        for reference in references:
            reference.name = names.get(reference.name, reference.name)
            for inner in reference.attr.values():
                rename(inner)

    for node in _all_nodes(proto):
        node.op = names.get(node.op, node.op)
        for attr in node.attr.values():
            rename(attr)
        if node.op in _TABLES:
            node.attr["container"].s = prefix.encode()
        for handle in node.attr["value"].tensor.resource_handle_val if node.op == "Const" else ():
            handle.name = f"{prefix}_{handle.name}"  # not found, so the dataset makes its own
    for function in proto.library.function:
        function.signature.name = names[function.signature.name]
    for gradient in proto.library.gradient:
        gradient.function_name = names.get(gradient.function_name, gradient.function_name)
        gradient.gradient_func = names.get(gradient.gradient_func, gradient.gradient_func)
    tables = [f"{node.name}:0" for node in proto.node if node.op in _TABLES]
    proto.node.remove(parsed.result)
    return proto, f"{parsed.dataset.name}:0", tables


def _all_nodes(proto: pb.GraphDef) -> Iterator[pb.NodeDef]:
    yield from proto.node
    for function in proto.library.function:
        yield from function.node_def

"""Serializes a dataset, and imports its graph into the function that is being traced."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Set
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import dataset_options_pb2, function_pb2, graph_pb2
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.eager import context
from tensorflow.python.ops import gen_dataset_ops

from ...proto import graph_pb2 as pb
from ...save_files import CHUNKS as CHUNKS_DIRECTORY
from .constants import element_types
from .graphs import isolate, node_name
from .source_walk import CHUNKS

Dataset = Any
Tensor = Any
Policy = tf.data.experimental.ExternalStatePolicy


def graph_of(dataset: Dataset, external_state_policy: Any = Policy.WARN) -> bytes:
    """The serialized GraphDef of a dataset. Raises TensorFlow's errors if it cannot be
    serialized."""
    graph = dataset._as_serialized_graph(external_state_policy=external_state_policy)
    return bytes(graph.numpy())


class ImportedGraph:
    """A graph whose functions are registered in this process's TensorFlow under unique names."""

    def __init__(self, graph: bytes) -> None:
        """Raises InvalidGraph, and TensorFlow's errors."""
        self.prefix = f"forebay{uuid.uuid4().hex}"
        self.proto, self.result, self.tables = isolate(graph, self.prefix)
        self._functions: list[str] = []

    def add_functions(self) -> None:
        for function in self.proto.library.function:
            definition = function_pb2.FunctionDef.FromString(function.SerializeToString())
            context.context().add_function_def(definition)
            self._functions.append(function.signature.name)

    def forget(self) -> None:
        """Free the traced graph, except for its tables: constants may be large, and TensorFlow has
        its own copies."""
        names = set(map(node_name, self.tables))
        self.proto = pb.GraphDef(node=[node for node in self.proto.node if node.name in names])

    def close(self) -> None:
        """Free TensorFlow's resources. Idempotent."""
        for name in self._functions:
            context.context().remove_function(name)
        self._functions = []


def options_of(serialized: bytes) -> Any:
    """A dataset's options, as SourceWalk finds them in its graph."""
    options = tf.data.Options()
    options._from_proto(dataset_options_pb2.Options.FromString(serialized))
    return options


def output_specs(node: pb.NodeDef) -> tuple[Any, ...]:
    """The raw tensors that a dataset node yields (composites are variants there)."""
    types, shapes = element_types(node)
    return tuple(
        tf.TensorSpec(
            None if shape.unknown_rank else [None if d.size < 0 else d.size for d in shape.dim],
            tf.dtypes.as_dtype(dtype),
        )
        for dtype, shape in zip(types.list.type, shapes.list.shape, strict=True)
    )


StandIn = Callable[[pb.NodeDef, list[Tensor], Tensor], Tensor]
"""The variant of a dataset of a source's splits, by the source's node, operands and own variant."""


def import_graph(
    graph: pb.GraphDef,
    sources: Set[str],
    stand_in: StandIn,
    given: dict[str, Tensor],
    results: list[str],
) -> list[Tensor]:
    """Import a graph into the function being traced, in two parts. First the sources and what they
    depend on. Then the rest, which reads from the stand-ins of the sources and from the tensors
    in `given`."""
    lower = _ancestors(graph, sources)
    parts = [pb.GraphDef(), pb.GraphDef()]
    for node in graph.node:
        parts[node.name not in lower].node.append(node)

    bridge = {
        _tensor_name(name)
        for node in parts[1].node
        for name in node.input
        if node_name(name) in lower and not name.startswith("^")
    }
    inputs = {
        _tensor_name(name)
        for node in parts[0].node
        if node.name in sources
        for name in node.input
        if not name.startswith("^")
    }
    early = {name for name in results if node_name(name) in lower}
    wanted = sorted(bridge | inputs | early | {f"{name}:0" for name in sources})
    found = dict(zip(wanted, import_part(parts[0], {}, wanted), strict=True))
    for node in parts[0].node:
        if node.name in sources:
            operands = [found[_tensor_name(i)] for i in node.input if not i.startswith("^")]
            found[f"{node.name}:0"] = stand_in(node, operands, found[f"{node.name}:0"])

    for node in parts[1].node:  # the first part is imported already
        kept = [i for i in node.input if not (i.startswith("^") and node_name(i) in lower)]
        node.input[:] = kept
    upper = [name for name in results if name not in found]
    mapped = {name: found[name] for name in bridge} | given
    found.update(zip(upper, import_part(parts[1], mapped, upper), strict=True))
    return [found[name] for name in results]


def import_part(graph: pb.GraphDef, mapped: dict[str, Tensor], wanted: list[str]) -> list[Tensor]:
    proto = graph_pb2.GraphDef.FromString(graph.SerializeToString())
    return list(
        tf.graph_util.import_graph_def(proto, input_map=mapped, return_elements=wanted, name="")
    )


def _ancestors(graph: pb.GraphDef, names: Iterable[str]) -> set[str]:
    nodes = {node.name: node for node in graph.node}
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(node_name(i) for i in nodes[name].input)
    return found


def _tensor_name(name: str) -> str:
    return name if ":" in name else f"{name}:0"


def expansion(
    node: pb.NodeDef, operands: list[Tensor], source: Tensor, specs: tuple[Any, ...]
) -> Callable[..., Dataset]:
    """A function from (first, count), or from (names,) for named splits, to their dataset."""
    if node.op == CHUNKS:
        (path,) = operands
        return lambda names: tf.data.Dataset.from_tensor_slices(
            (tf.strings.join([path, f"/{CHUNKS_DIRECTORY}/", names]),)
        )
    if node.op == "RangeDataset":
        start, _, step = operands

        def of_range(first: Tensor, count: Tensor) -> Dataset:
            begin = start + first * step
            end = begin + count * step
            return tf.data.Dataset.range(begin, end, step, output_type=specs[0].dtype)

        return of_range
    if node.op == "TensorSliceDataset":

        def of_slices(first: Tensor, count: Tensor) -> Dataset:
            slices = [operand[first : first + count] for operand in operands]
            shapes = [spec.shape for spec in specs]
            variant = gen_dataset_ops.tensor_slice_dataset(slices, output_shapes=shapes)
            return dataset_ops._VariantDataset(variant, specs)

        return of_slices
    whole = dataset_ops._VariantDataset(source, specs)
    return lambda first, count: whole.skip(first).take(count)

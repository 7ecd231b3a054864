"""A dataset graph on leased splits: its sources replaced by feeds.

Python gives ranges of splits, (first, count), and C++ expands them into the splits themselves, so
Python is touched once a lease, not once a split. Each time the pipeline opens the source again
(`repeat`, for instance) the feed goes on to the next repetition.

Nothing here is a `from_generator`: the first one in a process has TensorFlow tell malloc to give
every large buffer back to the system at once, and then each batch of the pipeline begins with
pages that the kernel has to make.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.eager import context
from tensorflow.python.ops import gen_dataset_ops

from ..element_specs import plain, until_stopped
from ..graphs import Graph, isolate
from ..proto import graph_pb2 as pb
from .packs import calls_functions

Dataset = Any
Tensor = Any


class SplitFeed(Protocol):
    """Where a task's splits come from."""

    def next_range(self, provider: int, repetition: int) -> tuple[int, int] | None:
        """The next (first, count) of a provider's splits; None at the repetition's end.

        Blocks until that is known. Called by one thread a provider at a time. What it raises
        ends the source, and the pipeline unless that ignores errors; whoever cancels the
        executor makes it raise, too.
        """
        ...


class LoadedGraph:
    """A graph as a dataset of this process. `close` frees what it holds in TensorFlow."""

    def __init__(self, graph: bytes, feed: SplitFeed | None) -> None:
        """Raises InvalidGraph, NotSplittable (with a feed), and TensorFlow's errors."""
        prefix = f"forebay{uuid.uuid4().hex}"
        parsed = Graph(graph)
        sources = [node.name for node in parsed.sources()] if feed else []
        self.component_specs = output_specs(parsed.dataset)
        self.calls_functions = calls_functions(parsed)
        del parsed  # constants may be large, and TensorFlow makes copies of its own
        isolated, result, tables = isolate(graph, prefix)
        self._functions: list[str] = []
        self._tables: list[Tensor] = []

        def build() -> list[Tensor]:
            return _import(isolated, sources, feed, [result, *tables])

        try:
            for function in isolated.library.function:
                definition = function_pb2.FunctionDef.FromString(function.SerializeToString())
                context.context().add_function_def(definition)
                self._functions.append(function.signature.name)
            # Kept, because the feeds' Python functions live as long as it does.
            self._build = tf.function(build, autograph=False).get_concrete_function()
            isolated.Clear()
            self.variant, *self._tables = self._build()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Idempotent. No pipeline of this graph may run any more."""
        for handle in self._tables:
            tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)
        for name in self._functions:
            context.context().remove_function(name)
        self._tables, self._functions = [], []
        self.variant = self._build = None  # which hold the graph's constants


def output_specs(node: pb.NodeDef) -> tuple[Any, ...]:
    """The raw tensors that a dataset node yields (composites are variants there)."""
    types = node.attr["output_types"].list.type or node.attr["Toutput_types"].list.type
    shapes = node.attr["output_shapes"].list.shape
    if not types:  # file readers
        return (tf.TensorSpec([], tf.string),)
    return tuple(
        tf.TensorSpec(
            None if shape.unknown_rank else [None if d.size < 0 else d.size for d in shape.dim],
            tf.dtypes.as_dtype(dtype),
        )
        for dtype, shape in zip(types, shapes, strict=True)
    )


def _import(
    graph: pb.GraphDef, sources: list[str], feed: SplitFeed | None, results: list[str]
) -> list[Tensor]:
    """Import a graph into the function being traced, in two parts: the sources with all that
    they depend on, then the rest, reading from feeds."""
    lower = _ancestors(graph, sources)
    parts = [pb.GraphDef(), pb.GraphDef()]
    for node in graph.node:
        parts[node.name not in lower].node.append(node)

    bridge = {
        _tensor_name(name)
        for node in parts[1].node
        for name in node.input
        if _node_name(name) in lower and not name.startswith("^")
    }
    inputs = {
        _tensor_name(name)
        for node in parts[0].node
        if node.name in sources
        for name in node.input
        if not name.startswith("^")
    }
    early = {name for name in results if _node_name(name) in lower}
    wanted = sorted(bridge | inputs | early | {f"{name}:0" for name in sources})
    found = dict(zip(wanted, _import_part(parts[0], {}, wanted), strict=True))
    for provider, name in enumerate(sources):
        node = next(node for node in parts[0].node if node.name == name)
        operands = [found[_tensor_name(i)] for i in node.input if not i.startswith("^")]
        source = _feed(node, operands, found[f"{name}:0"], feed, provider)
        found[f"{name}:0"] = source

    for node in parts[1].node:  # all of the first part is there already
        kept = [i for i in node.input if not (i.startswith("^") and _node_name(i) in lower)]
        node.input[:] = kept
    upper = [name for name in results if name not in found]
    mapped = {name: found[name] for name in bridge}
    found.update(zip(upper, _import_part(parts[1], mapped, upper), strict=True))
    return [found[name] for name in results]


def _import_part(graph: pb.GraphDef, mapped: dict[str, Tensor], wanted: list[str]) -> list[Tensor]:
    proto = graph_pb2.GraphDef.FromString(graph.SerializeToString())
    return list(
        tf.graph_util.import_graph_def(proto, input_map=mapped, return_elements=wanted, name="")
    )


def _ancestors(graph: pb.GraphDef, names: list[str]) -> set[str]:
    nodes = {node.name: node for node in graph.node}
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(_node_name(i) for i in nodes[name].input)
    return found


def _node_name(name: str) -> str:
    return name.removeprefix("^").split(":")[0]


def _tensor_name(name: str) -> str:
    return name if ":" in name else f"{name}:0"


def _feed(
    node: pb.NodeDef, operands: list[Tensor], source: Tensor, feed: SplitFeed | None, provider: int
) -> Tensor:
    """The variant of a dataset of the splits that `feed` gives to this provider."""
    if node.op.startswith("RandomDataset") or node.attr["replicate_on_split"].b or feed is None:
        return source  # every worker has its own, whole
    specs = output_specs(node)
    repetitions = itertools.count()
    failed = threading.Event()  # and asked no more: `ignore_errors` would ask for ever

    def next_range(repetition: Any) -> tuple[int, int]:
        splits = None
        if not failed.is_set():
            try:
                splits = feed.next_range(provider, int(repetition))
            except BaseException:
                failed.set()
                raise
        if splits is None:
            raise StopIteration
        return splits

    @plain
    def leases(_: Tensor) -> Dataset:
        repetition = _integers(lambda: next(repetitions), 1)
        return until_stopped(lambda: _integers(next_range, 2, *repetition))

    opened = tf.data.Dataset.range(1).flat_map(leases)
    return opened.flat_map(plain(_expansion(node, operands, source, specs)))._variant_tensor


def _integers(function: Callable[..., Any], size: int, *inputs: Tensor) -> tuple[Tensor, ...]:
    """`size` integers: what a Python function of the inputs returns."""
    found = tf.numpy_function(lambda *own: np.asarray(function(*own), np.int64), inputs, tf.int64)
    return tuple(tf.unstack(tf.reshape(found, [size])))


def _expansion(
    node: pb.NodeDef, operands: list[Tensor], source: Tensor, specs: tuple[Any, ...]
) -> Callable[[Tensor, Tensor], Dataset]:
    """(first, count) → the dataset of these splits of the source."""
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

"""A dataset graph on leased splits: feeds replace its sources.

Python gives a feed ranges of splits, (first, count), or the names of splits. C++ expands them into
splits, so Python runs once a lease, not once a split. Each time the pipeline opens the source again
(in a `repeat`, say), the feed goes to its next *opening*, which is the next pass.

TensorFlow ends an endless repeat whose first opening is empty. Here an empty opening only means
that other workers have all splits. So a flat_map over an endless *gate* replaces the repeat.

This module avoids `from_generator`: the first one in a process makes TensorFlow tell malloc to
return every large buffer to the system at once. Each batch would then fault in new pages.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import function_pb2
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.framework import op_def_registry

from ....journal.proto import events_pb2 as ev
from ....journal.splits import ENDLESS, source_size
from ...proto import graph_pb2 as pb
from ..splits import SplitFeed, SplitRange
from .element_packs import calls_functions
from .graphs import TABLES, Graph
from .imports import ImportedGraph, expansion, import_graph, options_of, output_specs
from .save_watchers import Watch, saves_in
from .source_walk import CHUNKS, NotSplittable, SourceNode, SourceWalk, splits_per_element
from .split_files import Begun
from .split_sources import require_splittable
from .transformations import Traced, call_unoptimized, concrete, opened, traced, until_stopped

Dataset = Any
Tensor = Any

_MOST_BEGUN = 64

GATE = "forebay/gate/{}:0"
"""Stands for the tensor of a repeat's gate while a graph is imported."""


class TracedGraph:
    """A graph as a function in this process's TensorFlow: each call makes the dataset anew.

    The trace captures nothing of a run, so many runs may share it, also concurrently.
    """

    def __init__(self, graph: bytes, sources: Sequence[ev.SplitSource] | None) -> None:
        """`sources` are the registered ones; None if the graph runs without leases.

        Raises InvalidGraph, NotSplittable (with sources), and TensorFlow's errors.
        """
        parsed = Graph(graph)
        walk = SourceWalk(parsed) if sources is not None else None
        self._watched = saves_in(parsed) if sources is None else {}
        self._strands = _strands(walk.sources, sources) if walk and sources is not None else {}
        repeats = walk.endless_repeats if walk else {}
        self._per_element = splits_per_element(parsed) if walk and len(self._strands) == 1 else 0
        self._repeats = list(repeats.values())
        # An endless repeat begins again, with a new lease, after this many elements.
        sizes = [source_size(sources[n]) for own in self._repeats for n in own] if sources else []
        self.most_at_once = max(1, min(sizes, default=ENDLESS))
        self.component_specs = output_specs(parsed.dataset)
        self.calls_functions = calls_functions(parsed)
        # Set the options again: those from below an endless repeat don't pass its gate.
        options = options_of(walk.options if walk else b"")
        if options.deterministic is False:
            self._per_element = 0
        del parsed  # constants may be large, and TensorFlow copies them
        self._imported = ImportedGraph(graph)
        isolated, result = self._imported.proto, self._imported.result
        tables = self._imported.tables
        _replace_repeats(isolated, repeats, f"{self._imported.prefix}_reopen")
        # TensorFlow itself keeps callbacks only while the tracing thread lives.
        self._callbacks: list[Callable[..., Any]] = []

        def build(first: Tensor) -> list[Tensor]:
            """`first` is the number of the run's first feed; the gates' numbers come last."""
            feeds = _FedSources([*self._strands, *self._watched], first, self._callbacks)
            after = first + len(feeds.names)
            gates = {
                GATE.format(name): _gate(after + i, self._callbacks)
                for i, name in enumerate(repeats)
            }
            results = [result, *tables]
            variant, *rest = import_graph(isolated, {*feeds.names}, feeds.dataset, gates, results)
            dataset = dataset_ops._VariantDataset(variant, self.component_specs)
            return [dataset.with_options(options)._variant_tensor, *rest]

        try:
            self._imported.add_functions()
            self._build = concrete(build, [tf.TensorSpec([], tf.int64)])
            self._imported.forget()
        except BaseException:
            self.close()
            raise

    def load(self, feed: SplitFeed | None) -> LoadedGraph:
        """The dataset of one run. Raises TensorFlow's errors."""
        asked: list[_Feed | _Gate | Watch] = [Watch(path) for path in self._watched.values()]
        if feed is not None:
            shared = {strand: _Strand(feed, *strand) for strand in self._strands.values()}
            feeds = [_Feed(shared[strand]) for strand in self._strands.values()]
            asked = [*feeds, *[_Gate(feed, own) for own in self._repeats]]
        return LoadedGraph(self._build, asked, self._per_element)

    def close(self) -> None:
        """Free TensorFlow's resources. Idempotent. No run may still use it."""
        self._imported.close()
        self._callbacks = []
        self._build = None  # it holds the graph's constants


class LoadedGraph:
    """A traced graph as the dataset of one run. `close` frees its TensorFlow resources."""

    def __init__(
        self,
        build: Any,  # a traced function: (first feed) → the variant, tables
        asked: Sequence[_Feed | _Gate | Watch],
        per_element: int = 0,
    ) -> None:
        """`per_element` is how many splits each element is of, in their order; 0: not known."""
        self._tables: list[Tensor] = []
        self._asked = asked
        self.per_element = per_element if asked and isinstance(asked[0], _Feed) else 0
        if self.per_element:
            cast(_Feed, asked[0]).strand.records = True
        first = next(_first_numbers)
        self._numbers = range(first, first + len(asked))
        _asked.update(zip(self._numbers, asked, strict=True))
        try:
            self.variant, *self._tables = call_unoptimized(build, tf.constant(first, tf.int64))
        except BaseException:
            self.close()
            raise

    def passed(self, elements: int) -> None:
        """So many more elements were yielded."""
        if self.per_element:
            cast(_Feed, self._asked[0]).strand.passed(elements * self.per_element)

    def begun(self) -> Begun:
        strands = [asked.strand for asked in self._asked if isinstance(asked, _Feed)]
        return {strand.source: strand.begun() for strand in strands} or None

    def cancel(self) -> None:
        """End the pipeline's waits in this module, except for a SplitFeed. Idempotent."""
        for asked in self._asked:
            if isinstance(asked, Watch):
                asked.cancelled.set()

    def close(self) -> None:
        """Idempotent. The pipeline must have ended."""
        for handle in self._tables:
            tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)
        for number in self._numbers:
            _asked.pop(number, None)
        self._tables = []
        self.variant = None


_asked: dict[int, Any] = {}
"""The _Feeds, _Gates and Watches that this process's pipelines call, by unique numbers."""

_first_numbers = itertools.count(0, 1 << 32)  # of each run, whose numbers are consecutive


def _gate(number: Tensor, callbacks: list[Callable[..., Any]]) -> Tensor:
    """The variant of a gate: one item for each opening, until its sources have no further split."""
    return until_stopped(
        lambda: _integers(lambda n: _asked[int(n)].pass_one(), 1, callbacks, number)
    )._variant_tensor


def _replace_repeats(graph: pb.GraphDef, repeats: Collection[str], function: str) -> None:
    """Replace the nodes `repeats` by flat_maps over their gates: each item of a gate opens the
    repeat's input. Adds the flat_maps' `function` to the library.
    """
    for node in graph.node:
        if node.name in repeats:
            dataset, _, *control = node.input
            node.op = "FlatMapDataset"
            node.input[:] = [GATE.format(node.name), dataset, *control]
            node.attr["f"].func.name = function
            node.attr["Targuments"].list.type.append(tf.variant.as_datatype_enum)
    if repeats:
        definition = function_pb2.FunctionDef()
        definition.signature.name = function
        definition.signature.input_arg.add(name="item", type=tf.int64.as_datatype_enum)
        definition.signature.input_arg.add(name="dataset", type=tf.variant.as_datatype_enum)
        definition.signature.output_arg.add(name="opened", type=tf.variant.as_datatype_enum)
        definition.ret["opened"] = "dataset"
        graph.library.function.add().ParseFromString(definition.SerializeToString())


def _strands(
    sources: list[SourceNode], registered: Sequence[ev.SplitSource]
) -> dict[str, tuple[int, bool]]:
    """For each fed source, by its node's name: the source whose leases it shares, and whether that
    is below an endless repeat. Sources that are read whole aren't fed.

    Raises NotSplittable.
    """
    require_splittable(registered)
    found = {}
    for number, (source, splits) in enumerate(zip(sources, registered, strict=True)):
        leases = splits.leased_with if splits.HasField("leased_with") else number
        require_splittable((), source.unleasable)  # an earlier version may have registered it
        if source.leases != leases:
            raise NotSplittable(
                "the dataset zips several sources, and was registered by a version that did not "
                "keep their pairs together: register it again, under another id if you choose it"
            )
        if source.whole:
            continue
        found[source.node.name] = (leases, sources[leases].endless)
    return found


class _Strand:
    """The ranges of sources that share leases, and each source's position in them.

    The source that is ahead leases the next range, and the others read the same ranges after it. So
    zipped sources have the same splits in the same order, whichever is ahead.
    """

    def __init__(self, feed: SplitFeed, source: int, endless: bool) -> None:
        self._feed = feed
        self.source = source
        self._endless = endless
        self._lock = threading.Lock()
        self._ahead: list[deque[tuple[int, SplitRange | None]]] = []  # (opening, range or end)
        self.records = False  # whether `passed` is called
        self._begun: deque[SplitRange] = deque()
        self._passed = 0  # splits of the first of these

    def add_reader(self) -> int:
        self._ahead.append(deque())
        return len(self._ahead) - 1

    def next_range(self, reader: int, opening: int) -> SplitRange | None:
        with self._lock:
            mine = self._ahead[reader]
            while mine and mine[0][0] < opening:  # this reader left that opening early
                mine.popleft()
            if not mine:
                found = self._feed.next_range(self.source, opening, self._endless)
                for ahead in self._ahead:
                    ahead.append((opening, found))
                if found is not None:
                    self._begun.append(found)
                    if not self.records and len(self._begun) > _MOST_BEGUN:
                        self._begun.popleft()
            if mine[0][0] > opening:
                return None  # another reader left it early
            if mine[0][1] is None:
                return None  # however often it asks
            return mine.popleft()[1]

    def begun(self) -> list[SplitRange]:
        """What may be unfinished, as far as that is known."""
        with self._lock:
            return list(self._begun)

    def passed(self, splits: int) -> None:
        """All elements of so many further splits were yielded, in order."""
        while splits and self._begun:
            of = self._begun[0]
            count = min(splits, of.count - self._passed)
            of.made(count)
            splits -= count
            self._passed += count
            if self._passed == of.count:
                self._begun.popleft()
                self._passed = 0


class _Feed:
    """One source's view of a strand."""

    def __init__(self, strand: _Strand) -> None:
        self.openings = itertools.count()
        self.strand = strand
        self._reader = strand.add_reader()
        self._failed = threading.Event()  # ask no more: `ignore_errors` would ask forever

    def next_range(self, opening: Any) -> SplitRange:
        splits = None
        if not self._failed.is_set():
            try:
                splits = self.strand.next_range(self._reader, int(opening))
            except BaseException:
                self._failed.set()
                raise
        if splits is None:
            raise StopIteration
        return splits


class _Gate:
    """Guards an endless repeat: answers whether its sources will have a further split."""

    def __init__(self, feed: SplitFeed, sources: list[int]) -> None:
        self._feed = feed
        self._sources = sources

    def pass_one(self) -> int:
        if self._feed.is_over(self._sources):
            raise StopIteration
        return 0


class _FedSources:
    """A graph's sources on leased splits, by their nodes' names.

    Sources that are alike share one traced function: tracing takes 20 ms, and there may be
    hundreds of sources.
    """

    def __init__(
        self, names: list[str], first: Tensor, callbacks: list[Callable[..., Any]]
    ) -> None:
        """The feeds' numbers begin with `first`; the trace must keep `callbacks` alive."""
        self.names = names
        self._first = first
        self._callbacks = callbacks
        self._traced: dict[Any, tuple[Traced, list[int]]] = {}

    def dataset(self, node: pb.NodeDef, operands: list[Tensor], source: Tensor) -> Tensor:
        """The variant of a dataset of a source's leased splits."""
        number, callbacks = self._first + self.names.index(node.name), self._callbacks
        next_splits = _next_names if node.op == CHUNKS else _next_numbers

        def leases(number: Tensor) -> Dataset:
            opening = _integers(lambda n: next(_asked[int(n)].openings), 1, callbacks, number)
            return until_stopped(lambda: next_splits(callbacks, number, *opening))

        specs, inputs = output_specs(node), [*operands, source]
        alike = (node.op, specs, *[(t.dtype, str(t.shape)) for t in inputs])
        numbers = tf.data.Dataset.range(number, number + 1)
        leased = self._flat_map(numbers, next_splits, leases, [])
        expand = expansion(node, operands, source, specs)
        return self._flat_map(leased, alike, expand, inputs)._variant_tensor

    def _flat_map(
        self, dataset: Dataset, alike: Any, function: Callable[..., Dataset], inputs: list[Tensor]
    ) -> Dataset:
        """`dataset.flat_map(function)`, where the function refers to some of the inputs. Functions
        with equal `alike` differ only in these."""
        if alike not in self._traced:
            made = traced(function, dataset.element_spec)
            places = {id(tensor): place for place, tensor in enumerate(inputs)}
            own = [places[id(tensor)] for tensor in made.function.captured_inputs]
            self._traced[alike] = made, own
        made, own = self._traced[alike]
        return opened(dataset, made, [inputs[place] for place in own])


def _next_numbers(callbacks: list[Callable[..., Any]], *inputs: Tensor) -> tuple[Tensor, ...]:
    """A feed's next range, (first, count), from its number and its opening."""

    def first_and_count(number: Any, opening: Any) -> tuple[int, int]:
        splits = _asked[int(number)].next_range(opening)
        return splits.first, splits.count

    return _integers(first_and_count, 2, callbacks, *inputs)


def _next_names(callbacks: list[Callable[..., Any]], *inputs: Tensor) -> tuple[Tensor, ...]:
    """A feed's next names, (names,), for splits that have names."""

    def names(number: Any, opening: Any) -> Any:
        splits = _asked[int(number)].next_range(opening)
        return np.array([name.encode() for name in splits.names], object)

    callbacks.append(names)
    found = tf.numpy_function(names, inputs, tf.string)
    return (tf.ensure_shape(found, [None]),)


def _integers(
    function: Callable[..., Any], size: int, callbacks: list[Callable[..., Any]], *inputs: Tensor
) -> tuple[Tensor, ...]:
    """The `size` integers that a Python function of the inputs returns; keep `callbacks` alive."""
    callbacks.append(lambda *own: np.asarray(function(*own), np.int64))
    found = tf.numpy_function(callbacks[-1], inputs, tf.int64)
    return tuple(tf.unstack(tf.reshape(found, [size])))


# Ops that TensorFlow marks as stateful only so that it does not prune them.
_HARMLESS = {"Assert", "Case", "If", "PrintV2", "StatefulPartitionedCall", "While"}


def runs_share_nothing(graph: Graph, options: tf.data.Options) -> bool:
    """Whether runs of one trace share nothing but the graph, to whose options these are added.

    A graph may have state besides its datasets, which every run makes anew: in itself, in tables,
    which have names, or in functions, such as that of random numbers. A stateful function has
    separate state in each run if TensorFlow rewrites the dataset, as that copies the functions.
    """
    functions = [node.op for f in graph.proto.library.function for node in f.node_def]
    nodes = [node for node in graph.proto.node if node is not graph.result]
    if any(_has_state(node.op) for node in nodes) or not TABLES.isdisjoint(functions):
        return False
    given = [n.attr["serialized_options"].s for n in nodes if n.op == "OptionsDataset"]
    is_rewritten = all(map(_rewrites, [options, *map(options_of, given)]))
    return is_rewritten or not any(map(_has_state, functions))


def _rewrites(options: tf.data.Options) -> bool:
    """Whether TensorFlow rewrites a dataset, as far as these options say."""
    rewriting = options.experimental_optimization
    return rewriting.apply_default_optimizations is not False and (
        rewriting.noop_elimination is not False
    )


def _has_state(op: str) -> bool:
    definition = op_def_registry.get(op)  # None for a function of the graph
    stateful = definition is not None and definition.is_stateful
    return stateful and "Dataset" not in op and op not in _HARMLESS

"""Finds a graph's sources, and what lies between them and its result, without TensorFlow.

The walk goes back from a graph's result. Each dataset node passes on the sources of its inputs. A
node without dataset inputs is a *source*, with one split provider. split_sources.py says what it
yields.

Zipped sources are *leased together*: a worker that has split n of one has split n of the others.
Pairs then stay pairs if each split yields equally many elements, so the inputs of a zip must treat
their sources alike. Where they visibly don't, the sources are *unleasable*. So are sources below a
node that cannot work on a part of its input. Every worker reads a few sources *whole*.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...errors import Unimplemented
from ...proto import graph_pb2 as pb
from .graphs import Graph, InvalidGraph


class NotSplittable(Unimplemented):
    """The dataset has a source that cannot be divided among workers."""


@dataclass
class SourceNode:
    """A source in its graph, and how workers lease its splits."""

    node: pb.NodeDef
    leases: (
        int  # the number of the source whose leases it has: its own, or the first one's of a zip
    )
    whole: bool = False  # every worker reads all of it
    endless: bool = False  # below a repeat without an end
    unleasable: str = ""
    singly: bool = False  # a worker may leave it early
    sizes_match: bool = False  # sources leased together must have equal sizes, not a common prefix


class _Lineage(NamedTuple):
    """The sources of a dataset, in groups that are leased together, and the nodes between them and
    the dataset that change the number or order of elements."""

    sources: list[list[int]]
    changes: tuple[Any, ...]
    once: str = ""  # why pairs are kept only if nothing repeats the dataset


_REFUSED = {
    "ChooseFastest": "it picks one of several inputs by their speed",
    "ChooseFastestBranch": "it picks one of several branches by their speed",
    "GroupByReducer": "each worker would reduce its own elements of a group",
    "WeightedFlatMap": "it reads its inputs by index",
    "Snapshot": "Splitting is not implemented for snapshot datasets",  # TensorFlow's words
    "Generator": "a Python generator can only be run from its start",
}
"""Why a dataset passes no splits on, by its kind."""

# Ops that yield one element for each input, so that pairs stay pairs. (A shuffle mixes pairs
# without leases, too.) A cache is not among them: its next repetition leases nothing.
_ONE_TO_ONE = {
    *("AssertCardinality", "AssertNext", "AssertPrev", "BytesProducedStats", "Finalize"),
    *("LatencyStats", "Map", "MaxIntraOpParallelism", "Model", "Options", "Prefetch"),
    *("PrivateThreadPool", "Scan", "SetStatsAggregator", "Shuffle"),
}

# Ops that change the number or order of elements by a rule that doesn't look at them: the inputs
# that are the rule's parameters, by their places after the functions' arguments. All other ops
# decide by element, so they keep no pairs.
_RULES = {
    "Batch": (1, -1),
    "Cache": (),
    "FlatMap": (),  # if each split yields equally many, which cannot be checked here
    "Interleave": (1, 2),
    "PaddedBatch": (1, -1),
    "Repeat": (1,),
    "Shard": (1, 2),
    "Skip": (1,),
    "Take": (1,),
    "Unbatch": (),
    "Window": (1, 2, 3),
}

CHUNKS = "ListSnapshotChunksDataset"
"""The source whose splits are the files of a distributed save; tf.data.Dataset.load makes one."""

_COUNT_INPUTS = {"Repeat": 1, "ShuffleAndRepeat": 4}
"""The place of a repeat's count among its inputs."""

_ENDLESS_REPEAT = (("Repeat", -1),)

_EMPTY_FILE_NAMES = {b"\x08\x07\x12\x00", b"\x08\x07\x12\x00B\x00"}  # TensorProtos of ""


class SourceWalk:
    """One walk over a graph's datasets, from its result down to the sources.

    `sources` are in the order of their split providers. `repeats` are nodes. `endless_repeats` are
    pairs of an endless repeat's node and the sources below it that are leased again and again.
    `choices` are the nodes of choose_from_datasets and sample_from_datasets.
    `options` are those of the whole dataset, TensorFlow's message serialized. Raises NotSplittable
    at a node that cannot pass splits on, and InvalidGraph.
    """

    def __init__(self, graph: Graph) -> None:
        self.sources: list[SourceNode] = []
        self.endless_repeats: dict[str, list[int]] = {}
        self.repeats: list[pb.NodeDef] = []  # with any count but 1
        self.choices: list[pb.NodeDef] = []
        self.options = b""
        self._graph = graph
        self._below: list[tuple[pb.NodeDef, list[int]]] = []  # endless repeats and their sources
        self._walk()
        for node, numbers in self._below:
            leased = [n for n in numbers if not self.sources[n].whole]
            for source in (self.sources[n] for n in leased):
                source.endless = True
                if node.op.startswith("ShuffleAndRepeat"):
                    source.unleasable = (
                        f"its {node.name!r} ({node.op}) would end for a worker that gets no split "
                        "in a repetition: write shuffle(…).repeat() instead"
                    )
            if leased:
                self.endless_repeats[node.name] = leased

    def _walk(self) -> None:
        """Depth first, with an explicit stack: graphs may be of any depth."""
        path: set[str] = set()
        visited: set[str] = set()
        stack: list[tuple[pb.NodeDef, Iterator[pb.NodeDef], list[_Lineage]]] = []

        def enter(node: pb.NodeDef) -> None:
            if node.name in path:
                raise InvalidGraph(f"the graph has a cycle through node {node.name!r}")
            if why := _REFUSED.get(kind_of(node)):
                raise not_splittable(node, why)
            inputs = self._graph.dataset_inputs(node)
            if not inputs:
                # TensorFlow writes a tree. A shared source would have two readers, which nothing
                # here tells apart.
                if node.name in visited:
                    raise not_splittable(node, "it is the input of two datasets")
                visited.add(node.name)
            path.add(node.name)
            stack.append((node, iter(inputs), []))

        enter(self._graph.dataset)
        while stack:
            node, inputs, readings = stack[-1]
            if (child := next(inputs, None)) is not None:
                enter(child)
                continue
            stack.pop()
            path.remove(node.name)
            reading = self._reading(node, readings)
            if stack:
                stack[-1][2].append(reading)

    def _reading(self, node: pb.NodeDef, inputs: list[_Lineage]) -> _Lineage:
        if not inputs:
            whole = node.op.startswith("RandomDataset") or node.attr["replicate_on_split"].b
            number = len(self.sources)
            self.sources.append(SourceNode(node, number, whole=whole))
            return _Lineage([] if whole else [[number]], ())
        kind = kind_of(node)
        times = self._fact(node.input[_COUNT_INPUTS[kind]]) if kind in _COUNT_INPUTS else 1
        if times != 1:
            self.repeats.append(node)
        if kind == "DirectedInterleave":
            self.choices.append(node)
        if why := self._needs_whole(kind, node):
            for reading in inputs:
                self._refuse(reading.sources, f"{node.name!r} ({node.op}) {why}")
        if kind == "Options":
            self.options += node.attr["serialized_options"].s  # protobuf merges concatenations
        if kind == "Zip":
            return self._zip(node, inputs)
        if len(inputs) > 1:
            changes = tuple(reading.changes for reading in inputs)
            # An op that chooses between its inputs equals no other.
            name = "" if kind == "Concatenate" else node.name
            sources = [group for reading in inputs for group in reading.sources]
            if node.attr["stop_on_empty_dataset"].b:  # it drops what the others still have
                for number in (n for group in sources for n in group):
                    self.sources[number].singly = True
            once = next((reading.once for reading in inputs if reading.once), "")
            return _Lineage(sources, ((kind, name, changes),), once)
        ((sources, changes, once),) = inputs
        if kind in _ONE_TO_ONE and not (kind == "Scan" and changes == _ENDLESS_REPEAT):
            return inputs[0]  # a scan of one repeated element counts: the element changes
        if once and kind in ("Repeat", "ShuffleAndRepeat"):
            self._refuse(sources, once)
        extent = [node.name]  # equals no other
        if kind in _RULES:
            arguments = len(node.attr["Targuments"].list.type)
            data = [name for name in node.input if not name.startswith("^")]
            places = [place + arguments * (place > 0) for place in _RULES[kind]]
            extent = [self._fact(data[place]) for place in places]
        # A cache repeats without leases, on each worker its own elements.
        if isinstance(times, int) and times < 0 and not _has_cache(changes):
            self._below.append((node, [n for group in sources for n in group]))
        return _Lineage(sources, (*changes, (kind, *extent)), once)

    def _needs_whole(self, kind: str, node: pb.NodeDef) -> str:
        """Why a dataset cannot work on a part of the splits; empty if it can."""
        if kind == "GlobalShuffle":
            return "reads its input by index. Write shuffle(…) instead"
        if kind == "Cache" and not names_no_file(self._graph.producer(node.input[1])):
            return (
                "keeps only a part of the elements in its file, those of one worker's splits, "
                "which whoever finds the file takes for his own. Cache in memory, or where "
                "you read"
            )
        return ""

    def _fact(self, tensor: str) -> Any:
        value = self._graph.value_of(tensor)
        return tensor if value is None else value

    def _refuse(self, sources: list[list[int]], why: str) -> None:
        for group in sources:
            for number in group:
                self.sources[number].unleasable = why

    def _zip(self, node: pb.NodeDef, inputs: list[_Lineage]) -> _Lineage:
        leased = [reading for reading in inputs if reading.sources]
        if len(leased) > 1:  # one repeated tensor pairs with everything
            whole = [r for r in leased if r.changes == _ENDLESS_REPEAT and self._is_tensor(r)]
            leased = [reading for reading in leased if reading not in whole]
            for number in (n for reading in whole for n in reading.sources[0]):
                self.sources[number].whole = True
        if not leased:
            return _Lineage([], ())
        first, *others = leased
        once = next((reading.once for reading in leased if reading.once), "")
        for other in others:
            one, two = first.changes, other.changes
            if one == two and len(first.sources) == len(other.sources):
                continue
            # A cache that isn't repeated changes nothing.
            copied = [tuple(change for change in c if change != ("Cache",)) for c in (one, two)]
            repeated = any(change[0] == "Repeat" for change in one)
            why = (
                f"{node.name!r} ({node.op}) zips a dataset that {_describe_changes(one)} "
                f"with one that {_describe_changes(two)}: on several workers, elements would be "
                f"paired that do not belong together. {self._advice(first, other)}"
            )
            if copied[0] != copied[1] or repeated or len(first.sources) != len(other.sources):
                for reading in leased:
                    self._refuse(reading.sources, why)
                return first
            once = why
        merged = []
        for groups in zip(*(reading.sources for reading in leased), strict=True):
            together = [number for group in groups for number in group]
            for source in (self.sources[number] for number in together):
                source.leases = together[0]
                source.sizes_match |= bool(first.changes)
            merged.append(together)
        return _Lineage(merged, first.changes, once)

    def _advice(self, *zipped: _Lineage) -> str:
        """The advice of an error about this zip: what to write instead."""
        for reading in filter(self._is_tensor, zipped):
            match [kind for kind, *_ in reading.changes]:
                case ["Repeat"]:
                    return "Repeat the tensor without a count: the zip ends with its other inputs"
                case ["Repeat", "Scan"]:  # tf.data.Dataset.counter
                    return (
                        "Write Dataset.range(start, tf.int64.max, step) for a counter: its numbers "
                        "are those of the other's splits. Or enumerate(), by which each worker "
                        "counts for itself"
                    )
        return "Treat its inputs alike, or do after the zip what is done before"

    def _is_tensor(self, reading: _Lineage) -> bool:
        sources = [self.sources[n].node.op for group in reading.sources for n in group]
        return len(reading.sources) == 1 and set(sources) == {"TensorDataset"}


def names_no_file(name: pb.NodeDef) -> bool:
    """Whether a cache whose file this node names has none, and is in memory."""
    return name.op == "Const" and (
        name.attr["value"].tensor.SerializeToString() in _EMPTY_FILE_NAMES
    )


def kind_of(node: pb.NodeDef) -> str:
    """A dataset node's op without variants that yield the same elements: ParallelBatchDatasetV2 is
    a "Batch".
    """
    op = node.op.rstrip("0123456789").removesuffix("V").removesuffix("Dataset")
    for prefix in ("Experimental", "Legacy", "Parallel"):
        op = op.removeprefix(prefix)
    return op


def _has_cache(changes: Any) -> bool:
    return isinstance(changes, tuple) and ("Cache" in changes or any(map(_has_cache, changes)))


def _describe_changes(changes: tuple[Any, ...]) -> str:
    """The transformations of a source's elements, in words, for errors."""
    done = [
        f"{kind}({', '.join(map(str, extent))})" if extent and kind in _RULES else str(kind)
        for kind, *extent in changes
    ]
    return f"does {', '.join(done)}" if done else "has an element for each split"


def not_splittable(node: pb.NodeDef, reason: str) -> NotSplittable:
    """Begins like TensorFlow's error, which trainers may look for."""
    return NotSplittable(
        f"Cannot create split providers for dataset of type {node.op}, which is the source "
        f"{node.name!r}: {reason}. Read it with sharding policy OFF, or start it from "
        "Dataset.range or Dataset.from_tensor_slices, for example of file names"
    )


_SLICED = {"Range", "TensorSlice"}  # a split is an element

_IN_ORDER = {
    *("AssertCardinality", "AssertNext", "Finalize", "Map", "MaxIntraOpParallelism", "Model"),
    *("Options", "Prefetch", "PrivateThreadPool", "Repeat"),
}


def splits_per_element(graph: Graph) -> int:
    """How many splits each element is of, if elements come in the order of their splits; else 0.

    The last batch may be smaller, so there is no such number if anything repeats it.
    """
    node, splits, repeats = graph.dataset, 1, False
    while inputs := graph.dataset_inputs(node):
        kind = kind_of(node)
        repeats |= kind == "Repeat"
        if kind == "Batch":
            splits *= graph.value_of(node.input[1]) or 0
        elif kind not in _IN_ORDER:
            return 0
        may_reorder = node.attr["deterministic"].s == b"false" or node.attr["sloppy"].b
        if may_reorder or len(inputs) > 1:
            return 0
        node = inputs[0]
    return splits if kind_of(node) in _SLICED and not (repeats and splits > 1) else 0

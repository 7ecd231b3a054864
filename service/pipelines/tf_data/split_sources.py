"""Finds a graph's split sources, and what each yields.

source_walk.py walks the graph to the sources. Most of what they yield is constant in the graph. For
the rest an `Evaluate` function runs TensorFlow (evaluate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ....journal.proto import events_pb2 as ev
from ....journal.splits import grows, source_size
from ...errors import cut_error
from ...proto import graph_pb2 as pb
from .constants import TensorFacts, constant, text
from .graphs import Graph
from .source_walk import CHUNKS, NotSplittable, SourceWalk, kind_of, not_splittable

Evaluate = Callable[[bytes, Sequence[str]], list[TensorFacts]]
"""(serialized GraphDef, tensor names) → facts about each tensor. May raise ForebayError."""


def split_sources(graph: bytes, evaluate: Evaluate | None = None) -> list[ev.SplitSource]:
    """The sources of a serialized dataset graph, one a split provider, in order.

    Calls `evaluate` at most once, if the graph's constants don't suffice. Raises InvalidGraph, and
    NotSplittable with the node, its op and the reason.
    """
    parsed = Graph(graph)
    found = SourceWalk(parsed).sources
    nodes = [source.node for source in found]
    wanted: dict[str, TensorFacts | None] = {
        name: constant(parsed.producer(name)) for node in nodes for name in _decisive(node)
    }
    unknown = [name for name, facts in wanted.items() if facts is None]
    if unknown:
        if evaluate is None:
            raise NotSplittable(
                f"the size of tensor {unknown[0]!r} is not a constant of the graph, and nothing "
                "here can evaluate it; register the dataset from a client with TensorFlow"
            )
        wanted.update(zip(unknown, evaluate(graph, unknown), strict=True))
    sources = [_splits(node, parsed, wanted) for node in nodes]
    for number, (known, source) in enumerate(zip(found, sources, strict=True)):
        source.unleasable = known.unleasable
        source.singly = known.singly
        if known.leases == number:
            continue
        source.leased_with = known.leases
        first = sources[known.leases]
        both = nodes[known.leases].name, known.node.name
        if grows(first) or grows(source):
            first.unleasable = (
                f"{both[0]!r} is zipped with {both[1]!r}, and of a distributed save nobody "
                "knows how many chunks it will have, and which has how many elements. Zip before "
                "you save, or where you read"
            )
            continue
        sizes = source_size(first), source_size(source)
        if known.sizes_match and sizes[0] != sizes[1]:
            first.unleasable = (
                f"{both[0]!r} with {sizes[0]} splits is zipped with {both[1]!r} with "
                f"{sizes[1]}, and what is done to their elements before the zip would pair on "
                "several workers what does not belong together. Zip first, or make them equally "
                "long"
            )
    for source in sources:
        source.unleasable = cut_error(source.unleasable)
    return sources


def require_splittable(sources: Iterable[ev.SplitSource], unsplittable: str = "") -> None:
    """Raises NotSplittable if Forebay's workers cannot divide these registered sources."""
    reasons = filter(None, [unsplittable, *(source.unleasable for source in sources)])
    if reason := next(reasons, None):
        raise NotSplittable(f"the dataset cannot be split among Forebay's workers: {reason}")


def require_bundles(walk: SourceWalk) -> None:
    """Raises NotSplittable, naming the node, if a range of this dataset's splits, run on its own
    iterator, would not be a part of the dataset.
    """
    for node in walk.choices:
        raise _no_bundle(
            node,
            "it chooses among several datasets, and a bundle is a range of one dataset's splits. "
            "Read each dataset by itself, and choose where you train; or choose within a function "
            "of flat_map",
        )
    for node in walk.repeats:
        raise _no_bundle(
            node,
            "it would repeat each bundle by itself. Repeat where you read, by further epochs; or "
            "within a function of flat_map, if each element shall come several times",
        )
    groups = {source.leases: source for source in walk.sources}
    for source in walk.sources:
        if source.unleasable:
            raise _no_bundle(source.node, source.unleasable)
        if source.node.op == CHUNKS:
            raise _no_bundle(
                source.node,
                "what it has is found while it is read, in any order. Save or list "
                "the elements themselves",
            )
        if source.whole:
            raise _no_bundle(
                source.node, "each bundle would read all of it. Map what it yields instead"
            )
    if len(groups) > 1:
        one, other, *_ = groups.values()
        raise _no_bundle(
            other.node,
            f"{one.node.name!r} ({one.node.op}) is another source, and a bundle has a range of "
            "one. Zip them, or put them into one list of what to read",
        )


def require_parts(graph: Graph) -> None:
    """Raises NotSplittable, naming the node, if the ranges' elements together aren't the dataset's.
    Batches are allowed, though the last one of a range may be smaller."""
    for _, error in begun_anew(graph):
        raise error


def begun_anew(graph: Graph) -> Iterator[tuple[bool, NotSplittable]]:
    """The nodes that begin anew in each range of splits: whether elements depend on how the splits
    were cut, and not just their grouping, and an error that names the node."""
    for node in (node for node in graph.proto.node if "Dataset" in node.op):
        kind = kind_of(node)
        if kind in _COUNTS or kind in _GROUPS:
            does = _COUNTS.get(kind, "it would begin anew in each part")
            yield kind in _COUNTS, _no_bundle(node, f"{does}. Apply it where you read")
        if kind in _BATCHES and node.input and graph.value_of(node.input[-1]) != 0:
            why = "it would drop what remains in each part. Leave out drop_remainder=True"
            yield False, _no_bundle(node, why)


_COUNTS = {
    "AssertCardinality": "it would count each part's elements",
    "AutoShard": "it would take a share of each part",
    "Scan": "it would begin with its first state in each part",
    "Shard": "it would count from 0 in each part",
    "Skip": "it would skip the first elements of each part",
    "SlidingWindow": "it would lack the windows between parts",
    "Take": "it would take the first elements of each part",
    "TakeWhile": "it would begin anew in each part",
    "Unique": "it would know the elements of one part only",
    "Window": "it would lack the windows between parts",
}
"""What each does that chooses or changes elements by their place among all."""

_GROUPS = frozenset({"DenseToSparseBatch", "GroupByReducer", "GroupByWindow", "Rebatch"})
_BATCHES = frozenset({"Batch", "PaddedBatch", "MapAndBatch"})


def _no_bundle(node: pb.NodeDef, reason: str) -> NotSplittable:
    return NotSplittable(
        f"the dataset cannot be run in bundles because of {node.name!r} ({node.op}): {reason}"
    )


_DECISIVE = {"RangeDataset": 3, "TensorSliceDataset": 1} | dict.fromkeys(
    ("TensorDataset", "ListDataset", "RandomDataset", "RandomDatasetV2", CHUNKS), 0
)
"""How many of a source's first inputs determine its splits."""


def _decisive(node: pb.NodeDef) -> Sequence[str]:
    """The tensors that determine a source's splits."""
    if node.op not in _DECISIVE:
        raise not_splittable(node, "only ranges, slices of tensors, lists and tensors can be")
    return node.input[: _DECISIVE[node.op]]


def _splits(node: pb.NodeDef, graph: Graph, facts: dict[str, TensorFacts | None]) -> ev.SplitSource:
    known = [fact for name in _decisive(node) if (fact := facts[name]) is not None]
    match node.op:
        case "RangeDataset":
            values = [fact.value for fact in known if fact.value is not None]
            if len(values) != 3 or not values[2]:
                raise not_splittable(node, f"start, stop and step are {values}")
            start, stop, step = values
            return ev.SplitSource(arithmetic=ev.Arithmetic(start=start, stop=stop, step=step))
        case "TensorSliceDataset":
            if not known or not known[0].shape:
                raise not_splittable(node, "its first component is no tensor with a length")
            return ev.SplitSource(count=known[0].shape[0])
        case "TensorDataset":
            return ev.SplitSource(count=1)
        case "ListDataset":
            components = len(node.attr["output_types"].list.type)
            return ev.SplitSource(count=len(node.input) // max(1, components))
        case _ if node.op == CHUNKS:
            path = text(graph.producer(node.input[0]))
            if path is None or not path.startswith("/") or "\0" in path:
                raise not_splittable(
                    node,
                    f"the dispatcher cannot list the chunks of a save at {path!r}; give load the "
                    "absolute path of a directory that the dispatcher and all workers see under "
                    "this name",
                )
            return ev.SplitSource(saved_chunks=ev.SavedChunks(path=path))
        case _:
            return ev.SplitSource(endless=ev.Endless())

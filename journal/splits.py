"""Split sources as data: the number of splits, and the value of split n."""

from __future__ import annotations

from .proto import events_pb2 as ev

ENDLESS = 2**63 - 1
"""The size of an infinite source."""

MAX_REASON = 500
"""The most characters of the reason why a split is skipped."""


def source_size(source: ev.SplitSource) -> int:
    """The number of splits of one pass; ENDLESS if it is infinite, 0 if it grows."""
    kind = source.WhichOneof("source")
    if kind == "arithmetic":
        numbers = source.arithmetic
        return min(max(0, -((numbers.start - numbers.stop) // numbers.step)), ENDLESS)
    if kind == "count":
        return source.count
    if kind == "explicit":
        return len(source.explicit.splits)
    return 0 if grows(source) else ENDLESS


def grows(source: ev.SplitSource) -> bool:
    """Whether each iteration finds its splits while it reads (SplitsFound)."""
    return source.HasField("saved_chunks")


def split_value(source: ev.SplitSource, number: int) -> int:
    """Split `number` as TensorFlow's GetSplit gives it: a value of a range, else an index."""
    if source.WhichOneof("source") == "arithmetic":
        return source.arithmetic.start + number * source.arithmetic.step
    return number

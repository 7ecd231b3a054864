"""The part of a dataset that a task reads: a shard, or splits from a feed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ...journal.proto import events_pb2 as ev
from ...journal.splits import ENDLESS, source_size

SHARD_HINT = -1
"""For `Dataset.shard(SHARD_HINT, …)` under ShardingPolicy.HINT."""


@dataclass(frozen=True, slots=True)
class SplitRange:
    """Consecutive splits of one pass over a source."""

    first: int
    count: int
    pass_number: int
    names: tuple[str, ...] = ()  # of the splits, if the source can grow
    made: Callable[[int], object] = field(default=lambda _: None, compare=False, repr=False)
    """A run that `needs` some calls it once it has yielded all elements of so many further splits
    of these, and its reader asks for more."""


PARTS = 8
"""How many ranges each process gets of shared splits, so that all end at about the same time."""


class Shard(NamedTuple):
    """Part `number` of the `of` parts that static sharding divides a dataset into."""

    sharding: ev.Sharding
    number: int
    of: int


class SkipReport(NamedTuple):
    """A request to skip the rest of a split, or records of it, as a Python dataset's function
    failed there, or cannot read them."""

    split: int
    element: int  # the first one to skip
    reason: str  # in few words
    limit: int  # registered limit of skipped splits and records
    records: int = 0  # to skip from there on; 0: the rest of the split


MaySkip = Callable[[SkipReport], bool]
"""Decides whether they may be skipped; may block. Its exceptions end the run."""


def require_bundle(sources: Iterable[ev.SplitSource], splits: SplitRange, start: int) -> None:
    """Raises ValueError."""
    if start < 0:
        raise ValueError(f"a bundle starts at an index from 0, not at {start}")
    there = min(map(source_size, sources), default=ENDLESS)
    if splits.first < 0 or splits.first + splits.count > there:
        raise ValueError(
            f"{splits.count} splits from {splits.first} on are no bundle of {there} splits"
        )


class SplitFeed(Protocol):
    """Gives a task's pipeline its splits."""

    @property
    def sources(self) -> Sequence[ev.SplitSource]:
        """The registered sources."""

    def next_range(self, source: int, opening: int, endless: bool) -> SplitRange | None:
        """The next splits of a source; None at the end of this opening of it.

        A pipeline with a `repeat` opens its source repeatedly. Openings count from 0: each is the
        pass of that number, or with an `endless` repeat any pass that has splits, which may include
        returned splits of an earlier pass. Blocks until the answer is known. Each source is called
        by one thread at a time. Its exceptions end the source, and the pipeline unless that ignores
        errors. Cancelling the run makes this call raise, too.
        """

    def is_over(self, sources: Iterable[int]) -> bool:
        """Whether present and future openings of these sources have no splits."""

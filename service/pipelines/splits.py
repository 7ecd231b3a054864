"""Which part of a dataset a task reads: a shard, or splits, and where these come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ...journal.proto import events_pb2 as ev

SHARD_HINT = -1
"""For `Dataset.shard(SHARD_HINT, …)` under ShardingPolicy.HINT."""


@dataclass(frozen=True, slots=True)
class SplitRange:
    """Consecutive splits of one pass over a source."""

    first: int
    count: int
    pass_number: int
    names: tuple[str, ...] = ()  # of the splits, if the source is one that grows


PARTS = 8
"""Ranges for each process of those that share the splits, so that all end at about once."""


class Shard(NamedTuple):
    """Number `number` of the parts that static sharding divides a dataset into, `of` them."""

    sharding: ev.Sharding
    number: int
    of: int


class SkipReport(NamedTuple):
    """The rest of a split shall be left out, since a Python dataset's function failed."""

    split: int
    element: int  # of the split, from which on it is left out
    reason: str  # in few words
    limit: int  # of splits that may be skipped, as was registered


MaySkip = Callable[[SkipReport], bool]
"""Whether it may be. Blocks until that is known. What it raises ends the run."""


class SplitFeed(Protocol):
    """Gives a task's pipeline its splits."""

    @property
    def sources(self) -> Sequence[ev.SplitSource]:
        """What was registered of each."""
        ...

    def next_range(self, source: int, opening: int, endless: bool) -> SplitRange | None:
        """The next splits of a source; None at the end of this opening of it.

        A pipeline with a `repeat` opens its source again and again. Openings count from 0: each is
        the pass of that number, or, if the repeat is `endless`, whichever has splits. Splits
        of an earlier pass that were handed back may be among them. Blocks until the answer
        is known. Called by one thread a source at a time. What it raises ends the source, and
        the pipeline unless that ignores errors; whoever cancels the run makes it raise, too.
        """
        ...

    def is_over(self, sources: Iterable[int]) -> bool:
        """Whether no opening of these that begins now or later will have a split."""
        ...

"""Measures how long trainers waited after each fault.

A trainer waits from its request for a block, which follows its work on the last block, until it has
the block. The *wait* after a fault is the longest wait of the trainers that the fault did not hit.
Waits count that begin before WINDOW_S after the fault and end after it, and they count from the
fault on. A wait may include the change of epochs, and counts for each of overlapping faults. So it
is an upper bound of the fault's cost.

Two kinds of waits are counted separately, since they say little about the fault. Some had no worker
left, and last until a new process has started. Others last as long as another, overlapping fault.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from .faults import DoneFault
from .members import TRAINERS
from .records import Got, Record, Started, Worked

WINDOW_S = 3.0
NONE_LEFT, DURING_ANOTHER = ", no worker left", ", during another"
"""Suffixes of a fault's kind."""


class Delivery(NamedTuple):
    """A block that a trainer's process got. Times are CLOCK_MONOTONIC."""

    asked_s: float  # when the trainer requested it; `got_s` for its first block
    got_s: float


Deliveries = Mapping[str, Sequence[Delivery]]
"""By trainer process."""


class Wait(NamedTuple):
    """A trainer waited from `since_s` to `until_s`; it counts from `fault_s` at the earliest."""

    since_s: float
    until_s: float
    fault_s: float

    @property
    def lasted_s(self) -> float:
        return self.until_s - max(self.since_s, self.fault_s)

    def overlaps(self, from_s: float, to_s: float) -> bool:
        return from_s < self.until_s and self.since_s < to_s


class Waits(msgspec.Struct, frozen=True):
    """The waits after the faults of one kind, in seconds."""

    faults: int
    p50_s: float
    p99_s: float
    longest_s: float


def deliveries(trainers: Sequence[Iterable[Record]]) -> Deliveries:
    """The blocks that each trainer process got, with their times."""
    found: defaultdict[str, list[Delivery]] = defaultdict(list)
    for records in trainers:
        name, asked_s = "", math.nan
        for record in records:
            match record:
                case Started():
                    name, asked_s = record.name, math.nan
                case Got(at_s=at_s):
                    since_s = at_s if math.isnan(asked_s) else asked_s
                    found[name].append(Delivery(since_s, at_s))
                    asked_s = at_s
                case Worked():
                    asked_s = record.at_s
    return dict(found)


def wait_after(done: DoneFault, got: Deliveries) -> Wait | None:
    """The wait after a fault; None if no other trainer got blocks both before and after it."""
    waits = []
    for name, blocks in got.items():
        first = bisect_right(blocks, done.at_s, key=lambda block: block.got_s)
        if name == done.name or first == 0:
            continue
        for block in blocks[first:]:
            if block.asked_s >= done.at_s + WINDOW_S:
                break
            waits.append(Wait(block.asked_s, block.got_s, done.at_s))
    return max(waits, key=lambda wait: wait.lasted_s, default=None)


def waits_by_kind(
    kinds: Iterable[tuple[str, DoneFault]],
    got: Deliveries,
    no_worker_s: Sequence[tuple[float, float]] = (),
) -> dict[str, Waits]:
    """The waits after all faults that hit a process, by the given kinds.

    `no_worker_s` are the periods (from, until) without workers.
    """
    hits = [(kind, done) for kind, done in kinds if done.name is not None]
    lasting = [done for kind, done in hits if _stops_others(kind, done)]
    found: defaultdict[str, list[float]] = defaultdict(list)
    for kind, done in hits:
        wait = wait_after(done, got)
        if wait is None:
            continue
        if any(wait.overlaps(*none) for none in no_worker_s):
            kind += NONE_LEFT
        elif any(wait.overlaps(d.at_s, d.until_s) for d in lasting if d is not done):
            kind += DURING_ANOTHER
        found[kind].append(wait.lasted_s)
    return {
        kind: Waits(len(waits), percentile(waits, 50), percentile(waits, 99), max(waits))
        for kind, waits in sorted(found.items())
    }


def _stops_others(kind: str, done: DoneFault) -> bool:
    """Whether trainers that it does not hit may have to wait while it lasts: it hits neither a
    trainer nor a standby dispatcher."""
    of_one = done.fault.role in TRAINERS or kind.endswith(" standby")
    return done.until_s > done.at_s and not of_one


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]

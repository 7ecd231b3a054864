"""How long trainers waited after a fault, and how fast they got elements in between.

The *wait* after a fault is the longest time without a new block at any trainer that the fault
did not hit: of the gaps between two blocks of one trainer's process that begin before WINDOW_S
after the fault and end after it, the longest, counted from the fault at the earliest. So it
includes the pace of an undisturbed trainer and the turn of an epoch, and where faults overlap a
gap counts for each. It is an upper bound of what the fault has cost. If no worker was left during
it, it is counted apart: then it is the time in which the next process starts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from .cluster import Done
from .records import Got, Record, Started

WINDOW_S = 3.0
NONE_LEFT = ", no worker left"
"""Behind the kind of faults."""


class Wait(NamedTuple):
    """From when until when, CLOCK_MONOTONIC."""

    since_s: float
    until_s: float

    @property
    def lasted_s(self) -> float:
        return self.until_s - self.since_s


class Waits(msgspec.Struct, frozen=True):
    """The waits after the faults of one kind, in seconds."""

    faults: int
    p50_s: float
    p99_s: float
    longest_s: float


def deliveries(trainers: Sequence[Iterable[Record]]) -> dict[str, list[tuple[float, int]]]:
    """(when, how many elements) for each block, by trainer process."""
    blocks: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for records in trainers:
        name = ""
        for record in records:
            if isinstance(record, Started):
                name = record.name
            elif isinstance(record, Got):
                blocks[name].append((record.at_s, len(record.ids)))
    return dict(blocks)


def wait_after(done: Done, blocks: dict[str, list[tuple[float, int]]]) -> Wait | None:
    """The wait after a fault; None if no other trainer got anything before it and after it."""
    waits = []
    for name, got in blocks.items():
        times = [at_s for at_s, _ in got]
        first = bisect_right(times, done.at_s)
        if name == done.name or first == 0:
            continue
        for since_s, until_s in zip(times[first - 1 :], times[first:], strict=False):
            if since_s >= done.at_s + WINDOW_S:
                break
            waits.append(Wait(max(since_s, done.at_s), until_s))
    return max(waits, key=lambda wait: wait.lasted_s, default=None)


def waits_by_kind(
    kinds: Iterable[tuple[str, Done]],
    blocks: dict[str, list[tuple[float, int]]],
    no_worker_s: Sequence[tuple[float, float]] = (),
) -> dict[str, Waits]:
    """The waits after all faults that hit somebody, by the kinds given with them.

    `no_worker_s` is from when until when there was none.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    for kind, done in kinds:
        if done.name is not None and (wait := wait_after(done, blocks)) is not None:
            alone = any(f < wait.until_s and wait.since_s < u for f, u in no_worker_s)
            found[kind + NONE_LEFT * alone].append(wait.lasted_s)
    return {
        kind: Waits(len(waits), percentile(waits, 50), percentile(waits, 99), max(waits))
        for kind, waits in sorted(found.items())
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that `percent` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def throughput(blocks: dict[str, list[tuple[float, int]]], from_s: float) -> list[int]:
    """Elements that all trainers together got, in each second from `from_s` on."""
    seconds: Counter[int] = Counter()
    for got in blocks.values():
        for at_s, count in got:
            seconds[math.floor(at_s - from_s)] += count
    last = max(seconds, default=-1)
    return [seconds[second] for second in range(last + 1)]

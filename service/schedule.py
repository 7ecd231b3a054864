"""The schedule of an ordered job: which element of which source each position has.

A dataset by itself is one source. Changes stand on the *line*, which has every element that the job
would read if nothing were left out. From a place on the line on, the sources have other shares; or
a stretch of it is left out. *Positions* count what is read: those behind a stretch of n that is
left out have what stands n further on the line. So a place on the line keeps its element, whatever
is left out before it, and saved states name places.

Each source's count goes on through changes: nothing of it is lost or comes twice.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..journal.datasets import MAX_POSITION
from ..journal.proto import events_pb2 as ev
from .errors import InvalidArgument
from .order import Ints
from .picks import Picks

FAR = 1 << 16


class _Stretch(NamedTuple):
    """The sources have certain shares from a place on the line on."""

    first: int
    shares: tuple[int, ...]
    picks: Picks
    counts: list[int]  # of each source, before


class Schedule:
    """Of sources that have these shares, with these changes by their places. Its line begins at
    `first` on that of the changes."""

    def __init__(
        self, shares: Sequence[int], changes: Iterable[ev.ScheduleChange] = (), first: int = 0
    ) -> None:
        self._stretches = [_Stretch(0, tuple(shares), Picks(shares), [0] * len(shares))]
        left_out: list[tuple[int, int]] = []
        for change in changes:
            if change.skipped:
                start, stop = change.place - first, change.place + change.skipped - first
                if stop > 0:
                    left_out.append((max(0, start), stop))
                continue
            assert not first, "sources have epochs of their own"
            counts = [self.count_before(change.place, s) for s in range(len(shares))]
            cut = bisect_right(self._stretches, change.place - 1, key=lambda each: each.first)
            new = tuple(change.shares)
            self._stretches[cut:] = [_Stretch(change.place, new, Picks(new), counts)]
        merged: list[list[int]] = []
        for start, stop in sorted(left_out):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], stop)
            else:
                merged.append([start, stop])
        self._starts = np.array([start for start, _ in merged], np.int64)
        self._stops = np.array([stop for _, stop in merged], np.int64)
        self._gone = np.array([*accumulate((b - a for a, b in merged), initial=0)], np.int64)
        # Positions at which a stretch is left out.
        self._cuts: list[int] = (self._starts - self._gone[:-1]).tolist()
        self.left_out = merged  # places, ascending: first, and behind the last

    # -- places and positions ------------------------------------------------------------------

    def place_of(self, position: int) -> int:
        """Where on the line the element at this position stands."""
        return position + int(self._gone[bisect_right(self._cuts, position)])

    def places_of(self, positions: Ints) -> Ints:
        """`place_of` of each."""
        return positions + self._gone[np.searchsorted(self._cuts, positions, "right")]

    def position_of(self, place: int) -> int:
        """The position of the first element at this place or behind it that is not left out."""
        number = bisect_right(self.left_out, place, key=lambda gap: gap[0])
        if number and place < self.left_out[number - 1][1]:
            return self._cuts[number - 1]
        return place - int(self._gone[number])

    def positions_of(self, places: Ints) -> Ints:
        """Of places on the line, ascending; -1 of those that are left out."""
        if not len(self._starts):
            return places
        numbers = np.searchsorted(self._starts, places, "right")
        stops = np.concatenate([[0], self._stops])
        return np.where(places < stops[numbers], -1, places - self._gone[numbers])

    def shares_at(self, place: int) -> tuple[int, ...]:
        """Of the sources, at this place."""
        number = bisect_right(self._stretches, place, key=lambda each: each.first) - 1
        return self._stretches[number].shares

    def weights_before(self, place: int) -> str:
        """A hash of the changes of shares that count before this place; "" without any."""
        said = [(first, shares) for first, shares, *_ in self._stretches[1:] if first < place]
        return hashlib.sha256(repr(said).encode()).hexdigest()[:8] if said else ""

    def first_difference(self, other: Schedule) -> int | None:
        """The first place that one leaves out and the other does not, or from which on they give
        the sources other shares, or anew."""
        schedules = self, other
        edges = {each.first for one in schedules for each in one._stretches}
        edges |= {edge for one in schedules for gap in one.left_out for edge in gap}
        for place in sorted(edges):
            mine, theirs = (one._said_of(place) for one in schedules)
            if mine != theirs:
                return place
        return None

    def _said_of(self, place: int) -> tuple[int, tuple[int, ...], bool]:
        number = bisect_right(self._stretches, place, key=lambda each: each.first) - 1
        first, found, *_ = self._stretches[number]
        return first, found, bool(self.positions_of(np.array([place]))[0] < 0)

    # -- sources -------------------------------------------------------------------------------

    def count_before(self, place: int, source: int) -> int:
        """How many elements of the source stand before this place."""
        number = bisect_right(self._stretches, place, key=lambda each: each.first) - 1
        first, _, picks, counts = self._stretches[number]
        return counts[source] + picks.count_before(place - first, source)

    def sources_of(self, places: Ints) -> Ints:
        """By place on the line, ascending, the number of its source."""
        if len(cuts := np.flatnonzero(np.diff(places) > FAR) + 1):  # all in between is looked at
            return np.concatenate([self.sources_of(each) for each in np.split(places, cuts)])
        found = np.zeros_like(places)
        first, stop = int(places.min()), int(places.max()) + 1
        for source in range(1, len(self._stretches[0].shares)):
            begin, end = (self.count_before(place, source) for place in (first, stop))
            found[np.isin(places, self.places(source, begin, end - begin))] = source
        return found

    def places(self, source: int, first: int, count: int) -> Ints:
        """Where on the line the source's elements first … first + count - 1 stand: int64, of fewer
        if the source has no more."""
        found = []
        numbers = range(len(self._stretches))
        number = bisect_right(numbers, first, key=lambda n: self._stretches[n].counts[source]) - 1
        while count and number < len(self._stretches):
            begin, _, picks, counts = self._stretches[number]
            number += 1
            is_last = number == len(self._stretches)
            if is_last:
                here = count if picks.has(source) else 0
            else:
                here = min(count, self._stretches[number].counts[source] - first)
            if here:
                found.append(begin + picks.positions(source, first - counts[source], here))
                first, count = first + here, count - here
        return np.concatenate(found) if found else np.zeros(0, np.int64)


class EpochSteps:
    """The steps of a job, over all its epochs, as a group counts them that has read all before."""

    def __init__(
        self, schedule: Schedule, size: int, total: int | None = None, drop_remainder: bool = False
    ) -> None:
        """`size`: elements of a step; `total`: of an epoch, None if all is taken to be in one."""
        self._schedule, self._size = schedule, size
        self._total, self._drop = total, drop_remainder

    def _steps(self, elements: int) -> int:
        return elements // self._size if self._drop else -(-elements // self._size)

    def of_epoch(self, number: int) -> int:
        """How many steps the epoch has; its total is known."""
        assert self._total is not None
        first, stop = (self._schedule.position_of(n * self._total) for n in (number, number + 1))
        return self._steps(stop - first)

    def before(self, number: int) -> int:
        """How many steps the epochs before this one have."""
        if not self._total:
            return 0
        regular = self._steps(self._total)
        steps, odd = number * regular, set()
        for start, stop in self._schedule.left_out:
            first, last = start // self._total, (stop - 1) // self._total
            odd |= {first, last}
            steps -= regular * max(0, min(last, number) - first - 1)  # wholly left out
        return steps - sum(regular - self.of_epoch(each) for each in odd if each < number)

    def find(self, step: int) -> tuple[int, int]:
        """The epoch of this step, and its first position there. Raises InvalidArgument."""
        if self._total is None:
            return 0, step * self._size
        if not (regular := self._steps(self._total)):
            if not step:
                return 0, 0
            raise InvalidArgument(
                f"there is no step {step}: epochs of {self._total} elements have no whole step of "
                f"{self._size}; begin at step 0, or give a smaller batch_size or "
                "drop_remainder=False if there are elements"
            )
        gone = sum(-(-(stop - start) // self._total) + 1 for start, stop in self._schedule.left_out)
        epochs = range(step // regular + gone + 2)
        number = bisect_right(epochs, step, key=self.before) - 1
        return number, (step - self.before(number)) * self._size

    def place_of(self, step: int) -> int:
        """Where on the line it begins. Raises InvalidArgument."""
        epoch, position = self.find(step)
        before = self._schedule.position_of(epoch * (self._total or 0))
        return self._schedule.place_of(before + position)

    def behind(self, step: int) -> int:
        """The place right behind the steps before this one. Raises InvalidArgument."""
        if not step:
            return 0
        epoch, position = self.find(step - 1)
        before, end = self._schedule.position_of(epoch * (self._total or 0)), position + self._size
        if self._total:
            end = min(end, self._schedule.position_of((epoch + 1) * self._total) - before)
        return self._schedule.place_of(before + end - 1) + 1

    def step_of(self, place: int) -> int:
        """The first step that begins at this place or behind it."""
        epoch = place // self._total if self._total else 0
        before = self._schedule.position_of(epoch * (self._total or 0))
        steps = -((before - self._schedule.position_of(place)) // self._size)
        return self.before(epoch) + (min(steps, self.of_epoch(epoch)) if self._total else steps)


def decisions(
    job: Any,
    sources: Sequence[ev.MixtureSource],
    steps: Callable[[int], EpochSteps],
    last: int | None = None,
) -> Iterator[dict[str, Any]]:
    """What was decided for a job, for people: the first weights of a mixture, the fork that it
    began with, and its changes, or the `last` ones.

    `steps(n)` are the steps by its first n changes. All is described in steps as they were before.
    """
    names = [source.name for source in sources]
    if sources:
        nobody = {"reason": None, "who": None, "changed_ms": None}
        yield {"from_step": 0, "weights": _weights(names, [s.share for s in sources]), **nobody}
    if (fork := job.fork) is not None:
        inherited = sum(change.time_ms <= fork.time_ms for change in job.changes)
        at = None if fork.place == MAX_POSITION else steps(inherited).step_of(fork.place)
        yield {"from_step": at, "fork_of": fork.origin, **_decided(fork)}
    for number, change in [*enumerate(job.changes)][-(last or len(job.changes)) :]:
        first, stop = map(steps(number).step_of, (change.place, change.place + change.skipped))
        what: dict[str, Any] = {"skipped_steps": stop - first}
        if change.shares:
            what = {"weights": _weights(names, change.shares)}
        yield {"from_step": first, **what, **_decided(change)}


def _decided(it: Any) -> dict[str, Any]:
    return {"reason": it.reason or None, "who": it.who or None, "changed_ms": it.time_ms}


def _weights(names: Iterable[str], shares: Sequence[int]) -> dict[str, float]:
    """By source; they add up to 1."""
    return {name: round(s / sum(shares), 6) for name, s in zip(names, shares, strict=True)}

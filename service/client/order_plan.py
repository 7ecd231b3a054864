"""OrderPlan: what a consumer has asked for of an order, and when it asks for more."""

from __future__ import annotations

import itertools
from bisect import bisect_right

import numpy as np

from ...journal.proto import events_pb2 as ev
from ..delivery import End
from ..order import Ints
from ..transport.messages import Key
from .links import Links
from .positions import OrderedRead
from .slices import Slices
from .source_plan import MAX_REQUESTS, SharedPlan, SourcePlan


class OrderPlan(SharedPlan):
    """The plan of one or several sources, whose elements are put together."""

    def __init__(self, read: OrderedRead, spec: ev.OrderSpec, links: Links) -> None:
        slices = Slices(links, lambda request: self.source_at(request.place).slice(request))
        super().__init__(read, spec, slices)
        self.is_stale = True  # whether there is something new to plan with
        self._is_bounded = False  # whether as many slices are outstanding as may be
        self._refill_at = 0  # if it is full: plan again when no more elements than these are left
        counts = [*spec.source_bundles] or [spec.bundles]
        self._firsts = [*itertools.accumulate(counts, initial=0)]
        self.sources = [
            SourcePlan(self, number, self._firsts[number], count)
            for number, count in enumerate(counts)
        ]

    def source_at(self, place: int) -> SourcePlan:
        return self.sources[bisect_right(self._firsts, place % self.spec.bundles) - 1]

    def begin(self) -> None:
        self.epoch = self.read.begin(self.spec)
        self.until = self.epoch.start
        for source in self.sources:
            source.begin(self.schedule.place_of(self.until))

    def may_be_elsewhere(self) -> bool:
        """Whether it begins in another epoch, by what is known now."""
        is_new = self.epoch.total is None and self.read.total is not None
        return is_new and not self.sources[0].is_located

    def has_ended(self) -> bool:
        return self.is_all_planned() and not self.has_something()

    def is_all_planned(self) -> bool:
        """Whether it has an end, up to which it is planned."""
        return not self.is_endless and self.sources[0].has_ended

    def is_due(self) -> bool:
        if self.is_full:
            return self.portions.elements <= self._refill_at
        if self._is_bounded:
            return self._outstanding() <= MAX_REQUESTS // 2
        return self.is_stale or (self.left_for_later and not self.has_something())

    def plan(self) -> None:
        """Ask for what comes next, if there is room."""
        self.is_stale = self.is_full = self.left_for_later = self._is_bounded = False
        is_moved = True
        while is_moved and self._has_room():
            self.ahead.grow()
            for source in self.sources:
                source.plan(self.until + self.ahead.positions())
            is_moved = self._put_together()
        for source in self.sources:
            source.query()
        self._forget()

    def _has_room(self) -> bool:
        """Whether to plan more; if not, it notes why."""
        half = self.ahead.elements() // 2
        if self.portions.is_waiting:
            if self.portions.elements > half:
                self.is_full, self._refill_at = True, half
            elif self._outstanding() >= MAX_REQUESTS:
                self._is_bounded = True
        return not (self.is_full or self._is_bounded)

    def _outstanding(self) -> int:
        """How many slices of elements are: all of these end, also if the trainer takes nothing."""
        return len(self.slices.requests) - sum(
            source.lengths.outstanding for source in self.sources
        )

    def _put_together(self) -> bool:
        """Give what all sources have planned; whether there is any."""
        until = min(source.next_position for source in self.sources)
        if until <= self.until:
            return False
        if not self.is_all_planned() and (whole := self.epoch.deal.step_begin(until)) > self.until:
            until = whole  # a batch in two parts would be copied twice
        self.until = until
        ready: list[tuple[Ints, Ints]] = []
        for source in self.sources:
            pending, source.pending = source.pending, []
            for places, positions in pending:
                cut = int(np.searchsorted(positions, until))
                if cut:
                    ready.append((places[:cut], positions[:cut]))
                if cut < len(positions):
                    source.pending.append((places[cut:], positions[cut:]))
        if ready:
            places, positions = map(np.concatenate, zip(*ready, strict=True))
            if len(self.sources) > 1:
                order = np.argsort(positions, kind="stable")
                places, positions = places[order], positions[order]
            deal = None if self.read.batch_size is None else self.epoch.deal
            self.portions.plan(places, positions, deal)
        return True

    def _forget(self) -> None:
        lacking: dict[SourcePlan, list[int]] = {source: [] for source in self.sources}
        for place in self.portions.lacking():
            lacking[self.source_at(place)].append(place)
        for source in self.sources:
            source.forget(lacking[source])
        self.floor = min(source.floor for source in self.sources)
        self.slices.forget_homes(lambda place: place < self.source_at(place).floor)

    def go_back(self, position: int) -> None:
        """Withdraw what was asked for, and plan anew from this position on."""
        with self.slices.together():
            self.slices.withdraw(lambda _: True)
        for source in self.sources:
            source.go_back(self.schedule.place_of(position))
        self.until = position
        self.is_stale, self.is_full = True, False

    def plan_anew(self) -> None:
        """Withdraw what was asked for, but for what was put together, and begin there again."""
        if (position := self.portions.withdraw()) is not None:
            self.go_back(position)

    def ended(self, key: Key, end: End) -> None:
        """A worker has sent all that it sends of a slice, or query."""
        if (found := self.slices.ended(key, end)) is not None:
            request, said = found
            self.is_stale |= self.source_at(request.place).ended(request, said)

"""The mode of an ordered read's consumer: its elements of one global order.

service/order.py says what the order of a dataset is, and service/schedule.py what that of a mixture
is. The consumer asks workers for slices of bundles (source_plan.py, slices.py), and puts their
elements in order (portions.py), until its window (read_ahead.py) is full. It gives them in
*portions*, each once it is complete.

Elements may turn out much larger than those before, when many were asked for. The consumer then
withdraws what it has asked for, and plans anew from the next element that is in no portion yet.
"""

from __future__ import annotations

import itertools
import threading
import time
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from google.protobuf.message import Message

from ...journal.proto import events_pb2 as ev
from ..blocks import Block, Component
from ..delivery import End, Slice
from ..order import Ints, epoch_order
from ..proto import forebay_pb2 as pb
from ..schedule import Schedule
from ..transport.messages import Key
from .heartbeats import News
from .links import Client, Links, WorkerLink
from .portions import Portions
from .positions import OrderedEpoch, OrderedRead
from .read_ahead import ReadAhead
from .slices import BundlesMode, Request, Slices
from .source_plan import MAX_REQUESTS, SourcePlan

CUT_S = 0.02
"""A trainer that has waited for so long is given what is here, however few elements."""

GIVEN_BATCHES, GIVEN_ELEMENTS, GIVEN_S = 4, 64, 0.1
"""The trainer is given at most so many batches at a time, or of small ones so many elements; twice
as many as last time if it comes again within GIVEN_S. A change of the schedule holds behind what
was given."""


class OrderedMode(BundlesMode):
    """Gives this consumer's elements of one order."""

    def __init__(
        self, ordered: OrderedRead, links: Links, joined: pb.JoinIterationResponse
    ) -> None:
        self.read, order = ordered, joined.order
        self.is_endless = bool(ordered.sources)
        self.bundles = order.bundles
        self.slices = Slices(links, self._slice)
        self.portions = Portions()
        self.ahead = ReadAhead(self.portions, ordered)
        self.floor = 0  # nothing of places before this one is needed any more
        self.is_full = False  # whether as much is planned as the window holds
        self._spec = order
        self._is_stale = True  # whether there is something new to plan with
        self._holds_back = False  # whether rounds that are known are not asked for yet
        self._is_bounded = False  # whether as many slices are outstanding as may be
        self._refill_at = 0  # if it is full: plan again when no more elements than these are left
        self._waits_s = 0.0  # since when the trainer waits; 0: it does not
        # What the dispatcher said, which the reading thread has not heard yet.
        self._coming: list[ev.ScheduleChange] = []
        self._proposal = self._answer = pb.Proposal()
        self._lock = threading.Lock()  # of these, and of `_taken` and the schedule
        ordered.learn(order, joined.lengths)
        ordered.changes = [*joined.news.changes]
        counts = [*order.source_bundles] or [order.bundles]
        self._firsts = [*itertools.accumulate(counts, initial=0)]
        self._sources: list[SourcePlan] = []
        for number, count in enumerate(counts):
            self._sources.append(SourcePlan(self, number, self._firsts[number], count))
        self._begin()
        self.answered(pb.ConsumerHeartbeatResponse(proposal=joined.news.proposal))

    def _begin(self) -> None:
        """Begin where the trainer is."""
        self.epoch = self.read.begin(self._spec)
        self._until = self.epoch.start  # all positions before this one are planned
        self._taken = self.epoch.start  # the next position to give
        self._most_given, self._given_s = 0, 0.0  # positions, at a time, and when that was
        for source in self._sources:
            source.begin(self.schedule.place_of(self._until))

    def source_epoch(self, number: int, bundles: slice) -> OrderedEpoch:
        """An epoch of the source that has these bundles."""
        if not self.is_endless:
            return self.epoch
        whole = self._spec
        spec = ev.OrderSpec(
            seed=whole.seed, shuffle=whole.shuffle, cycle_length=whole.cycle_length,
            block_length=whole.block_length, bundles=bundles.stop - bundles.start,
        )  # fmt: skip
        of_places, order = epoch_order(spec, self.read.lengths[bundles], number)
        return replace(
            self.epoch, number=number, total=order.length, spec=spec, bundles=of_places.tolist(),
            order=order, drop_remainder=False,
        )  # fmt: skip

    # -- its schedule --------------------------------------------------------------------------

    @property
    def schedule(self) -> Schedule:
        """Its places are those of the epoch, or of a mixture."""
        return self.epoch.schedule

    def answered(self, news: News) -> bool:
        with self._lock:
            was_held = self._proposal.number
            self._coming.extend(news.changes)
            self._proposal, self._answer = pb.Proposal(), pb.Proposal()
            if news.proposal.number:
                place = self.epoch.first_place + self.schedule.place_of(self._taken)
                self._answer = pb.Proposal(number=news.proposal.number, place=place)
                if place <= news.proposal.place:
                    self._proposal = news.proposal
            return bool(was_held or news.changes)

    def _take(self, limit: int) -> tuple[Block, Ints] | None:
        if self._coming:
            self._change()
        with self._lock:
            held = [change.place for change in self._coming]
            if self._proposal.number:
                held.append(self._proposal.place)
            for place in held:
                here = max(0, place - self.epoch.first_place)
                limit = min(limit, self.schedule.position_of(here))
            deal, now = self.epoch.deal, time.monotonic()
            least = max(GIVEN_BATCHES * deal.batch_size, GIVEN_ELEMENTS) * deal.consumers
            most = max(least, 2 * self._most_given if now - self._given_s < GIVEN_S else 0)
            taken = self.portions.take(min(limit, self._taken + most))
            if taken is not None:
                self._taken = int(taken[1][-1]) + 1
                self._most_given, self._given_s = min(most, limit), now
            return taken

    def _change(self) -> None:
        """Go on with another schedule: all behind what was given is planned anew."""
        with self._lock:
            self.read.changes = [*(self.read.changes or ()), *self._coming]
            self._coming.clear()
            self.epoch.schedule = self.read.schedule(self.epoch.first_place)
        self.portions.clear()
        self._go_back(self._taken)

    def _go_back(self, position: int) -> None:
        with self.slices.together():
            self.slices.withdraw_all()
        for source in self._sources:
            source.go_back(self.schedule.place_of(position))
        self._until = position
        self._is_stale, self.is_full = True, False

    # -- what it gives -------------------------------------------------------------------------

    def take(self) -> tuple[Block, tuple[Client, int] | None] | None:
        if self._is_due():
            with self.slices.together():
                self._plan()
        now, limit = time.monotonic(), self.epoch.limit(self._until)
        if self._waits_s and now - self._waits_s >= CUT_S and self.portions.is_waiting:
            self._waits_s = now
            self.portions.cut()
        if (taken := self._take(limit)) is None:
            self._waits_s = self._waits_s or now
            return None
        self._waits_s = 0.0
        block, positions = taken
        self.ahead.given += block.count
        if self.read.add_position:
            behind = Component(self.epoch.positions_behind(positions))
            block = replace(
                block, components=(*block.components, behind), encodings=None, loan=None
            )
        return block, None

    @property
    def patience_s(self) -> float:
        return self.slices.patience_s

    # -- where it ends ---------------------------------------------------------------------------

    def has_ended(self) -> bool:
        if self.is_endless or self._coming:
            return False
        is_planned = self._sources[0].has_ended
        self.epoch.complete = is_planned and not self.portions.has_before(
            self.epoch.limit(self._until)
        )
        return self.epoch.complete

    def awaited(self) -> str:
        epoch, asked = self.epoch, self.slices.awaited()
        position = min(self.portions.next_position(), self._until)
        if self.is_endless:
            return f"position {position} of the mixture: {asked}"
        if self.slices.tasks and not self._sources[0].is_located:
            return (
                f"the lengths of the bundles before position {epoch.start} of epoch "
                f"{epoch.number}, which are run to be counted"
            )
        return f"position {position} of epoch {epoch.number}: {asked}"

    # -- the plan ------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Ask for what comes next, if there is room."""
        if not self.slices.tasks:
            return
        self._is_stale = self.is_full = self._holds_back = self._is_bounded = False
        is_known = self.epoch.total is None and self.read.total is not None
        if is_known and not self._sources[0].is_located:  # it may start in another epoch
            self._begin()
        is_moved = True
        while is_moved and self._has_room():
            self.ahead.grow()
            for source in self._sources:
                source.plan(self._until + self.ahead.positions())
            is_moved = self._put_together()
        for source in self._sources:
            source.query()
        self._forget()

    def holds_back(self) -> bool:
        """Whether rounds that are known are left for later, as more will be known soon, and there
        is something to give."""
        self._holds_back |= self.portions.has_before(self.epoch.limit(self._until))
        return self._holds_back

    def _put_together(self) -> bool:
        """Give what all sources have planned; whether there is any."""
        until = min(source.next_position for source in self._sources)
        if until <= self._until:
            return False
        self._until = until
        ready: list[tuple[Ints, Ints]] = []
        for source in self._sources:
            pending, source.pending = source.pending, []
            for places, positions in pending:
                cut = int(np.searchsorted(positions, until))
                if cut:
                    ready.append((places[:cut], positions[:cut]))
                if cut < len(positions):
                    source.pending.append((places[cut:], positions[cut:]))
        if ready:
            places, positions = map(np.concatenate, zip(*ready, strict=True))
            if len(self._sources) > 1:
                order = np.argsort(positions, kind="stable")
                places, positions = places[order], positions[order]
            deal = None if self.read.batch_size is None else self.epoch.deal
            self.portions.plan(places, positions, deal)
        return True

    def _plan_anew(self) -> None:
        """Withdraw what was asked for, but for what was put together, and begin there again."""
        if (position := self.portions.withdraw()) is not None:
            self._go_back(position)

    def _forget(self) -> None:
        lacking: dict[SourcePlan, list[int]] = {source: [] for source in self._sources}
        for place in self.portions.lacking():
            lacking[self.source_at(place)].append(place)
        for source in self._sources:
            source.forget(lacking[source])
        self.floor = min(source.floor for source in self._sources)
        self.slices.forget_homes(lambda place: place < self.source_at(place).floor)

    def _is_due(self) -> bool:
        """Whether to plan."""
        if self.is_full:
            return self.portions.elements <= self._refill_at
        if self._is_bounded:
            return self._outstanding() <= MAX_REQUESTS // 2
        return self._is_stale or (
            self._holds_back and not self.portions.has_before(self.epoch.limit(self._until))
        )

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
        return len(self.slices.requests) - self._queries()

    # -- what the dispatcher says --------------------------------------------------------------

    def report(self, request: pb.ConsumerHeartbeatRequest) -> None:
        if request.wait_ms:  # an urgent one may fail, and is not repeated
            del request.bundles[:], request.lengths[:]
            self._report_lengths(request)
        if self.read.given and (position := self.position()) is not None:
            request.position = position
        with self._lock:
            request.changes = len(self.read.changes or ()) + len(self._coming)
            request.answer.CopyFrom(self._answer)

    def position(self) -> int | None:
        """None if a later iteration goes on with the same read."""
        epoch, given, total = self.epoch, self.read.given, self.epoch.order.length
        if self.read.epoch is not epoch:
            return None
        if epoch.complete and total is not None:  # the trainer is given the rest at once
            return (epoch.number + 1) * total
        return epoch.position(given) if given else self.read.start_position

    def final_reports(self, consumer_id: int, left: int) -> Iterable[tuple[Message, type[Message]]]:
        """Lengths that were learned, for who goes on from here."""
        last = pb.ConsumerHeartbeatRequest(consumer_id=consumer_id)
        self._report_lengths(last)
        return [(last, News)] if last.bundles else []

    def update(self, news: News) -> None:
        self._is_stale = True
        self.slices.update(news.tasks)

    def gone(self, link: WorkerLink) -> None:
        self._is_stale = True
        self.slices.gone(link)

    # -- what workers say ----------------------------------------------------------------------

    def deliver(self, client: Client, key: Key, block: Block) -> None:
        client.taken(block)  # what is asked for bounds what is here
        if self.slices.delivered(key, block) is not None:
            self.portions.count(block)
            if self.ahead.is_exceeded:
                self._plan_anew()

    def ask_again(self) -> None:
        place = self.portions.awaited_place()
        self.slices.ask_again(
            lambda r: r.is_query and not r.is_ahead if place is None else r.place == place
        )

    # -- slices --------------------------------------------------------------------------------

    def source_at(self, place: int) -> SourcePlan:
        """The source of a place, or bundle."""
        return self._sources[bisect_right(self._firsts, place % self.bundles) - 1]

    def _slice(self, request: Request) -> Slice:
        return self.source_at(request.place).slice(request)

    def end(self, key: Key, end: End) -> None:
        if (ended := self.slices.ended(key, end)) is not None:
            request, said = ended
            self._is_stale |= self.source_at(request.place).ended(request, said)

    def _queries(self) -> int:
        return sum(source.lengths.outstanding for source in self._sources)

    def _report_lengths(self, request: pb.ConsumerHeartbeatRequest) -> None:
        for source in self._sources:
            source.lengths.report(request)

"""The mode of a mixture's consumer: its elements of the one order of several sources.

service/picks.py says which source a position takes its element from, and the how-manieth of that
source it is. Each source has its own order and epochs, as if it were read by itself
(service/order.py). So a consumer's elements are certain elements of each source. It plans the
sources one by one up to a position, and puts together what all of them have planned.

The bundles and places of all sources are numbered together: those of an epoch number e of a source
begin at e * (the bundles of all sources) + (those of the sources before).
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right
from collections.abc import Iterable

import numpy as np

from ...journal.datasets import SHARES
from ...journal.proto import events_pb2 as ev
from ..blocks import Block
from ..delivery import End, EndOfSlice, Slice
from ..delivery.read_requests import MAX_INDEX, UNNEEDED
from ..errors import FailedPrecondition
from ..order import Ints, epoch_order
from ..picks import MOST
from ..proto import forebay_pb2 as pb
from ..schedule import Schedule
from ..transport.messages import Key
from .bundle_lengths import BundleLengths
from .heartbeats import News
from .links import Links
from .ordered import AHEAD, MAX_REQUESTS, InOrder, requests_for
from .planned_rounds import PlannedRounds
from .positions import OrderedEpoch, OrderedRead
from .read_ahead import ReadAhead
from .slices import MAX_HOMES, Request

GIVEN_BATCHES, GIVEN_ELEMENTS = 4, 64
"""The trainer is given at most so many batches at a time, or of small ones so many elements: a
change of the schedule holds behind what was given."""


class SourceDeal:
    """Which elements of an epoch of a source a consumer gets: those at its positions."""

    def __init__(self, mode: MixtureMode, source: int, first: int) -> None:
        """`first`: how many elements the source has in earlier epochs."""
        self._mode, self._source, self.first = mode, source, first
        self._last: tuple[int, Ints] = 0, np.zeros(0, np.int64)

    def mine(self, first_position: int, count: int) -> Ints:
        """As Deal.mine."""
        schedule, deal = self._mode.schedule, self._mode.epoch.deal
        places = schedule.places(self._source, self.first + first_position, count)
        positions = schedule.positions_of(places)
        self._last = first_position, positions
        of = (positions - deal.start) // deal.batch_size % deal.consumers
        return np.flatnonzero((of == deal.index) & (positions >= deal.start))

    def positions(self, offsets: Ints) -> Ints:
        """Of elements at these offsets in the epoch, of those that `mine` was last asked for."""
        return self._last[1][offsets - self._last[0]]


class SourceInOrder:
    """One source of a mixture, as one consumer reads it."""

    def __init__(
        self, number: int, first_bundle: int, mode: MixtureMode, spec: ev.OrderSpec
    ) -> None:
        self.name, self._share = mode.read.sources[number]
        self.number = number
        self.first_bundle = first_bundle
        self.lengths = BundleLengths(mode.read, self._ask, first_bundle)
        self.pending: list[tuple[Ints, Ints]] = []  # places and positions that are not put together
        self.floor = 0  # nothing of places before this one is needed any more
        self._mode = mode
        self._spec = spec
        self._epochs: dict[int, OrderedEpoch] = {}  # of which something may be needed
        self._begun: dict[int, int] = {}  # by place that no worker was told of: its first element
        self._start = 0  # the source's elements before the read
        self._is_located = False

    # -- where it is ---------------------------------------------------------------------------

    def begin(self, place: int) -> None:
        """Go on with the first element at this place of the mixture or behind it."""
        self._start = self._mode.schedule.count_before(place, self.number)
        self._is_located = False
        self.pending.clear()
        self._begin_epoch(0, 0)

    def _begin_epoch(self, number: int, first: int) -> None:
        """`first`: the source's elements in the epochs before."""
        mine = slice(self.first_bundle, self.first_bundle + self._spec.bundles)
        bundles, order = epoch_order(self._spec, self._mode.read.lengths[mine], number)
        self._deal = SourceDeal(self._mode, self.number, first)
        self._epoch = self._epochs[number] = OrderedEpoch(
            number, 0, order.length, self._spec, self._mode.epoch.deal, bundles.tolist(), order,
            drop_remainder=False,
        )  # fmt: skip
        self._planned = PlannedRounds(order, self._deal)
        self.lengths.begin(self._epoch)
        self._forget_queries()

    def _forget_queries(self) -> None:
        """What was asked is known, or of another epoch."""

        def is_mine(request: Request) -> bool:
            return request.is_query and self._mode.source_at(request.place) is self

        self._mode.slices.withdraw(is_mine)
        self.lengths.forget_queries()

    def _locate(self) -> bool:
        """Find the start; False if more lengths are needed for that."""
        if self._is_located:
            return True
        total, offset = self._epoch.order.length, self._start
        if total is not None and offset:
            self._require_some(total)
            number, offset = divmod(offset, total)
            self._begin_epoch(number, self._start - offset)
        if offset and not self._planned.seek(offset):
            return False
        if self._start:
            self._forget_queries()  # that counted bundles in front of it
        self._is_located = True
        return True

    def go_back(self, place: int) -> None:
        """Plan again from this place on. All requests were withdrawn."""
        offset = self._mode.schedule.count_before(place, self.number) - self._deal.first
        if offset < 0 or not self._is_located:
            self.begin(place)
            return
        self.pending.clear()
        self.lengths.forget_queries()
        # A new plan: who gets which elements of the last rounds may be otherwise now.
        before, self._planned = self._planned, PlannedRounds(self._epoch.order, self._deal)
        if not (offset < before.next and self._planned.seek(offset)):
            self._planned.go_to(before.round, before.before, before.next)

    def _require_some(self, total: int) -> None:
        if not total:
            raise FailedPrecondition(
                f"source {self.name!r} of the mixture has no elements, and has a share of it: give "
                "it the weight 0, or leave it out"
            )

    @property
    def next_position(self) -> int:
        """Of its next element that is not planned, or, if that is left out, of what comes behind;
        MAX_INDEX if it has no more."""
        if not self._is_located:
            return self._mode.epoch.start
        place = self._next_place
        return MAX_INDEX if place is None else self._mode.schedule.position_of(place)

    @property
    def _next_place(self) -> int | None:
        found = self._mode.schedule.places(self.number, self._deal.first + self._planned.next, 1)
        return int(found[0]) if len(found) else None

    # -- the plan ------------------------------------------------------------------------------

    def _pass_over(self) -> bool:
        """Go on behind what is left out, if its next element is. False if that is not known yet."""
        schedule, place = self._mode.schedule, self._next_place
        if place is None or schedule.positions_of(np.array([place]))[0] >= 0:
            return False
        behind = schedule.place_of(schedule.position_of(place))
        offset = schedule.count_before(behind, self.number) - self._deal.first
        order = self._epoch.order
        if order.length is not None and offset >= order.length:
            self._require_some(order.length)
            epochs, offset = divmod(offset, order.length)
            first = self._deal.first + epochs * order.length
            self._begin_epoch(self._epoch.number + epochs, first)
        return self._planned.seek(offset)

    def plan(self, until: int) -> None:
        """Plan its elements before this position, as far as they are known, and ask for this
        consumer's."""
        while self._locate() and self.next_position < until:
            if self._pass_over():
                continue
            order, planned = self._epoch.order, self._planned
            if order.ended(planned.round):
                assert order.length is not None
                self._require_some(order.length)
                self._begin_epoch(self._epoch.number + 1, self._deal.first + order.length)
                continue
            known = order.known_until - planned.round
            if known <= 0:
                break
            place = self._mode.schedule.place_of(until)
            before = self._mode.schedule.count_before(place, self.number)
            wanted = min(before - self._deal.first - planned.next, MOST)
            elements = self._epoch.round_elements
            deal = self._mode.epoch.deal
            most = wanted // deal.consumers + deal.batch_size + elements
            last = planned.round + min(known, -(-wanted // elements))
            part = planned.plan(last, most, MAX_REQUESTS)
            base = self._place(self._epoch.number, 0)
            for place, index in part.first_indexes.items():
                if not self._mode.slices.has_home(base + place):
                    self._begun.setdefault(base + place, index)
            if len(part.places):
                positions = self._deal.positions(part.offsets)
                places = part.places + base
                first_indexes = {base + at: index for at, index in part.first_indexes.items()}
                for request in requests_for(
                    self._mode.portions, places, part.indexes, positions, first_indexes
                ):
                    self._mode.slices.ask(request)
                self.pending.append((places, positions))

    def _place(self, epoch: int, place: int) -> int:
        return epoch * self._mode.bundles + self.first_bundle + place

    def query(self, positions: int, *, is_young: bool) -> None:
        """Ask for the lengths that plans of so many positions need."""
        if self._is_located and self._next_place is None:
            return
        order, planned = self._epoch.order, self._planned
        rounds = max(1, positions * self._share // SHARES // self._epoch.round_elements)
        if not self._is_located:
            for place in itertools.chain(*order.opened(order.known_until, AHEAD)):
                self.lengths.query(place, planned.index_at(place))
            return
        ahead = -(-AHEAD * self._share // SHARES)
        opened, coming = order.opened(planned.round, ahead)
        for place in opened:
            self.lengths.query_rounds(place, planned.round, rounds)
        for place in () if is_young else coming:
            if self.lengths.at_least(place):
                continue  # one element is enough: the bundle is open
            if order.has_started(place, order.known_until):
                self.lengths.query(place, planned.index_at(place))
            else:
                self.lengths.query_ahead(place)

    def forget(self, lacking: Iterable[int]) -> None:
        """Only these places of earlier epochs, and the present one, are needed any more."""
        opened, coming = self._epoch.order.opened(self._planned.round, 1)
        here = min((*opened, *coming), default=self._epoch.order.bundles)
        self.floor = min([self._place(self._epoch.number, here), *lacking])
        oldest = min(self.floor // self._mode.bundles, self._epoch.number)
        for number in [number for number in self._epochs if number < oldest]:
            del self._epochs[number]
        if len(self._begun) > MAX_HOMES:
            self._begun = {at: index for at, index in self._begun.items() if at >= self.floor}

    # -- slices --------------------------------------------------------------------------------

    def _ask(self, query: Request) -> None:
        query.place = self._place(self._epoch.number, query.place)
        self._mode.slices.ask(query)

    def slice(self, request: Request, epoch_number: int, place: int) -> Slice:
        """What a worker is asked for, at this place of one of its epochs."""
        epoch, bundles = self._epochs[epoch_number], self._mode.bundles
        counted = request.is_query and not self._is_located
        if epoch is self._epoch:
            planned = self._planned.index_at(place)
        else:
            planned = epoch.order.index_at(place, epoch.order.known_until)
        keep = MAX_INDEX
        if not counted:
            lacking = self._mode.portions.first_lacking(request.place)
            first = planned if lacking is None else lacking
            keep = min(first, self._begun.pop(request.place, first))
        deal = self._mode.epoch.deal
        position = self.next_position if request.is_query else request.offset
        return Slice(
            bundle=epoch_number * bundles + self.first_bundle + epoch.bundles[place],
            place=request.place,
            runs=request.runs,
            until=MAX_INDEX if counted else max(planned, request.until),
            enough=request.enough,
            known=MAX_INDEX if counted else request.known,
            keep=keep,
            floor=min(self._mode.floor, request.place),
            reader=deal.index,
            readers=deal.consumers,
            position=UNNEEDED if request.is_ahead else position,
        )

    def ended(self, request: Request, epoch_number: int, place: int, end: EndOfSlice) -> bool:
        """Learn what a worker says. Returns whether more can be planned."""
        epoch = self._epochs.get(epoch_number)
        if request.runs:
            raise self.lengths.mismatch(
                place,
                f"the bundle at place {place} of source {self.name!r} had more than "
                f"{request.runs[0]} elements, and now has {end.length}",
                epoch,
            )
        if epoch is not self._epoch:
            return False
        order = self._epoch.order
        known = order.known_until, order.length
        self.lengths.learn(place, end.length, end.complete)
        if request.is_query:
            request.place = place
            self.lengths.answered(request)
        return (order.known_until, order.length) != known or end.complete


class MixtureMode(InOrder):
    """Gives this consumer's elements of a mixture."""

    def __init__(
        self, ordered: OrderedRead, links: Links, joined: pb.JoinIterationResponse
    ) -> None:
        self._changes = [*joined.news.changes]
        ordered.schedule = self.schedule = self._schedule(ordered)
        super().__init__(ordered, links, joined)
        self.read, self.portions, self.slices = ordered, self._portions, self._slices
        order = joined.order
        self.bundles = order.bundles
        self.floor = 0  # nothing of places before this one is needed any more
        self._ahead = ReadAhead(self._portions, ordered, 1)  # in positions
        self._until = self.epoch.start  # all positions before this one are planned
        self._taken = self.epoch.start  # the next position to give
        batches = max(GIVEN_BATCHES, -(-GIVEN_ELEMENTS // self.epoch.deal.batch_size))
        self._most_given = batches * self.epoch.deal.batch_size * self.epoch.deal.consumers
        # What the dispatcher said, which the reading thread has not heard yet.
        self._coming: list[ev.ScheduleChange] = []
        self._proposal = self._answer = pb.Proposal()
        self._lock = threading.Lock()  # of these four
        self._firsts = [*itertools.accumulate(order.source_bundles, initial=0)]
        self._sources: dict[int, SourceInOrder] = {}  # by number
        for number in range(len(ordered.sources)):
            first, bundles = self._firsts[number], order.source_bundles[number]
            own = ev.OrderSpec(
                seed=order.seed, shuffle=order.shuffle, cycle_length=order.cycle_length,
                block_length=order.block_length, bundles=bundles,
            )  # fmt: skip
            self._sources[number] = source = SourceInOrder(number, first, self, own)
            source.begin(self.schedule.place_of(self._until))
        self.answered(pb.ConsumerHeartbeatResponse(proposal=joined.news.proposal))

    # -- its schedule --------------------------------------------------------------------------

    def _schedule(self, ordered: OrderedRead) -> Schedule:
        return Schedule([share for _, share in ordered.sources], self._changes)

    def answered(self, news: News) -> bool:
        with self._lock:
            was_held = self._proposal.number
            self._coming.extend(news.changes)
            self._proposal = pb.Proposal()
            if news.proposal.number:
                place = self.schedule.place_of(self._taken)
                self._answer = pb.Proposal(number=news.proposal.number, place=place)
                if place <= news.proposal.place:
                    self._proposal = news.proposal
            else:
                self._answer = pb.Proposal()
            return bool(was_held or news.changes)

    def _take(self, limit: int) -> tuple[Block, Ints] | None:
        if self._coming:
            self._change()
        with self._lock:
            held = [change.place for change in self._coming]
            if self._proposal.number:
                held.append(self._proposal.place)
            for place in held:
                limit = min(limit, self.schedule.position_of(place))
            limit = min(limit, self._taken + self._most_given)
            taken = self._portions.take(limit)
            if taken is not None:
                self._taken = int(taken[1][-1]) + 1
            return taken

    def _change(self) -> None:
        """Go on with another schedule: all behind what was given is planned anew."""
        with self._lock:
            self._changes += self._coming
            self._coming.clear()
            self.read.schedule = self.epoch.schedule = self.schedule = self._schedule(self.read)
        self._portions.clear()
        with self._slices.together():
            self._slices.withdraw_all()
        self._go_back(self._taken)

    def _go_back(self, position: int) -> None:
        for source in self._sources.values():
            source.go_back(self.schedule.place_of(position))
        self._until = position
        self._is_stale, self._is_full = True, False

    def report(self, request: pb.ConsumerHeartbeatRequest) -> None:
        super().report(request)
        with self._lock:
            request.changes = len(self._changes) + len(self._coming)
            request.answer.CopyFrom(self._answer)

    @property
    def _next(self) -> int:
        return self._until

    def _queries(self) -> int:
        return sum(source.lengths.outstanding for source in self._sources.values())

    def has_ended(self) -> bool:
        return False

    def awaited(self) -> str:
        position = min(self._portions.next_position(), self._until)
        return f"position {position} of the mixture: {self._slices.awaited()}"

    # -- the plan ------------------------------------------------------------------------------

    def _plan(self) -> None:
        if not self._slices.tasks:
            return
        self._is_stale = self._is_full = self._is_bounded = False
        sources, is_moved = self._sources.values(), True
        while is_moved and self._has_room():
            self._ahead.grow()
            for source in sources:
                source.plan(self._until + self._ahead.rounds())
            is_moved = self._put_together()
        for source in sources:
            source.query(self._ahead.rounds(), is_young=self._ahead.is_young)
        self._forget()

    def _put_together(self) -> bool:
        """Give what all sources have planned; whether there is any."""
        until = min(source.next_position for source in self._sources.values())
        if until <= self._until:
            return False
        self._until = until
        ready: list[tuple[Ints, Ints]] = []
        for source in self._sources.values():
            pending, source.pending = source.pending, []
            for places, positions in pending:
                cut = int(np.searchsorted(positions, until))
                if cut:
                    ready.append((places[:cut], positions[:cut]))
                if cut < len(positions):
                    source.pending.append((places[cut:], positions[cut:]))
        if ready:
            places, positions = map(np.concatenate, zip(*ready, strict=True))
            order = np.argsort(positions, kind="stable")
            deal = None if self.read.batch_size is None else self.epoch.deal
            self._portions.plan(places[order], positions[order], deal)
        return True

    def _plan_anew(self) -> None:
        if (position := self._portions.withdraw()) is None:
            return
        with self._slices.together():
            self._slices.withdraw_all()
        self._go_back(position)

    def _forget(self) -> None:
        lacking: dict[int, list[int]] = {number: [] for number in self._sources}
        for place in self._portions.lacking():
            lacking[self._at(place)[0].number].append(place)
        for number, source in self._sources.items():
            source.forget(lacking[number])
        self.floor = min(source.floor for source in self._sources.values())
        self._slices.forget_homes(lambda place: place < self._at(place)[0].floor)

    # -- slices --------------------------------------------------------------------------------

    def _at(self, place: int) -> tuple[SourceInOrder, int, int]:
        """The source of a place, the epoch of it, and the place there."""
        epoch, index = divmod(place, self.bundles)
        number = bisect_right(self._firsts, index) - 1
        return self._sources[number], epoch, index - self._firsts[number]

    def source_at(self, place: int) -> SourceInOrder | None:
        """None while the sources are made."""
        number = bisect_right(self._firsts, place % self.bundles) - 1
        return self._sources.get(number)

    def _slice(self, request: Request) -> Slice:
        source, epoch, place = self._at(request.place)
        return source.slice(request, epoch, place)

    def end(self, key: Key, end: End) -> None:
        if (ended := self._slices.ended(key, end)) is not None:
            request, said = ended
            source, epoch, place = self._at(request.place)
            self._is_stale |= source.ended(request, epoch, place, said)

    def _report_lengths(self, request: pb.ConsumerHeartbeatRequest) -> None:
        for source in self._sources.values():
            source.lengths.report(request)

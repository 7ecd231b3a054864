"""One source of an ordered read, as one consumer reads it: what it asks workers for.

A dataset that is read in order is one source; a mixture has several. service/picks.py says which
source a position takes its element from, and the how-manieth of that source it is. Each source has
its own order and epochs, as if it were read by itself (service/order.py). So a consumer's elements
are certain elements of each source. `OrderedMode` plans the sources one by one up to a position,
and puts together what all of them have planned.

The consumer knows the order of a source by arithmetic, as far as the lengths of its bundles are
known. Of the rounds that are known it asks for its own elements, one slice a bundle. A round that
is larger than the window is asked for in parts. A *query* asks a worker for a bundle's length.

The bundles and places of all sources are numbered together: those of an epoch number e of a source
begin at e * (the bundles of all sources) + (those of the sources before).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from ...journal.datasets import SHARES
from ...journal.proto import events_pb2 as ev
from ..delivery import EndOfSlice, Slice
from ..delivery.read_requests import MAX_INDEX, MAX_SLICE_RUNS, UNNEEDED
from ..errors import FailedPrecondition
from ..order import Ints, epoch_order
from ..picks import MOST
from ..schedule import Schedule
from .bundle_lengths import BundleLengths
from .planned_rounds import PlannedRounds
from .portions import Portions, by_place
from .positions import OrderedEpoch, OrderedRead
from .read_ahead import ReadAhead
from .slices import MAX_HOMES, Request, Slices

MAX_REQUESTS = 2000
"""When so many slices are outstanding, no more are asked for, and one plan asks for slices of so
many bundles: a worker bounds them."""

AHEAD = 16
"""How many bundles behind those that are read have their lengths asked for."""


class SharedPlan:
    """What the plans of a read's sources share."""

    epoch: OrderedEpoch  # of the read; a mixture has one
    is_full = False  # whether as much is planned as the window holds

    def __init__(self, read: OrderedRead, spec: ev.OrderSpec, slices: Slices) -> None:
        self.read, self.spec, self.slices = read, spec, slices
        self.is_endless = bool(read.sources)
        self.portions = Portions()
        self.ahead = ReadAhead(self.portions, read)
        self.until = 0  # all positions before this one are planned
        self.floor = 0  # nothing of places before this one is needed any more
        self.left_for_later = False  # whether rounds that are known are not asked for yet

    @property
    def schedule(self) -> Schedule:
        """Its places are those of the epoch, or of a mixture."""
        return self.epoch.schedule

    def has_something(self) -> bool:
        """Whether something is planned that may be given."""
        return self.portions.has_before(self.epoch.limit(self.until))

    def epoch_of(self, bundles: slice, number: int) -> OrderedEpoch:
        """An epoch of the source that has these bundles."""
        if not self.is_endless:
            return self.epoch
        spec = ev.OrderSpec()
        spec.CopyFrom(self.spec)
        spec.bundles = bundles.stop - bundles.start
        of_places, order = epoch_order(spec, self.read.lengths[bundles], number)
        return replace(
            self.epoch, number=number, total=order.length, spec=spec, bundles=of_places.tolist(),
            order=order, drop_remainder=False,
        )  # fmt: skip


class SourcePlan:
    """What one consumer has planned of a source."""

    def __init__(self, shared: SharedPlan, number: int, first_bundle: int, bundles: int) -> None:
        sources = shared.read.sources
        self.name, self._share = sources[number] if sources else ("", SHARES)
        self.number = number
        self.lengths = BundleLengths(shared.read, self._ask_length, first_bundle)
        self.pending: list[tuple[Ints, Ints]] = []  # places and positions that are not put together
        self.floor = 0  # nothing of places before this one is needed any more
        self.is_located = False  # whether its start was found
        self._shared = shared
        self._bundles = slice(first_bundle, first_bundle + bundles)
        self._epochs: dict[int, OrderedEpoch] = {}  # of which something may be needed
        self._begun: dict[int, int] = {}  # by place that no worker was told of: its first element
        self._start = 0  # the source's elements before the read

    # -- where it is ---------------------------------------------------------------------------

    def begin(self, place: int) -> None:
        """Go on with the first element at this place of the schedule or behind it."""
        self._start = self._shared.schedule.count_before(place, self.number)
        self.is_located = False
        self.pending.clear()
        self._begin_epoch(0 if self._shared.is_endless else self._shared.epoch.number, 0)

    def _begin_epoch(self, number: int, first: int) -> None:
        """`first`: the source's elements in the epochs before, if it goes on through epochs."""
        self._epoch = self._epochs[number] = self._shared.epoch_of(self._bundles, number)
        self._first = first
        self._planned = PlannedRounds(self._epoch.order, self._shared.epoch.deal, self._positions)
        self.lengths.begin(self._epoch)
        self._forget_queries()

    def _positions(self, first: int, count: int) -> Ints:
        """Of elements of the epoch; -1 of those that are left out."""
        schedule = self._shared.schedule
        places = schedule.places(self.number, self._first + first, count)
        return schedule.positions_of(places)

    def _forget_queries(self) -> None:
        """What was asked is known, or of another epoch."""

        def is_mine(request: Request) -> bool:
            at = request.place % self._shared.spec.bundles
            return request.is_query and self._bundles.start <= at < self._bundles.stop

        self._shared.slices.withdraw(is_mine)
        self.lengths.forget_queries()

    def _locate(self) -> bool:
        """Find the start; False if more lengths are needed for that."""
        if self.is_located:
            return True
        epoch, offset = self._epoch, self._start
        total = epoch.order.length
        if offset and self._shared.is_endless and total is not None:
            self._require_some(total)
            number, offset = divmod(offset, total)
            self._begin_epoch(number, self._start - offset)
        elif offset and not self._shared.is_endless:
            if total is None and not epoch.has_a_step():
                return False
            end = epoch.end()
            if total is not None and end is not None and end <= epoch.start:  # the rest is empty
                self._planned.go_to(epoch.order.known_until, total)
                offset = 0
        if offset and not self._planned.seek(offset):
            return False
        if self._start:
            self._forget_queries()  # that counted bundles in front of it
        self.is_located = True
        return True

    def go_back(self, place: int) -> None:
        """Plan again from this place on. All requests were withdrawn."""
        offset = self._shared.schedule.count_before(place, self.number) - self._first
        if offset < 0 or not self.is_located:
            self.begin(place)
            return
        self.pending.clear()
        self.lengths.forget_queries()
        # A new plan: who gets which elements of the last rounds may be otherwise now.
        before = self._planned
        self._planned = PlannedRounds(self._epoch.order, self._shared.epoch.deal, self._positions)
        if not (offset < before.next and self._planned.seek(offset)):
            self._planned.go_to(before.round, before.before, before.next)

    def _require_some(self, total: int) -> None:
        if not total:
            raise FailedPrecondition(
                f"source {self.name!r} of the mixture has no elements, and has a share of it: give "
                "it the weight 0, or leave it out"
            )

    @property
    def has_ended(self) -> bool:
        """Whether all of its epoch is planned."""
        return self.is_located and self._epoch.order.ended(self._planned.round)

    @property
    def next_position(self) -> int:
        """Of its next element that is not planned, or, if that is left out, of what comes behind;
        MAX_INDEX if it has no more."""
        if not self.is_located:
            return self._shared.epoch.start
        place = self._next_place
        return MAX_INDEX if place is None else self._shared.schedule.position_of(place)

    @property
    def _next_place(self) -> int | None:
        found = self._shared.schedule.places(self.number, self._first + self._planned.next, 1)
        return int(found[0]) if len(found) else None

    # -- the plan ------------------------------------------------------------------------------

    def _pass_over(self) -> bool:
        """Go on behind what is left out, if its next element is. False if it is not, or what comes
        behind is not known yet."""
        schedule, place = self._shared.schedule, self._next_place
        if place is None or schedule.positions_of(np.array([place]))[0] >= 0:
            return False
        behind = schedule.place_of(schedule.position_of(place))
        offset = schedule.count_before(behind, self.number) - self._first
        order, planned = self._epoch.order, self._planned
        if order.length is not None and offset >= order.length:
            if not self._shared.is_endless:
                has_more = not order.ended(planned.round)
                planned.go_to(order.known_until, order.length)
                return has_more
            self._require_some(order.length)
            epochs, offset = divmod(offset, order.length)
            first = self._first + epochs * order.length
            self._begin_epoch(self._epoch.number + epochs, first)
        return self._planned.seek(offset)

    def plan(self, until: int) -> None:
        """Plan some of its elements before this position, if known, and ask for this consumer's."""
        shared = self._shared
        while self._locate() and self.next_position < until:
            if self._pass_over():
                continue
            order, planned = self._epoch.order, self._planned
            if order.ended(planned.round):
                if not shared.is_endless:
                    return
                assert order.length is not None
                self._require_some(order.length)
                self._begin_epoch(self._epoch.number + 1, self._first + order.length)
                continue
            before = shared.schedule.count_before(shared.schedule.place_of(until), self.number)
            wanted = min(before - self._first - planned.next, MOST)
            known, elements = order.known_until - planned.round, self._epoch.round_elements
            rounds = -(-wanted // elements)
            if known <= 0:
                return
            enough = min(rounds, self._rounds_ahead()) // 2
            if known < enough and order.length is None and shared.has_something():
                shared.left_for_later = True  # more will be known soon
                return
            most = wanted // shared.epoch.deal.consumers + shared.epoch.deal.batch_size + elements
            position = self.next_position
            self._ask(planned.round + min(known, rounds), min(most, shared.ahead.elements()))
            if self.next_position > position:  # else these rounds have no elements that are read
                return

    def _ask(self, last: int, most: int) -> None:
        """Ask for this consumer's elements of the rounds from the present one to `last`, but of
        fewer rounds, or a part of one, if these are more than `most`."""
        shared, base = self._shared, self._place(self._epoch.number, 0)
        part = self._planned.plan(last, most, MAX_REQUESTS)
        first_indexes = {base + at: index for at, index in part.first_indexes.items()}
        for place, index in first_indexes.items():
            if not shared.slices.has_home(place):
                self._begun.setdefault(place, index)
        if len(part.places):
            places, positions = part.places + base, part.positions
            for request in requests_for(
                shared.portions, places, part.indexes, positions, first_indexes
            ):
                shared.slices.ask(request)
            self.pending.append((places, positions))

    def _rounds_ahead(self) -> int:
        positions = self._shared.ahead.positions()
        return max(1, positions * self._share // SHARES // self._epoch.round_elements)

    def query(self) -> None:
        """Ask for the lengths of the bundles that are read now or soon, unless each is known to
        have enough for the next plan. Bundles are opened ahead once a quarter of a window was
        given. Those in front of the start are only counted: workers keep nothing of them."""
        if self.is_located and self._next_place is None:
            return
        order, planned = self._epoch.order, self._planned
        if not self.is_located:
            for place in itertools.chain(*order.opened(order.known_until, AHEAD)):
                self.lengths.query(place, planned.index_at(place))
            return
        opened, coming = order.opened(planned.round, -(-AHEAD * self._share // SHARES))
        for place in opened:
            self.lengths.query_rounds(place, planned.round, self._rounds_ahead())
        for place in () if self._shared.ahead.is_young else coming:
            if self.lengths.at_least(place):
                continue  # one element is enough: the bundle is open
            if order.has_started(place, order.known_until):
                self.lengths.query(place, planned.index_at(place))
            else:
                self.lengths.query_ahead(place)

    def forget(self, lacking: Iterable[int]) -> None:
        """Only these places of earlier epochs, and the present one, are needed any more."""
        order = self._epoch.order
        opened, coming = order.opened(
            self._planned.round if self.is_located else order.known_until, 1
        )
        here = min((*opened, *coming), default=order.bundles)
        self.floor = min([self._place(self._epoch.number, here), *lacking])
        for number in [*self._epochs]:
            if number < self._epoch.number and self._place(number + 1, 0) <= self.floor:
                del self._epochs[number]
        if len(self._begun) > MAX_HOMES:
            self._begun = {at: index for at, index in self._begun.items() if at >= self.floor}

    # -- slices --------------------------------------------------------------------------------

    def _place(self, epoch: int, place: int) -> int:
        return epoch * self._shared.spec.bundles + self._bundles.start + place

    def _ask_length(self, query: Request) -> None:
        query.place = self._place(self._epoch.number, query.place)
        self._shared.slices.ask(query)

    def _at(self, place: int) -> tuple[int, int]:
        """The epoch of a place, and the place there."""
        epoch, at = divmod(place, self._shared.spec.bundles)
        return epoch, at - self._bundles.start

    def slice(self, request: Request) -> Slice:
        """What a worker is asked for."""
        number, place = self._at(request.place)
        epoch, shared = self._epochs[number], self._shared
        counted = request.is_query and not self.is_located
        if epoch is self._epoch:
            planned = self._planned.index_at(place)
        else:
            planned = epoch.order.index_at(place, epoch.order.known_until)
        keep = MAX_INDEX
        if not counted:
            # This consumer needs none before. Others of its group may need those that follow, so a
            # worker begins a run here. The first time it is the same for all.
            lacking = shared.portions.first_lacking(request.place)
            first = planned if lacking is None else lacking
            keep = min(first, self._begun.pop(request.place, first))
        position = self.next_position if request.is_query else request.offset
        return Slice(
            bundle=self._place(number, epoch.bundles[place]),
            place=request.place,
            runs=request.runs,
            until=MAX_INDEX if counted else max(planned, request.until),
            enough=request.enough,
            known=MAX_INDEX if counted else request.known,
            keep=keep,
            floor=min(shared.floor, request.place),
            reader=shared.epoch.deal.index,
            readers=shared.epoch.deal.consumers,
            position=UNNEEDED if request.is_ahead else shared.epoch.first_place + position,
        )

    def ended(self, request: Request, end: EndOfSlice) -> bool:
        """Learn what a worker says. Returns whether more can be planned."""
        number, place = self._at(request.place)
        epoch = self._epochs.get(number)
        if request.runs:
            of = f" of source {self.name!r}" if self.name else ""
            raise self.lengths.mismatch(
                place,
                f"the bundle at place {place}{of} had more than {request.runs[0]} elements, and "
                f"now has {end.length}",
                epoch,
            )
        if epoch is not self._epoch:
            return False
        order, planned = self._epoch.order, self._planned
        known = order.known_until, order.length
        self.lengths.learn(place, end.length, end.complete)
        if request.is_query:
            request.place = place
            self.lengths.answered(request)
        is_idle = len(self._shared.slices.requests) <= 2 * AHEAD  # others may be asked about
        if (order.known_until, order.length) != known or (end.complete and is_idle):
            return True
        is_asking = request.is_query and self.is_located and not self._shared.is_full
        if is_asking and order.has_started(place, planned.round):
            self.lengths.query_rounds(place, planned.round, self._rounds_ahead())
        return False


def requests_for(
    portions: Portions, places: Ints, indexes: Ints, offsets: Ints, first_indexes: dict[int, int]
) -> Iterator[Request]:
    """The slices that bring the elements of these indexes, which stand at these offsets, to the
    portions that expect them: one a place, unless it has too many runs."""
    for of_place in by_place(places):
        place = int(places[of_place[0]])
        of_place = of_place[portions.use(place, len(of_place)) :]
        for at in _parts(indexes[of_place], of_place):
            first = first_indexes[place]
            request = Request(place, _runs(indexes[at]), first, int(offsets[at[0]]))
            portions.expect(request)
            yield request


def _parts(indexes: Ints, at: Ints) -> list[Ints]:
    """`at`, cut so that the indexes of each part have at most MAX_SLICE_RUNS runs."""
    if len(at) <= MAX_SLICE_RUNS:
        return [at] if len(at) else []
    firsts = np.flatnonzero(np.diff(indexes) != 1) + 1
    return np.split(at, firsts[MAX_SLICE_RUNS - 1 :: MAX_SLICE_RUNS])


def _runs(indexes: Ints) -> tuple[int, ...]:
    """Ascending indexes as pairs of a first one and a count."""
    first, last = int(indexes[0]), int(indexes[-1])
    if last - first == len(indexes) - 1:
        return first, len(indexes)
    cuts = np.flatnonzero(indexes[1:] - indexes[:-1] != 1) + 1
    firsts = np.concatenate([[0], cuts])
    runs = np.empty(2 * len(firsts), np.int64)
    runs[::2], runs[1::2] = indexes[firsts], np.concatenate([cuts, [len(indexes)]]) - firsts
    return tuple(runs.tolist())

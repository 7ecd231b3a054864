"""The mode of an ordered read's consumer: its elements of one global order (service/order.py).

The consumer knows the order by arithmetic, as far as the lengths of bundles are known. It asks
workers for slices of bundles (slices.py), and puts their elements in order (portions.py). A *query*
asks a worker for a bundle's length.

Of the rounds that are known, the consumer asks for its own elements, one slice a bundle, until
its window (read_ahead.py) is full. A round that is larger than the window is asked for in parts.
It gives them in *portions*, each once it is complete.

Elements may turn out much larger than those before, when many were asked for. The consumer then
withdraws what it has asked for, and plans anew from the next element that is in no portion yet.
"""

from __future__ import annotations

import abc
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from google.protobuf.message import Message

from ..blocks import Block, Component
from ..delivery import End, Slice
from ..delivery.read_requests import MAX_INDEX, MAX_SLICE_RUNS, UNNEEDED
from ..order import Ints
from ..proto import forebay_pb2 as pb
from ..transport.messages import Key
from .bundle_lengths import BundleLengths
from .heartbeats import News
from .links import Client, Links, WorkerLink
from .planned_rounds import PlannedRounds
from .portions import Portions, by_place
from .positions import OrderedEpoch, OrderedRead
from .read_ahead import ReadAhead
from .slices import BundlesMode, Request, Slices

log = logging.getLogger(__name__)

MAX_REQUESTS = 2000
"""When so many slices are outstanding, no more are asked for, and one plan asks for slices of so
many bundles: a worker bounds them."""

LARGE_ROUND_BYTES = 1 << 30
"""The consumer warns of rounds that are larger than this, as workers may have to hold them."""

CUT_S = 0.02
"""A trainer that has waited for so long is given what is here, however few elements."""

AHEAD = 16
"""How many bundles behind those that are read have their lengths asked for."""


class InOrder(BundlesMode):
    """Gives this consumer's elements of one order, once `_plan` has asked for them."""

    def __init__(
        self, ordered: OrderedRead, links: Links, joined: pb.JoinIterationResponse
    ) -> None:
        self._ordered = ordered
        self._spec = joined.order
        self._slices = Slices(links, self._slice)
        self._portions = Portions()
        ordered.learn(joined.order, joined.lengths)
        self.epoch = ordered.begin(joined.order)
        self._ahead = ReadAhead(self._portions, ordered, self.epoch.round_elements)
        self._is_stale = True  # whether there is something new to plan with
        self._is_full = False  # whether as much is planned as the window holds
        self._holds_back = False  # whether rounds that are known are not asked for yet
        self._is_bounded = False  # whether as many slices are outstanding as may be
        self._refill_at = 0  # if it is full: plan again when no more elements than these are left
        self._waits_s = 0.0  # since when the trainer waits; 0: it does not

    @property
    @abc.abstractmethod
    def _next(self) -> int:
        """All positions before this one are planned."""

    @abc.abstractmethod
    def _plan(self) -> None:
        """Ask for what comes next, if there is room."""

    @abc.abstractmethod
    def _plan_anew(self) -> None:
        """Withdraw what was asked for, but for what was put together, and begin there again."""

    @abc.abstractmethod
    def _slice(self, request: Request) -> Slice:
        """What a worker is asked."""

    @abc.abstractmethod
    def _queries(self) -> int:
        """How many are outstanding."""

    @abc.abstractmethod
    def _report_lengths(self, request: pb.ConsumerHeartbeatRequest) -> None:
        """Put lengths that were learned into the request."""

    # -- what it gives -------------------------------------------------------------------------

    def take(self) -> tuple[Block, tuple[Client, int] | None] | None:
        if self._is_due():
            with self._slices.together():
                self._plan()
        now, limit = time.monotonic(), self.epoch.limit(self._next)
        if self._waits_s and now - self._waits_s >= CUT_S and self._portions.is_waiting:
            self._waits_s = now
            self._portions.cut()
        if (taken := self._take(limit)) is None:
            self._waits_s = self._waits_s or now
            return None
        self._waits_s = 0.0
        block, positions = taken
        self._ahead.given += block.count
        if self._ordered.add_position:
            behind = Component(self.epoch.positions_behind(positions))
            block = replace(
                block, components=(*block.components, behind), encodings=None, loan=None
            )
        return block, None

    def _take(self, limit: int) -> tuple[Block, Ints] | None:
        return self._portions.take(limit)

    @property
    def patience_s(self) -> float:
        return self._slices.patience_s

    # -- the plan ------------------------------------------------------------------------------

    def _is_due(self) -> bool:
        """Whether to plan."""
        if self._is_full:
            return self._portions.elements <= self._refill_at
        if self._is_bounded:
            return self._outstanding() <= MAX_REQUESTS // 2
        return self._is_stale or (
            self._holds_back and not self._portions.has_before(self.epoch.limit(self._next))
        )

    def _has_room(self) -> bool:
        """Whether to plan more; if not, it notes why."""
        half = self._ahead.elements() // 2
        if self._portions.is_waiting:
            if self._portions.elements > half:
                self._is_full, self._refill_at = True, half
            elif self._outstanding() >= MAX_REQUESTS:
                self._is_bounded = True
        return not (self._is_full or self._is_bounded)

    def _outstanding(self) -> int:
        """How many slices of elements are: all of these end, also if the trainer takes nothing."""
        return len(self._slices.requests) - self._queries()

    # -- what the dispatcher says --------------------------------------------------------------

    def report(self, request: pb.ConsumerHeartbeatRequest) -> None:
        if request.wait_ms:  # an urgent one may fail, and is not repeated
            del request.bundles[:], request.lengths[:]
            self._report_lengths(request)
        if self._ordered.given and (position := self.position()) is not None:
            request.position = position

    def position(self) -> int | None:
        """None if a later iteration goes on with the same read."""
        epoch, given, total = self.epoch, self._ordered.given, self.epoch.order.length
        if self._ordered.epoch is not epoch:
            return None
        if epoch.complete and total is not None:  # the trainer is given the rest at once
            return (epoch.number + 1) * total
        return epoch.position(given) if given else self._ordered.start_position

    def final_reports(self, consumer_id: int, left: int) -> Iterable[tuple[Message, type[Message]]]:
        """Lengths that were learned, for who goes on from here."""
        last = pb.ConsumerHeartbeatRequest(consumer_id=consumer_id)
        self._report_lengths(last)
        return [(last, News)] if last.bundles else []

    def update(self, news: News) -> None:
        self._is_stale = True
        self._slices.update(news.tasks)

    def gone(self, link: WorkerLink) -> None:
        self._is_stale = True
        self._slices.gone(link)

    # -- what workers say ----------------------------------------------------------------------

    def deliver(self, client: Client, key: Key, block: Block) -> None:
        client.taken(block)  # what is asked for bounds what is here
        if self._slices.delivered(key, block) is not None:
            self._portions.count(block)
            if self._ahead.is_exceeded:
                self._plan_anew()

    def ask_again(self) -> None:
        place = self._portions.awaited_place()
        self._slices.ask_again(
            lambda r: r.is_query and not r.is_ahead if place is None else r.place == place
        )


class OrderedMode(InOrder):
    """Gives this consumer's elements of a dataset's order."""

    def __init__(
        self, ordered: OrderedRead, links: Links, joined: pb.JoinIterationResponse
    ) -> None:
        super().__init__(ordered, links, joined)
        self._lengths = BundleLengths(ordered, self._slices.ask)
        self._begun: dict[int, int] = {}  # by place that no worker was told of: its first element
        self._floor = 0  # nothing of places before this one is needed any more
        self._planned = PlannedRounds(self.epoch.order, self.epoch.deal)
        self._located = False
        self._has_warned = False
        self._slices.begin_epoch(self.epoch.number * self._spec.bundles)
        self._lengths.begin(self.epoch)

    @property
    def _next(self) -> int:
        return self._planned.next

    def _queries(self) -> int:
        return self._lengths.outstanding

    def _report_lengths(self, request: pb.ConsumerHeartbeatRequest) -> None:
        self._lengths.report(request)

    # -- where it begins -----------------------------------------------------------------------

    def _locate(self) -> bool:
        """Find the round of the start; False if more lengths are needed for that."""
        if self._located:
            return True
        total = self._ordered.total
        if self.epoch.total is None and total is not None:  # it may start in another epoch
            self.epoch = self._ordered.begin(self._spec)
            self._planned = PlannedRounds(self.epoch.order, self.epoch.deal)
            self._floor = 0
            self._slices.begin_epoch(self.epoch.number * self._spec.bundles)
            self._lengths.begin(self.epoch)
        end = self.epoch.end()
        if self.epoch.start and end is not None and end <= self.epoch.start:  # the rest is empty
            self._planned.go_to(self.epoch.order.known_until, end)
        elif self.epoch.start:
            round_of_start = self.epoch.order.locate(self.epoch.start)
            if round_of_start is None or not (total is not None or self.epoch.has_a_step()):
                return False
            self._planned.go_to(*round_of_start)
            self._slices.withdraw_all()  # the queries that counted bundles in front of it
            self._lengths.forget_queries()
        self._located = True
        return True

    def has_ended(self) -> bool:
        if not self._located or self._portions.has_before(self.epoch.limit(self._planned.next)):
            return False
        self.epoch.complete = self.epoch.order.ended(self._planned.round)
        return self.epoch.complete

    def awaited(self) -> str:
        epoch = self.epoch
        if self._slices.tasks and not self._located:
            return (
                f"the lengths of the bundles before position {epoch.start} of epoch "
                f"{epoch.number}, which are run to be counted"
            )
        position = min(self._portions.next_position(), self._planned.next)
        return f"position {position} of epoch {epoch.number}: {self._slices.awaited()}"

    def _plan(self) -> None:
        if not self._slices.tasks:
            return
        self._is_stale = self._is_full = self._holds_back = self._is_bounded = False
        if not self._locate():
            self._query()
            return
        order = self.epoch.order
        while not order.ended(self._planned.round):
            rounds = order.known_until - self._planned.round
            if rounds <= 0 or not self._has_room():
                break
            self._ahead.grow()
            wanted = self._ahead.rounds()
            if (
                rounds < wanted // 2
                and self._portions.has_before(self.epoch.limit(self._planned.next))
                and order.length is None
            ):
                self._holds_back = True  # more will be known soon
                break
            last = self._planned.round + min(rounds, wanted)
            self._ask_for_rounds(last, self._ahead.elements())
        self._query()

    def _ask_for_rounds(self, last: int, most: int) -> None:
        """Ask for this consumer's elements of the rounds from the present one to `last`, but of
        fewer rounds, or a part of one, if these are more than `most`."""
        part = self._planned.plan(last, most, MAX_REQUESTS)
        for place, index in part.first_indexes.items():
            if not self._slices.has_home(place):
                self._begun.setdefault(place, index)
        if part.round_elements is not None and not self._has_warned:
            fitting = self._portions.fit(LARGE_ROUND_BYTES)
            self._has_warned = _warn_if_large(part.round_elements, fitting, self.epoch)
        for request in requests_for(
            self._portions, part.places, part.indexes, part.offsets, part.first_indexes
        ):
            self._slices.ask(request)
        deal = None if self._ordered.batch_size is None else self.epoch.deal
        self._portions.plan(part.places, part.offsets, deal)

    def _plan_anew(self) -> None:
        """Withdraw what was asked for, but for what was put together, and begin there again."""
        if (position := self._portions.withdraw()) is not None:
            is_known = self._planned.seek(position)
            assert is_known, "it was planned"
            with self._slices.together():
                self._slices.withdraw_all()
                self._lengths.forget_queries()
            self._is_stale, self._is_full = True, False

    def _query(self) -> None:
        """Ask for the lengths of the bundles that are read now or soon, unless each is known to
        have enough elements for the next plan. Bundles are opened ahead once a quarter of a window
        was given. Those in front of the start are only counted: workers keep nothing of them.
        """
        order = self.epoch.order
        here = self._planned.round if self._located else order.known_until
        opened, coming = order.opened(here, AHEAD)
        needed = (*opened, *coming, *self._portions.lacking())
        self._floor = min(needed, default=self._spec.bundles)
        is_young = self._located and self._ahead.is_young
        for place in opened:
            if self._located:
                self._lengths.query_rounds(place, self._planned.round, self._ahead.rounds())
            else:
                self._lengths.query(place, self._planned.index_at(place))
        for place in () if is_young else coming:
            if self._located and self._lengths.at_least(place):
                continue  # one element is enough: the bundle is open
            if not self._located or order.has_started(place, order.known_until):
                self._lengths.query(place, self._planned.index_at(place))
            else:
                self._lengths.query_ahead(place)

    def _slice(self, request: Request) -> Slice:
        spec, number, place = self._spec, self.epoch.number, request.place
        counted = request.is_query and not self._located
        if counted:
            keep = MAX_INDEX
        else:
            # This consumer needs none before. Others of its group may need those that follow, so a
            # worker begins a run here. The first time it is the same for all.
            lacking = self._portions.first_lacking(place)
            first = self._planned.index_at(place) if lacking is None else lacking
            keep = min(first, self._begun.pop(place, first))
        position = number * (self.epoch.total or 0)
        position += self._planned.before if request.is_query else request.offset
        return Slice(
            bundle=number * spec.bundles + self.epoch.bundles[place],
            place=number * spec.bundles + place,
            runs=request.runs,
            until=MAX_INDEX if counted else max(self._planned.index_at(place), request.until),
            enough=request.enough,
            known=MAX_INDEX if counted else request.known,
            keep=keep,
            floor=number * spec.bundles + self._floor,
            reader=self._ordered.consumer_index,
            readers=self._ordered.num_consumers,
            position=UNNEEDED if request.is_ahead else position,
        )

    def end(self, key: Key, end: End) -> None:
        ended = self._slices.ended(key, end)
        if ended is None:
            return
        request, said = ended
        order = self.epoch.order
        known = order.known_until, order.length
        self._lengths.learn(request.place, said.length, said.complete)
        if request.is_query:
            self._lengths.answered(request)
        if (order.known_until, order.length) != known or (
            said.complete and len(self._slices.requests) <= 2 * AHEAD  # others may be asked about
        ):
            self._is_stale = True
        elif (
            request.is_query
            and self._located
            and not self._is_full
            and order.has_started(request.place, self._planned.round)
        ):
            self._lengths.query_rounds(request.place, self._planned.round, self._ahead.rounds())
        if request.runs:
            raise self._lengths.mismatch(
                request.place,
                f"the bundle at place {request.place} had more than {request.runs[0]} elements, "
                f"and now has {said.length}",
            )


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


def _warn_if_large(elements: int, fitting: int | None, epoch: OrderedEpoch) -> bool:
    """Warn of a round of so many elements, if it is large: about `fitting` are not yet."""
    if fitting is None or elements <= fitting or epoch.order.length is not None:
        return False
    log.warning(
        "a round of this order (block_length=%d of each of cycle_length=%d bundles) has %d "
        "elements, about %d MB, and workers hold a round in memory while the lengths of its "
        "bundles are unknown: give a smaller block_length or cycle_length",
        *(epoch.spec.block_length, epoch.spec.cycle_length, elements),
        elements * (LARGE_ROUND_BYTES >> 20) // fitting,
    )
    return True


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
    firsts = np.flatnonzero(np.diff(indexes, prepend=indexes[0] - 2) != 1)
    counts = np.diff(firsts, append=len(indexes))
    return tuple(np.stack([indexes[firsts], counts], axis=1).ravel().tolist())

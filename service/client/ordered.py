"""The mode of an ordered read's consumer: its elements of one global order.

service/order.py says what the order of a dataset is, and service/schedule.py what that of a mixture
is. The consumer asks workers for slices of bundles (source_plan.py, slices.py), and puts their
elements in order (portions.py), until its window (read_ahead.py) is full. It gives them in
*portions*, each once it is complete.

Elements may turn out much larger than those before, when many were asked for. The consumer then
withdraws what it has asked for, and plans anew from the next element that is in no portion yet.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from google.protobuf.message import Message

from ...journal.proto import events_pb2 as ev
from ..blocks import Block, Component, Texts
from ..delivery import End
from ..order import Ints
from ..proto import forebay_pb2 as pb
from ..transport.messages import Key
from .heartbeats import News
from .links import Client, Links, WorkerLink
from .order_plan import OrderPlan
from .positions import OrderedEpoch, OrderedRead
from .slices import BundlesMode

GIVEN_BATCHES, GIVEN_ELEMENTS, GIVEN_S = 4, 64, 0.1
"""At most so many batches are given at a time, or of small ones so many elements; twice as many as
last time if the trainer comes again within GIVEN_S. A change holds behind what was given."""

CUT_S = 0.02
"""A trainer that has waited for so long is given what is here, however few elements."""


class OrderedMode(BundlesMode):
    """Gives this consumer's elements of one order."""

    def __init__(
        self, ordered: OrderedRead, links: Links, joined: pb.JoinIterationResponse
    ) -> None:
        self._waits_s = 0.0  # since when the trainer waits; 0: it does not
        ordered.learn(joined.order, joined.lengths)
        ordered.changes = [*joined.news.changes]
        ordered.changes_at_join = len(ordered.changes)
        self._read = ordered
        self._plan = OrderPlan(ordered, joined.order, links)
        self.slices, self._portions = self._plan.slices, self._plan.portions
        self._hold = ScheduleHold(ordered.changes)
        self._begin()
        self.answered(pb.ConsumerHeartbeatResponse(proposal=joined.news.proposal))

    def _begin(self) -> None:
        with self._hold.applied():
            self._plan.begin()
            self._hold.epoch, self._hold.taken = self._plan.epoch, self._plan.epoch.start

    def _change(self) -> None:
        """Go on with another schedule: all behind what was given is planned anew."""
        with self._hold.applied():
            self._plan.epoch.schedule = self._read.schedule(self._plan.epoch.first_place)
        self._portions.clear()
        self._plan.go_back(self._hold.taken)

    # -- what it gives -------------------------------------------------------------------------

    def take(self) -> tuple[Block, tuple[Client, int] | None] | None:
        plan, now = self._plan, time.monotonic()
        if self._hold.coming:
            self._change()
        if plan.is_due() and self.slices.tasks:
            with self.slices.together():
                if plan.may_be_elsewhere():
                    self._begin()
                plan.plan()
        if self._waits_s and now - self._waits_s >= CUT_S and self._portions.is_waiting:
            self._waits_s = now
            self._portions.cut()
        taken = self._hold.take(self._portions.take, plan.epoch.limit(plan.until))
        if taken is None:
            self._waits_s = self._waits_s or now
            return None
        self._waits_s = 0.0
        block, positions = taken
        plan.ahead.given += block.count
        more = []
        if self._read.add_source:
            names = [name.encode() for name, _ in self._read.sources]
            sources = plan.epoch.sources_of(positions).tolist()
            more.append(Component(Texts([names[source] for source in sources])))
        if self._read.add_position:
            more.append(Component(plan.epoch.positions_behind(positions)))
        if more:
            components = *block.components, *more
            block = replace(block, components=components, encodings=None, loan=None)
        return block, None

    def has_ended(self) -> bool:
        epoch = self._plan.epoch
        epoch.complete = not self._hold.coming and self._plan.has_ended()
        return epoch.complete

    def awaited(self) -> str:
        plan, epoch, asked = self._plan, self._plan.epoch, self.slices.awaited()
        position = min(self._portions.next_position(), plan.until)
        if plan.is_endless:
            return f"position {position} of the mixture: {asked}"
        if self.slices.tasks and not plan.sources[0].is_located:
            return (
                f"the lengths of the bundles before position {epoch.start} of epoch "
                f"{epoch.number}, which are run to be counted"
            )
        return f"position {position} of epoch {epoch.number}: {asked}"

    # -- what the dispatcher says --------------------------------------------------------------

    def answered(self, news: News) -> bool:
        return self._hold.heard(news)

    def report(self, request: pb.ConsumerHeartbeatRequest) -> None:
        if request.wait_ms:  # an urgent one may fail, and is not repeated
            del request.bundles[:], request.lengths[:]
            self._report_lengths(request)
        if self._read.given and (position := self.position()) is not None:
            request.position = position
        self._hold.report(request)

    def _report_lengths(self, request: pb.ConsumerHeartbeatRequest) -> None:
        for source in self._plan.sources:
            source.lengths.report(request)

    def position(self) -> int | None:
        """None if a later iteration goes on with the same read."""
        epoch, given = self._plan.epoch, self._read.given
        if self._read.epoch is not epoch:
            return None
        if epoch.complete and epoch.order.length is not None:  # the rest is given at once
            return (epoch.number + 1) * epoch.order.length
        return epoch.position(given) if given else self._read.start_position

    def final_reports(self, consumer_id: int, left: int) -> Iterable[tuple[Message, type[Message]]]:
        """Lengths that were learned, for who goes on from here."""
        last = pb.ConsumerHeartbeatRequest(consumer_id=consumer_id)
        self._report_lengths(last)
        return [(last, News)] if last.bundles else []

    def update(self, news: News) -> None:
        self._plan.is_stale = True
        self.slices.update(news.tasks)

    def gone(self, link: WorkerLink) -> None:
        self._plan.is_stale = True
        super().gone(link)

    # -- what workers say ----------------------------------------------------------------------

    def deliver(self, client: Client, key: Key, block: Block) -> None:
        client.taken(block)  # what is asked for bounds what is here
        if self.slices.delivered(key, block) is not None:
            self._portions.count(block)
            if self._plan.ahead.is_exceeded:
                self._plan.plan_anew()

    def end(self, key: Key, end: End) -> None:
        self._plan.ended(key, end)

    def ask_again(self) -> None:
        place = self._portions.awaited_place()
        self.slices.ask_again(
            lambda r: r.is_query and not r.is_ahead if place is None else r.place == place
        )


class ScheduleHold:
    """Keeps a consumer from giving what a change of the schedule may make another.

    The dispatcher proposes a change to all consumers (service/dispatcher/changes.py). Each says
    where it is, and gives nothing behind the change's place until it is told whether the change
    holds. The reading thread calls all but those that say otherwise.
    """

    epoch: OrderedEpoch  # that is read

    def __init__(self, changes: list[ev.ScheduleChange]) -> None:
        self.changes = changes  # that the reading thread goes by
        self.taken = 0  # the next position to give
        self.coming: list[ev.ScheduleChange] = []  # that are to be applied
        self._proposal = self._answer = pb.Proposal()
        self._most_given, self._given_s = 0, 0.0  # positions, at a time, and when that was
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """All changes are in `changes`. Begin an epoch within the block, or change its schedule."""
        with self._lock:
            self.changes += self.coming
            self.coming.clear()
            yield

    def heard(self, news: News) -> bool:
        """Called by the heartbeat thread. Returns whether the reading thread may go on."""
        with self._lock:
            was_held = self._proposal.number
            self.coming.extend(news.changes)
            self._proposal, self._answer = pb.Proposal(), pb.Proposal()
            if news.proposal.number:
                # A step is wholly given, or not at all: the others of the group are given theirs.
                epoch, behind = self.epoch, self.epoch.deal.step_end(self.taken)
                place = epoch.first_place + epoch.schedule.place_of(behind)
                total = epoch.order.length
                if total is not None and self.taken <= epoch.schedule.position_of(total) <= behind:
                    place = epoch.first_place + total
                self._answer = pb.Proposal(number=news.proposal.number, place=place)
                if place <= news.proposal.place:
                    self._proposal = news.proposal
            return bool(was_held or news.changes)

    def report(self, request: pb.ConsumerHeartbeatRequest) -> None:
        """Called by any thread."""
        with self._lock:
            request.changes = len(self.changes) + len(self.coming)
            request.answer.CopyFrom(self._answer)

    def take(
        self, take: Callable[[int], tuple[Block, Ints] | None], limit: int
    ) -> tuple[Block, Ints] | None:
        """What `take` gives before the position `limit`, or before one that may change."""
        with self._lock:
            deal, now = self.epoch.deal, time.monotonic()
            held = [change.place for change in self.coming]
            if self._proposal.number:
                held.append(self._proposal.place)
            for place in held:
                here = max(0, place - self.epoch.first_place)
                limit = min(limit, deal.step_begin(self.epoch.schedule.position_of(here)))
            least = max(GIVEN_BATCHES * deal.batch_size, GIVEN_ELEMENTS) * deal.consumers
            most = max(least, 2 * self._most_given if now - self._given_s < GIVEN_S else 0)
            taken = take(min(limit, self.taken + most))
            if taken is not None:
                self.taken = int(taken[1][-1]) + 1
                self._most_given, self._given_s = min(most, limit), now
            return taken

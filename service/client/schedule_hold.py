"""ScheduleHold: keeps a consumer from giving what a change of the schedule may make another.

The dispatcher proposes a change to all consumers (service/dispatcher/changes.py). Each says where
it is, and gives nothing behind the change's place until it is told whether the change holds.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from ...journal.proto import events_pb2 as ev
from ..blocks import Block
from ..order import Ints
from ..proto import forebay_pb2 as pb
from .heartbeats import News
from .positions import OrderedEpoch

GIVEN_BATCHES, GIVEN_ELEMENTS, GIVEN_S = 4, 64, 0.1
"""At most so many batches are given at a time, or of small ones so many elements; twice as many as
last time if the trainer comes again within GIVEN_S. A change holds behind what was given."""


class ScheduleHold:
    """Of one consumer. The reading thread calls all but those that say otherwise."""

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

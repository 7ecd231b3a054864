"""RunQueue: which run of a bundle begins next, and how many work at a time.

The run that is needed first begins first. Runs that nobody needs yet come last, and begin one at a
time, whatever the others do. At most `max_runs` have begun: beyond that, one that waits for its
readers has to end for one that is needed before what it is asked for.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from .read_requests import UNNEEDED


class QueuedRun(ABC):
    """What the queue needs of a run."""

    def __init__(self, lock: threading.Lock, position: int) -> None:
        self.position = position  # the first one that it was asked for
        self.begun = False
        self.busy = False  # makes elements
        self.waits = False  # its producer waits for readers
        self.dropped = False  # nobody needs it
        self.used = 0  # when something of it was given last; a number
        self.room = threading.Condition(lock)  # its producer may go on

    @property
    def is_ahead(self) -> bool:
        """Whether nobody needs it yet."""
        return self.position == UNNEEDED

    @property
    @abstractmethod
    def asked(self) -> int:
        """The first position that it is asked for now."""


R = TypeVar("R", bound=QueuedRun)


class RunQueue(Generic[R]):
    """The runs of a task that make elements, or will. All methods need the lock."""

    def __init__(self, lock: threading.Lock, max_runs: int) -> None:
        self.numbers = itertools.count()
        self.busy = 0  # runs that make elements
        self.begun: dict[R, None] = {}  # and neither over nor dropped; in order
        self.max_runs = max_runs
        self._changed = threading.Condition(lock)  # another run may begin
        self._pending: list[tuple[int, int, R]] = []  # a heap, by position
        self._ahead = 0  # of the busy ones, those that nobody needs yet
        self._most_busy = 0
        self._busy_s, self._busy_from_s = 0.0, 0.0

    def add(self, run: R) -> None:
        heapq.heappush(self._pending, (run.position, next(self.numbers), run))
        self._changed.notify_all()

    def hurry(self, run: R, position: int) -> None:
        """This position is asked of the run, perhaps an earlier one than before."""
        if position >= run.position:
            return
        if run.is_ahead:
            self._ahead -= run.busy
            self._changed.notify_all()
        run.position = position
        if not run.begun:
            self._pending = [(run.position, number, run) for _, number, run in self._pending]
            heapq.heapify(self._pending)

    def wait(self, most: int, timeout_s: float, is_over: Callable[[], bool]) -> bool:
        """With the lock held: wait until a run may begin, as fewer than `most` that are needed make
        elements, or it is over. False after `timeout_s`."""

        def may_begin() -> bool:
            if is_over():
                return True
            if (run := self.first()) is None:
                return False
            if self._ahead if run.is_ahead else self.busy - self._ahead >= most:
                return False
            return not self.is_full or self.to_end_for(run) is not None

        self._most_busy = most
        return self._changed.wait_for(may_begin, timeout_s)

    def pop(self) -> R:
        return heapq.heappop(self._pending)[2]

    def begin(self, run: R) -> None:
        """The run that was taken makes elements from now on."""
        self.begun[run] = None
        if not self.is_run_needed():  # others may make more than was asked for
            for other in self.begun:
                if other.waits:
                    other.room.notify_all()
        run.begun = True
        self.set_busy(run, True)

    def end(self, run: R) -> None:
        self.set_busy(run, False)
        if run in self.begun:
            del self.begun[run]
        self._changed.notify_all()  # it may have kept others from beginning

    def clear(self) -> None:
        self._pending.clear()
        self._changed.notify_all()

    def notify(self) -> None:
        """What begun runs are asked for has changed: another one may end for the next."""
        if self.is_full:
            self._changed.notify_all()

    @property
    def is_full(self) -> bool:
        return len(self.begun) >= self.max_runs

    def to_end_for(self, run: R) -> R | None:
        """What waits, is asked for only later than the run, and will be for the longest time."""
        waiting = [each for each in self.begun if each.waits]
        last = max(waiting, key=lambda each: (each.asked, each.used), default=None)
        return last if last is not None and last.asked > run.position else None

    def first(self) -> R | None:
        while self._pending and self._pending[0][2].dropped:
            heapq.heappop(self._pending)
        return self._pending[0][2] if self._pending else None

    def is_run_needed(self) -> bool:
        """Whether a reader needs a run that is to begin."""
        run = self.first()
        return run is not None and not run.is_ahead

    def set_busy(self, run: R, busy: bool) -> None:
        if busy != run.busy:
            self._busy_s, self._busy_from_s = self.busy_s(), time.monotonic()
            self.busy += 1 if busy else -1
            run.busy = busy
            if run.is_ahead:
                self._ahead += 1 if busy else -1
            if not busy and self._pending:
                self._changed.notify_all()

    def busy_s(self) -> float:
        """The time in which as many runs made elements as may, or a part of it if fewer did."""
        share = min(self.busy / self._most_busy, 1) if self._most_busy else 0.0
        return self._busy_s + share * (time.monotonic() - self._busy_from_s)

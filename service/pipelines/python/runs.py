"""Runs of a Python dataset: which child has which splits, and what becomes of those that fail.

Whoever reads `blocks` does all of it: hands out parts of the lease, waits for the children's
sockets, and takes their blocks as they come. A thread asks the feed, as that may wait for a
dispatcher; only when all splits of the range before are with children, since asking says that they
were begun.
"""

from __future__ import annotations

import collections
import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

from ...blocks import Block
from ...errors import PipelineError
from ...proto.python_pb2 import RETRY, SKIP, OnError
from ..splits import SplitRange
from .children import Children, Died, Ended, Failed, Place, PythonChild, Received

log = logging.getLogger(__name__)

PARTS = 8
"""A lease is handed out in so many for each process, so that all of them end at about once."""

SILENT_S = 60.0
"""An element that takes so long is said in the log."""

NOWHERE = Place(-1, 0)

NextRange = Callable[[], SplitRange | None]


@dataclass(frozen=True)
class Policy:
    """What becomes of a split that fails."""

    on_error: OnError
    limit: int
    timeout_s: float  # for an element; 0: none
    where: str  # the worker, for people


@dataclass
class _Work:
    """Splits, first … stop − 1, from element `start` of them on; and how far a child has come."""

    first: int
    stop: int
    start: int = 0
    behind: Place = NOWHERE  # the last element that came
    seen: Place = NOWHERE  # where the child is
    since_s: float = 0.0  # when it came there
    warned: bool = False


class PythonRun:
    """One run, in up to `width` processes; of a bundle in one."""

    def __init__(
        self,
        children: Children,
        policy: Policy,
        next_range: NextRange,
        width: int,
        *,
        bundle: int | None = None,
        seed: str | None = None,
        start: int = 0,
    ) -> None:
        self._children = children
        self._policy = policy
        self._width = width
        self._bundle = bundle
        self._seed = seed
        self._index = start
        self._cancelled = threading.Event()
        self._lock = threading.Lock()  # of `_wake`
        self._wake: int | None = None  # while it is read
        self._feeder = _Feeder(next_range, self._notify)
        self._waiting: collections.deque[_Work] = collections.deque()
        self._busy: dict[PythonChild, _Work] = {}
        self._idle: list[PythonChild] = []
        self._failures: collections.Counter[int] = collections.Counter()  # by split

    def cancel(self) -> None:
        """End `blocks` soon, from any thread. Idempotent."""
        self._cancelled.set()
        self._notify()

    def _notify(self) -> None:
        with self._lock:
            if self._wake is not None:
                os.eventfd_write(self._wake, 1)

    def blocks(self) -> Generator[Block, None, None]:
        """The elements; to be called once. Raises PipelineError, and what the feed raises."""
        with self._lock:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            yield from self._blocks()
        finally:
            self._feeder.stop()
            for child in self._busy:
                child.kill()
            for child in self._idle:
                self._children.give_back(child)
            with self._lock:
                os.close(self._wake)
                self._wake = None

    def _blocks(self) -> Generator[Block, None, None]:
        while not self._cancelled.is_set():
            if not self._hand_out() and not self._busy:
                return
            for child in self._ready():
                match child.receive():
                    case Received(block, behind):
                        self._busy[child].behind = behind
                        yield self._placed(block)
                        if self._cancelled.is_set():
                            return
                        child.take()
                        for work in self._busy.values():
                            work.since_s = time.monotonic()  # they may have waited for us
                    case Ended():
                        del self._busy[child]
                        self._idle.append(child)
                    case Failed() | Died() as failure:
                        self._fail(child, failure)

    def _placed(self, block: Block) -> Block:
        index = self._index
        self._index += block.count
        if self._bundle is None:
            return block
        return replace(block, bundle=self._bundle, index=index)

    # -- splits ----------------------------------------------------------------------------------

    def _hand_out(self) -> bool:
        """Give splits to who has none; whether there may be more."""
        while len(self._busy) < self._width:
            if not self._waiting:
                if (found := self._feeder.answer()) is None:
                    break
                self._divide(found)
            work = self._waiting.popleft()
            child = self._idle.pop() if self._idle else self._children.take()
            work.behind, work.seen = Place(work.first, work.start), NOWHERE
            work.since_s = time.monotonic()
            self._busy[child] = work
            child.run(work.first, work.stop - work.first, work.start, self._seed)
        return not self._feeder.over

    def _divide(self, splits: SplitRange) -> None:
        stop = splits.first + splits.count
        if self._bundle is not None:
            self._waiting.append(_Work(splits.first, stop, self._index))
            return
        parts = 1 if self._width == 1 else min(splits.count, PARTS * self._width)
        bounds = [splits.first + splits.count * part // parts for part in range(parts + 1)]
        self._waiting.extend(map(_Work, bounds, bounds[1:]))

    # -- children --------------------------------------------------------------------------------

    def _ready(self) -> list[PythonChild]:
        """Those that have something to say, once one has, or once there may be something to do."""
        assert self._wake is not None
        polled = select.poll()
        for end in (self._wake, *(end for child in self._busy for end in child.filenos())):
            polled.register(end, select.POLLIN)
        patience_s = min(self._policy.timeout_s or SILENT_S, SILENT_S)
        ready = {descriptor for descriptor, _ in polled.poll(1000 * patience_s / 4)}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        found = [child for child in self._busy if not ready.isdisjoint(child.filenos())]
        if not found:
            self._look(time.monotonic())
        return found

    def _look(self, now_s: float) -> None:
        """Whether one is in an element for too long."""
        for child, work in list(self._busy.items()):
            if child.at != work.seen:
                work.seen, work.since_s, work.warned = child.at, now_s, False
            silent_s, where = now_s - work.since_s, _said(work.seen)
            if work.seen.split < 0:
                continue  # it is starting
            if 0 < self._policy.timeout_s <= silent_s:
                what = f"{where}: it has taken longer than {self._policy.timeout_s:g} s"
                child.kill()
                self._fail(child, Failed("DEADLINE_EXCEEDED", what, work.seen), has_ended=True)
            elif silent_s >= SILENT_S and not work.warned:
                log.warning("a Python dataset's function is in %s for %d s", where, silent_s)
                work.warned = True

    def _fail(self, child: PythonChild, failure: Failed | Died, *, has_ended: bool = False) -> None:
        """The rest of what it had is for another one, or PipelineError is raised."""
        work = self._busy.pop(child)
        at = failure.at
        if isinstance(failure, Died):
            child.kill()
            behind = max(work.behind, failure.sent)
            where = _said(at) if at.split >= 0 else "before the first element"
            code, text = "ABORTED", f"{where}: the process that ran it ended: {failure.how}"
        else:
            code, text = failure.code, failure.text
            behind = work.behind if has_ended else max(work.behind, at)
            if not has_ended:
                self._idle.append(child)
        text = f"worker {self._policy.where}: {text}"
        self._failures[at.split] += 1
        if at.split < 0:
            raise PipelineError(code, text)
        if self._policy.on_error == RETRY and self._failures[at.split] <= self._policy.limit:
            log.warning("tried again: %s", text)
            if self._bundle is not None:  # with the same random numbers
                self._waiting.appendleft(replace(work, start=self._index))
            else:
                self._again(behind.split, work.stop, behind.element)
        elif self._policy.on_error == SKIP and self._failures.total() <= self._policy.limit:
            log.warning("its rest is skipped: %s", text)
            self._again(at.split + 1, work.stop)
            self._again(behind.split, at.split, behind.element)
        else:
            raise PipelineError(code, text)

    def _again(self, first: int, stop: int, start: int = 0) -> None:
        if first < stop:
            self._waiting.appendleft(_Work(first, stop, start))


def _said(at: Place) -> str:
    return f"split {at.split}, element {at.element}"


class _Feeder:
    """Asks for ranges, one at a time, in a thread of its own; it starts with the first."""

    def __init__(self, next_range: NextRange, notify: Callable[[], None]) -> None:
        self._next_range = next_range
        self._notify = notify
        self._asked = False
        self._stopped = False
        self._asks: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[SplitRange | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="forebay-python-feed", daemon=True)
        self.over = False

    def answer(self) -> SplitRange | None:
        """The next range, if it is there; else it is asked for. Raises what the feed does."""
        if self.over:
            return None
        if not self._asked:
            if self._thread.ident is None:
                self._thread.start()
            self._asked = True
            self._asks.put(True)
        try:
            answer = self._answers.get_nowait()
        except queue.Empty:
            return None
        self._asked = False
        if isinstance(answer, BaseException):
            raise answer
        self.over = answer is None
        return answer

    def stop(self) -> None:
        """Ask no more, and wait until nobody does."""
        self._asks.put(False)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._asks.get():
            try:
                answer: SplitRange | BaseException | None = self._next_range()
            except BaseException as error:  # noqa: BLE001 - for who reads the run
                answer = error
            self._answers.put(answer)
            self._notify()

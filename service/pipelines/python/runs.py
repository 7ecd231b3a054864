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
    late: str = ""  # why its child was told to end


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
        self._bell = _Bell()
        self._feeder = _Feeder(next_range, self._bell)
        self._looked_s = 0.0
        self._waiting: collections.deque[_Work] = collections.deque()
        self._busy: dict[PythonChild, _Work] = {}
        self._idle: list[PythonChild] = []
        self._failures: collections.Counter[int] = collections.Counter()  # by split

    def cancel(self) -> None:
        """End `blocks` soon, from any thread. Idempotent."""
        self._cancelled.set()
        self._bell.ring()

    def blocks(self) -> Generator[Block, None, None]:
        """The elements; to be called once. Raises PipelineError, and what the feed raises."""
        self._bell.open()
        try:
            yield from self._blocks()
        finally:
            self._feeder.stop()
            while self._busy:
                self._busy.popitem()[0].kill()
            while self._idle:
                self._children.give_back(self._idle.pop())
            self._bell.close()

    def _blocks(self) -> Generator[Block, None, None]:
        while not self._cancelled.is_set():
            if not self._hand_out() and not self._busy:
                return
            for child in self._ready():
                match child.receive():
                    case Received(block, behind):
                        self._busy[child].behind = behind
                        given_s = time.monotonic()
                        yield self._placed(block)
                        if self._cancelled.is_set():
                            return
                        child.take()
                        for work in self._busy.values():  # they may have waited for us
                            work.since_s += time.monotonic() - given_s
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
            child = self._free_child()
            work.behind, work.seen = Place(work.first, work.start), NOWHERE
            work.since_s = time.monotonic()
            self._busy[child] = work
            child.run(work.first, work.stop - work.first, work.start, self._seed)
        return not self._feeder.over

    def _free_child(self) -> PythonChild:
        while self._idle:
            child = self._idle.pop()
            if child.lives:
                return child
            child.kill()
        return self._children.take()

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
        polled = select.poll()
        for end in (self._bell.fileno(), *(end for child in self._busy for end in child.filenos())):
            polled.register(end, select.POLLIN)
        patience_s = min(self._policy.timeout_s or SILENT_S, SILENT_S)
        ready = {descriptor for descriptor, _ in polled.poll(1000 * patience_s / 4)}
        if self._bell.fileno() in ready:
            self._bell.clear()
        found = [child for child in self._busy if not ready.isdisjoint(child.filenos())]
        if (now_s := time.monotonic()) - self._looked_s >= patience_s / 4 or not found:
            self._looked_s = now_s
            for child in self._busy.keys() - found:
                self._look(child, self._busy[child], now_s)
        return found

    def _look(self, child: PythonChild, work: _Work, now_s: float) -> None:
        """Whether it is in an element for too long, or in its start."""
        if child.at != work.seen:
            work.seen, work.since_s, work.warned = child.at, now_s, False
        silent_s, where, limit_s = now_s - work.since_s, _said(work.seen), self._policy.timeout_s
        if work.seen.split < 0 and limit_s:
            limit_s = max(limit_s, SILENT_S)  # imports and models take longer than an element
        if not work.late:
            if 0 < limit_s <= silent_s:
                work.late = f"{where}: it has taken longer than {limit_s:g} s"
                child.end()  # what it has sent comes yet, and then that it has ended
            if silent_s >= SILENT_S and not work.warned:
                log.warning("a Python dataset's function is in %s for %d s", where, silent_s)
                work.warned = True

    def _fail(self, child: PythonChild, failure: Failed | Died) -> None:
        """The rest of what it had is for another one, or PipelineError is raised."""
        work = self._busy.pop(child)
        at = failure.at
        if isinstance(failure, Died):
            child.kill()
            behind = max(work.behind, failure.sent)
            code, text = "ABORTED", f"{_said(at)}: the process that ran it ended: {failure.how}"
            if work.late:
                code, text = "DEADLINE_EXCEEDED", work.late
        else:
            code, text = failure.code, failure.text
            behind = max(work.behind, at)
            self._idle.append(child)
        text = f"worker {self._policy.where}: {text}"
        self._failures[at.split] += 1
        if at.split < 0 and isinstance(failure, Failed):  # as the next one would
            raise PipelineError(code, text)
        if self._policy.on_error == RETRY and self._failures[at.split] <= self._policy.limit:
            log.warning("tried again: %s", text)
            if self._bundle is not None:  # with the same random numbers
                self._waiting.appendleft(replace(work, start=self._index, late=""))
            else:
                self._again(behind.split, work.stop, behind.element)
        elif (
            at.split >= 0
            and self._policy.on_error == SKIP
            and self._failures.total() <= self._policy.limit
        ):
            log.warning("its rest is skipped: %s", text)
            self._again(at.split + 1, work.stop)
            self._again(behind.split, at.split, behind.element)
        else:
            raise PipelineError(code, text)

    def _again(self, first: int, stop: int, start: int = 0) -> None:
        if first < stop:
            self._waiting.appendleft(_Work(first, stop, start))


def _said(at: Place) -> str:
    return f"split {at.split}, element {at.element}" if at.split >= 0 else "its start"


class _Bell:
    """Wakes who waits for its descriptor, while it is open. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor: int | None = None

    def open(self) -> None:
        with self._lock:
            self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        assert self._descriptor is not None
        return self._descriptor

    def ring(self) -> None:
        with self._lock:
            if self._descriptor is not None:
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        os.eventfd_read(self.fileno())

    def close(self) -> None:
        with self._lock:
            os.close(self.fileno())
            self._descriptor = None


class _Feeder:
    """Asks for ranges, one at a time, in a thread of its own; it starts with the first."""

    def __init__(self, next_range: NextRange, bell: _Bell) -> None:
        self._next_range = next_range
        self._bell = bell
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
            self._bell.ring()

"""Runs of a Python dataset, in child processes.

Whoever reads `blocks` does all of it: tells the children what to run, as run_states.py decides,
waits for their sockets, and takes their blocks as they come. A thread asks for splits, and whether
one may be skipped, as both may wait for a dispatcher.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

from ...blocks import Block
from ...metrics import Totals
from ..splits import MaySkip, SkipReport, SplitRange
from .children import Children, Counted, Died, Ended, Failed, PythonChild, Received
from .run_states import (
    Answered,
    Ask,
    Begun,
    Broke,
    Came,
    Done,
    EndLate,
    Event,
    Granted,
    Looked,
    Policy,
    Run,
    RunStates,
    Waited,
    Warn,
)

log = logging.getLogger(__name__)

NextRange = Callable[[], SplitRange | None]


class PythonRun:
    """One run, in up to `width` processes; of a bundle in one."""

    def __init__(
        self,
        children: Children,
        policy: Policy,
        next_range: NextRange,
        may_skip: MaySkip,
        width: int,
        *,
        totals: Totals | None = None,
        bundle: int | None = None,
        seed: str | None = None,
        start: int = 0,
    ) -> None:
        """What the function counts is added to `totals`: of each split that ends, once."""
        self._children = children
        self._totals = totals or Totals()
        self._bundle = bundle
        self._seed = seed
        self._index = start
        self._is_awaited = True  # until something has come
        self._cancelled = threading.Event()
        self._bell = _Bell()
        self._feeder = _Feeder(next_range, may_skip, self._bell)
        self._looked_s = 0.0
        self._states = RunStates(policy, width, None if bundle is None else start)
        self._busy: dict[int, PythonChild] = {}  # by slot
        self._idle: list[PythonChild] = []

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
            self._feeder.stop()  # which the error, if there is one, does not wait for
            for child in self._busy.values():
                child.end()  # all of them, before one is waited for
            while self._busy:
                self._busy.popitem()[1].kill()
            idle, self._idle = self._idle, []
            self._children.give_back(idle)
            self._bell.close()

    def _blocks(self) -> Generator[Block, None, None]:
        self._handle(Begun())
        while not (self._cancelled.is_set() or self._states.is_over):
            for slot in self._ready():
                child = self._busy[slot]
                match child.receive():
                    case Received(block, behind, metrics):
                        self._totals.add(metrics)
                        self._handle(Came(slot, block.count, behind))
                        given_s = time.monotonic()
                        yield self._placed(block)
                        if self._cancelled.is_set():
                            return
                        child.take()
                        self._handle(Waited(time.monotonic() - given_s))
                    case Counted(behind, metrics):
                        self._totals.add(metrics)
                        self._handle(Came(slot, 0, behind))
                    case Ended():
                        self._idle.append(self._busy.pop(slot))
                        self._handle(Done(slot))
                    case Failed() as failure:
                        self._idle.append(self._busy.pop(slot))
                        self._handle(Broke(slot, failure))
                    case Died() as failure:
                        self._busy.pop(slot).kill()
                        self._handle(Broke(slot, failure))
            for answer in self._feeder.answers():
                self._handle(answer)

    def _placed(self, block: Block) -> Block:
        self._is_awaited = False
        index = self._index
        self._index += block.count
        if self._bundle is None:
            return block
        return replace(block, bundle=self._bundle, index=index)

    def _handle(self, event: Event) -> None:
        for instruction in self._states.handle(event, time.monotonic()):
            match instruction:
                case Run(slot, first, count, start):
                    child = self._busy[slot] = self._free_child()
                    child.run(first, count, start, self._seed, awaited=self._is_awaited)
                case EndLate(slot):
                    self._busy[slot].end()
                case Ask() | SkipReport():
                    self._feeder.ask(instruction)
                case Warn(text):
                    log.warning("%s", text)

    def _free_child(self) -> PythonChild:
        while self._idle:
            child = self._idle.pop()
            if child.lives:
                return child
            child.kill()
        return self._children.take()

    def _ready(self) -> list[int]:
        """The slots whose processes have something to say, once one has, or once there may be
        something to do."""
        polled, patience_s = select.poll(), self._states.patience_s
        polled.register(self._bell.fileno(), select.POLLIN)
        for child in self._busy.values():
            for end in child.filenos():
                polled.register(end, select.POLLIN)
        ready = {descriptor for descriptor, _ in polled.poll(1000 * patience_s / 4)}
        if self._bell.fileno() in ready:
            self._bell.clear()
        found = [s for s, child in self._busy.items() if not ready.isdisjoint(child.filenos())]
        if (now_s := time.monotonic()) - self._looked_s >= patience_s / 4 or not found:
            self._looked_s = now_s
            self._handle(Looked({s: self._busy[s].at for s in self._busy.keys() - found}))
        return found


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
    """Asks for ranges, and whether splits may be skipped, in a thread of its own, one after the
    other; it starts with the first."""

    def __init__(self, next_range: NextRange, may_skip: MaySkip, bell: _Bell) -> None:
        self._next_range = next_range
        self._may_skip = may_skip
        self._bell = bell
        self._asks: queue.SimpleQueue[Ask | SkipReport | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Granted | Answered | BaseException] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forebay-python-feed", daemon=True)

    def ask(self, what: Ask | SkipReport) -> None:
        """`answers` has what is said to it, once the bell has rung."""
        if self._thread.ident is None:
            self._thread.start()
        self._asks.put(what)

    def answers(self) -> Iterator[Granted | Answered]:
        """Those that are there. Raises what the feed does."""
        while not self._answers.empty():
            answer = self._answers.get()
            if isinstance(answer, BaseException):
                raise answer
            yield answer

    def stop(self) -> None:
        """Ask no more. Its thread ends once what it is asking for is answered, or the feed is
        closed."""
        self._stopped.set()
        self._asks.put(None)

    def _run(self) -> None:
        answer: Granted | Answered | BaseException
        while (what := self._asks.get()) is not None and not self._stopped.is_set():
            try:
                if isinstance(what, SkipReport):
                    answer = Answered(self._may_skip(what))
                else:
                    answer = Granted(self._next_range())
            except BaseException as error:  # noqa: BLE001 - for who reads the run
                answer = error
            self._answers.put(answer)
            self._bell.ring()

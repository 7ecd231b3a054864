"""Runs of a Python dataset in child processes.

The thread that reads `blocks` sends work to the children, as run_states.py decides. It polls their
sockets and takes their blocks as they come. Another thread asks for splits, and for permission to
skip one, because either may wait for a dispatcher.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ....storage.thread_pool import ThreadPool
from ...blocks import Block
from ...user_metrics import Totals
from ..splits import MaySkip, SkipReport, SplitRange
from .child_connections import AskedToSkip, Children, Died, Failed, Finished, PythonChild, Received
from .fork_server import readable
from .run_states import Ask, EndLate, FailureRules, Instruction, RunStates, StartRun

T = TypeVar("T")

NextRange = Callable[[], SplitRange | None]


class PythonRun:
    """One run, in up to `width` processes; a bundle runs in one."""

    needs = 1
    most = 0  # not used: its blocks follow its ranges
    waiting = 0  # not known

    def __init__(
        self,
        children: Children,
        rules: FailureRules,
        next_range: NextRange,
        may_skip: MaySkip,
        width: int,
        *,
        totals: Totals | None = None,
        bundle: int | None = None,
        seed: str | None = None,
        start: int = 0,
    ) -> None:
        """`totals` collects what the function counts, once for each split that ends."""
        self._children = children
        self._totals = totals or Totals()
        self._bundle = bundle
        self._seed = seed
        self._index = start
        self._is_awaited = True  # until the first block
        self._cancelled = threading.Event()
        self._bell = _Bell()
        self._next_range = next_range
        self._may_skip = may_skip
        self._questions = _Questions(self._bell)
        self._asking: dict[int, float] = {}  # since when slots have asked to skip something
        self._limit = rules.limit
        self._looked_s = 0.0
        self._states = RunStates(rules, width, None if bundle is None else start)
        self._busy: dict[int, PythonChild] = {}  # by slot

    def cancel(self) -> None:
        """End `blocks` soon, from any thread. Idempotent."""
        self._cancelled.set()
        self._bell.ring()

    def blocks(self) -> Generator[Block, None, None]:
        """The elements; call it once. Raises PipelineError, and what the feed raises."""
        try:
            yield from self._blocks()
        finally:
            self._questions.stop()  # doesn't wait for answers
            for child in self._busy.values():
                child.end()  # all of them before waiting for one
            while self._busy:
                self._busy.popitem()[1].kill()

    def _blocks(self) -> Generator[Block, None, None]:
        self._carry_out(self._states.begun(time.monotonic()))
        while not (self._cancelled.is_set() or self._states.is_over):
            for slot in self._ready():
                child = self._busy[slot]
                match child.receive():
                    case Received(None, behind, metrics):
                        self._totals.add(metrics)
                        self._states.received(slot, 0, behind)
                    case Received(Block() as block, behind, metrics):
                        self._totals.add(metrics)
                        self._states.received(slot, block.count, behind)
                        given_s = time.monotonic()
                        yield self._placed(block)
                        if self._cancelled.is_set():
                            return
                        child.take()
                        self._states.stalled(time.monotonic() - given_s)
                    case AskedToSkip() as asked:
                        self._be_asked_to_skip(slot, asked)
                    case Finished():
                        self._children.give_back(self._busy.pop(slot))
                        self._carry_out(self._states.done(slot, time.monotonic()))
                    case Failed() as failure:
                        self._children.give_back(self._busy.pop(slot))
                        self._fail(slot, failure)
                    case Died() as failure:
                        self._busy.pop(slot).kill()
                        self._fail(slot, failure)
            self._questions.take_answers()

    def _be_asked_to_skip(self, slot: int, asked: AskedToSkip) -> None:
        report = SkipReport(*asked.at, asked.reason, self._limit, asked.records)
        child = self._busy[slot]
        self._asking[slot] = time.monotonic()
        self._questions.ask(
            "skips", partial(self._may_skip, report), partial(self._answer, slot, child)
        )

    def _answer(self, slot: int, child: PythonChild, allowed: bool) -> None:
        """Whether the process, which was in this slot, may skip what it has asked to skip."""
        if self._busy.get(slot) is child:
            child.answer(allowed)
        if (since_s := self._asking.pop(slot, None)) is not None:
            self._states.stalled(time.monotonic() - since_s)

    def _fail(self, slot: int, failure: Failed | Died) -> None:
        self._carry_out(self._states.failed(slot, failure, time.monotonic()))

    def _grant(self, splits: SplitRange | None) -> None:
        self._carry_out(self._states.granted(splits, time.monotonic()))

    def _skip(self, allowed: bool) -> None:
        self._carry_out(self._states.answered(allowed, time.monotonic()))

    def _placed(self, block: Block) -> Block:
        self._is_awaited = False
        index = self._index
        self._index += block.count
        if self._bundle is None:
            return block
        return replace(block, bundle=self._bundle, index=index)

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case StartRun(slot, first, count, start):
                    child = self._busy[slot] = self._children.take()
                    child.run(first, count, start, self._seed, awaited=self._is_awaited)
                case EndLate(slot):
                    self._busy[slot].end()
                case Ask():
                    self._questions.ask("splits", self._next_range, self._grant)
                case SkipReport():
                    self._questions.ask("skips", partial(self._may_skip, instruction), self._skip)

    def _ready(self) -> list[int]:
        """The slots whose processes have messages. Waits until there are some, or until there may
        be something else to do."""
        patience_s = self._states.patience_s
        ends = [end for child in self._busy.values() for end in child.filenos()]
        ready = readable(self._bell.descriptor, *ends, timeout_ms=1000 * patience_s / 4)
        if self._bell.descriptor in ready:
            os.eventfd_read(self._bell.descriptor)
        found = [s for s, child in self._busy.items() if not ready.isdisjoint(child.filenos())]
        if (now_s := time.monotonic()) - self._looked_s >= patience_s / 4 or not found:
            self._looked_s = now_s
            # Those that ask to skip something wait for the worker.
            silent = self._busy.keys() - self._asking.keys() - set(found)
            self._carry_out(self._states.polled({s: self._busy[s].at for s in silent}, now_s))
        return found


class _Bell:
    """An event with a descriptor to poll. Thread-safe."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        closed = weakref.finalize(self, os.close, self.descriptor)
        closed.atexit = False  # threads may poll it until the process has ended

    def ring(self) -> None:
        os.eventfd_write(self.descriptor, 1)


class _Questions:
    """Asks questions that may wait for a dispatcher, in threads. Each topic has a thread, which
    starts with the first question and asks one after the other."""

    def __init__(self, bell: _Bell) -> None:
        self._bell = bell
        names = ("splits", "skips")
        self._threads = {topic: ThreadPool(1, "forebay-python-feed") for topic in names}
        self._answers: queue.SimpleQueue[tuple[Callable[[Any], None], Future[Any]]]
        self._answers = queue.SimpleQueue()

    def ask(self, topic: str, question: Callable[[], T], take: Callable[[T], None]) -> None:
        """Ask; `take_answers` has the answer taken once the bell has rung."""

        def answered(answer: Future[T]) -> None:
            self._answers.put((take, answer))
            self._bell.ring()

        self._threads[topic].submit(question).add_done_callback(answered)

    def take_answers(self) -> None:
        """Those that are there. Raises what the questions raise."""
        while not self._answers.empty():
            take, answer = self._answers.get()
            take(answer.result())

    def stop(self) -> None:
        """Ask no more. Each thread ends once its question is answered, or the feed is closed."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)

"""Parks idle tasks, which nobody reads, and evicts their elements to bound a worker's memory.

A job that is left early leaves a pipeline with threads, and unread elements. The few tasks that
were left last stay unchanged, so a trainer that returns soon continues at once. The others are
*parked* (tasks.py): they have no threads and together keep up to MAX_IDLE_BYTES of finished
elements. Beyond that the longest idle lose their elements first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple

from ..delivery import MemoryBudget
from . import losses
from .tasks import WorkerTask

log = logging.getLogger(__name__)

CHECK_S = 0.25
FINISH_S = 10.0
"""A pipeline being parked has this long to finish begun splits, which are lost afterwards."""

MOST_FINISHING = 8
"""How many pipelines may be finishing for parking. Beyond that the oldest are cut."""

MAX_IDLE_BYTES = 96 << 20
IDLE_SHARE = 8
"""Idle tasks together keep at most this fraction (1/8) of the budget, and MAX_IDLE_BYTES."""

MIN_FINISHED_BYTES = 8 << 20
"""A pipeline being parked may always finish this much; longer idle tasks make room for it."""

GONE_CHECK_S = 5.0
POLL_S, MAX_POLL_S = 0.5, 30.0
"""A parked task polls this often whether any splits remain; the interval grows with its age."""

COMPLETE_S = 10.0
"""How long a task that resumed in order to complete is not parked again."""

MAX_POLLS = 20
"""How many parked tasks ask the dispatcher in one `_check`."""


class IdleTask(NamedTuple):
    """A task that nobody reads."""

    task_id: int
    held_bytes: int
    is_parked: bool
    is_cached: bool  # fixed-size cache: evicted only if others need memory


class Decided(NamedTuple):
    """The ids of tasks to park, and of parked tasks whose elements to drop."""

    park: list[int]
    shed: list[int]


def decide(idle: Sequence[IdleTask], kept: int, most_bytes: int, needed_bytes: int) -> Decided:
    """`idle` is ordered, the longest idle first. `kept` pipelines and `most_bytes` of elements may
    stay, unless other tasks need `needed_bytes`."""
    running = [task.task_id for task in idle if not task.is_parked]
    park = dict.fromkeys(running[: max(0, len(running) - kept)])
    shed = []
    too_much = sum(task.held_bytes for task in idle if not task.is_cached) - most_bytes
    for task in idle:
        if needed_bytes <= 0 and (too_much <= 0 or task.is_cached):
            continue
        if not task.is_parked:
            park[task.task_id] = None
        elif task.held_bytes:
            shed.append(task.task_id)
        needed_bytes -= task.held_bytes
        too_much -= 0 if task.is_cached else task.held_bytes
    return Decided(list(park), shed)


class IdleTasks:
    """Parks a worker's idle tasks, in a thread of its own."""

    def __init__(
        self,
        runners: Callable[[], Iterable[WorkerTask]],
        read_tasks: Callable[[], Set[int]],
        forget_gone: Callable[[], None],
        budget_bytes: int,
        expected_s: float,
        kept_pipelines: int,
    ) -> None:
        """`runners` returns those of the unfinished tasks. `forget_gone` asks the dispatcher which
        disconnected consumers are gone for good."""
        self._runners = runners
        self._read_tasks = read_tasks
        self._forget_gone = forget_gone
        self.budget = MemoryBudget(budget_bytes, self._on_need)
        self._most_bytes = min(MAX_IDLE_BYTES, budget_bytes // IDLE_SHARE)
        self._expected_s = expected_s
        self._kept = kept_pipelines
        self._idle: dict[int, tuple[WorkerTask, float]] = {}  # since when; longest idle first
        self._parking: dict[int, float] = {}  # since when
        self._polled: dict[int, float] = {}  # when
        self._not_before: dict[int, float] = {}  # tasks that resumed to complete: park not before
        self._checked_s = 0.0
        self._needed = threading.Event()  # memory is needed, or the worker stops
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forebay-idle", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Idempotent."""
        self._stopping.set()
        self._needed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _on_need(self) -> None:
        self._needed.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            is_needed = self._needed.wait(CHECK_S)
            if self._stopping.is_set():
                return
            self._needed.clear()
            try:
                self._check(is_needed)
            except Exception:  # a bug; memory must stay bounded all the same
                log.exception("tasks that nobody reads are looked at again")
            if is_needed:
                self._stopping.wait(CHECK_S / 10)  # limit the rate while memory stays short

    def _check(self, is_needed: bool) -> None:
        now = time.monotonic()
        # Count `opens` before reading the consumers: `park` then notices a later subscription.
        runners = {r.task.task_id: (r, r.output.opens) for r in self._runners()}
        read = self._read_tasks()
        for task_id, (runner, _) in runners.items():
            if task_id in read and runner.is_parked:
                runner.resume()  # no thread was available when a consumer subscribed
        idle = {}
        for task_id, (runner, _) in runners.items():
            known, since_s = self._idle.get(task_id, (runner, now))
            if task_id not in read and (runner.is_parked or runner.may_be_parked):
                idle[task_id] = runner, since_s if known is runner else now
        self._idle = dict(sorted(idle.items(), key=lambda item: item[1][1]))
        listed = [
            IdleTask(i, r.output.held_bytes, r.is_parked, r.task.cross_trainer_cache)
            for i, (r, since_s) in self._idle.items()
            if now >= self._not_before.get(i, since_s + (0 if runners[i][1] else self._expected_s))
        ]
        most = self.budget.max_bytes
        needed = self.budget.held - (most // 2 if is_needed else most)
        park, shed = decide(listed, self._kept, self._most_bytes, needed)
        held = sum(task.held_bytes for task in listed if not task.is_cached)
        room = (self._most_bytes - held) // max(1, len(park))
        for task_id in park:
            runner, opens = runners[task_id]
            own = runner.output.held_bytes
            runner.park(opens, own + max(room, MIN_FINISHED_BYTES))
        for task_id in shed:
            runner = runners[task_id][0]
            if elements := runner.shed():
                losses.shed(runner.task, elements)
        self._cut_slow(now)
        self._poll(now)
        if now - self._checked_s >= GONE_CHECK_S:
            self._checked_s = now
            self._forget_gone()

    def _cut_slow(self, now: float) -> None:
        being_parked = {i: r for i, (r, _) in self._idle.items() if r.is_being_parked()}
        self._parking = {i: self._parking.get(i, now) for i in being_parked}
        in_turn = sorted(self._parking, key=lambda i: self._parking[i], reverse=True)
        for number, task_id in enumerate(in_turn):
            if number >= MOST_FINISHING or now - self._parking[task_id] >= FINISH_S:
                being_parked[task_id].cut()

    def _poll(self, now: float) -> None:
        """Resume parked tasks whose pass has no splits left, so that they complete."""
        parked = {i: since_s for i, (r, since_s) in self._idle.items() if r.is_parked}
        self._polled = {i: self._polled.get(i, now) for i in parked}
        self._not_before = {i: s for i, s in self._not_before.items() if i in self._idle}
        due = [
            task_id
            for task_id, polled_s in self._polled.items()
            if now - polled_s >= min(max(POLL_S, (now - parked[task_id]) / 8), MAX_POLL_S)
        ]
        for task_id in sorted(due, key=lambda i: self._polled[i])[:MAX_POLLS]:
            if self._stopping.is_set():
                return
            self._polled[task_id] = time.monotonic()
            runner = self._idle[task_id][0]
            is_exhausted = runner.is_pass_over()
            if is_exhausted is None:
                return  # each call would wait for its timeout while tasks need memory
            if is_exhausted:
                self._not_before[task_id] = time.monotonic() + COMPLETE_S
                runner.resume()

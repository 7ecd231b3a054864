"""RunningTasks: carries out what task_states.py decides about a worker's tasks."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Mapping

from ...storage.thread_pool import ThreadPool
from ..http.families import Made, Measured, Tallies
from ..proto import forebay_pb2 as pb
from ..transport.sessions import Sessions
from . import losses
from .task_states import (
    Cancel,
    Drain,
    DrainAsked,
    Ended,
    Event,
    ForgetAll,
    HandedOut,
    Instruction,
    NotMade,
    Start,
    TaskStates,
)
from .tasks import WorkerTask

log = logging.getLogger(__name__)

WAITS = ("working", "backpressured", "no_split")
COUNTED = ("elements", "shed_elements", "parked_tasks")


class RunningTasks:
    """The runners of a worker's tasks. Thread-safe."""

    def __init__(self, make: Callable[[pb.Task], WorkerTask], sessions: Sessions) -> None:
        """`make` makes a task's runner, whose output `sessions` then serve."""
        self.states = TaskStates()  # to read; `handle` and `report` change it
        self._make = make
        self._sessions = sessions
        self._runners: dict[int, WorkerTask] = {}  # of each task that is not ABSENT in `states`
        self._ending: list[WorkerTask] = []  # cancelled, threads still running
        self._tallies = Tallies()  # by job
        self._counted: dict[WorkerTask, dict[str, float]] = {}  # what is in the tallies
        self._lock = threading.Lock()  # guards the fields above, and `states`

    def runner_of(self, task_id: int) -> WorkerTask | None:
        """The runner of a current or recently completed task; None if unknown."""
        with self._lock:
            return self._runners.get(task_id)

    def runners(self) -> list[WorkerTask]:
        """Those of all tasks, KEPT ones included."""
        with self._lock:
            return [*self._runners.values()]

    def unfinished(self) -> list[WorkerTask]:
        with self._lock:
            return [self._runners[i] for i in self.states.unfinished() if i in self._runners]

    def handle(self, event: Event) -> list[Instruction]:
        """Carry out Start, Cancel and ForgetAll; return all instructions for the caller."""
        with self._lock:
            instructions = self.states.handle(event)
            cancelled = []
            for instruction in instructions:
                match instruction:
                    case Start(task):
                        self._start(task)
                    case Cancel(task_id, given_up):
                        cancelled.append((self._runners.pop(task_id), given_up))
            self._ending += [runner for runner, _ in cancelled]
        for instruction in instructions:
            if isinstance(instruction, ForgetAll):
                log.warning(
                    "the dispatcher has another journal (%s, was %s), since that was in memory, or "
                    "was repaired; this worker begins anew", instruction.now, instruction.before,
                )  # fmt: skip
                self._sessions.forget_all()
        for runner, given_up in cancelled:
            if given_up and (what := runner.undelivered()) is not None:
                losses.given_up(runner.task, what)
            runner.cancel()
            self._sessions.remove_task(runner.task.task_id)
        return instructions

    def _start(self, task: pb.Task) -> None:
        # A task that fails to start must not stop the other instructions.
        try:
            # A copy: a protobuf message keeps alive the whole response that it is part of, which
            # lists all of the worker's tasks.
            runner = self._make(copy.copy(task))
            self._sessions.add_task(task.task_id, runner.output, task.iteration_id)
        except Exception:
            log.exception("task %d cannot be made, and is tried again", task.task_id)
            self.states.handle(NotMade(task.task_id))
            return
        self._runners[task.task_id] = runner
        try:
            runner.start()
        except (RuntimeError, MemoryError) as error:  # no thread available
            log.error("task %d cannot be started: %s", task.task_id, error)
            runner.fail("RESOURCE_EXHAUSTED", f"the worker cannot start the task: {error}")
            self.states.handle(Ended(task.task_id))

    def report(self, runner: WorkerTask, event: HandedOut | Ended) -> list[Instruction]:
        """Handle a runner's event. Events of cancelled runners are ignored: after a journal
        change the same task id may belong to another runner."""
        with self._lock:
            if self._runners.get(event.task_id) is not runner:
                return []
            return self.states.handle(event)

    def drain(self, give_up_s: float) -> None:
        """Begin no further split, and return unstarted ones until `give_up_s` (monotonic clock)."""
        instructions = self.handle(DrainAsked())
        with self._lock:
            shall = {i.task_id for i in instructions if isinstance(i, Drain)}
            draining = [runner for i, runner in self._runners.items() if i in shall]
        if draining:
            with ThreadPool(len(draining), "forebay-drain") as pool:
                list(pool.map(lambda runner: runner.drain(give_up_s), draining))

    def forget_ended(self) -> None:
        """Forget the cancelled runners whose threads have ended."""
        with self._lock:
            ended = [runner for runner in self._ending if runner.join(0)]
            self._ending = [runner for runner in self._ending if runner not in ended]
            for runner in ended:
                self._count(runner)
                self._counted.pop(runner, None)

    def loads(self) -> list[pb.JobLoad]:
        """Of each job of the unfinished tasks: what its tasks have done here so far."""
        with self._lock:
            unfinished = [self._runners[i] for i in self.states.unfinished() if i in self._runners]
            by_job: dict[int, list[WorkerTask]] = {}
            for runner in unfinished:
                by_job.setdefault(runner.task.job_id, []).append(runner)
                self._count(runner)
            return [
                _load(job_id, self._tallies.of(str(job_id)), runners)
                for job_id, runners in by_job.items()
            ]

    def counts(self, families: Mapping[str, Made]) -> list[Measured]:
        """By job: what its tasks have done here so far, ended ones included."""
        with self._lock:
            for runner in [*self._runners.values(), *self._ending]:
                self._count(runner)
            return [*self._tallies.measured(families)]

    def _count(self, runner: WorkerTask) -> None:
        before, now = self._counted.get(runner, {}), runner.counts()
        # What another thread measures while it is read may be a moment behind.
        now = {kind: max(value, before.get(kind, 0)) for kind, value in now.items()}
        new = {kind: value - before.get(kind, 0) for kind, value in now.items()}
        self._counted[runner] = now
        if any(new.values()):
            self._tallies.add(str(runner.task.job_id), new)

    def join(self, give_up_s: float) -> None:
        """Wait for the cancelled runners until `give_up_s` (monotonic clock)."""
        for runner in self._ending:
            if not runner.join(max(0.0, give_up_s - time.monotonic())):
                log.warning("task %d is still in an element, and is left", runner.task.task_id)


def _load(job_id: int, counts: Mapping[str, float], runners: list[WorkerTask]) -> pb.JobLoad:
    ms = {f"{kind}_ms": int(1000 * counts.get(kind, 0)) for kind in WAITS}
    held = sum(runner.output.held_bytes for runner in runners)
    counted = {kind: int(counts.get(kind, 0)) for kind in COUNTED}
    return pb.JobLoad(job_id=job_id, held_bytes=held, **ms, **counted)

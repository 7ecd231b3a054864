"""The state machine of a worker's tasks.

Events go in, and instructions come out; `RunningTasks` and `TaskRunner` carry these out. An event
has all facts that the decision needs. The module has no thread, clock or connection, so tests can
try any order of events. TASK is the transition table. An event without an entry for the task's
state leaves the state unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import NamedTuple

from ..proto import forebay_pb2 as pb

COME_BACK_S = 5.0
"""A worker that had been given up keeps its unlisted tasks this long, so consumers can return."""

KEPT_COMPLETED = 64
"""How many completed tasks are kept for late consumers."""

ABSENT = "absent"  # not listed yet, or removed
RUNNING = "running"  # the pipeline works, or its elements wait for consumers
DRAINING = "draining"  # begins no further split, delivers begun ones, and does not complete
HANDED_OUT = "handed out"  # consumers have taken all elements: it completes
ENDED = "ended"  # failed or stopped before that; not restarted while it is listed
KEPT = "kept"  # completed and no longer listed: it tells late consumers its end

Table = dict[str, dict[str, str]]
"""Event to {state before: state after}."""

TASK: Table = {
    "listed": {ABSENT: RUNNING},
    "not made": {RUNNING: ABSENT},
    "unlisted": {RUNNING: ABSENT, DRAINING: ABSENT, ENDED: ABSENT, HANDED_OUT: KEPT},
    "drained": {RUNNING: DRAINING},
    "handed out": {RUNNING: HANDED_OUT, DRAINING: ENDED},
    "exhausted": {RUNNING: HANDED_OUT, DRAINING: HANDED_OUT},
    "ended": {RUNNING: ENDED, DRAINING: ENDED},
    "let go": dict.fromkeys((RUNNING, DRAINING, HANDED_OUT, ENDED, KEPT), ABSENT),
}


class JournalSeen(NamedTuple):
    """The dispatcher has this journal. Task ids are valid within one journal."""

    journal_id: str


class Listed(NamedTuple):
    """The dispatcher's complete list of tasks that this worker runs.

    `read` has the unlisted tasks that consumers read; `now_s` is of the monotonic clock.
    """

    worker_id: int
    tasks: Mapping[int, pb.Task]
    read: Set[int]
    now_s: float


class NotMade(NamedTuple):
    """The task could not be created. The next list starts it again."""

    task_id: int


class DrainAsked(NamedTuple):
    """Start no further tasks, and deliver begun splits."""


class StopAsked(NamedTuple):
    """Cancel all tasks, and start no further ones."""


class HandedOut(NamedTuple):
    """The task's pipeline has ended, and consumers have taken all its elements.

    `data_over`: the pipeline ended with its data, and not because the task drains.
    """

    task_id: int
    data_over: bool = False


class Ended(NamedTuple):
    """The task's runner ended before HandedOut, or couldn't report the task as complete."""

    task_id: int


Event = JournalSeen | Listed | NotMade | DrainAsked | StopAsked | HandedOut | Ended


class Start(NamedTuple):
    task: pb.Task


class Drain(NamedTuple):
    task_id: int


class Complete(NamedTuple):
    """Tell the dispatcher that the task is complete."""

    task_id: int


class Cancel(NamedTuple):
    """Stop the task and its output. `given_up`: the dispatcher no longer lists the task, so its
    undelivered elements are lost.
    """

    task_id: int
    given_up: bool


class ForgetAll(NamedTuple):
    """The dispatcher's journal changed from `before` to `now`: earlier ids are invalid."""

    before: str
    now: str


Instruction = Start | Drain | Complete | Cancel | ForgetAll


class TaskStates:
    """The tasks of one worker. Not thread-safe."""

    def __init__(self) -> None:
        self.worker_id = 0  # assigned by the dispatcher; 0 before its first answer
        self.journal_id = ""
        self._states: dict[int, str] = {}  # without ABSENT ones; KEPT in order of age
        self._came_back_s = -math.inf
        self._draining = False
        self._stopping = False

    def state(self, task_id: int) -> str:
        return self._states.get(task_id, ABSENT)

    def unfinished(self) -> list[int]:
        """All tasks except ABSENT and KEPT ones."""
        return [task_id for task_id, state in self._states.items() if state != KEPT]

    def handle(self, event: Event) -> list[Instruction]:
        """Apply the event; return the instructions in the order to carry them out."""
        match event:
            case JournalSeen(journal_id):
                before, self.journal_id = self.journal_id, journal_id
                if before in ("", journal_id):
                    return []
                return [ForgetAll(before, journal_id), *self._let_go(list(self._states))]
            case Listed():
                return self._listed(event)
            case NotMade(task_id):
                self._move("not made", task_id)
                return []
            case DrainAsked():
                self._draining = True
                return [Drain(i) for i in self.unfinished() if self._move("drained", i) == DRAINING]
            case StopAsked():
                self._stopping = True
                return self._let_go(list(self._states))
            case HandedOut(task_id, data_over):
                moved = self._move("exhausted" if data_over else "handed out", task_id)
                return [Complete(task_id)] if moved == HANDED_OUT else []
            case Ended(task_id):
                self._move("ended", task_id)
                return []

    def _listed(self, event: Listed) -> list[Instruction]:
        # A worker that was given up was perhaps suspended: its sockets may hold consumers' reports.
        if self.worker_id not in (0, event.worker_id):
            self._came_back_s = event.now_s
        came_back = event.now_s - self._came_back_s < COME_BACK_S
        self.worker_id = event.worker_id
        if self._stopping:
            return []
        new = [] if self._draining else [i for i in event.tasks if self.state(i) == ABSENT]
        for task_id in new:
            self._move("listed", task_id)
        gone: list[Instruction] = []
        for task_id in [i for i in self.unfinished() if i not in event.tasks]:
            # The iteration went on without this worker. Consumers still get the begun splits.
            is_awaited = came_back or task_id in event.read
            if self.state(task_id) != HANDED_OUT and is_awaited:
                continue
            if self._move("unlisted", task_id) == ABSENT:
                gone.append(Cancel(task_id, given_up=True))
        kept = [i for i, state in self._states.items() if state == KEPT and i not in event.tasks]
        gone += self._let_go(kept[: max(0, len(kept) - KEPT_COMPLETED)])
        # Start before Cancel: ending a task takes time.
        return [*(Start(event.tasks[i]) for i in new), *gone]

    def _let_go(self, task_ids: list[int]) -> list[Instruction]:
        for task_id in task_ids:
            self._move("let go", task_id)
        return [Cancel(task_id, given_up=False) for task_id in task_ids]

    def _move(self, event: str, task_id: int) -> str | None:
        """The task's new state; None if the event doesn't change it."""
        state = TASK[event].get(self.state(task_id))
        if state is not None:
            self._states.pop(task_id, None)  # so that the latest comes last
            if state != ABSENT:
                self._states[task_id] = state
        return state

"""What becomes of a worker's tasks: which one runs, which completes, and which is kept or let go.

Events go in, each with all that is to be known of the world at that moment; instructions come out,
which `Worker` and `TaskRunner` carry out. No thread, clock or connection is known here, so any
order of events can be tried. The life of a task is a table: an event that has nothing for the
task's state leaves it as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import NamedTuple

from ..proto import forebay_pb2 as pb

COME_BACK_S = 5.0
"""For consumers to find a worker that had been given up, before what they do not read is let go."""

KEPT_COMPLETED = 64
"""Completed tasks that late consumers may still ask for."""

ABSENT = "absent"  # not listed yet, or let go
RUNNING = "running"  # its pipeline works, or what that has made waits for consumers
DRAINING = "draining"  # it begins no further split, delivers what was begun, and does not complete
HANDED_OUT = "handed out"  # consumers have taken all that there is: it completes
ENDED = "ended"  # before that; as long as it is listed it is not begun again
KEPT = "kept"  # completed, and listed no more: it tells its end to consumers that come late

Table = dict[str, dict[str, str]]
"""By the event: from which state to which."""

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
    """The dispatcher has this journal: task ids are of it."""

    journal_id: str


class Listed(NamedTuple):
    """The dispatcher's list: what shall run here, and nothing else.

    `read` are the tasks of which consumers read; `now_s` is of the monotonic clock.
    """

    worker_id: int
    tasks: Mapping[int, pb.Task]
    read: Set[int]
    now_s: float


class NotMade(NamedTuple):
    """What the task needs to be started is not to be had: the next list starts it."""

    task_id: int


class DrainAsked(NamedTuple):
    """Begin nothing more, and deliver what was begun."""


class StopAsked(NamedTuple):
    """Let everything go, and begin nothing more."""


class HandedOut(NamedTuple):
    """The task's pipeline has ended, and consumers have taken all that it made.

    `data_over`: it was the data that ended, and not, of a task that is drained, its leases.
    """

    task_id: int
    data_over: bool = False


class Ended(NamedTuple):
    """The task's runner has ended without that, or could not have the task completed."""

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
    """End it, and serve it no more. `given_up`: the dispatcher lists it no more, so that what it
    has not delivered is lost.
    """

    task_id: int
    given_up: bool


class BeginAnew(NamedTuple):
    """The dispatcher's journal is not `before` any more: numbers mean others from now on."""

    before: str
    now: str


Instruction = Start | Drain | Complete | Cancel | BeginAnew


class TaskStates:
    """The tasks of one worker. Not thread-safe."""

    def __init__(self) -> None:
        self.worker_id = 0  # what the dispatcher calls this worker; 0 before it has answered
        self.journal_id = ""
        self._states: dict[int, str] = {}  # those that are not absent; KEPT: the oldest first
        self._came_back_s = -math.inf
        self._draining = False
        self._stopping = False

    def state(self, task_id: int) -> str:
        return self._states.get(task_id, ABSENT)

    def unfinished(self) -> list[int]:
        """The tasks that are here, but for those that are only kept."""
        return [task_id for task_id, state in self._states.items() if state != KEPT]

    def handle(self, event: Event) -> list[Instruction]:
        """What is to be done about it, in this order."""
        match event:
            case JournalSeen(journal_id):
                before, self.journal_id = self.journal_id, journal_id
                if before in ("", journal_id):
                    return []
                return [BeginAnew(before, journal_id), *self._let_go(list(self._states))]
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
        # Given up, we were perhaps stopped, and what consumers have told us lies in the sockets.
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
            # Who reads a task of an iteration that went on without us still gets what was begun.
            is_awaited = came_back or task_id in event.read
            if self.state(task_id) != HANDED_OUT and is_awaited:
                continue
            if self._move("unlisted", task_id) == ABSENT:
                gone.append(Cancel(task_id, given_up=True))
        kept = [i for i, state in self._states.items() if state == KEPT and i not in event.tasks]
        gone += self._let_go(kept[: max(0, len(kept) - KEPT_COMPLETED)])
        # What is new comes first: ending takes its time.
        return [*(Start(event.tasks[i]) for i in new), *gone]

    def _let_go(self, task_ids: list[int]) -> list[Instruction]:
        for task_id in task_ids:
            self._move("let go", task_id)
        return [Cancel(task_id, given_up=False) for task_id in task_ids]

    def _move(self, event: str, task_id: int) -> str | None:
        """Where the event brings the task; None if it leaves it where it is."""
        state = TASK[event].get(self.state(task_id))
        if state is not None:
            self._states.pop(task_id, None)  # so that the latest comes last
            if state != ABSENT:
                self._states[task_id] = state
        return state

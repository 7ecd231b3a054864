"""A worker's tasks, event by event, without a thread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.service.delivery import OutputCancelled, TaskFailed, TaskUnknown
from forebay.service.errors import (
    FailedPrecondition,
    ForebayError,
    NotFound,
    PipelineError,
    Unavailable,
)
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.worker.task_states import (
    ABSENT,
    COME_BACK_S,
    DRAINING,
    ENDED,
    HANDED_OUT,
    KEPT,
    KEPT_COMPLETED,
    RUNNING,
    TASK,
    Cancel,
    Complete,
    Drain,
    DrainAsked,
    Ended,
    Event,
    ForgetAll,
    HandedOut,
    JournalSeen,
    Listed,
    Start,
    StopAsked,
    TaskStates,
)
from forebay.service.worker.tasks import end_after


def task(task_id: int) -> pb.Task:
    return pb.Task(task_id=task_id)


def listed(
    *task_ids: int, read: Iterable[int] = (), worker_id: int = 1, now_s: float = 100.0
) -> Listed:
    return Listed(worker_id, {i: task(i) for i in task_ids}, set(read), now_s)


def after(*events: Event) -> TaskStates:
    states = TaskStates()
    for event in events:
        states.handle(event)
    return states


def test_a_worker_that_registers_again_gives_consumers_time_to_find_its_tasks() -> None:
    states = after(listed(1, worker_id=1))
    assert states.handle(listed(worker_id=2, now_s=50)) == []
    assert states.handle(listed(worker_id=2, now_s=50 + COME_BACK_S - 0.1)) == []
    late = listed(worker_id=2, now_s=50 + COME_BACK_S)
    assert states.handle(late) == [Cancel(1, given_up=True)]


def test_a_task_whose_elements_were_all_handed_out_completes_and_is_kept() -> None:
    states = after(listed(1))
    assert states.handle(HandedOut(1)) == [Complete(1)]
    assert states.handle(listed()) == []
    assert states.state(1) == KEPT
    assert states.unfinished() == []


@pytest.mark.parametrize("how", [{"read": [1]}, {"worker_id": 2}])
def test_a_completed_task_is_kept_while_consumers_read_it(how: Any) -> None:
    states = after(listed(1), HandedOut(1))
    assert states.handle(listed(**how)) == []
    assert states.state(1) == KEPT


def test_a_task_that_could_not_report_its_completion_is_kept() -> None:
    states = after(listed(1), HandedOut(1), Ended(1))
    assert states.state(1) == HANDED_OUT
    assert states.handle(listed()) == []


def test_the_tasks_that_completed_first_are_cancelled_first() -> None:
    ids = range(1, KEPT_COMPLETED + 3)
    states = after(listed(*ids), *map(HandedOut, reversed(ids)))
    assert states.handle(listed(5)) == [Cancel(ids[-1], given_up=False)]
    assert states.handle(listed()) == [Cancel(ids[-2], given_up=False)]
    assert states.handle(listed()) == []


def test_a_failed_task_is_not_started_again() -> None:
    states = after(listed(1), Ended(1))
    assert states.state(1) == ENDED
    assert states.handle(listed(1)) == []
    assert states.handle(listed()) == [Cancel(1, given_up=True)]


def test_a_draining_worker_begins_nothing_and_completes_nothing() -> None:
    states = after(listed(1, 2), HandedOut(2))
    assert states.handle(DrainAsked()) == [Drain(1)]
    assert states.handle(listed(1, 2, 3)) == []
    assert states.handle(HandedOut(1)) == []
    assert states.handle(DrainAsked()) == []


def test_a_worker_that_stops_starts_no_task() -> None:
    states = after(StopAsked())
    assert states.handle(listed(1)) == []
    assert states.worker_id == 1  # to say goodbye


def test_tasks_of_another_journal_are_cancelled() -> None:
    states = after(JournalSeen("a"), listed(1))
    assert states.handle(JournalSeen("a")) == []
    assert states.handle(JournalSeen("b")) == [ForgetAll("a", "b"), Cancel(1, given_up=False)]
    assert states.handle(listed(1)) == [Start(task(1))]


def test_the_transition_table_names_every_state() -> None:
    known = {ABSENT, RUNNING, DRAINING, HANDED_OUT, ENDED, KEPT}
    for moves in TASK.values():
        assert {*moves, *moves.values()} <= known
    assert {there for moves in TASK.values() for there in moves.values()} == known


class Model:
    """Carries out instructions, and fails on one that is impossible in its state."""

    def __init__(self) -> None:
        self.states = TaskStates()
        self.here: set[int] = set()  # started, and not cancelled
        self.told: set[int] = set()  # of these, whose runner was told to complete
        self.over: set[int] = set()  # whose runner has said all
        self.journal = ""
        self.worker_id = 0
        self.came_back_s = -COME_BACK_S
        self.stopped = self.draining = False

    def handle(self, event: Event) -> None:
        was_here = set(self.here)
        for instruction in self.states.handle(event):
            match instruction:
                case Start(started):
                    assert isinstance(event, Listed)
                    assert event.tasks[started.task_id] == started
                    assert started.task_id not in was_here | self.here
                    assert not (self.draining or self.stopped)
                    self.here.add(started.task_id)
                case Cancel(task_id, given_up):
                    assert task_id in self.here
                    self.here.remove(task_id)
                    self.told.discard(task_id)
                    self.over.discard(task_id)
                    if given_up:
                        assert isinstance(event, Listed)
                        assert task_id not in event.tasks.keys() | event.read
                case Complete(task_id):
                    assert event == HandedOut(task_id)
                    assert task_id in self.here - self.told
                    assert not self.draining
                    self.told.add(task_id)
                case Drain(task_id):
                    assert event == DrainAsked()
                    assert task_id in self.here
                case ForgetAll(before, now):
                    assert before == self.journal != now
        self._look(event)

    def _look(self, event: Event) -> None:
        self.stopped |= isinstance(event, StopAsked)
        self.draining |= isinstance(event, DrainAsked)
        if isinstance(event, JournalSeen):
            assert event.journal_id == self.journal or not (self.journal and self.here)
            self.journal = event.journal_id
        if isinstance(event, Listed):
            if not (self.draining or self.stopped):
                assert event.tasks.keys() <= self.here  # it is done, too
            if self.worker_id not in (0, event.worker_id):
                self.came_back_s = event.now_s
            self.worker_id = event.worker_id
            if event.now_s - self.came_back_s >= COME_BACK_S:
                assert self.here - self.told <= event.tasks.keys() | event.read
        assert not (self.stopped and self.here)
        assert self.here == {i for i in range(100) if self.states.state(i) != ABSENT}
        kept = self.here - set(self.states.unfinished())
        assert kept <= self.told
        if isinstance(event, Listed):
            assert len(kept - event.tasks.keys()) <= KEPT_COMPLETED


IDS = st.integers(0, 99)
KINDS = st.sampled_from(["list"] * 6 + ["say"] * 6 + ["journal", "journal", "drain", "stop"])
SOME = st.one_of(st.sets(IDS, max_size=5), st.builds(range, st.integers(60, 100)))


@given(st.data())
def test_any_order_of_events_gives_instructions_that_can_be_carried_out(
    data: st.DataObject,
) -> None:
    model = Model()
    now_s = 0.0
    for kind in data.draw(st.lists(KINDS, min_size=10, max_size=30)):
        now_s += data.draw(st.sampled_from([0.1, 1, COME_BACK_S]))
        match kind:
            case "list":
                worker_id = data.draw(st.sampled_from([1, 1, 1, 2]))
                read = data.draw(st.sets(IDS, max_size=3))
                model.handle(listed(*data.draw(SOME), read=read, worker_id=worker_id, now_s=now_s))
            case "say":  # of a runner that is here: others are not heard
                if saying := sorted(model.here - model.over):
                    how = data.draw(st.sampled_from([HandedOut, Ended]))
                    few = data.draw(st.sampled_from([1, len(saying)]))
                    for task_id in saying[:few]:
                        # Who is told to complete may yet say that it could not.
                        if how is Ended or task_id in model.told:
                            model.over.add(task_id)
                            model.handle(Ended(task_id))
                        else:
                            model.handle(HandedOut(task_id))
            case "journal":
                model.handle(JournalSeen(data.draw(st.sampled_from("ab"))))
            case "drain":
                model.handle(DrainAsked())
            case "stop":
                model.handle(StopAsked())


@pytest.mark.parametrize(
    ("error", "feed_failed", "end"),
    [
        (PipelineError("UNKNOWN", "x"), None, TaskFailed("UNKNOWN", "x")),
        (PipelineError("UNKNOWN", "x"), Unavailable("stopped"), TaskUnknown()),
        (PipelineError("UNKNOWN", "x"), FailedPrecondition("y"), TaskUnknown()),
        (NotFound("x"), None, TaskUnknown()),
        (Unavailable("x"), None, TaskUnknown()),
        (OutputCancelled("x"), None, TaskUnknown()),
        (FailedPrecondition("x"), None, TaskFailed("FAILED_PRECONDITION", "x")),
    ],
)
def test_consumers_are_told_how_the_task_ended(
    error: ForebayError, feed_failed: ForebayError | None, end: TaskFailed | TaskUnknown
) -> None:
    assert end_after(error, feed_failed) == end

"""Workers that are lost, come back, or were another process."""

from __future__ import annotations

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.core import workers
from forebay.service.core.encoding import decode_state, encode_state
from forebay.service.core.machine import apply
from forebay.service.core.read_kinds import SHARED, Shared
from forebay.service.core.state import MAX_LOST_WORKERS, Job, lease_caller
from forebay.service.core.status import status
from forebay.service.errors import FailedPrecondition, Unavailable

from .given import Given, dataset


def test_a_process_whose_address_was_taken_is_refused() -> None:
    given = Given()
    given.when(c.RegisterWorker(address="w:1", uid=1))
    given.when(c.RegisterWorker(address="w:1", uid=2))
    with pytest.raises(FailedPrecondition, match="of its own"):
        given.when(c.RegisterWorker(address="w:1", uid=1))
    given.when(c.RegisterWorker(address="w:1", uid=2))
    assert given.then == []


def test_a_heartbeat_looks_at_no_epoch_that_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Given()
    worker_id = given.worker(1)
    given.iteration("goes on")
    joined = given.iteration("finished", given.when(dataset("a", sources=[])))
    given.when(c.CompleteTask(task_id=given.task_of(worker_id)))
    assert given.state.iterations[joined.iteration_id].finished
    asked: list[str] = []

    def kind_of(job: Job) -> Shared:
        asked.append(job.name)
        return SHARED

    monkeypatch.setattr(workers, "kind_of", kind_of)
    given.worker(1)
    assert asked == ["goes on"]


def test_a_heartbeat_that_a_goodbye_has_overtaken_registers_nobody() -> None:
    given = Given()
    worker_id = given.worker(7)
    given.when(c.LoseWorker(worker_id=worker_id, reason="it said goodbye", left=True))
    with pytest.raises(FailedPrecondition, match="has said goodbye"):
        given.worker(7)
    assert given.worker(8)


def test_a_process_that_was_given_up_and_comes_back_goes_on_with_its_task() -> None:
    given = Given()
    worker_id = given.worker(7)
    joined = given.iteration()
    task_id = given.task_of(worker_id)
    lease = given.lease(task_id, 10)
    assert lease is not None
    given.when(c.LoseWorker(worker_id=worker_id, reason="no sign of life"))
    assert given.then == ["lease_lost", "worker_lost"]
    for command in (
        c.LeaseSplits(task_id=task_id, source=0, pass_number=0, want=1),
        c.CompleteTask(task_id=task_id),
    ):
        with pytest.raises(Unavailable, match="registered again"):
            given.when(command)
    again = given.worker(7)
    assert again != worker_id
    assert given.task_of(again) == task_id
    ledger = given.state.iterations[joined.iteration_id].ledgers[0]
    assert ledger.lost == []
    back = ((lease.lease_id, lease.count),)
    given.when(c.ReturnSplits(task_id=task_id, returned=back))
    assert given.lease(task_id, 10) == lease_like(lease, given)
    assert not given.state.lost_tasks


def test_a_lease_whose_answer_was_lost_with_the_worker_is_found_when_it_comes_back() -> None:
    given = Given()
    worker_id = given.worker(7)
    given.iteration()
    task_id = given.task_of(worker_id)
    request = (lease_caller(task_id, 0), 1)
    ask = c.LeaseSplits(request=request, task_id=task_id, source=0, pass_number=0, want=5)
    lease = given.when(ask)
    given.when(c.LoseWorker(worker_id=worker_id, reason="no sign of life"))
    given.worker(7)
    assert given.when(ask) == lease
    assert given.then == []


def test_another_process_does_not_go_on_with_a_lost_task() -> None:
    given = Given()
    worker_id = given.worker(7)
    given.iteration()
    task_id = given.task_of(worker_id)
    given.when(c.LoseWorker(worker_id=worker_id, reason="no sign of life"))
    assert given.task_of(given.worker(8)) != task_id


@pytest.mark.parametrize("ends", ["finished", "collected", "replaced", "repaired", "departed"])
def test_a_task_that_nobody_can_go_on_with_is_forgotten(ends: str) -> None:
    given = Given()
    worker_id = given.worker(7)
    joined = given.iteration()
    task_id = given.task_of(worker_id)
    given.when(
        c.LeaseSplits(
            request=(lease_caller(task_id, 0), 1), task_id=task_id, source=0, pass_number=0, want=5
        )
    )
    given.when(c.LoseWorker(worker_id=worker_id, reason="r", left=ends == "departed"))
    assert bool(given.state.lost_tasks) == (ends != "departed")
    if ends == "finished":
        given.when(c.CompleteTask(task_id=given.task_of(given.worker(8))))
    elif ends == "collected":
        given.when(c.LeaveIteration(consumer_id=joined.consumer_id, reason="r"))
    elif ends == "replaced":
        given.worker(7)
        given.when(c.RegisterWorker(address="w:7", uid=8))
    elif ends == "repaired":
        cut = ev.LeaderElected(term=2, journal_id="k", after_repair=True)
        apply(given.state, ev.Event(leader_elected=cut))
    assert not given.state.lost_tasks
    assert lease_caller(task_id, 0) not in given.state.answers


def lease_like(lease: ev.SplitsLeased, given: Given) -> ev.SplitsLeased:
    """The same splits, leased once more."""
    again = ev.SplitsLeased()
    again.CopyFrom(lease)
    again.lease_id = max(given.state.leases)
    return again


def test_a_completed_task_of_a_worker_that_comes_back_is_not_run_again() -> None:
    given = Given()
    first, second = given.worker(1), given.worker(2)
    job_id = given.when(c.GetOrCreateJob(dataset_id="d", name="off", sharding=ev.OFF))
    joined = given.when(c.JoinIteration(job_id=job_id, epoch=0))
    done, other = given.task_of(first), given.task_of(second)
    given.when(c.CompleteTask(task_id=done))
    given.when(c.LoseWorker(worker_id=first, reason="no sign of life"))
    given.when(c.CompleteTask(task_id=done))  # a retry whose answer was lost
    assert given.then == []
    again = given.worker(1)
    iteration = given.state.iterations[joined.iteration_id]
    assert sorted(iteration.tasks) == sorted([done, other])
    assert not given.state.workers[again].tasks
    given.when(c.JoinIteration(job_id=job_id, epoch=0))
    assert given.then == ["consumer_joined"]
    given.when(c.CompleteTask(task_id=other))
    assert given.then == ["task_completed", "iteration_finished"]


def test_lost_tasks_are_not_remembered_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.service.core.tasks.MAX_LOST_TASKS", 3)
    given = Given()
    given.iteration()
    for number in range(5):
        given.when(c.LoseWorker(worker_id=given.worker(number), reason="no sign of life"))
    assert [task.lost_with for task in given.state.lost_tasks.values()] == [2, 3, 4]


def test_a_worker_that_drains_gets_nothing_new() -> None:
    given = Given()
    worker_id = given.worker(1)
    given.iteration("before")
    task_id = given.task_of(worker_id)
    given.worker(1, draining=True)
    assert given.then == ["worker_drains"]
    given.worker(1)  # it was on its way
    given.worker(1, draining=True)
    assert given.then == []
    assert [worker["draining"] for worker in status(given.state)["workers"]] == [True]
    given.iteration("after")
    assert "task_created" not in given.then
    assert given.lease(task_id, 3), "what it has goes on"
    given.worker(2)
    assert given.then.count("task_created") == 2, "who comes gets a task of both"


def test_splits_that_a_draining_worker_hands_back_go_to_no_draining_worker() -> None:
    given = Given()
    first, second = given.worker(1), given.worker(2)
    given.iteration()
    given.worker(1, draining=True), given.worker(2, draining=True)
    lease = given.lease(given.task_of(first), 100)
    assert lease is not None
    given.when(c.CompleteTask(task_id=given.task_of(second)))
    given.hand_back(lease, lease.count)
    given.when(c.LoseWorker(worker_id=first, reason="it said goodbye", left=True))
    assert given.then == ["worker_lost"]
    given.worker(3)
    assert given.then == ["worker_registered", "task_created"]


def test_a_worker_that_is_given_up_as_it_drains_goes_on_with_that() -> None:
    given = Given()
    given.iteration("has a task")
    worker_id = given.worker(1, draining=True)
    assert given.then == ["worker_registered"], "nothing new"
    given.when(c.LoseWorker(worker_id=worker_id, reason="r"))
    worker_id = given.worker(1)
    task_id = given.task_of(worker_id)
    given.worker(1, draining=True)
    given.when(c.LoseWorker(worker_id=worker_id, reason="r"))
    given.iteration("another")
    again = given.worker(1, draining=True)
    assert given.then == ["worker_registered", "task_created"]
    assert given.state.workers[again].tasks == {task_id}
    assert given.state.workers[again].draining


def test_lost_workers_are_remembered_the_latest_last() -> None:
    given = Given()
    workers = [given.worker(port) for port in range(1, MAX_LOST_WORKERS + 3)]
    left, *lost = workers
    given.when(c.LoseWorker(worker_id=left, reason="r", left=True))
    for worker_id in lost:
        given.when(c.LoseWorker(worker_id=worker_id, reason=f"reason {worker_id}"))
    again = given.worker(4)
    given.when(c.LoseWorker(worker_id=again, reason="once more"))
    found = decode_state(encode_state(given.state)).lost_workers
    assert len(found) == MAX_LOST_WORKERS and not {"w:1", "w:2"} & found.keys()
    assert [each.reason for each in found.values()][-2:] == [f"reason {lost[-1]}", "once more"]

"""Workers that are lost, come back, or were another process."""

from __future__ import annotations

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.core.encoding import decode_state, encode_state
from forebay.service.core.machine import apply
from forebay.service.core.read_kinds import why_no_task
from forebay.service.core.saves import waits_for
from forebay.service.core.state import MAX_LOST_WORKERS, Grants, WorkerGrant, lease_caller
from forebay.service.core.status import status
from forebay.service.errors import FailedPrecondition, PermissionDenied, Unavailable

from .given import Given


def test_a_process_whose_address_was_taken_is_refused() -> None:
    given = Given()
    given.when(c.RegisterWorker(address="w:1", uid=1))
    given.when(c.RegisterWorker(address="w:1", uid=2))
    with pytest.raises(FailedPrecondition, match="of its own"):
        given.when(c.RegisterWorker(address="w:1", uid=1))
    given.when(c.RegisterWorker(address="w:1", uid=2))
    assert given.then == []


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
    given.when(c.LeaseSplits(task_id=task_id, returned=back))
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


def test_a_worker_that_was_given_up_and_came_back_may_leave_in_order() -> None:
    given = Given()
    given.when(c.LoseWorker(worker_id=given.worker(1), reason="no sign of life"))
    assert [*given.state.lost_workers] == ["w:1"]
    given.when(c.LoseWorker(worker_id=given.worker(1), reason="it said goodbye", left=True))
    assert not given.state.lost_workers


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


A, B = (WorkerGrant(("a/*", "common"), ("*",)),), (WorkerGrant(("b/*",), ("*",)),)


def of_pool(given: Given, number: int, grants: Grants, holder: str = "", address: str = "") -> int:
    return given.when(
        c.RegisterWorker(
            address=address or f"w:{number}", uid=number, grants=grants,
            holder=(holder or f"holder {number}").encode(),
        )
    )  # fmt: skip


def read_by(given: Given, worker_id: int) -> set[str]:
    """The datasets of which the worker has tasks."""
    state = given.state
    iterations = (
        state.iterations[state.tasks[i].iteration_id] for i in state.workers[worker_id].tasks
    )
    return {state.jobs[iteration.job_id].dataset_id for iteration in iterations}


@pytest.fixture
def teams() -> Given:
    given = Given()
    for dataset_id in ("a/1", "b/1", "common"):
        given.register(dataset_id, ev.SplitSource(count=100))
    return given


def test_a_pool_gets_tasks_of_its_datasets_alone_whoever_comes_first(teams: Given) -> None:
    before = [of_pool(teams, 1, A), of_pool(teams, 2, B), teams.worker(3)]
    for dataset_id in ("a/1", "b/1", "common"):
        teams.iteration(dataset_id, dataset_id)
    after = [of_pool(teams, 4, A), of_pool(teams, 5, B), teams.worker(6)]
    for a, b, everything in (before, after):
        assert read_by(teams, a) == {"a/1", "common"}
        assert read_by(teams, b) == {"b/1"}
        assert read_by(teams, everything) == {"a/1", "b/1", "common"}
    assert decode_state(encode_state(teams.state)) == teams.state


def test_splits_that_come_back_go_to_a_worker_of_the_pool_or_wait(teams: Given) -> None:
    own, _ = of_pool(teams, 1, B), of_pool(teams, 2, A)
    teams.iteration("x", "b/1")
    lease = teams.lease(teams.task_of(own), 100)
    teams.hand_back(lease, lease.count)
    teams.when(c.LoseWorker(worker_id=own, reason="it said goodbye", left=True))
    assert teams.then == ["worker_lost"]
    (iteration,) = teams.state.iterations.values()
    assert "pool" in why_no_task(teams.state, iteration)
    of_pool(teams, 3, B)
    assert teams.then == ["worker_registered", "task_created"]


def test_the_next_heartbeat_decides_if_grants_have_changed(teams: Given) -> None:
    worker_id = of_pool(teams, 1, A)
    teams.iteration("a", "a/1"), teams.iteration("b", "b/1")
    task_id = teams.task_of(worker_id)
    assert teams.lease(task_id, 3)
    assert of_pool(teams, 1, (*A, *B)) == worker_id
    assert teams.then == ["worker_registered", "task_created"]
    assert read_by(teams, worker_id) == {"a/1", "b/1"}
    of_pool(teams, 1, (*A, *B), "another token")
    assert teams.then == ["worker_registered"]
    of_pool(teams, 1, A, "another token")  # b/1 is no longer its own
    assert "worker_lost" in teams.then
    again = of_pool(teams, 1, A, "another token")
    assert read_by(teams, again) == {"a/1"}
    assert [*teams.state.workers[again].tasks] == [task_id]
    assert len(teams.state.tasks[task_id].leases) == 1, "it goes on with what it had"


@pytest.mark.parametrize("number", [1, 9], ids=["number and address", "address"])
def test_nobody_takes_the_place_of_another_pool_s_worker(teams: Given, number: int) -> None:
    of_pool(teams, 1, B)
    with pytest.raises(PermissionDenied, match="with other grants"):
        of_pool(teams, number, A, "thief", address="w:1")
    with pytest.raises(PermissionDenied, match="process number 1"):
        of_pool(teams, 1, A, "thief", address="evil:1")  # it would then say goodbye for it
    of_pool(teams, number, B, "of the pool", address="w:1")
    teams.when(c.RegisterWorker(address="w:1", uid=8, holder=b"operator"))  # may run everything


def test_a_pool_writes_no_saves(teams: Given) -> None:
    writer = of_pool(teams, 1, A)
    save = c.StartSave(
        path="/s",
        prepared="/s.p",
        metadata=b"",
        definition=ev.DatasetDefinition(sources=[ev.SplitSource(count=9)]),
    )
    teams.when(save)
    teams.when(c.AssignStream(worker_id=writer, most=3))
    assert teams.then == []
    (started,) = teams.state.saves.values()
    assert "no patterns" in waits_for(teams.state, started)
    other = teams.worker(2)
    teams.when(c.AssignStream(worker_id=other, most=3))
    assert teams.then == ["stream_assigned"]

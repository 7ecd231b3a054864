"""Jobs and their iterations: who joins what, and when it ends."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.errors import InvalidArgument, NotFound

from .given import Given, dataset


def test_a_named_job_is_found_whosever_dataset_it_is() -> None:
    given = Given()
    other = given.when(dataset("a"))
    job_id = given.when(c.GetOrCreateJob(dataset_id="d", name="n", sharding=ev.DYNAMIC))
    for dataset_id in (other, "d", "not registered"):
        again = c.GetOrCreateJob(dataset_id=dataset_id, name="n", sharding=ev.DYNAMIC)
        assert given.when(again) == job_id
        assert given.then == []
    for fields, why in (
        ({"target_workers": 3}, "Existing target workers: <0>; got <LOCAL>"),
        ({"sharding": ev.OFF}, "Existing processing mode: <DYNAMIC>; got <OFF>"),
        ({"num_consumers": 2}, "Existing number of consumers: <None>; got <2>"),
    ):
        how: dict[str, Any] = {"dataset_id": "d", "name": "n", "sharding": ev.DYNAMIC, **fields}
        with pytest.raises(InvalidArgument, match=why):
            given.when(c.GetOrCreateJob(**how))


def test_one_decision_creates_and_joins_a_job_and_answers_retries() -> None:
    given = Given()
    given.worker(1)
    asked = c.JoinJob(
        request=("trainer", 1), dataset_id="d", name="n", sharding=ev.DYNAMIC, epoch=1
    )
    joined = given.when(asked)
    assert given.then == ["job_created", "iteration_created", "task_created", "consumer_joined"]
    assert given.when(asked) == joined
    assert given.then == []
    fellow = given.when(
        c.JoinJob(request=("fellow", 1), dataset_id="d", name="n", sharding=ev.DYNAMIC, epoch=1)
    )
    assert given.then == ["consumer_joined"]
    assert given.state.iterations[joined.iteration_id].consumers == {
        joined.consumer_id, fellow.consumer_id
    }  # fmt: skip


def test_a_job_of_another_dataset_is_not_joined_unasked() -> None:
    given = Given()
    other = given.when(dataset("a"))
    given.iteration("n")
    (job,) = given.state.jobs.values()
    asked = c.JoinJob(
        request=("trainer", 1), dataset_id=other, name="n", sharding=ev.DYNAMIC, epoch=0
    )
    answer = given.when(asked)
    assert given.then == []
    given.when(c.RemoveDataset(dataset_id="d", force=True))  # before the answer leaves
    assert (answer.job_id, answer.dataset_id) == (job.job_id, "d")


def test_a_job_that_cannot_be_joined_is_not_created() -> None:
    given = Given()
    with pytest.raises(InvalidArgument, match="epoch -1 is negative"):
        given.when(c.JoinJob(dataset_id="d", name="n", sharding=ev.DYNAMIC, epoch=-1))
    assert not given.state.jobs


def test_an_iteration_whose_workers_are_all_lost_waits_for_the_next_one() -> None:
    given = Given()
    worker = given.worker(1)
    joined = given.iteration()
    given.when(c.LoseWorker(worker_id=worker, reason="killed"))
    assert given.then == ["worker_lost"]
    given.worker(2)
    assert given.then == ["worker_registered", "task_created"]
    assert not given.state.iterations[joined.iteration_id].finished


@pytest.mark.parametrize("name", ["", "named"])
def test_an_anonymous_iteration_ends_with_its_last_consumer(name: str) -> None:
    given = Given()
    worker = given.worker(1)
    joined = given.iteration(name)
    given.lease(given.task_of(worker), 10)
    given.when(c.LeaveIteration(consumer_id=joined.consumer_id, reason="r"))
    if name:
        assert given.then == ["consumer_left"]
        assert given.state.iterations
    else:
        assert given.then == ["consumer_left", "lease_lost", "iteration_collected"]
        state = given.state
        assert not (state.iterations or state.jobs or state.tasks or state.leases)
        assert not state.workers[worker].tasks


def test_an_epoch_that_was_left_early_goes_on_with_the_splits_that_are_left() -> None:
    given = Given()
    worker_id = given.worker(1)
    joined = given.iteration("named")
    lease = given.lease(given.task_of(worker_id), 10)
    given.when(c.LeaveIteration(consumer_id=joined.consumer_id, reason="r"))
    given.when(c.CollectIteration(iteration_id=joined.iteration_id))
    assert given.then == ["lease_lost", "iteration_paused"]
    state = given.state
    assert not (state.tasks or state.leases or state.workers[worker_id].tasks)
    given.when(c.CollectIteration(iteration_id=joined.iteration_id))
    assert given.then == []
    other = given.worker(2)
    assert given.then == ["worker_registered"]  # nobody reads it
    again = given.iteration("named")
    assert given.then == ["task_created", "task_created", "consumer_joined"]
    assert again.iteration_id == joined.iteration_id
    got = [lease.count]
    for task_id in (given.task_of(worker_id), given.task_of(other)):
        while (lease := given.lease(task_id, 100)) is not None:
            assert lease.first == sum(got)
            got.append(lease.count)
        given.when(c.CompleteTask(task_id=task_id))
    assert sum(got) == 100
    assert given.then == ["task_completed", "iteration_finished"]


def test_a_lost_task_of_an_epoch_that_was_paused_is_not_gone_on_with() -> None:
    given = Given()
    worker_id = given.worker(1)
    joined = given.iteration("named")
    given.worker(2)
    task_id = given.task_of(worker_id)
    given.when(c.LoseWorker(worker_id=worker_id, reason="no sign of life"))
    given.when(c.LeaveIteration(consumer_id=joined.consumer_id, reason="r"))
    given.when(c.CollectIteration(iteration_id=joined.iteration_id))
    given.worker(1)
    assert given.then == ["worker_registered"]
    with pytest.raises(NotFound):
        given.lease(task_id, 1)

"""Garbage collection: it assigns no split twice, and finished epochs stay finished."""

from __future__ import annotations

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.core.encoding import encode_state
from forebay.service.core.status import status
from forebay.service.errors import FailedPrecondition, NotFound

from .given import Given, dataset


def finished(given: Given, name: str, sharding: int, epoch: int = 0) -> ev.ConsumerJoined:
    """An epoch that somebody has read to its end, and left."""
    job_id = given.when(c.GetOrCreateJob(dataset_id="d", name=name, sharding=sharding))
    joined: ev.ConsumerJoined = given.when(c.JoinIteration(job_id=job_id, epoch=epoch))
    for task_id in list(given.state.iterations[joined.iteration_id].tasks):
        if sharding == ev.DYNAMIC:
            while given.lease(task_id, 100) is not None:
                pass
        given.when(c.CompleteTask(task_id=task_id))
    assert given.state.iterations[joined.iteration_id].finished
    given.when(c.LeaveIteration(consumer_id=joined.consumer_id, reason="r"))
    return joined


@pytest.mark.parametrize("sharding", [ev.OFF, ev.DYNAMIC])
def test_a_consumer_of_a_collected_epoch_gets_its_end(sharding: int) -> None:
    given = Given()
    worker = given.worker(1)
    read = finished(given, "named", sharding)
    given.when(c.CollectIteration(iteration_id=read.iteration_id))
    assert not given.state.iterations
    job_id = given.when(c.GetOrCreateJob(dataset_id="d", name="named", sharding=sharding))
    late = given.when(c.JoinIteration(job_id=job_id, epoch=0))
    assert given.state.iterations[late.iteration_id].finished
    assert not given.state.workers[worker].tasks
    given.when(c.LeaveIteration(consumer_id=late.consumer_id, reason="r"))
    given.when(c.CollectIteration(iteration_id=late.iteration_id))
    other = given.when(c.JoinIteration(job_id=job_id, epoch=1))
    assert not given.state.iterations[other.iteration_id].finished


def test_finished_epochs_leave_little_behind() -> None:
    """Of a job that is read on and on, by several trainers; a job has a size, an epoch none."""
    given = Given()
    given.worker(1)
    number = 0

    def live(epochs: range) -> int:
        nonlocal number
        for epoch in epochs:
            consumers = []
            for _ in range(3):
                number += 1
                caller = f"{number:036}"
                job_id = given.when(
                    c.GetOrCreateJob(request=(caller, 1), dataset_id="d", name="n", sharding=ev.OFF)
                )
                join = c.JoinIteration(request=(caller, 2), job_id=job_id, epoch=epoch)
                consumers.append(given.when(join))
            iteration_id = consumers[0].iteration_id
            for task_id in list(given.state.iterations[iteration_id].tasks):
                given.when(c.CompleteTask(task_id=task_id))
            for joined in consumers:
                assert given.when(join) == consumers[-1]  # a retry, still after others left
                given.when(c.LeaveIteration(consumer_id=joined.consumer_id, reason="r"))
            given.when(c.CollectIteration(iteration_id=iteration_id))
        return len(encode_state(given.state))

    few = live(range(1, 400))  # so many that no more answers are kept for those who left
    many = live(range(400, 800))
    assert many <= few + 100
    assert given.state.jobs[given.state.job_by_name["n"]].summarized == [(1, 800)]


def test_a_summary_counts_lost_splits() -> None:
    given = Given()
    one, _two = given.worker(1), given.worker(2)
    joined = given.iteration("n")
    lost = given.lease(given.task_of(one), 5)
    given.when(c.LoseWorker(worker_id=one, reason="killed", left=True))
    (task_id,) = given.state.iterations[joined.iteration_id].tasks
    given.when(c.CompleteTask(task_id=task_id))
    given.when(c.LeaveIteration(consumer_id=joined.consumer_id, reason="r"))
    for _ in range(2):  # again by somebody who came late
        before = status(given.state)["jobs"][0]
        left = [source["lost"] for source in before["iterations"][0]["sources"]]
        assert before["lost_splits"] + sum(left) == lost.count
        iteration_id = before["iterations"][0]["iteration_id"]
        given.when(c.CollectIteration(iteration_id=iteration_id))
        (job,) = status(given.state)["jobs"]
        assert (job["summarized"], job["lost_splits"]) == ([[0, 0]], lost.count)
        assert not job["iterations"]
        late = given.iteration("n")
        given.when(c.LeaveIteration(consumer_id=late.consumer_id, reason="r"))


def removable(given: Given, blob: str = "b") -> str:
    return given.when(dataset(blob, "same", sources=[ev.SplitSource(count=9)]))


def test_a_dataset_goes_with_its_jobs_and_leaves_its_graph_to_be_deleted() -> None:
    given = Given()
    before = len(encode_state(given.state))
    worker = given.worker(1)
    dataset_id = removable(given)
    for name in ("one", "two"):
        joined = given.iteration(name, dataset_id)
        given.when(c.LeaveIteration(consumer_id=joined.consumer_id, reason="r"))
    remove = c.RemoveDataset(dataset_id=dataset_id, request=("caller", 1))
    assert given.when(remove).jobs == ["one", "two"]
    state = given.state
    assert given.then[-3:] == ["iteration_collected", "job_removed", "dataset_removed"]
    assert not (state.jobs or state.job_by_name or state.iterations or state.tasks)
    assert not state.workers[worker].tasks
    assert state.unused_blobs == ["b"]
    assert given.when(remove).jobs == ["one", "two"], "its answer was lost"
    given.state.answers.clear()
    again = removable(given, "b2")
    assert again != dataset_id, "an id that somebody may hold yet"
    given.when(c.ForgetBlob(blob="b"))
    given.when(c.ForgetBlob(blob="b"))
    assert given.then == []
    given.when(c.RemoveDataset(dataset_id=again))
    given.when(c.ForgetBlob(blob="b2"))
    given.when(c.LoseWorker(worker_id=worker, reason="r", left=True))
    assert len(encode_state(state)) <= before + 20
    for wrong in (
        c.RemoveDataset(dataset_id=again),
        c.GetOrCreateJob(dataset_id=again, name="", sharding=ev.OFF),
        c.DecideCompression(dataset_id=again, disable=True),
    ):
        with pytest.raises(NotFound, match=f"{again} not found: it was removed"):
            given.when(wrong)


def test_a_dataset_in_use_is_removed_only_by_force() -> None:
    given = Given()
    given.worker(1)
    dataset_id = removable(given)
    consumers = [given.iteration(name, dataset_id).consumer_id for name in ("", "named")]
    with pytest.raises(FailedPrecondition, match=r"read by 2 consumers, of the jobs \d+, named"):
        given.when(c.RemoveDataset(dataset_id=dataset_id))
    for job_id in given.state.jobs:
        with pytest.raises(FailedPrecondition, match="has 1 consumers"):
            given.when(c.RemoveJob(job_id=job_id))
    given.when(c.RemoveDataset(dataset_id=dataset_id, force=True))
    assert given.then.count("consumer_left") == len(consumers)
    assert not (given.state.consumers or given.state.iterations or given.state.jobs)


def test_no_registration_is_answered_with_a_dataset_that_was_removed() -> None:
    """Also if its graph was lost, and replaced, so that it had been known by another one."""
    given = Given()
    first = dataset("a")
    dataset_id = given.when(first)
    restored = c.RegisterDataset(
        dataset_id=dataset_id, definition=dataset("b").definition, restores=True
    )
    assert given.when(restored) == dataset_id
    assert given.state.unused_blobs == ["a"]
    given.when(c.RemoveDataset(dataset_id=dataset_id))
    assert given.state.unused_blobs == ["a", "b"]
    assert given.when(first) in given.state.datasets

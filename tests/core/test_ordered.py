"""Ordered reads: the order of a job, who joins its group, and which workers have tasks of it."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.core.bundles import MAX_BUNDLES, MAX_INTERLEAVED
from forebay.service.core.ordered import MAX_CONSUMERS
from forebay.service.core.read_kinds import why_no_task
from forebay.service.core.state import BundleSpec, Consumer, Iteration, Job
from forebay.service.core.status import status
from forebay.service.errors import AlreadyExists, InvalidArgument, Unimplemented

from .given import Given

ORDER = ev.OrderSpec(seed=7, shuffle=True, cycle_length=4, block_length=2)


def source(**fields: Any) -> ev.SplitSource:
    return ev.SplitSource(**fields)


def numbers(stop: int) -> ev.SplitSource:
    return source(arithmetic=ev.Arithmetic(stop=stop, step=1))


class Ordered(Given):
    """Datasets and ordered jobs."""

    def job(self, dataset_id: str = "d", name: str = "j", **fields: Any) -> Job:
        order = ev.OrderSpec()
        order.CopyFrom(ORDER)
        for field in ORDER.DESCRIPTOR.fields_by_name.keys() & fields.keys():
            setattr(order, field, fields.pop(field))
        how: dict[str, Any] = {
            "dataset_id": dataset_id,
            "name": name,
            "sharding": ev.OFF,
            "order": order,
            **fields,
        }
        return self.state.jobs[self.when(c.GetOrCreateJob(**how))]

    def join(
        self, index: int = 0, of: int = 2, start: int = 0, name: str = "j", **fields: Any
    ) -> Consumer:
        member = ev.GroupMember(index=index, consumers=of, start_position=start, batch_size=8)
        how: dict[str, Any] = {
            "dataset_id": "d",
            "name": name,
            "sharding": ev.OFF,
            "order": ORDER,
            **fields,
        }
        command = c.JoinJob(epoch=0, member=member, **how)
        joined: ev.ConsumerJoined = self.when(command)
        return self.state.consumers[joined.consumer_id]

    def leave(self, consumer: Consumer) -> None:
        self.when(c.LeaveIteration(consumer_id=consumer.consumer_id, reason="r"))

    def tasks_at(self, *workers: int) -> list[int]:
        """How many tasks each of the workers has."""
        return [len(self.state.workers[worker_id].tasks) for worker_id in workers]

    def iteration_of(self, consumer: Consumer) -> Iteration:
        return self.state.iterations[consumer.iteration_id]


@pytest.mark.parametrize(
    ("sources", "asked", "bundle_splits", "bundles"),
    [
        ([source(count=0)], 0, 1, 0),
        ([source(count=1)], 0, 1, 1),
        ([source(count=256)], 0, 1, 256),
        ([source(count=1024)], 0, 1, 1024),
        ([source(count=1025)], 0, 2, 513),
        ([source(count=100)], 7, 7, 15),
        ([numbers(1)], 0, 1, 1),
        ([numbers(65)], 0, 2, 33),
        ([numbers(256)], 0, 4, 64),
        ([numbers(257)], 0, 5, 52),
        ([numbers(64 * 256)], 0, 64, 256),
        ([numbers(64 * 256 + 1)], 0, 65, 253),
        ([numbers(10**9)], 0, 3906250, 256),
        ([source(count=300), source(count=200, leased_with=0)], 0, 1, 200),
        ([source(endless=ev.Endless()), source(count=5, leased_with=0)], 0, 1, 5),
        ([numbers(10**6), source(count=2000, leased_with=0)], 0, 2, 1000),
        ([source(explicit=ev.ExplicitSplits(splits=[b"a", b"b", b"c"]))], 2, 2, 2),
    ],
)
def test_an_order_is_completed_when_the_job_is_created(
    sources: list[ev.SplitSource], asked: int, bundle_splits: int, bundles: int
) -> None:
    given = Ordered()
    given.register("e", *sources)
    job = given.job("e", bundle_splits=asked, bundles=4711)
    assert given.then == ["job_created"]
    assert job.order == BundleSpec(7, True, 4, 2, bundle_splits, bundles)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"cycle_length": 0}, "cycle_length=0 must be from 1"),
        ({"block_length": MAX_INTERLEAVED + 1}, "block_length=65537 must be from 1 to 65536"),
        ({"bundle_splits": -1}, "bundle_splits=-1 must be at least 1"),
        ({"dataset_id": "large", "bundle_splits": 2}, "1048577 bundles.*bundle_splits=3 or more"),
        ({"sharding": ev.DYNAMIC}, "DYNAMIC sharding; use OFF"),
        ({"sharding": ev.FILE}, "FILE sharding; use OFF"),
        ({"num_consumers": 2}, "num_consumers=2.; leave out one"),
        ({"cross_trainer_cache": True}, "cross-trainer cache"),
        ({"target_workers": 3}, 'target_workers "LOCAL"'),
        ({"dataset_id": "endless"}, r"dataset endless has no end.*use take\(n\), or remove repeat"),
    ],
)
def test_options_that_do_not_go_with_an_order_are_refused(fields: dict[str, Any], why: str) -> None:
    given = Ordered()
    given.register("large", numbers(2 * MAX_BUNDLES + 1))
    given.register("endless", source(endless=ev.Endless()))
    with pytest.raises(InvalidArgument, match=why):
        given.job(**fields)


@pytest.mark.parametrize(
    ("definition", "why"),
    [
        ({"unsplittable": "node n of op Generator"}, "dataset e cannot.*: node n of op Generator"),
        ({}, "0 sources of splits"),
        (
            {"sources": [source(count=1), source(count=1)]},
            "2 sources of splits that are not zipped",
        ),
        ({"sources": [source(count=1, unleasable="it counts")]}, "it counts"),
        (
            {"sources": [source(saved_chunks=ev.SavedChunks(path="/s"))]},
            "the distributed save at /s",
        ),
    ],
)
def test_datasets_that_have_no_order(definition: dict[str, Any], why: str) -> None:
    given = Ordered()
    registered = ev.DatasetDefinition(**definition)
    given.when(c.RegisterDataset(dataset_id="e", definition=registered))
    with pytest.raises(Unimplemented, match=why):
        given.job("e")


def test_a_job_is_found_by_the_same_order_only() -> None:
    given = Ordered()
    job = given.job(bundle_splits=4)
    for same in (0, 4):
        assert given.job(bundle_splits=same) is job
        assert given.then == []
    for other in ({"seed": 8}, {"shuffle": False}, {"cycle_length": 5}, {"bundle_splits": 5}):
        (field, value) = next(iter(other.items()))
        with pytest.raises(
            InvalidArgument, match=rf"Existing order: <seed=7.*got <.*{field}={value}"
        ):
            given.job(**other)
    with pytest.raises(InvalidArgument, match=r"Existing order: <seed=7.*got <none>"):
        given.job(order=None)
    given.job(name="unordered", order=None)
    with pytest.raises(InvalidArgument, match=r"Existing order: <none>; got <seed=7"):
        given.job(name="unordered")


def test_a_group_joins_one_iteration() -> None:
    given = Ordered()
    worker = given.worker(1)
    one = given.join(0, start=64)
    assert given.then == ["job_created", "iteration_created", "task_created", "consumer_joined"]
    other = given.join(1, start=64)
    assert given.then == ["consumer_joined"]
    assert one.iteration_id == other.iteration_id
    assert given.tasks_at(worker) == [1]
    (job,) = status(given.state)["jobs"]
    assert job["order"] == {
        "seed": 7, "shuffle": True, "cycle_length": 4, "block_length": 2, "bundle_splits": 1,
        "bundles": 100, "known_lengths": 0, "claimed": False, "source_bundles": [],
        "source_bundle_splits": [],
    }  # fmt: skip
    assert job["iterations"][0]["group"] == [
        {
            "consumer_id": consumer.consumer_id, "index": index, "consumers": 2,
            "start_position": 64, "batch_size": 8, "start_step": None, "drop_remainder": False,
                "position": None,
        }
        for index, consumer in enumerate((one, other))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("member", "epoch", "why"),
    [
        ((0, 0, 0, 0), 0, "a group of 0 consumers; it must have from 1"),
        ((0, MAX_CONSUMERS + 1, 0, 0), 0, "a group of 65537 consumers"),
        ((-1, 2, 0, 0), 0, "consumer_index=-1 is none of the 2 consumers"),
        ((2, 2, 0, 0), 0, "consumer_index=2 is none of the 2 consumers"),
        ((0, 2, -1, 0), 0, "start_position=-1 is negative"),
        ((0, 2, 0, -1), 0, "batch_size=-1 is negative"),
        ((0, 2, 0, 0), 1, "epoch 1 of job j: .*join epoch 0"),
        (None, 0, "job j is read in order: say which consumer"),
    ],
)
def test_consumers_of_no_group(member: tuple[int, ...] | None, epoch: int, why: str) -> None:
    given = Ordered()
    job_id = given.job().job_id
    names = ("index", "consumers", "start_position", "batch_size")
    joins = None if member is None else ev.GroupMember()
    for name, number in zip(names, member or [0] * 4, strict=True):
        setattr(joins or ev.GroupMember(), name, number)
    with pytest.raises(InvalidArgument, match=why):
        given.when(c.JoinIteration(job_id=job_id, epoch=epoch, member=joins))
    assert not given.state.iterations


def test_a_group_is_for_ordered_jobs() -> None:
    given = Ordered()
    with pytest.raises(
        InvalidArgument, match="job j is not read in order: leave out consumer 0 of 2"
    ):
        given.join(order=None)


def test_a_place_in_the_group_is_one_consumers() -> None:
    given = Ordered()
    first = given.join(1, of=2)
    taken = rf"job j .*consumer {first.consumer_id}, .*index=1 of a group of 2.*another job_name"
    for index, of in ((1, 2), (0, 3), (2, 4)):
        with pytest.raises(AlreadyExists, match=taken):
            given.join(index, of=of)
    assert given.join(0, of=2)
    given.leave(first)
    assert given.join(1, of=2, start=800)


def test_the_place_of_one_that_is_gone_is_taken() -> None:
    given = Ordered()
    first, second = given.join(0), given.join(1)
    gone = (first.consumer_id, second.consumer_id)
    again = given.join(0, start=80, gone=gone)
    assert given.then == ["consumer_left", "consumer_joined"]
    assert given.iteration_of(again).consumers == {again.consumer_id, second.consumer_id}
    with pytest.raises(AlreadyExists, match=f"consumer {again.consumer_id},"):
        given.join(0, of=3, gone=gone)
    another = given.join(2, of=3, gone=(again.consumer_id, second.consumer_id))
    assert given.then == ["consumer_left", "consumer_left", "consumer_joined"]
    assert given.iteration_of(another).consumers == {another.consumer_id}


def test_an_ordered_job_without_a_name_goes_with_its_last_consumer() -> None:
    given = Ordered()
    given.worker(1)
    consumer = given.join(0, of=1, name="")
    other = given.join(0, of=1, name="")
    assert consumer.iteration_id != other.iteration_id
    given.leave(consumer)
    assert given.then == ["consumer_left", "iteration_collected"]
    assert len(given.state.jobs) == 1
    with pytest.raises(AlreadyExists, match=r"job \d+ is being"):
        given.when(
            c.JoinIteration(
                job_id=given.iteration_of(other).job_id, epoch=0,
                member=ev.GroupMember(consumers=1),
            )
        )  # fmt: skip


def test_forebays_workers_have_tasks_and_tensorflows_have_none() -> None:
    given = Ordered()
    stock = given.worker(1, stock=True)
    consumer = given.join()
    iteration = given.iteration_of(consumer)
    assert "all tf.data service's own" in why_no_task(given.state, iteration)
    given.worker(2, stock=True)
    assert given.tasks_at(stock) == [0]
    ours = given.worker(3)
    assert given.then == ["worker_registered", "task_created"]
    assert why_no_task(given.state, iteration) == ""
    assert given.tasks_at(ours) == [1]


def test_tasks_never_complete() -> None:
    given = Ordered()
    worker = given.worker(1)
    iteration = given.iteration_of(given.join())
    given.when(c.CompleteTask(task_id=given.task_of(worker)))
    assert given.then == []
    given.when(c.LoseWorker(worker_id=worker, reason="r", left=True))
    assert given.then == ["worker_lost"]
    assert not iteration.finished


def test_a_lost_workers_task_is_not_listed_and_is_resumed() -> None:
    given = Ordered()
    lost, stays = given.worker(1), given.worker(2)
    iteration = given.iteration_of(given.join())
    mine, other = given.task_of(lost), given.task_of(stays)
    given.when(c.LoseWorker(worker_id=lost, reason="r"))
    assert iteration.tasks == [other]
    back = given.worker(1)
    assert given.then == ["worker_registered", "task_created"]
    assert iteration.tasks == [other, mine]
    assert given.task_of(back) == mine


def test_a_draining_worker_leaves_the_list_at_once() -> None:
    given = Ordered()
    drains, stays = given.worker(1), given.worker(2)
    iteration = given.iteration_of(given.join())
    version = iteration.version
    given.worker(1, draining=True)
    assert given.then == ["worker_drains", "task_removed"]
    assert given.tasks_at(drains, stays) == [0, 1]
    assert iteration.tasks == [given.task_of(stays)]
    assert iteration.version > version
    assert not iteration.removed
    given.join(1)
    assert given.then == ["consumer_joined"]
    given.when(c.LoseWorker(worker_id=stays, reason="r"))
    given.worker(2, draining=True)
    assert given.then == ["worker_registered"]
    assert iteration.tasks == []


def test_how_far_trainers_are_is_journaled_once_they_are_further() -> None:
    given = Ordered()
    given.register("d", source(count=100))
    one, other = given.join(0), given.join(1)
    iteration_id = one.iteration_id

    def move(**said: int) -> list[str | None]:
        found = {
            {"one": one, "other": other}[who].consumer_id: position
            for who, position in said.items()
        }
        given.when(c.MoveConsumers(iteration_id=iteration_id, positions={**found, 4711: 9}))
        return given.then

    assert move(one=16, other=0) == ["consumers_moved"]
    assert (one.position, other.position) == (16, None)
    assert move(one=16) == [] and move(one=3) == []  # late reports, and no news
    assert move(one=32, other=48) == ["consumers_moved"]
    assert (one.position, other.position) == (32, 48)
    given.when(c.LeaveIteration(consumer_id=one.consumer_id, reason="r", position=80))
    assert given.then == ["consumer_left"]
    assert move(one=96) == []  # it has left

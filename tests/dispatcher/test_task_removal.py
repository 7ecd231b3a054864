"""The vote by which consumers of a coordinated read remove a task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.dispatcher import task_removal
from forebay.service.dispatcher.dispatcher import Dispatcher
from forebay.service.dispatcher.dispatcher_servicer import DispatcherServicer
from forebay.service.dispatcher.tf_data_dispatcher_servicer import TfDataDispatcherServicer
from forebay.service.errors import FailedPrecondition, InvalidArgument, NotFound
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto import tf_service_pb2 as tf
from forebay.storage import MemoryStorage

from .leading import register, run_dispatcher


async def begin(dispatcher: Dispatcher) -> int:
    """A coordinated read of two consumers; its task."""
    await register(dispatcher, 1)
    await dispatcher.execute(c.RegisterWorker(address="w:1", uid=1, stock=True))
    job = c.GetOrCreateJob(dataset_id="d", name="x", sharding=ev.OFF, num_consumers=2)
    job_id = await dispatcher.execute(job)
    await dispatcher.execute(c.JoinIteration(job_id=job_id, epoch=0))
    (task_id,) = dispatcher.state.tasks
    return task_id


def asks(servicer: TfDataDispatcherServicer, task_id: int, index: int, round_: int) -> Any:
    request = tf.MaybeRemoveTaskRequest(task_id=task_id, consumer_index=index, round=round_)
    return servicer.maybe_remove_task(request)


@pytest.mark.parametrize(
    ("votes", "removed"),
    [([(0, 7), (1, 7)], True), ([(0, 7), (1, 8)], False), ([(0, 7), (0, 8)], False)],
)
def test_a_task_is_removed_when_all_consumers_ask_in_the_same_round(
    votes: list[tuple[int, int]], removed: bool
) -> None:
    async def scene(dispatcher: Dispatcher) -> None:
        task_id = await begin(dispatcher)
        servicer = TfDataDispatcherServicer(dispatcher)
        for index in (-1, 2):
            with pytest.raises(InvalidArgument, match=f"consumer index {index} .* 0 to 1"):
                await asks(servicer, task_id, index, 7)
        answers = await asyncio.gather(*(asks(servicer, task_id, *vote) for vote in votes))
        assert [answer.removed for answer in answers] == [removed, removed]
        assert (task_id in dispatcher.state.tasks) == (not removed)
        if removed:
            assert (await asks(servicer, task_id, 0, 9)).removed  # it has gone
        await servicer.close()

    run_dispatcher(MemoryStorage(), scene)


def test_consumers_of_a_worker_that_was_lost_within_a_round_are_told() -> None:
    async def scene(dispatcher: Dispatcher) -> None:
        task_id = await begin(dispatcher)
        (consumer_id,), (worker_id,) = dispatcher.state.consumers, dispatcher.state.workers
        await dispatcher.execute(c.LoseWorker(worker_id=worker_id, reason="r"))
        servicer = TfDataDispatcherServicer(dispatcher)
        beat = tf.ClientHeartbeatRequest(iteration_client_id=consumer_id, current_round=3)
        (info,) = (await servicer.client_heartbeat(beat)).task_info
        assert info.task_id == task_id  # for all consumers, though its worker is lost
        assert info.worker_address == "w:1"
        assert [s.address for s in info.transfer_servers] == ["w:1"]
        asked = [asks(servicer, task_id, 0, 7), asks(servicer, task_id, 1, 8)]
        for error in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(error, FailedPrecondition) and "lost within a round" in str(error)
        with pytest.raises(FailedPrecondition, match="round 7"):  # whenever the others come
            await asks(servicer, task_id, 0, 8)
        await servicer.close()

    run_dispatcher(MemoryStorage(), scene)


def test_a_consumer_that_times_out_while_a_removal_is_journaled_is_told_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def slow(dispatcher: Dispatcher) -> None:
        task_id = await begin(dispatcher)
        removals, durable = dispatcher.removals, dispatcher.durable

        async def durable_later() -> None:
            await asyncio.sleep(0.5)
            await durable()

        monkeypatch.setattr(task_removal, "PATIENCE_S", 0.1)
        monkeypatch.setattr(dispatcher, "durable", durable_later)
        asked = [removals.ask(task_id, index, 7) for index in range(2)]
        assert await asyncio.gather(*asked) == [True, True]

    run_dispatcher(MemoryStorage(), slow)


def test_a_consumer_that_is_given_up_while_it_is_being_answered_is_told_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = []

    async def scene(dispatcher: Dispatcher) -> None:
        await begin(dispatcher)
        (consumer_id,) = dispatcher.state.consumers
        left.append(consumer_id)
        await dispatcher.execute(c.RegisterWorker(address="w:2", uid=2, stock=True))
        servicer = TfDataDispatcherServicer(dispatcher)

        async def given_up_meanwhile(_: object) -> None:
            leave = c.LeaveIteration(consumer_id=consumer_id, reason="no sign of life")
            await dispatcher.execute(leave)

        monkeypatch.setattr(servicer.pusher, "wait_until_pushed", given_up_meanwhile)
        request = tf.ClientHeartbeatRequest(iteration_client_id=consumer_id, current_round=1)
        unknown = rf"Unknown iteration client id.* {consumer_id} not found: no sign of life"
        for _ in range(2):  # in tf.data service's words
            with pytest.raises(NotFound, match=unknown):
                await servicer.client_heartbeat(request)
        await servicer.close()

    async def led_by_another(dispatcher: Dispatcher) -> None:
        why = f"{left[0]} not found: no sign of life for .* ms .* read the dataset again"
        with pytest.raises(NotFound, match=why):
            dispatcher.find_consumer(left[0])

    storage = MemoryStorage()
    run_dispatcher(storage, scene)
    run_dispatcher(storage, led_by_another)


@pytest.mark.parametrize("how", ["was lost", "has ended"])
@pytest.mark.parametrize("then", ["the rest arrives", "the worker comes back", "another leads"])
def test_all_consumers_are_told_of_a_torn_round(how: str, then: str) -> None:
    """They are told even after the first one that was told has ended."""
    consumers: list[int] = []

    def beats(dispatcher: Dispatcher, index: int, *held: pb.HeldTask) -> Awaitable[object]:
        rounds = pb.RoundReport(consumer_index=index, held=held)
        request = pb.ConsumerHeartbeatRequest(consumer_id=consumers[index], rounds=rounds)
        return DispatcherServicer(dispatcher).consumer_heartbeat(request)

    async def scene(dispatcher: Dispatcher) -> None:
        task_id = await begin(dispatcher)
        (job_id,), (worker_id,) = dispatcher.state.jobs, dispatcher.state.workers
        await dispatcher.execute(c.JoinIteration(job_id=job_id, epoch=0))
        consumers.extend(dispatcher.state.consumers)
        lost = worker_id if how == "was lost" else 0
        if lost:
            await dispatcher.execute(c.LoseWorker(worker_id=worker_id, reason="r"))
        await beats(dispatcher, 0, pb.HeldTask(task_id=task_id, lost=lost, round=3, received=3))
        torn = rf"not found: the worker at w:1 {how}.* within a round: .* of round 5"
        with pytest.raises(NotFound, match=torn):
            held = pb.HeldTask(task_id=task_id, lost=lost, round=5, received=5)
            await beats(dispatcher, 1, held)
        if then == "the worker comes back":
            await dispatcher.execute(c.RegisterWorker(address="w:1", uid=1, stock=True))
            with pytest.raises(NotFound, match=torn):
                await beats(dispatcher, 0)
        elif then == "the rest arrives":
            with pytest.raises(NotFound, match=torn):
                held = pb.HeldTask(task_id=task_id, lost=lost, round=3, received=5)
                await beats(dispatcher, 0, held)
        assert not dispatcher.state.tasks

    async def led_by_another(dispatcher: Dispatcher) -> None:
        with pytest.raises(NotFound, match="within a round"):
            await beats(dispatcher, 0)

    storage = MemoryStorage()
    run_dispatcher(storage, scene)
    run_dispatcher(storage, led_by_another)


def test_consumers_of_both_faces_cannot_share_a_read() -> None:
    async def scene(dispatcher: Dispatcher) -> None:
        await begin(dispatcher)  # its consumer is none of TensorFlow's
        (job_id,) = dispatcher.state.jobs
        servicer = TfDataDispatcherServicer(dispatcher)
        with pytest.raises(FailedPrecondition, match="use one kind"):
            await servicer.get_or_create_iteration(tf.GetOrCreateIterationRequest(job_id=job_id))
        (consumer_id,) = dispatcher.state.consumers
        await dispatcher.execute(c.LeaveIteration(consumer_id=consumer_id, reason="r"))
        await servicer.get_or_create_iteration(tf.GetOrCreateIterationRequest(job_id=job_id))
        ours = DispatcherServicer(dispatcher)
        with pytest.raises(FailedPrecondition, match="use one kind"):
            await ours.join_iteration(pb.JoinIterationRequest(job_id=job_id))
        await servicer.close()

    run_dispatcher(MemoryStorage(), scene)

"""The vote by which consumers of a coordinated read remove a task."""

from __future__ import annotations

import asyncio

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.dispatcher import task_removal
from forebay.service.dispatcher.dispatcher import Dispatcher
from forebay.service.dispatcher.forebay_face import ForebayFace
from forebay.service.dispatcher.tensorflow_face import TensorFlowFace
from forebay.service.errors import FailedPrecondition, NotFound
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto import tf_service_pb2 as tf
from forebay.storage import MemoryStorage

from .leading import run_dispatcher


async def begin(dispatcher: Dispatcher) -> int:
    """A coordinated read of two consumers; its task."""
    definition = ev.DatasetDefinition(sources=[ev.SplitSource(count=1)])
    await dispatcher.execute(c.RegisterDataset(dataset_id="d", definition=definition))
    await dispatcher.execute(c.RegisterWorker(address="w:1", uid=1, stock=True))
    job = c.GetOrCreateJob(dataset_id="d", name="x", sharding=ev.OFF, num_consumers=2)
    job_id = await dispatcher.execute(job)
    await dispatcher.execute(c.JoinIteration(job_id=job_id, epoch=0))
    (task_id,) = dispatcher.state.tasks
    return task_id


def test_whose_patience_ends_while_a_removal_is_being_journaled_is_told_of_it(
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
        face = TensorFlowFace(dispatcher)

        async def given_up_meanwhile(_: object) -> None:
            leave = c.LeaveIteration(consumer_id=consumer_id, reason="no sign of life")
            await dispatcher.execute(leave)

        monkeypatch.setattr(face._pusher, "wait_until_pushed", given_up_meanwhile)
        request = tf.ClientHeartbeatRequest(iteration_client_id=consumer_id, current_round=1)
        unknown = rf"Unknown iteration client id.* {consumer_id} not found: no sign of life"
        for _ in range(2):  # in tf.data service's words
            with pytest.raises(NotFound, match=unknown):
                await face.client_heartbeat(request)
        await face.close()

    async def led_by_another(dispatcher: Dispatcher) -> None:
        with pytest.raises(NotFound, match=f"{left[0]} not found: no sign of life"):
            dispatcher.find_consumer(left[0])

    storage = MemoryStorage()
    run_dispatcher(storage, scene)
    run_dispatcher(storage, led_by_another)


def test_consumers_that_are_torn_by_a_worker_that_was_not_lost_are_not_told_that_it_was() -> None:
    async def scene(dispatcher: Dispatcher) -> None:
        task_id = await begin(dispatcher)
        hold = dispatcher.removals.hold
        await hold(pb.HeldTask(task_id=task_id, round=3, received=3), 0)
        ended = rf"the worker at w:1 has ended task {task_id} within a round: .* of round 5"
        with pytest.raises(FailedPrecondition, match=ended):
            await hold(pb.HeldTask(task_id=task_id, round=5, received=5), 1)

    run_dispatcher(MemoryStorage(), scene)


def test_consumers_of_both_faces_cannot_share_a_read() -> None:
    async def scene(dispatcher: Dispatcher) -> None:
        await begin(dispatcher)  # its consumer is none of TensorFlow's
        (job_id,) = dispatcher.state.jobs
        face = TensorFlowFace(dispatcher)
        with pytest.raises(FailedPrecondition, match="use one kind"):
            await face.get_or_create_iteration(tf.GetOrCreateIterationRequest(job_id=job_id))
        (consumer_id,) = dispatcher.state.consumers
        await dispatcher.execute(c.LeaveIteration(consumer_id=consumer_id, reason="r"))
        await face.get_or_create_iteration(tf.GetOrCreateIterationRequest(job_id=job_id))
        ours = ForebayFace(dispatcher)
        with pytest.raises(FailedPrecondition, match="use one kind"):
            await ours.join_iteration(pb.JoinIterationRequest(job_id=job_id))
        await face.close()

    run_dispatcher(MemoryStorage(), scene)

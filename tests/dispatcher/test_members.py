"""Members of a dispatcher that was restarted, or whose storage is away."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.dispatcher.dispatcher import Dispatcher
from forebay.service.dispatcher.tf_data_dispatcher_servicer import TfDataDispatcherServicer
from forebay.service.errors import Unavailable
from forebay.service.proto import tf_service_pb2 as tf
from forebay.storage import MemoryStorage, StorageError

from .leading import Renewals, register, run_dispatcher, until


def test_while_the_storage_is_away_queries_wait_and_nobody_is_given_up() -> None:
    storage = Renewals()

    async def away(dispatcher: Dispatcher) -> None:
        worker_id = await dispatcher.execute(c.RegisterWorker(address="w:1", uid=1))
        storage.error = StorageError("it is away")
        await until(lambda: not dispatcher.leadership.known)
        with pytest.raises(Unavailable, match="cannot be reached"):
            await dispatcher.settled()
        await asyncio.sleep(1.5)  # several times the worker's timeout
        assert worker_id in dispatcher.state.workers
        storage.error = None
        await dispatcher.settled()
        await until(lambda: worker_id not in dispatcher.state.workers)  # its silence is its own

    timeouts = {"worker_timeout_ms": 300, "reconnect_grace_ms": 100}
    run_dispatcher(storage, away, leader_lease_ms=100, **timeouts)


def test_members_of_a_restarted_dispatcher_have_time_to_find_it_whatever_the_timeouts() -> None:
    storage = MemoryStorage()
    members: list[int] = []

    async def before(dispatcher: Dispatcher) -> None:
        await register(dispatcher, 1)
        job_id = await dispatcher.execute(c.GetOrCreateJob(dataset_id="d", name="", sharding=0))
        joined = await dispatcher.execute(c.JoinIteration(job_id=job_id, epoch=0))
        for n in range(2):
            worker = c.RegisterWorker(address=f"w:{n}", uid=n, stock=bool(n))
            members.append(await dispatcher.execute(worker))
        members.append(joined.consumer_id)

    async def after(dispatcher: Dispatcher) -> None:
        await asyncio.sleep(1.5)  # several times their timeout
        assert members == [*dispatcher.state.workers, *dispatcher.state.consumers]

    run_dispatcher(storage, before)
    run_dispatcher(storage, after, worker_timeout_ms=200, client_timeout_ms=200)


@pytest.mark.parametrize("stock", [True, False])
def test_members_that_do_not_find_a_restarted_dispatcher_are_given_up(stock: bool) -> None:
    storage = MemoryStorage()

    async def before(dispatcher: Dispatcher) -> None:
        await dispatcher.execute(c.RegisterWorker(address="w:1", uid=1, stock=stock))

    async def after(dispatcher: Dispatcher) -> None:
        await until(lambda: not dispatcher.state.workers)

    run_dispatcher(storage, before)
    timeout_ms = 200 if stock else 3_600_000
    run_dispatcher(storage, after, worker_timeout_ms=timeout_ms, reconnect_grace_ms=100)


def test_a_stock_client_that_has_not_begun_to_read_is_not_given_up() -> None:
    async def silent(dispatcher: Dispatcher) -> None:
        await register(dispatcher, 1)
        job_id = await dispatcher.execute(c.GetOrCreateJob(dataset_id="d", name="", sharding=0))
        servicer = TfDataDispatcherServicer(dispatcher)
        joined = await servicer.get_or_create_iteration(
            tf.GetOrCreateIterationRequest(job_id=job_id)
        )
        await asyncio.sleep(1.5)  # several times its timeout
        client_id = joined.iteration_client_id
        assert client_id in dispatcher.state.consumers
        await servicer.client_heartbeat(tf.ClientHeartbeatRequest(iteration_client_id=client_id))
        await until(lambda: not dispatcher.state.consumers)
        await servicer.close()

    run_dispatcher(MemoryStorage(), silent, client_timeout_ms=200)


async def read_in_rounds(dispatcher: Dispatcher, name: str) -> None:
    """A consumer begins a coordinated read."""
    await register(dispatcher, 1)
    job = c.GetOrCreateJob(dataset_id="d", name=name, sharding=ev.OFF, num_consumers=1)
    job_id = await dispatcher.execute(job)
    await dispatcher.execute(c.JoinIteration(job_id=job_id, epoch=0))


def test_a_stock_worker_may_be_lost_while_it_is_told_of_coordinated_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def lost(dispatcher: Dispatcher) -> None:
        servicer = TfDataDispatcherServicer(dispatcher)
        beat = tf.WorkerHeartbeatRequest(worker_address="w:1", worker_uid=1)

        async def lose_its_worker(*_: Any) -> Any:
            for worker_id in list(dispatcher.state.workers):
                await dispatcher.execute(c.LoseWorker(worker_id=worker_id, reason="r"))
            return b""

        await servicer.worker_heartbeat(beat)
        with monkeypatch.context() as patch:
            patch.setattr(dispatcher, "settled", lose_its_worker)
            for name in "ab":
                await read_in_rounds(dispatcher, name)
            await servicer.pusher.wait_until_pushed(dispatcher.state.tasks)
        assert not any(pusher.done() for pusher in servicer.pusher._pushers)
        await read_in_rounds(dispatcher, "c")
        monkeypatch.setattr(dispatcher.graphs, "_read_blob", lose_its_worker)
        assert not (await servicer.worker_heartbeat(beat)).tasks_to_delete
        assert all(task.orphan for task in dispatcher.state.tasks.values())
        await servicer.close()

    run_dispatcher(MemoryStorage(), lost)


def test_a_silent_member_has_at_least_the_time_of_one_whose_connection_broke() -> None:
    async def silent(dispatcher: Dispatcher) -> None:
        await dispatcher.execute(c.RegisterWorker(address="w:1", uid=1))
        await asyncio.sleep(1.5)
        assert dispatcher.state.workers

    run_dispatcher(MemoryStorage(), silent, worker_timeout_ms=200)

"""Leadership, and what a dispatcher answers when it has lost it or cannot tell."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.core.base import Decision
from forebay.service.core.lifecycles import WrongTransition
from forebay.service.dispatcher import decider, server
from forebay.service.dispatcher.candidate import Candidate
from forebay.service.dispatcher.dispatcher import Dispatcher
from forebay.service.dispatcher.dispatcher_servicer import DispatcherServicer
from forebay.service.dispatcher.leadership import Leadership
from forebay.service.dispatcher.listener import ServedPort
from forebay.service.dispatcher.options import DispatcherOptions
from forebay.service.dispatcher.tf_data_dispatcher_servicer import TfDataDispatcherServicer
from forebay.service.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unimplemented,
)
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto import tf_service_pb2 as tf
from forebay.storage import Fenced, MemoryStorage, StorageError, StorageUnavailable
from forebay.storage.memory import MemoryWriter

from ..transfer_servers import SERVERS
from .leading import Renewals, register, run_dispatcher, until


def leadership(lease_ms: int) -> tuple[Renewals, Leadership, list[StorageError]]:
    storage = Renewals()
    lost: list[StorageError] = []
    return storage, Leadership(storage.open_writer("x", lease_ms=lease_ms), lost.append), lost


def test_a_leader_renews_at_most_once_a_lease_to_answer_queries() -> None:
    storage, leads, lost = leadership(60_000)

    async def prove() -> None:
        await asyncio.gather(*(leads.prove() for _ in range(10)))
        await leads.prove()

    asyncio.run(prove())
    assert (storage.count, lost) == (1, [])
    assert leads.known


@pytest.mark.parametrize(("lease_ms", "query_ms"), [(1, 1), (60_000, 1)])
def test_a_leader_that_others_may_displace_renews_before_it_answers(
    lease_ms: int, query_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryWriter, "query_ms", query_ms)
    storage, leads, _ = leadership(lease_ms)

    async def prove() -> None:
        for _ in range(3):
            await leads.prove()
            await asyncio.sleep(0.005)

    asyncio.run(prove())
    assert storage.count == 3


def test_a_renewal_that_was_sent_before_a_query_does_not_prove_leadership_for_it() -> None:
    """The process may be paused between the renewal's answer and the query."""
    storage, leads, _ = leadership(1)

    async def prove() -> None:
        storage.answers.clear()
        early = asyncio.create_task(leads.prove())
        await until(lambda: storage.count == 1)
        await asyncio.sleep(0.005)  # longer than the lease
        late = asyncio.create_task(leads.prove())
        await asyncio.sleep(0)  # it has asked
        storage.answers.set()
        await asyncio.gather(early, late)

    asyncio.run(prove())
    assert storage.count == 2


def test_an_event_that_cannot_be_applied_is_neither_journaled_nor_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = MemoryStorage()
    right = ev.Event(
        time_ms=1, worker_registered=ev.WorkerRegistered(worker_id=7, address="w:1", uid=7)
    )
    wrong = ev.Event(time_ms=1, task_completed=ev.TaskCompleted(task_id=7))

    async def a_bug(dispatcher: Dispatcher) -> None:
        status, request, _ = DispatcherServicer(dispatcher).methods()["GetStatus"]
        waiting = asyncio.create_task(dispatcher.wait_until(lambda: False, 60_000))
        await status(request())
        monkeypatch.setattr(decider, "decide", lambda *_: Decision([right, wrong], None))
        with pytest.raises(WrongTransition, match="task 7 is absent"):
            await dispatcher.execute(c.CompleteTask(task_id=7))
        assert dispatcher.stopped.is_set()
        await waiting
        with pytest.raises(Unavailable):
            await dispatcher.execute(c.CompleteTask(task_id=7))
        with pytest.raises(Unavailable):
            await status(request())

    run_dispatcher(storage, a_bug)
    monkeypatch.undo()

    async def the_next_one(dispatcher: Dispatcher) -> None:
        assert dispatcher.state.term == 2
        assert not dispatcher.state.workers

    run_dispatcher(storage, the_next_one)


def test_an_append_proves_leadership_for_its_own_command_but_for_no_query() -> None:
    storage = Renewals()

    async def renewals_fail(dispatcher: Dispatcher) -> None:
        await register(dispatcher, 9)
        job_id = await dispatcher.execute(c.GetOrCreateJob(dataset_id="d", name="", sharding=1))
        joined = await dispatcher.execute(c.JoinIteration(job_id=job_id, epoch=0))
        methods = TfDataDispatcherServicer(dispatcher).methods()
        storage.error = StorageUnavailable("it is away")
        await until(lambda: not dispatcher.leadership.known)
        get_split, get_workers = methods["GetSplit"][0], methods["GetWorkers"][0]
        found = await get_split(tf.GetSplitRequest(iteration_id=joined.iteration_id))
        assert not found.end_of_splits
        with pytest.raises(Unavailable):
            await get_workers(tf.GetWorkersRequest())

    run_dispatcher(storage, renewals_fail, leader_lease_ms=100)


def test_a_stopping_dispatcher_answers_what_it_decided_however_slow_the_journal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decided, go_on = threading.Event(), threading.Event()

    class Slow(MemoryStorage):
        def open_writer(self, owner: str, **options: Any) -> Any:
            writer = super().open_writer(owner, **options)
            append = writer.append

            def slow_append(records: Sequence[bytes]) -> int:
                if b"w:1" in b"".join(records):
                    decided.set()
                    go_on.wait(60)
                return append(records)

            writer.append = slow_append  # type: ignore[method-assign]
            return writer

    async def run() -> None:
        listener = ServedPort("127.0.0.1", 0, standby=False)
        candidate = Candidate(Slow(), DispatcherOptions(), listener.address)
        ready = asyncio.Event()
        lead = asyncio.create_task(server._lead(listener, candidate, ready.set))
        await ready.wait()
        async with grpc.aio.insecure_channel(listener.address) as channel:
            beat = channel.unary_unary(
                "/forebay.v1.Dispatcher/WorkerHeartbeat",
                pb.WorkerHeartbeatRequest.SerializeToString,
                pb.WorkerHeartbeatResponse.FromString,
            )
            call = beat(pb.WorkerHeartbeatRequest(transfer_servers=SERVERS, address="w:1", uid=1))
            await until(decided.is_set)
            lead.cancel()
            await asyncio.sleep(0.5)  # longer than the grace
            go_on.set()
            assert (await call).worker_id > 0
        await asyncio.gather(lead, return_exceptions=True)

    monkeypatch.setattr(server, "STOP_GRACE_S", 0.1)
    asyncio.run(run())


def test_a_dispatcher_that_is_fenced_stops() -> None:
    storage = Renewals()

    async def fence(dispatcher: Dispatcher) -> None:
        storage.error = Fenced("term 2 exists")
        await asyncio.wait_for(dispatcher.stopped.wait(), 60)
        assert dispatcher.displaced
        with pytest.raises(Unavailable):
            await dispatcher.execute(c.RegisterWorker(address="w:1", uid=1))

    run_dispatcher(storage, fence, leader_lease_ms=100)


@pytest.mark.parametrize("kind", [DispatcherServicer, TfDataDispatcherServicer])
def test_a_leader_that_does_not_know_whether_it_leads_answers_nobody(
    kind: type[DispatcherServicer] | type[TfDataDispatcherServicer],
) -> None:
    storage = Renewals()

    async def resumed(dispatcher: Dispatcher) -> None:
        methods = kind(dispatcher).methods()
        assert len(methods) >= 11
        for answer, request, _ in methods.values():
            with contextlib.suppress(FailedPrecondition, InvalidArgument, NotFound, Unimplemented):
                await answer(request())
        storage.error = Fenced("term 2 exists")
        await until(lambda: not dispatcher.leadership.known)
        for answer, request, _ in methods.values():
            with pytest.raises(Unavailable):
                await answer(request())

    run_dispatcher(storage, resumed, leader_lease_ms=100)

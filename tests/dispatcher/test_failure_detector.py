"""Which workers and consumers the failure detector gives up, and on what evidence."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.diagnosis import findings
from forebay.service.dispatcher import failure_detector
from forebay.service.dispatcher.dispatcher import Dispatcher
from forebay.service.dispatcher.dispatcher_servicer import DispatcherServicer
from forebay.service.errors import AlreadyExists, Unavailable
from forebay.service.proto import forebay_pb2 as pb
from forebay.storage import MemoryStorage, Storage

from ..transfer_servers import SERVERS
from .leading import register, run_dispatcher, until

NEVER_MS = 3_600_000
UID = 7


def run(
    then: Callable[[Dispatcher, DispatcherServicer], Coroutine[Any, Any, None]],
    storage: Storage | None = None,
    **options: Any,
) -> None:
    """A dispatcher whose timeouts never run out, unless `options` say otherwise."""
    times = {"worker_timeout_ms": NEVER_MS, "reconnect_grace_ms": NEVER_MS, **options}
    run_dispatcher(storage or MemoryStorage(), lambda d: then(d, DispatcherServicer(d)), **times)


async def some_checks() -> None:
    """Waits until the failure detector has checked several times."""
    await asyncio.sleep(4 * failure_detector.CHECK_S)


def beat(servicer: DispatcherServicer, known: int = 0) -> asyncio.Task[pb.WorkerHeartbeatResponse]:
    """A heartbeat of the worker; with the current version it is a long poll."""
    request = pb.WorkerHeartbeatRequest(
        transfer_servers=SERVERS, address="w:1", uid=UID, version=known, wait_ms=30_000
    )
    return asyncio.create_task(servicer.worker_heartbeat(request))


async def poll(
    dispatcher: Dispatcher, servicer: DispatcherServicer
) -> asyncio.Task[pb.WorkerHeartbeatResponse]:
    """A heartbeat that waits."""
    version = (await beat(servicer)).version
    heartbeat = beat(servicer, version)
    await until(lambda: dispatcher.waiting)
    return heartbeat


async def break_off(heartbeat: asyncio.Task[Any]) -> None:
    """Cancel the poll, as gRPC does when the connection ends."""
    heartbeat.cancel()
    await asyncio.gather(heartbeat, return_exceptions=True)


async def join(dispatcher: Dispatcher, servicer: DispatcherServicer) -> int:
    """A consumer of an iteration that has a task on the worker; its id."""
    dataset_id = await dispatcher.execute(
        c.RegisterDataset(dataset_id="", definition=ev.DatasetDefinition())
    )
    job_id = await dispatcher.execute(
        c.GetOrCreateJob(dataset_id=dataset_id, name="", sharding=ev.OFF)
    )
    joined = await servicer.join_iteration(pb.JoinIterationRequest(job_id=job_id))
    return joined.consumer_id


def joined_before(storage: Storage) -> int:
    """A consumer that joined, as `join` does, when another dispatcher led; its id."""
    consumers: list[int] = []

    async def before(dispatcher: Dispatcher, servicer: DispatcherServicer) -> None:
        await beat(servicer)
        consumers.append(await join(dispatcher, servicer))

    run(before, storage)
    return consumers[0]


async def say_refused(
    servicer: DispatcherServicer, consumer_id: int, answered: bool = True
) -> None:
    request = pb.ConsumerHeartbeatRequest(consumer_id=consumer_id)
    (request.refused if answered else request.never_answered).append(UID)
    await servicer.consumer_heartbeat(request)


def test_a_worker_that_consumers_cannot_reach_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(dispatcher: Dispatcher, servicer: DispatcherServicer) -> None:
        await beat(servicer)
        consumer_id = await join(dispatcher, servicer)
        assert dispatcher.measured()["unreachable_workers"] == []
        for _ in range(2):
            await say_refused(servicer, consumer_id, answered=False)
            await beat(servicer)
        (told,) = dispatcher.measured()["unreachable_workers"]
        assert told["address"] == next(iter(dispatcher.state.workers.values())).address
        assert told["since_s"] > 0
        monkeypatch.setattr(failure_detector, "UNREACHABLE_S", 0.0)  # nobody says so any more
        await asyncio.sleep(0.01)
        assert dispatcher.measured()["unreachable_workers"] == []

    run(scene)


EVIDENCE = {
    "a broken poll": (100, "poll, break, lost"),
    "a broken poll, after the event loop was blocked": (100, "poll, block, wait, break, lost"),
    "an older poll broke": (100, "poll, poll beside it, break, wait, stays"),
    "a broken poll and a refused consumer": (NEVER_MS, "beat, join, poll, break, refuse, lost"),
    "a refused consumer and a broken poll": (NEVER_MS, "beat, join, poll, refuse, break, lost"),
    "a refused consumer alone": (NEVER_MS, "beat, join, poll, refuse, wait, stays"),
    "a sign of life since": (NEVER_MS, "beat, join, refuse, poll, break, wait, stays"),
    "it died between two polls": (100, "poll, join, told, wait, stays, refuse a stranger, lost"),
    "a firewall": (100, "beat, join, poll, refuse a stranger, wait, stays"),
    "it came back in time": (
        1_000, "poll, join, told, refuse a stranger, poll, refuse a stranger, wait, stays",
    ),
    "a new leader, and a refused consumer": (NEVER_MS, "new, wait, stays, refuse, lost"),
    "a new leader, which waits longer": (1_000, "new, refuse a stranger, wait, stays"),
    "no timeout": (100, "without timeout, beat, join, poll, break, refuse, wait, stays"),
}  # fmt: skip
"""The grace, and what happens to a worker until it is lost or stays."""


@pytest.mark.parametrize("case", EVIDENCE)
def test_on_what_evidence_a_worker_is_given_up(case: str) -> None:
    grace_ms, text = EVIDENCE[case]
    steps, storage, options = text.split(", "), MemoryStorage(), {"reconnect_grace_ms": grace_ms}
    consumer_id = joined_before(storage) if "new" in steps else 0
    if "without timeout" in steps:
        options["worker_timeout_ms"] = -1

    async def scene(dispatcher: Dispatcher, servicer: DispatcherServicer) -> None:
        nonlocal consumer_id
        polls: list[asyncio.Task[pb.WorkerHeartbeatResponse]] = []
        for step in steps:
            match step:
                case "beat":
                    await beat(servicer)
                case "join":
                    consumer_id = await join(dispatcher, servicer)
                case "poll":
                    polls = [await poll(dispatcher, servicer)]
                case "poll beside it":
                    polls.append(beat(servicer, (await beat(servicer)).version))
                    await until(lambda: len(dispatcher.waiting) == 2)
                case "told":
                    assert (await polls.pop()).tasks
                case "break":
                    await break_off(polls.pop(0))
                case "block":
                    time.sleep(3 * failure_detector.CHECK_S)  # noqa: ASYNC251 - nothing is heard
                case "refuse" | "refuse a stranger":
                    await say_refused(servicer, consumer_id, answered=step == "refuse")
                case "wait":
                    await some_checks()
                case "stays":
                    assert dispatcher.state.workers
                case "lost":
                    await until(lambda: not dispatcher.state.workers)
        for left in polls:
            await break_off(left)

    run(scene, storage, **options)


@pytest.mark.parametrize("breaks", [True, False])
def test_a_worker_whose_answer_waits_for_the_journal_and_does_not_come_is_given_up_soon(
    breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks, or the journal is away. A worker that lives asks again at once."""

    async def scene(dispatcher: Dispatcher, servicer: DispatcherServicer) -> None:
        version = (await beat(servicer)).version
        reached, never = asyncio.Event(), asyncio.Event()

        async def settled() -> None:
            reached.set()
            if breaks:
                await never.wait()
            raise Unavailable("the journal is away")

        with monkeypatch.context() as patch:
            patch.setattr(dispatcher, "settled", settled)
            heartbeat = beat(servicer, version + 1)
            await reached.wait()
            if breaks:
                await break_off(heartbeat)
            else:
                with pytest.raises(Unavailable, match="is away"):
                    await heartbeat
        await until(lambda: not dispatcher.state.workers)

    run(scene, reconnect_grace_ms=100)


def test_a_worker_leaves_while_its_heartbeat_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(dispatcher: Dispatcher, servicer: DispatcherServicer) -> None:
        heartbeat = await poll(dispatcher, servicer)
        (worker_id,) = dispatcher.state.workers
        with monkeypatch.context() as patch:
            hold = asyncio.Event()
            patch.setattr(dispatcher, "settled", hold.wait)  # the answer, until it is forgotten
            await dispatcher.execute(c.LoseWorker(worker_id=worker_id, reason="it left"))
            await some_checks()
            hold.set()
            with pytest.raises(Unavailable, match="beat again"):
                await heartbeat

    run(scene)


# -- consumers that are refused --------------------------------------------------------------------


def test_a_draining_worker_with_an_open_poll_is_not_given_up() -> None:
    """It sends the goodbye's heartbeat beside the poll that waits."""

    async def scene(dispatcher: Dispatcher, servicer: DispatcherServicer) -> None:
        await beat(servicer)
        consumer_id = await join(dispatcher, servicer)
        drains = pb.WorkerHeartbeatRequest(
            transfer_servers=SERVERS, address="w:1", uid=UID, draining=True
        )
        version = (await servicer.worker_heartbeat(drains)).version
        waits = pb.WorkerHeartbeatRequest(version=version, wait_ms=30_000)
        waits.MergeFrom(drains)
        heartbeat = asyncio.create_task(servicer.worker_heartbeat(waits))
        await until(lambda: dispatcher.waiting)
        await servicer.worker_heartbeat(drains)
        await say_refused(servicer, consumer_id, answered=False)
        await some_checks()
        assert dispatcher.state.workers and not heartbeat.done()
        await break_off(heartbeat)

    run(scene, reconnect_grace_ms=100)


# -- consumers that are gone -----------------------------------------------------------------------


async def consumer_poll(
    dispatcher: Dispatcher, servicer: DispatcherServicer, consumer_id: int, wait_ms: int = 30_000
) -> asyncio.Task[pb.ConsumerHeartbeatResponse]:
    """A heartbeat of the consumer that waits."""
    request = pb.ConsumerHeartbeatRequest(consumer_id=consumer_id)
    request.version = (await servicer.consumer_heartbeat(request)).version
    request.wait_ms = wait_ms
    heartbeat = asyncio.create_task(servicer.consumer_heartbeat(request))
    await until(lambda: dispatcher.waiting)
    return heartbeat


async def member(dispatcher: Dispatcher, servicer: DispatcherServicer, index: int) -> int:
    """One of two consumers joins their group."""
    await register(dispatcher, 4)
    order = ev.OrderSpec(cycle_length=2, block_length=1, bundle_splits=1)
    job = pb.GetOrCreateJobRequest(dataset_id="d", job_name="j", order=order)
    group = ev.GroupMember(index=index, consumers=2, batch_size=1)
    return (
        await servicer.join_iteration(pb.JoinIterationRequest(job=job, member=group))
    ).consumer_id


async def until_gone(servicer: DispatcherServicer, consumer_id: int) -> None:
    give_up = time.monotonic() + 20
    while await gone(servicer, consumer_id) != [consumer_id]:
        assert time.monotonic() < give_up
        await asyncio.sleep(0.01)


async def gone(servicer: DispatcherServicer, *consumer_ids: int) -> list[int]:
    """Which of these consumers the dispatcher calls gone when a worker asks."""
    request = pb.FindGoneConsumersRequest(consumer_ids=consumer_ids)
    return list((await servicer.find_gone_consumers(request)).gone)


def test_a_consumer_whose_poll_broke_is_gone_soon_and_keeps_its_place() -> None:
    async def scene(dispatcher: Dispatcher, servicer: DispatcherServicer) -> None:
        consumer_id = await join(dispatcher, servicer)
        heartbeat = await consumer_poll(dispatcher, servicer, consumer_id)
        assert await gone(servicer, consumer_id) == []
        await say_refused(servicer, consumer_id)  # beside it
        await break_off(heartbeat)
        await until_gone(servicer, consumer_id)
        await some_checks()
        assert consumer_id in dispatcher.state.consumers
        await break_off(await consumer_poll(dispatcher, servicer, consumer_id))  # it came back

    run(scene, reconnect_grace_ms=100)


def test_a_consumer_has_time_to_come_back() -> None:
    async def scene(dispatcher: Dispatcher, servicer: DispatcherServicer) -> None:
        consumer_id = await join(dispatcher, servicer)
        await break_off(await consumer_poll(dispatcher, servicer, consumer_id))
        assert await gone(servicer, consumer_id) == []

    run(scene)


def test_a_consumer_that_came_back_or_is_silent_is_not_gone() -> None:
    async def scene(dispatcher: Dispatcher, servicer: DispatcherServicer) -> None:
        consumer_id = await join(dispatcher, servicer)
        await some_checks()
        assert await gone(servicer, consumer_id) == []
        older = await consumer_poll(dispatcher, servicer, consumer_id)
        newer = await consumer_poll(dispatcher, servicer, consumer_id)
        await break_off(older)
        await some_checks()
        assert await gone(servicer, consumer_id) == []
        await break_off(newer)

    run(scene, reconnect_grace_ms=100)


def test_a_consumer_that_is_silent_loses_its_place_in_a_group() -> None:
    """It was killed between two polls."""

    async def scene(dispatcher: Dispatcher, servicer: DispatcherServicer) -> None:
        killed = await member(dispatcher, servicer, 0)
        living = await member(dispatcher, servicer, 1)
        request = pb.ConsumerHeartbeatRequest(consumer_id=killed)
        request.version = (await servicer.consumer_heartbeat(request)).version
        request.wait_ms = 10
        await servicer.consumer_heartbeat(request)  # its last poll is answered
        waits = await consumer_poll(dispatcher, servicer, living)
        await some_checks()
        with pytest.raises(AlreadyExists, match="consumer_index=1 of a group of 2"):
            await member(dispatcher, servicer, 1)
        await member(dispatcher, servicer, 0)
        assert killed not in dispatcher.state.consumers
        assert await gone(servicer, living) == []
        await break_off(waits)

    run(scene, reconnect_grace_ms=100)


def test_how_long_a_trainer_is_silent_that_this_dispatcher_never_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have been killed before the failover. It is told as soon as one that was heard."""
    monkeypatch.setattr(failure_detector, "REDISCOVERIES", 10**6)

    async def scene(dispatcher: Dispatcher, servicer: DispatcherServicer) -> None:
        await beat(servicer)

        def gone() -> list[str]:
            told = json.loads(b"".join(dispatcher.encoded_status()))
            return [one.what for one in findings(told) if "trainer" in one.what]

        await until(lambda: any("at least since this dispatcher leads" in what for what in gone()))
        await servicer.consumer_heartbeat(pb.ConsumerHeartbeatRequest(consumer_id=consumer_id))
        assert not gone()
        await until(lambda: any(what.endswith("without leaving") for what in gone()))

    storage = MemoryStorage()
    consumer_id = joined_before(storage)
    run(scene, storage, reconnect_grace_ms=300)


@pytest.mark.parametrize("heard_again_s", [0, 0.3])
def test_time_in_which_the_dispatcher_stood_still_is_no_silence(heard_again_s: float) -> None:
    async def scene(dispatcher: Dispatcher, servicer: DispatcherServicer) -> None:
        consumer_id = await member(dispatcher, servicer, 0)
        await asyncio.sleep(2 * failure_detector.CHECK_S)
        time.sleep(3)  # noqa: ASYNC251 - the whole loop hears nothing
        await asyncio.sleep(heard_again_s)
        with pytest.raises(AlreadyExists):
            await member(dispatcher, servicer, 0)
        await servicer.consumer_heartbeat(pb.ConsumerHeartbeatRequest(consumer_id=consumer_id))
        await some_checks()
        silent_s = dispatcher.failure_detector.silent_s(consumer_id)
        assert silent_s is not None and silent_s >= 0

    run(scene, reconnect_grace_ms=1000)


def test_who_was_just_answered_is_not_silent() -> None:
    """Though its poll has waited for long."""

    async def scene(dispatcher: Dispatcher, servicer: DispatcherServicer) -> None:
        consumer_id = await member(dispatcher, servicer, 0)
        waits = await consumer_poll(dispatcher, servicer, consumer_id, wait_ms=2000)
        await waits
        with pytest.raises(AlreadyExists):
            await member(dispatcher, servicer, 0)

    run(scene, reconnect_grace_ms=200)


def test_a_consumer_that_left_is_gone() -> None:
    async def scene(dispatcher: Dispatcher, servicer: DispatcherServicer) -> None:
        consumer_id = await join(dispatcher, servicer)
        await servicer.leave_iteration(pb.LeaveIterationRequest(consumer_id=consumer_id))
        assert await gone(servicer, consumer_id) == [consumer_id]

    run(scene)


def test_a_consumer_that_a_new_leader_never_hears_is_gone() -> None:
    storage = MemoryStorage()
    consumers: list[int] = []

    async def before(dispatcher: Dispatcher, servicer: DispatcherServicer) -> None:
        consumers.append(await join(dispatcher, servicer))

    async def scene(dispatcher: Dispatcher, servicer: DispatcherServicer) -> None:
        assert await gone(servicer, *consumers) == []
        await until_gone(servicer, consumers[0])

    run(before, storage)
    run(scene, storage, reconnect_grace_ms=100)

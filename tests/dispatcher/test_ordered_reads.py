"""Ordered reads through Forebay's protocol: the next group knows what the one before learned."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.dispatcher import group_progress
from forebay.service.dispatcher.dispatcher import Dispatcher
from forebay.service.dispatcher.dispatcher_servicer import DispatcherServicer
from forebay.service.errors import AlreadyExists, InvalidArgument
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto.python_pb2 import PythonDataset
from forebay.storage import FileStorage, MemoryStorage

from ..transfer_servers import SERVERS
from .leading import register, run_dispatcher, until

ORDER = ev.OrderSpec(seed=5, shuffle=True, cycle_length=2, block_length=3, bundle_splits=4)


class Servicer:
    """The methods of Forebay's protocol, as connections call them."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self._methods = DispatcherServicer(dispatcher).methods()

    async def call(self, request: Any) -> Any:
        function, _, _ = self._methods[type(request).__name__.removesuffix("Request")]
        return await function(request)

    async def join(self, index: int, of: int = 2, start: int = 0) -> pb.JoinIterationResponse:
        job = pb.GetOrCreateJobRequest(dataset_id="d", job_name="j", order=ORDER)
        member = ev.GroupMember(index=index, consumers=of, start_position=start, batch_size=8)
        return await self.call(pb.JoinIterationRequest(job=job, member=member))

    async def learn(self, consumer_id: int, bundles: list[int], lengths: list[int]) -> None:
        await self.call(
            pb.ConsumerHeartbeatRequest(consumer_id=consumer_id, bundles=bundles, lengths=lengths)
        )

    async def work(self, uid: int, **fields: Any) -> list[pb.Task]:
        """The tasks of a worker that says that it is there."""
        beat = pb.WorkerHeartbeatRequest(
            transfer_servers=SERVERS, address=f"w:{uid}", uid=uid, **fields
        )
        response: pb.WorkerHeartbeatResponse = await self.call(beat)
        return list(response.tasks)


def test_lengths_are_declared_only_for_the_dataset_that_is_registered() -> None:
    """Another one under the same id is not read, as the client warns."""

    async def registers(dispatcher: Dispatcher) -> None:
        servicer = Servicer(dispatcher)

        async def register(function: bytes, *lengths: int) -> dict[int, list[int]]:
            python = PythonDataset(function=function).SerializeToString()
            request = pb.RegisterDatasetRequest(
                dataset_id="d", python=python, sources=[ev.SplitSource(count=3)], lengths=lengths
            )
            await servicer.call(request)
            return dispatcher.state.datasets["d"].lengths

        assert await register(b"one") == {}
        assert await register(b"other", 7, 7, 7) == {}
        assert await register(b"other", 7) == {}
        assert await register(b"one", 4, 5, 6) == {1: [4, 5, 6]}

    run_dispatcher(MemoryStorage(), registers)


def test_the_next_dispatcher_knows_the_lengths_that_the_one_before_learned(tmp_path: Path) -> None:
    complete = ev.OrderSpec()
    complete.CopyFrom(ORDER)
    complete.bundles = 5

    async def learns(dispatcher: Dispatcher) -> None:
        await register(dispatcher, 17)
        servicer = Servicer(dispatcher)
        first, second = [await servicer.join(index) for index in range(2)]
        for joined in (first, second):
            assert joined.order == complete
            assert joined.lengths == [-1] * 5
        (task,) = await servicer.work(1)
        assert task.order == complete
        await servicer.learn(first.consumer_id, bundles=[3, 0], lengths=[6, 0])
        await servicer.learn(second.consumer_id, bundles=[3], lengths=[6])
        status = json.loads((await servicer.call(pb.GetStatusRequest())).status)
        assert status["jobs"][0]["order"]["known_lengths"] == 2
        group = status["jobs"][0]["iterations"][0]["group"]
        assert [(member["index"], member["consumers"]) for member in group] == [(0, 2), (1, 2)]

    async def knows(dispatcher: Dispatcher) -> None:
        servicer = Servicer(dispatcher)
        with pytest.raises(AlreadyExists, match="index=0 of a group of 2"):
            await servicer.join(0, of=3)
        for consumer_id in sorted(dispatcher.state.consumers):
            await servicer.call(pb.LeaveIterationRequest(consumer_id=consumer_id))
        joined = await servicer.join(2, of=3, start=16)
        assert joined.order == complete
        assert joined.lengths == [0, -1, -1, 6, -1]
        assert [task.worker_address for task in joined.news.tasks] == ["w:1"]

    storage = FileStorage(tmp_path / "journal")
    for what in (learns, knows):
        run_dispatcher(storage, what)


def test_lengths_that_differ_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def differs(dispatcher: Dispatcher) -> None:
        await register(dispatcher, 17)
        servicer = Servicer(dispatcher)
        joined = await servicer.join(0)
        for length in (3, 4, 5):
            await servicer.learn(joined.consumer_id, bundles=[1], lengths=[length])
        with pytest.raises(InvalidArgument, match="bundles are 0 to 4"):
            await servicer.learn(joined.consumer_id, bundles=[5], lengths=[1])
        again = await servicer.join(1)
        assert again.lengths == [-1, 3, -1, -1, -1]

    with caplog.at_level(logging.WARNING):
        run_dispatcher(MemoryStorage(), differs)
    warned = [record.getMessage() for record in caplog.records if "lengths" in record.getMessage()]
    assert len(warned) == 1 and "dataset d have had other lengths before: [1]" in warned[0]


def test_what_a_group_reports_is_one_event_in_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """And who leaves in order says exactly how far it came."""
    now = [100.0]
    monkeypatch.setattr(group_progress, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def reports(dispatcher: Dispatcher) -> None:
        await register(dispatcher, 17)
        servicer, moved = Servicer(dispatcher), []
        dispatcher.subscribe(
            lambda e: moved.append(e.consumers_moved) if e.HasField("consumers_moved") else None
        )
        one, other = [(await servicer.join(index)).consumer_id for index in range(2)]
        for consumer_id, position, later_s in (
            (one, 8, 0), (other, 8, 1), (one, 16, 1), (other, 24, 13), (one, 16, 9),
        ):  # fmt: skip
            now[0] += later_s
            await servicer.call(
                pb.ConsumerHeartbeatRequest(consumer_id=consumer_id, position=position)
            )
        assert [(list(m.consumers), list(m.positions)) for m in moved] == [
            ([one], [8]),
            ([one, other], [16, 24]),
        ]
        state = dispatcher.state
        assert [state.consumers[i].position for i in (one, other)] == [16, 24]
        left: list[ev.ConsumerLeft] = []
        dispatcher.subscribe(
            lambda e: left.append(e.consumer_left) if e.HasField("consumer_left") else None
        )
        await servicer.call(pb.LeaveIterationRequest(consumer_id=one, position=32))
        await servicer.call(pb.LeaveIterationRequest(consumer_id=other))  # of an earlier version
        assert [(e.position, e.HasField("position")) for e in left] == [(32, True), (0, False)]

    run_dispatcher(MemoryStorage(), reports)


def test_who_is_started_again_has_its_place_soon_after_its_connection_broke() -> None:
    async def starts_again(dispatcher: Dispatcher) -> None:
        await register(dispatcher, 17)
        servicer = Servicer(dispatcher)
        joined, other = [await servicer.join(index) for index in range(2)]
        poll = pb.ConsumerHeartbeatRequest(
            consumer_id=joined.consumer_id, version=joined.news.version, wait_ms=30_000
        )
        waiting = asyncio.create_task(servicer.call(poll))
        await asyncio.sleep(0.01)
        with pytest.raises(AlreadyExists):
            await servicer.join(0)
        waiting.cancel()
        await until(lambda: dispatcher.failure_detector.is_gone(joined.consumer_id))
        again = await servicer.join(0, start=32)
        assert dispatcher.state.consumers.keys() == {again.consumer_id, other.consumer_id}

    run_dispatcher(MemoryStorage(), starts_again, reconnect_grace_ms=100)

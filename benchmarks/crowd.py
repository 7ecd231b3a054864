"""Row `crowd`: a dispatcher's answers with 500 simulated workers and 200 consumers, for minutes.

The workers run every job's task and read nothing: each leases splits at a steady pace. Workers and
consumers keep a heartbeat pending, as real ones do, and send another one at once in between. They
run in processes of their own:

python -m forebay.benchmarks.crowd DISPATCHER
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from ..journal.proto import events_pb2 as ev
from ..service.connections.grpc_server import CHANNEL_OPTIONS, connect_async
from ..service.proto import forebay_pb2 as fb
from .calls import ENDLESS, FOREBAY, GRAPH, SERVERS, TIMEOUT_S, Caller
from .results import Better, Result
from .servers import Responder, our_dispatcher
from .setting import Setting

WORKERS, CONSUMERS, JOBS = 500, 200, 20
QUICK = (10, 4, 2)
MINUTES_S = 300.0
SAMPLES = 10  # of the dispatcher's memory, all but the first two after its rise
PROCESSES = min(8, os.cpu_count() or 1)
LEASE = 100
PAUSE_S = 0.5  # between a worker's leases
BEAT_MS = 5_000
REQUIRED_MS = 100.0


def crowd(setting: Setting) -> list[Result]:
    """The slowest of a hundred answers, by kind, and the dispatcher's memory; measured once."""
    workers, consumers, jobs = QUICK if setting.quick else (WORKERS, CONSUMERS, JOBS)
    seconds = setting.seconds if setting.quick else MINUTES_S
    with contextlib.ExitStack() as stack:
        dispatcher = stack.enter_context(our_dispatcher(setting.directory("crowd")))
        callers = [
            stack.enter_context(Responder("forebay.benchmarks.crowd", dispatcher.address))
            for _ in range(PROCESSES)
        ]
        with Caller(dispatcher.address) as caller:
            members = list(_join(caller, consumers, jobs))
        for number, caller_process in enumerate(callers):
            caller_process.ask(
                {
                    "workers": list(range(1, workers + 1))[number::PROCESSES],
                    "consumers": members[number::PROCESSES],
                    "seconds": seconds,
                }
            )
        memory_mb = []
        for _ in range(SAMPLES):
            time.sleep(seconds / SAMPLES)
            memory_mb.append(dispatcher.rss_mb())
        answers = [json.loads(caller.answer(seconds + TIMEOUT_S)) for caller in callers]
    what = f"{workers} workers, {consumers} consumers, {jobs} jobs, {seconds:.0f} s"
    times: dict[str, list[float]] = collections.defaultdict(list)
    for answer in answers:
        for kind, took_ms in answer.items():
            times[kind] += took_ms
    return [
        *(
            Result(
                row="crowd",
                what=f"{what}: p99 of {len(took_ms):,} {kind}",
                unit="ms",
                better=Better.LESS,
                ours=[sorted(took_ms)[int(0.99 * len(took_ms))]],
                required=None if kind.endswith("join") else REQUIRED_MS,
            )
            for kind, took_ms in sorted(times.items())
        ),
        Result(
            row="crowd",
            what=f"{what}: how much the dispatcher's memory grows from a fifth of it to the end",
            unit="MB",
            better=Better.LESS,
            ours=[memory_mb[-1] - memory_mb[1]],
        ),
        Result(
            row="crowd",
            what=f"{what}: the dispatcher's memory at the end",
            unit="MB",
            better=Better.LESS,
            ours=[memory_mb[-1]],
        ),
    ]


def _join(caller: Caller, consumers: int, jobs: int) -> Iterator[int]:
    """Begin the jobs; the ids of their consumers."""
    endless = ev.SplitSource(arithmetic=ev.Arithmetic(start=0, stop=ENDLESS, step=1))
    dataset = caller.call(
        fb.RegisterDatasetRequest(graph=GRAPH, sources=[endless]), fb.RegisterDatasetResponse
    )
    for number in range(consumers):
        job = fb.GetOrCreateJobRequest(
            dataset_id=dataset.dataset_id, job_name=f"job {number % jobs}", sharding=ev.DYNAMIC
        )
        joined = caller.call(fb.JoinIterationRequest(job=job), fb.JoinIterationResponse)
        yield joined.consumer_id


class Crowd:
    """Some of the workers and consumers, each with a connection of its own."""

    def __init__(self, dispatcher: str) -> None:
        self._dispatcher = dispatcher

    async def live(
        self, workers: Sequence[int], consumers: Sequence[int], seconds: float
    ) -> dict[str, list[float]]:
        """How long each answer took, in milliseconds, by kind."""
        self._took_ms: dict[str, list[float]] = collections.defaultdict(list)
        begun = time.perf_counter()
        self._until, self._all_there = begun + seconds, begun + seconds / SAMPLES
        self._stagger_s = min(BEAT_MS / 1e3, seconds / 5)  # they did not start together
        await asyncio.gather(
            *(self._work(number) for number in workers),
            *(self._consume(consumer_id) for consumer_id in consumers),
        )
        return self._took_ms

    async def _work(self, number: int) -> None:
        request = fb.WorkerHeartbeatRequest(
            transfer_servers=SERVERS, address=f"127.0.0.1:{number}", uid=number
        )
        await asyncio.sleep(random.random() * self._stagger_s)
        async with _connect(self._dispatcher) as channel:
            beat = _method(channel, "WorkerHeartbeat", fb.WorkerHeartbeatResponse)
            lease = _method(channel, "LeaseSplits", fb.LeaseSplitsResponse)
            tasks = (await _call(beat, request)).tasks
            waiting = asyncio.create_task(_keep_waiting(beat, request))
            wanted = [fb.LeaseSplitsRequest(task_id=task.task_id, want=LEASE) for task in tasks]
            for turn in itertools.count():
                if time.perf_counter() > self._until:
                    break
                want = wanted[turn % len(wanted)]
                want.request.number += 1
                got = await self._timed("leases", lease, want)
                want.begun[:] = [got.lease_id]
                if turn % 10 == 0:
                    now = fb.WorkerHeartbeatRequest(
                        transfer_servers=SERVERS, address=request.address, uid=number
                    )
                    await self._timed("workers' heartbeats", beat, now)
                await asyncio.sleep(PAUSE_S)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def _consume(self, consumer_id: int) -> None:
        request = fb.ConsumerHeartbeatRequest(consumer_id=consumer_id)
        await asyncio.sleep(random.random() * self._stagger_s)
        async with _connect(self._dispatcher) as channel:
            beat = _method(channel, "ConsumerHeartbeat", fb.ConsumerHeartbeatResponse)
            waiting = asyncio.create_task(_keep_waiting(beat, request))
            while time.perf_counter() < self._until:
                now = fb.ConsumerHeartbeatRequest(consumer_id=consumer_id, version=request.version)
                await self._timed("consumers' heartbeats", beat, now)
                await asyncio.sleep(BEAT_MS / 1e3)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def _timed(self, kind: str, method: Any, request: Any) -> Any:
        begun = time.perf_counter()
        if begun < self._all_there:
            kind += " while all join"
        answer = await _call(method, request)
        self._took_ms[kind].append(1e3 * (time.perf_counter() - begun))
        return answer


async def _call(method: Any, request: Any) -> Any:
    """Call as clients do, which repeat what was broken off."""
    while True:
        try:
            return await method(request, timeout=TIMEOUT_S, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE):
                raise


async def _keep_waiting(beat: Any, request: Any) -> None:
    """Keep a heartbeat pending at the dispatcher, for news."""
    request.wait_ms = BEAT_MS
    while True:
        request.version = (await _call(beat, request)).version


def _connect(dispatcher: str) -> grpc.aio.Channel:
    return connect_async(dispatcher, [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)])


def _method(channel: grpc.aio.Channel, name: str, response: Any) -> Any:
    return channel.unary_unary(
        f"/{FOREBAY}/{name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=response.FromString,
    )


async def serve(dispatcher: str) -> None:
    members = Crowd(dispatcher)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await members.live(**json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))

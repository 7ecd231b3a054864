"""Row `fleet`: our dispatcher's decisions with 1 to 200 simulated workers.

Each worker keeps a heartbeat pending, as real ones do, and leases splits again and again
without ever working on any. They run in processes of their own:

python -m forebay.benchmarks.fleet DISPATCHER
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import grpc

from ..service.connections.grpc_server import connect_async
from ..service.proto import forebay_pb2 as fb
from .calls import FOREBAY, SERVERS, TIMEOUT_S, Caller, begin_tasks
from .machine import process_cpu_s
from .results import Curve, Finding
from .servers import Responder, our_dispatcher
from .setting import Setting

WORKERS = (1, 2, 5, 10, 20, 50, 100, 200)
QUICK = (1, 4)
PROCESSES = 2
LEASE = 100
BEAT_MS = 5_000


def fleet(setting: Setting) -> list[Finding]:
    """The leases per second, and the dispatcher's cost of each; measured once."""
    rates: list[tuple[float, float]] = []
    costs: list[tuple[float, float]] = []
    with contextlib.ExitStack() as stack:
        dispatcher = stack.enter_context(our_dispatcher(setting.directory("fleet")))
        callers = [
            stack.enter_context(Responder("forebay.benchmarks.fleet", dispatcher.address))
            for _ in range(PROCESSES)
        ]
        for workers in QUICK if setting.quick else WORKERS:
            with Caller(dispatcher.address) as caller:
                tasks = list(enumerate(begin_tasks(caller, workers), 1))
            cpu_s = process_cpu_s(dispatcher.pid)
            busy = callers[:workers]
            for number, child in enumerate(busy):
                child.ask({"tasks": tasks[number::PROCESSES], "seconds": setting.seconds})
            answers = [json.loads(child.answer()) for child in busy]
            cpu_s = process_cpu_s(dispatcher.pid) - cpu_s
            rates.append((workers, sum(answer["per_s"] for answer in answers)))
            costs.append((workers, cpu_s * 1e6 / sum(answer["leases"] for answer in answers)))
    what = f"simulated workers that lease {LEASE} splits at a time, without pause"
    return [
        Curve(row="fleet", what=what, x="workers", y="leases/s", lines={"Forebay": rates}),
        Curve(
            row="fleet",
            what=what,
            x="workers",
            y="dispatcher's CPU, µs a lease",
            lines={"Forebay": costs},
        ),
    ]


class Fleet:
    """Some of the workers."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._beat = self._method(channel, "WorkerHeartbeat", fb.WorkerHeartbeatResponse)
        self._lease = self._method(channel, "LeaseSplits", fb.LeaseSplitsResponse)
        self._leases = 0

    @staticmethod
    def _method(channel: grpc.aio.Channel, name: str, response: Any) -> Any:
        return channel.unary_unary(
            f"/{FOREBAY}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )

    async def work(self, tasks: Sequence[tuple[int, int]], seconds: float) -> dict[str, float]:
        """Lease for `seconds` as these workers, each with one task; count the leases."""
        self._leases = 0
        beats = [asyncio.create_task(self._keep_beating(number)) for number, _ in tasks]
        begun = time.perf_counter()
        until = begun + seconds
        await asyncio.gather(*(self._keep_leasing(task_id, until) for _, task_id in tasks))
        elapsed_s = time.perf_counter() - begun
        for beat in beats:
            beat.cancel()
        await asyncio.gather(*beats, return_exceptions=True)
        return {"leases": self._leases, "per_s": self._leases / elapsed_s}

    async def _keep_beating(self, number: int) -> None:
        request = fb.WorkerHeartbeatRequest(
            transfer_servers=SERVERS, address=f"127.0.0.1:{number}", uid=1, wait_ms=BEAT_MS
        )
        while True:
            answer = await self._beat(request, timeout=TIMEOUT_S)
            request.version = answer.version

    async def _keep_leasing(self, task_id: int, until: float) -> None:
        request = fb.LeaseSplitsRequest(task_id=task_id, want=LEASE)
        for request.request.number in itertools.count(1):
            lease = await self._lease(request, timeout=TIMEOUT_S)
            self._leases += 1
            request.begun[:] = [lease.lease_id]
            if time.perf_counter() >= until:
                return


async def serve(dispatcher: str) -> None:
    async with connect_async(dispatcher) as channel:
        workers = Fleet(channel)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await workers.work(**json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))

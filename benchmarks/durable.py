"""Durable events per second, from many callers with one event after another."""

from __future__ import annotations

import asyncio
import time

from ..journal.journal import Journal
from ..journal.proto import events_pb2 as ev
from ..storage import open_storage
from .results import Better, Result
from .setting import Setting

CALLERS = 64


def durable_events(row: str, how: str, url: str, setting: Setting, required: float) -> Result:
    """What each round found in the storage at `url`; `how` says in words what that is."""
    return Result(
        row=row,
        what=f"durable events{how}, {CALLERS} callers",
        unit="events/s",
        better=Better.MORE,
        ours=[asyncio.run(_durable_events(url, setting.seconds)) for _ in range(setting.rounds)],
        required=required,
    )


async def _durable_events(url: str, seconds: float) -> float:
    storage = open_storage(url, allow_volatile=True)
    journal = Journal(storage, storage.open_writer("a benchmark"))
    leased = ev.SplitsLeased(
        lease_id=10**6, iteration_id=10**6, task_id=10**6, first=10**6, count=9
    )
    event = ev.Event(time_ms=time.time_ns() // 10**6, splits_leased=leased)
    begun = time.perf_counter()

    async def caller() -> int:
        events = 0
        while time.perf_counter() < begun + seconds:
            await journal.wait_durable(journal.append([event]))
            events += 1
        return events

    events = sum(await asyncio.gather(*(caller() for _ in range(CALLERS))))
    elapsed = time.perf_counter() - begun
    await journal.close()
    storage.close()
    return events / elapsed

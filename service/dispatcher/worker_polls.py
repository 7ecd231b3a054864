"""A worker's heartbeat: a long poll for its tasks, and for streams of saves to write."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ..core import commands as c
from ..core.state import Save, Worker
from ..errors import Unavailable
from .dispatcher import Dispatcher


@dataclass(frozen=True, slots=True)
class WorkerNews:
    """The tasks and streams that a worker must run now."""

    worker: Worker
    version: int
    """Of its list of tasks; the worker sends it with its next poll. 0: it polls again at once."""
    streams: list[tuple[Save, int]]
    streams_are_partial: bool
    """Not all of its streams: the directories of some are not ready yet."""


@asynccontextmanager
async def worker_poll(
    dispatcher: Dispatcher, registration: c.RegisterWorker, version: int, wait_ms: int
) -> AsyncIterator[WorkerNews]:
    """Register the worker, wait until there is news behind `version`, and show it.

    The answer is made within the context: at its end, it waits until all that was decided is
    durable. A poll that breaks by then is known to the failure detector.

    Raises Unavailable if the worker was replaced or given up meanwhile.
    """
    state = dispatcher.state
    known = state.workers.get(state.worker_at.get(registration.address, 0))
    if known is None or known.uid != registration.uid:
        wait_ms = 0  # `version` is of an earlier registration
    worker_id = await dispatcher.execute(registration)
    worker = state.workers.get(worker_id)
    if worker is None:
        raise Unavailable(f"worker {registration.address} was replaced; beat again")
    with dispatcher.failure_detector.poll(worker_id):
        may_write_more = dispatcher.saves.watch(worker)
        await dispatcher.wait_until(
            lambda: worker.version != version or worker_id not in state.workers or may_write_more(),
            wait_ms,
        )
        streams, are_all = await dispatcher.saves.write(worker_id)
        if worker_id not in state.workers:  # an empty list would make it drop its tasks
            raise Unavailable(f"worker {registration.address} was given up meanwhile; beat again")
        yield WorkerNews(worker, worker.version if are_all else 0, streams, not are_all)
        await dispatcher.settled()

"""ObservedWorker: what a worker says over HTTP about its tasks and its memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..http.families import Family, Sample

if TYPE_CHECKING:
    from .worker import Worker

_TASK_SECONDS = "forebay_worker_task_{}_seconds_total"
COUNTS = {
    "elements": Family(
        "forebay_worker_elements_total", "counter", "Elements that its pipelines made.", ("job_id",)
    ),
    "bytes": Family(
        "forebay_worker_bytes_total", "counter", "Bytes of these elements.", ("job_id",)
    ),
    **{
        kind: Family(_TASK_SECONDS.format(kind), "counter", text, ("job_id",))
        for kind, text in (
            ("working", "Time in which the pipelines of tasks made elements."),
            ("backpressured", "Time in which they waited for consumers to take elements."),
            ("no_split", "Time in which they waited for the dispatcher to lease splits."),
            ("unread", "Time in which they waited for a first consumer."),
        )
    },
}
REGISTERED = Family(
    "forebay_worker_registered", "gauge", "1 once the dispatcher has registered it, else 0."
)
DRAINING = Family("forebay_worker_draining", "gauge", "1 while it drains, else 0.")
HEARD = Family(
    "forebay_worker_heartbeat_age_seconds", "gauge",
    "Time since the dispatcher last answered a heartbeat, which may wait for "
    "--heartbeat-interval-ms.",
)  # fmt: skip
TASKS = Family("forebay_worker_tasks", "gauge", "Unfinished tasks: running or parked.", ("state",))
READ_TASKS = Family("forebay_worker_read_tasks", "gauge", "Unfinished tasks that are being read.")
STREAMS = Family("forebay_worker_streams", "gauge", "Streams of saves that it writes.")
BUFFER = Family(
    "forebay_worker_buffer_bytes", "gauge", "Memory of elements that its tasks hold, with caches."
)
BUFFER_LIMIT = Family(
    "forebay_worker_buffer_limit_bytes", "gauge", "What they may hold: --memory-budget."
)
BUFFERED = Family(
    "forebay_worker_buffered_elements", "gauge", "Elements that no consumer was given yet."
)
CONNECTIONS = Family(
    "forebay_worker_connections_total", "counter",
    "Connections of Forebay's consumers: first ones, and of consumers that came back.", ("kind",),
)  # fmt: skip
AWAY = Family(
    "forebay_worker_away_consumers", "gauge", "Consumers without a connection that may come back."
)


class ObservedWorker:
    """Implements `Observed` (service/http/server.py)."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def unhealthy(self) -> str:
        return "its heartbeats have ended" if self._worker.lost_its_heart else ""

    def unready(self) -> str:
        if not self._worker.tasks.states.worker_id:
            return "not registered with a dispatcher yet"
        return "drains" if self._worker.is_leaving else ""

    async def samples(self) -> list[Sample]:
        return [*self._samples()]

    def _samples(self) -> Iterator[Sample]:
        worker = self._worker
        yield REGISTERED(worker.tasks.states.worker_id != 0)
        yield DRAINING(worker.is_leaving)
        if worker.heard_s is not None:
            yield HEARD(time.monotonic() - worker.heard_s)
        yield from worker.tasks.counts(COUNTS)
        runners = worker.tasks.unfinished()
        parked = sum(runner.is_parked for runner in runners)
        yield TASKS(len(runners) - parked, "running")
        yield TASKS(parked, "parked")
        read = worker.consumers.read_tasks()
        yield READ_TASKS(sum(runner.task.task_id in read for runner in runners))
        yield STREAMS(sum(not complete for _, _, complete in worker.streams))
        yield BUFFER(worker.idle.budget.held)
        yield BUFFER_LIMIT(worker.idle.budget.max_bytes)
        yield BUFFERED(sum(runner.output.waiting_elements for runner in runners))
        sessions = worker.sessions
        yield CONNECTIONS(sessions.connections - sessions.reconnects, "first")
        yield CONNECTIONS(sessions.reconnects, "again")
        yield AWAY(len(sessions.away()))

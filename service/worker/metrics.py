"""WorkerMetrics: what a worker says over HTTP about its tasks and its memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..connections.admission import Denials
from ..delivery import MemoryBudget
from ..fetched import fetched
from ..http.families import MOST_LABELLED, Family, Made, Measured, denied
from ..transport.sessions import Sessions
from .running_tasks import RunningTasks
from .task_consumers import TaskConsumers

ELEMENTS = Family(
    "forebay_worker_elements_total", "counter", "Elements that its pipelines made.", ("job_id",)
)
BYTES = Family("forebay_worker_bytes_total", "counter", "Bytes of these elements.", ("job_id",))
SECONDS = Family(
    "forebay_worker_task_seconds_total", "counter",
    "Time in which pipelines of tasks were open: working; backpressured, while consumers took no "
    "elements; no_split, while the dispatcher leased none; unread, before a first consumer.",
    ("job_id", "state"),
)  # fmt: skip
PARKED = Family(
    "forebay_worker_parked_tasks_total", "counter",
    "How often a task that nobody read was parked, which frees most of its memory.", ("job_id",),
)  # fmt: skip
SHED = Family(
    "forebay_worker_shed_elements_total", "counter",
    "Unread elements of parked tasks that were dropped, as others needed the memory.", ("job_id",),
)  # fmt: skip


def _seconds(state: str) -> Made:
    return lambda seconds, job_id: SECONDS(seconds, job_id, state)


COUNTS: dict[str, Made] = {
    "elements": ELEMENTS,
    "bytes": BYTES,
    "parked_tasks": PARKED,
    "shed_elements": SHED,
    **{state: _seconds(state) for state in ("working", "backpressured", "no_split", "unread")},
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
JOB_BUFFER = Family(
    "forebay_worker_job_buffer_bytes", "gauge", "What of it the tasks of a job hold.", ("job_id",)
)
BUFFER_LIMIT = Family(
    "forebay_worker_buffer_limit_bytes", "gauge", "What they may hold: --memory-budget."
)
OBJECTS = Family(
    "forebay_worker_object_bytes_total", "counter",
    "Bytes that the process read of files in object stores: fetched, or from --cache-directory.",
    ("source",),
)  # fmt: skip
CACHE = Family(
    "forebay_worker_cache_bytes", "gauge",
    "What --cache-directory holds, of all workers that share it; added up every 30 s.",
)  # fmt: skip
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


class Condition(NamedTuple):
    """How a worker is."""

    has_failed: bool  # the thread of its heartbeats has ended before it
    is_leaving: bool  # it drains or stops
    heard_s: float | None  # when the dispatcher last answered a heartbeat, monotonic
    streams: int  # of saves that it writes


@dataclass(frozen=True)
class WorkerMetrics:
    """Implements `HealthAndMetrics` (service/http/server.py)."""

    _tasks: RunningTasks
    _consumers: TaskConsumers
    _sessions: Sessions
    _budget: MemoryBudget
    _condition: Callable[[], Condition]
    _denials: Denials | None = None

    def unhealthy(self) -> str:
        return "the thread of its heartbeats has ended" if self._condition().has_failed else ""

    def unready(self) -> str:
        if not self._tasks.states.worker_id:
            return "not registered with a dispatcher yet"
        return "drains" if self._condition().is_leaving else ""

    async def measured(self) -> list[Measured]:
        return [*self._measured()]

    def _measured(self) -> Iterator[Measured]:
        condition = self._condition()
        yield REGISTERED(self._tasks.states.worker_id != 0)
        yield DRAINING(condition.is_leaving)
        if condition.heard_s is not None:
            yield HEARD(time.monotonic() - condition.heard_s)
        yield from self._tasks.counts(COUNTS)
        runners = self._tasks.unfinished()
        parked = sum(runner.is_parked for runner in runners)
        yield TASKS(len(runners) - parked, "running")
        yield TASKS(parked, "parked")
        read = self._consumers.read_tasks()
        yield READ_TASKS(sum(runner.task.task_id in read for runner in runners))
        yield STREAMS(condition.streams)
        yield BUFFER(self._budget.held)
        for load in self._tasks.loads()[:MOST_LABELLED]:
            yield JOB_BUFFER(load.held_bytes, load.job_id)
        yield BUFFER_LIMIT(self._budget.max_bytes)
        yield BUFFERED(sum(runner.output.waiting_elements for runner in runners))
        yield OBJECTS(fetched.fetched_bytes, "store")
        yield OBJECTS(fetched.cached_bytes, "cache")
        yield CACHE(fetched.held_bytes)
        yield CONNECTIONS(self._sessions.connections - self._sessions.reconnects, "first")
        yield CONNECTIONS(self._sessions.reconnects, "again")
        yield AWAY(len(self._sessions.away()))
        yield from denied(self._denials)

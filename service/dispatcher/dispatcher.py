"""The dispatcher: the decider and its parts. The gRPC services call them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from collections.abc import Coroutine, Iterator
from importlib.metadata import version
from typing import Any

from ...journal.journal import FLUSH_S
from ...journal.proto import events_pb2 as ev
from ...journal.reasons import REPAIRED, SILENT
from ...storage import Storage, Writer
from ..core import commands as c
from ..core.job_states import JobObservations
from ..core.jobs import readers_of
from ..core.state import Consumer, State
from ..core.status import encoded_status
from ..errors import NotFound, Unavailable
from .changes import ScheduleChanges
from .decider import Decider
from .failure_detector import FailureDetector
from .garbage_collector import GarbageCollector
from .graphs import Graphs
from .growing_sources import GrowingSources
from .history import JournalHistory
from .job_reports import JobReports
from .loads import Loads
from .options import DispatcherOptions
from .save_rates import SaveRates
from .saves import Saves
from .task_removal import TaskRemovals
from .user_metrics import UserMetrics

log = logging.getLogger(__name__)

MAX_LEFT = 10_000


class Dispatcher(Decider):
    """A decider with all of its parts.

    `Candidate.take_over` creates it; `close` gives up the journal.
    """

    def __init__(
        self, storage: Storage, writer: Writer, state: State, options: DispatcherOptions
    ) -> None:
        super().__init__(storage, writer, state, options)
        # Why recent consumers left, the latest last; includes departures under earlier leaders.
        self._left: dict[int, str] = {}
        for _, event in state.recent:
            self._remember_leaving(event)
        self.subscribe(self._remember_leaving)
        self.history = JournalHistory(self, writer)
        self.removals = TaskRemovals(self)
        self.graphs = Graphs(self, self.history, storage, writer)
        self.failure_detector = FailureDetector(self)
        self.garbage_collector = GarbageCollector(self, self.graphs)
        self.saves = Saves(self)
        self.changes = ScheduleChanges(self)
        self.growing_sources = GrowingSources(self)
        self.user_metrics = UserMetrics(state)
        self.loads = Loads(state, options.load_window_ms, self.failure_detector.gone_s)
        self.job_reports = JobReports(self)
        self.save_rates = SaveRates(self)
        self._leads_from_s = time.monotonic()
        now_s, now_ms = time.monotonic(), time.time_ns() // 1_000_000
        # By address, monotonic: the clock may jump.
        self._lost_s = {
            address: now_s - max(0, now_ms - lost.time_ms) / 1000
            for address, lost in state.lost_workers.items()
        }
        self.subscribe(self._remember_loss)
        self._tasks: list[asyncio.Task[None]] = []  # they run as long as it leads

    @classmethod
    async def open(
        cls,
        storage: Storage,
        writer: Writer,
        state: State,
        options: DispatcherOptions,
        address: str,
        dashboard: str = "",
    ) -> Dispatcher:
        """Begin the writer's term from the journal's replayed state. Raises Unavailable."""
        self = cls(storage, writer, state, options)
        self._run(self.leadership.keep(), "forebay-leadership")
        key = uuid.uuid4().hex.encode()
        elect = c.ElectLeader(
            term=writer.term,
            address=address,
            version=version("forebay"),
            journal_id=hashlib.sha256(key).hexdigest()[:32],
            position_key=key,
            worker_addresses=options.workers,
            dashboard=dashboard,
        )
        before = [place.configured for place in state.places]
        try:
            await self.execute(elect)
        except BaseException:
            await self.close()
            raise
        if before != list(options.workers) and (before or options.workers):
            log.warning(
                "the list of workers for static sharding was [%s], and is now [%s]: unfinished "
                "epochs under static sharding have ended",
                ", ".join(before), ", ".join(options.workers),
            )  # fmt: skip
        self._run(self.failure_detector.watch(), "forebay-failure-detector")
        self._run(self.garbage_collector.run(), "forebay-garbage-collector")
        self._run(self.saves.follow(), "forebay-saves")
        self._run(self.loads.watch(lambda: self.storage_watch.silent_s > 0), "forebay-loads")
        self._run(self.storage_watch.keep(), "forebay-storage-watch")
        return self

    async def finish(self) -> None:
        """Decide nothing more; return once all decisions are durable, or after FLUSH_S."""
        self.stop()
        with contextlib.suppress(Unavailable, TimeoutError):
            await asyncio.wait_for(self.durable(), FLUSH_S)

    async def close(self) -> None:
        """Flush and give up the journal. Call it only when no request is in progress."""
        self.stop()
        keeping, others = self._tasks[:1], self._tasks[1:]
        for task in (*others, self.snapshot_task, *keeping):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self.graphs.pieces.close()
        await self.growing_sources.close()
        await self.saves.close()
        self.storage_threads.shutdown(wait=False)
        await self.leadership.close()
        await self.journal.close()

    def measured(self) -> dict[str, Any]:
        """For the status: what is no part of the state."""
        appends = self.journal.appends
        return {
            **self.loads.status(),
            "strangers": [peer._asdict() for peer in self.history.refused_peers()],
            "leads_s": time.monotonic() - self._leads_from_s,
            "append_s": appends.sum_s / max(1, sum(appends.counts)),  # on average
            "storage": self.storage_watch.status(),
            "silent_workers": [*self.failure_detector.silent_workers()],
            "unreachable_workers": [*self.failure_detector.unreachable_workers()],
            "worker_timeout_s": _seconds(self.options.worker_timeout_ms),
            "client_timeout_s": _seconds(self.options.client_timeout_ms),
            "lost_workers": self._lost_workers(),
            "save_rates": self.save_rates.status(),
            "schedules": self.changes.schedules.status(),
            "now_ms": time.time_ns() // 1_000_000,
            "removed_jobs": self.job_reports.removed(),
            "failed_saves": self.job_reports.failed_saves(),
        }

    def observations(self, job_id: int) -> JobObservations:
        """What is told of a job, for its state."""
        job, detector = self.state.jobs.get(job_id), self.failure_detector
        readers = [] if job is None else readers_of(self.state, job, unfinished=True)
        gone = [
            {
                "consumer_id": i,
                "silent_s": silent_s,
                "heard": detector.silent_s(i) is not None,
                "peer": detector.peers.get(i),
            }
            for i in readers
            if (silent_s := detector.gone_s(i)) is not None
        ]
        return JobObservations(
            waits=self.loads.waits(job_id), gone=gone, **self.job_reports.of(job_id)
        )

    def _lost_workers(self) -> list[dict[str, Any]]:
        """Those that were presumed dead lately, the latest last."""
        now_s = time.monotonic()
        return [
            {
                "address": address,
                "reason": lost.reason,
                "repaired": lost.reason == REPAIRED,
                "ago_s": now_s - self._lost_s[address],
                "back": address in self.state.worker_at,
            }
            for address, lost in self.state.lost_workers.items()
        ]

    def encoded_status(self) -> Iterator[bytes]:
        """The status as JSON, in pieces."""
        counted = self.user_metrics.shown
        return encoded_status(self.state, counted, self.measured(), self.observations)

    def find_consumer(self, consumer_id: int) -> Consumer:
        """Raises NotFound, with the reason why the consumer is gone."""
        if (consumer := self.state.consumers.get(consumer_id)) is None:
            why = self._left.get(consumer_id)
            if why == SILENT:
                why += (
                    f" for {self.options.client_timeout_ms} ms (--client-timeout-ms): its process "
                    "was stopped, or cut off from the dispatcher; read the dataset again"
                )
            why = why or (
                "it left, or was given up after too long a silence, or its dataset was removed by "
                "force, or it belongs to another dispatcher, or this one lost its state (it was in "
                "memory, or was repaired); read the dataset again"
            )
            raise NotFound(
                f"Unknown iteration client id, or consumer: client id {consumer_id} not found: "
                f"{why}"
            )
        return consumer

    def _remember_loss(self, event: ev.Event) -> None:
        if event.HasField("worker_lost") and not event.worker_lost.left:
            lost = self.state.lost_workers  # the latest last
            self._lost_s[next(reversed(lost))] = time.monotonic()
            self._lost_s = {address: self._lost_s[address] for address in lost}

    def _remember_leaving(self, event: ev.Event) -> None:
        if event.HasField("consumer_left"):
            self._left[event.consumer_left.consumer_id] = event.consumer_left.reason
            if len(self._left) > MAX_LEFT:
                del self._left[next(iter(self._left))]

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self.task_ended)
        self._tasks.append(task)


def _seconds(timeout_ms: int) -> float | None:
    return None if timeout_ms < 0 else timeout_ms / 1000

"""Samples: loads of a dispatcher that leads, each second, for the dashboard's plots; and its notes.

Their memory is bounded, and nothing of them is journaled.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from ...journal.proto import events_pb2 as ev
from ...journal.reasons import SILENT
from ...journal.words import brief, kind_of
from ..dashboard.series import Series
from ..diagnosis import WAITS_FOR, WORKERS_DO
from ..slicing import in_slices
from .dispatcher import Dispatcher
from .metrics import DispatcherMetrics

SAMPLE_S = 1.0
MOST_JOBS = 50
"""Jobs of which samples are kept: those that were read last."""

MOST_NOTES = 50
RATE_SAMPLES = 30
"""Over how many samples the rate of splits is taken."""

FIELDS = (
    *("rate", *(f"for_{cause}" for cause in WAITS_FOR), *WORKERS_DO),
    *("held", "budget", "workers", "wanted", "consumers", "events"),
)
JOB_FIELDS = "rate", "waits", "busy", "wanted"

NOTED = {
    "worker_registered": "change", "worker_drains": "change", "leader_elected": "leader",
    "split_skipped": "error", "save_failed": "error", "consumer_left": "lost",
    "worker_lost": "lost", "save_finished": "", "dataset_removed": "",
}  # fmt: skip
"""The kinds of events that are noted, and their marks in plots (dashboard/views.py), if any."""


class LoadSampler:
    """Everything runs on the dispatcher's event loop."""

    def __init__(self, metrics: DispatcherMetrics) -> None:
        self._metrics = metrics
        self._of: Dispatcher | None = None  # of which there are samples
        self._addresses: dict[int, str] = {}  # by ids, also of workers that are lost
        self._begin(None)

    def _begin(self, dispatcher: Dispatcher | None) -> None:
        self._of = dispatcher
        self.since_ms = time.time_ns() // 1_000_000
        self.series = Series(FIELDS)
        self.job_series: dict[int, Series] = {}
        self.notes: deque[dict[str, Any]] = deque(maxlen=MOST_NOTES)
        self._begun: dict[int, deque[tuple[float, float]]] = {}  # splits, by job
        self._sequence = 0
        if dispatcher is not None:
            state = dispatcher.state
            self._sequence = state.sequence
            self._addresses = {w.worker_id: w.address for w in state.workers.values()}
            before_ms = 0
            for _, event in [*state.recent]:
                self._note(event)
                if event.WhichOneof("event") == "leader_elected" and before_ms and self.notes:
                    away_s = (event.time_ms - before_ms) / 1000
                    self.notes[-1]["text"] += f", {away_s:.1f} s after the event before"
                before_ms = event.time_ms
            dispatcher.subscribe(self._note)

    async def keep(self) -> None:
        """Sample until cancelled."""
        while True:
            dispatcher = self._metrics.dispatcher
            if dispatcher is not self._of:
                self._begin(dispatcher)
            if dispatcher is not None:
                await in_slices(self._sample(dispatcher))
            await asyncio.sleep(SAMPLE_S)

    def _sample(self, dispatcher: Dispatcher) -> Iterator[None]:
        state, loads, now_s = dispatcher.state, dispatcher.loads, time.time()
        hangs = dispatcher.storage_watch.silent_s > 0  # then nothing is measured
        jobs = [] if hangs else [job for _, job in loads.jobs()]
        workers = [one for job in jobs if job.load for one in job.by_worker.values()]
        events, self._sequence = state.sequence - self._sequence, state.sequence
        memory = loads.memory.values()
        sample = (
            None if hangs else sum(job.load.rate for job in jobs if job.load),
            *(
                max((job.waits_for[cause] for job in jobs if job.waits_for), default=None)
                for cause in WAITS_FOR
            ),
            *(
                sum(getattr(one, share) for one in workers) / len(workers) if workers else None
                for share in WORKERS_DO
            ),
            sum(load.held_bytes for _, of in memory for load in of.values()),
            sum(budget for budget, _ in memory),
            len(state.workers),
            None if loads.wanted is None else loads.wanted.workers,
            len(state.consumers),
            events / SAMPLE_S,
        )
        self.series.add(now_s, sample)
        yield
        newest = loads.jobs()[:MOST_JOBS]
        for job_id, job in newest:
            load = None if hangs else job.load
            values = (None, None, None) if load is None else (load.rate, load.waits, load.busy)
            series = self.job_series.setdefault(job_id, Series(JOB_FIELDS))
            series.add(now_s, (*values, job.wanted.workers))
            begun = self._metrics.counts.splits.of(str(job_id)).get("begun", 0)
            done = self._metrics.counts.bundles.of(str(job_id)).get("done", 0)
            its = self._begun.setdefault(job_id, deque(maxlen=RATE_SAMPLES))
            its.append((now_s, begun + done))
            yield
        kept = {job_id for job_id, _ in newest}
        for of in (self.job_series, self._begun):
            for job_id in of.keys() - kept:
                del of[job_id]

    def splits_per_s(self, job_id: int) -> float | None:
        """Splits that were begun, and bundles that were done; None: not known yet."""
        its = self._begun.get(job_id)
        if not its or len(its) < 2:
            return None
        (from_s, before), (to_s, now) = its[0], its[-1]
        return (now - before) / max(to_s - from_s, 1e-3)

    def _note(self, event: ev.Event) -> None:
        """With each event, as a step of a decision: it must take next to no time."""
        kind = event.WhichOneof("event")
        if kind not in NOTED:
            return
        about, mark = getattr(event, kind), NOTED[kind]
        match kind:
            case "consumer_left" if about.reason != SILENT:
                return  # in order
            case "consumer_left":
                text = f"a trainer was given up: {about.reason}"
            case "leader_elected":
                text = f"{about.address} leads in term {about.term}"
                mark *= about.term > 1
            case "worker_registered":
                self._addresses[about.worker_id] = about.address
                text = f"{about.address} is there"
            case "worker_drains":
                text = f"{self._addresses.get(about.worker_id)} drains"
            case "worker_lost":
                address = self._addresses.pop(about.worker_id, "a worker")
                mark = "change" if about.left else mark
                text = f"{address} {'has left' if about.left else 'was given up'}: {about.reason}"
            case "split_skipped":
                where = f"split {about.split} from element {about.element} on"
                text = f"{about.worker_address} left out {where}: {about.reason}"
            case _:
                text = brief(event)
        told = {"time_ms": event.time_ms, "name": kind_of(event), "text": text, "mark": mark}
        self.notes.append(told)

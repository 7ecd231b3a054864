"""Loads: what consumers and workers say of their time, and how many workers follow from it.

Heartbeats bring counters, which are kept for a window. Nothing is journaled: a new leader measures
anew. All shares are of the sender's own time, so a heartbeat's way does not matter.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...journal.splits import ENDLESS
from .. import ranges
from ..core.state import STATIC, Iteration, Job, State
from ..diagnosis import BUSY
from ..http.families import label_value
from ..proto import forebay_pb2 as pb
from ..slicing import in_slices
from .wanted_workers import LIMIT_S, NOBODY, Judge, Load, Wanted, WindowedMaximum, all_jobs

LOOKS = 4
"""How often a window it judges."""

HOLDS = 6
"""Windows for which fewer workers must do."""

NO_WORKER = "no worker", "no worker has told of a task of it"
MADE = "made", "its elements are made, and wait for trainers"
MEASURING = "measuring", "is being measured"

TELLING = 0.9
"""Who waits for a larger share of the time, and gets nothing, does nothing else."""

FADES = 0.9
"""With each judgement, what the largest rate counts for."""

UNLIKELY = 20
"""So many elements do not fail to come by chance."""

NO_SAVES = Wanted(0, "saves", "the saves are complete")

MEMORY = "job_id", "held_bytes", "parked_tasks", "shed_elements"
"""Of a JobLoad, what is told of a worker's memory."""

MOST_REPORTS = 64
"""Of a member, within a window."""


class Reports:
    """The counters of one member. Their last one is of elements, if a worker tells them."""

    def __init__(self) -> None:
        self.newest: tuple[int, ...] = ()
        self.told_s = self.made_s = 0.0  # the newest report, and the one that told of an element
        self._reports: deque[tuple[float, tuple[int, ...]]] = deque(maxlen=MOST_REPORTS)

    def add(self, now_s: float, counters: tuple[int, ...]) -> None:
        if self._reports and len(counters) != len(self._reports[-1][1]):
            self._reports.clear()  # another version tells other counters
        if counters[-1:] != self.newest[-1:]:
            self.made_s = now_s
        self.told_s = now_s
        self.newest = counters
        self._reports.append((now_s, counters))

    def grown(self, from_s: float) -> tuple[int, ...]:
        """By how much each has grown since then, as far as is known; empty if it is not."""
        reports = self._reports
        while reports and reports[0][0] < from_s:
            reports.popleft()
        if len(reports) < 2:
            return ()
        first, last = reports[0][1], reports[-1][1]
        return tuple(max(0, now - before) for before, now in zip(first, last, strict=True))


class WorkerShare(NamedTuple):
    """What a worker does for a job: shares of its time, and elements a second."""

    working: float
    backpressured: float
    no_split: float
    elements_per_s: float


@dataclass
class MeasuredJob:
    """A job that has consumers, or had some lately."""

    judge: Judge
    workers: dict[int, Reports] = field(default_factory=dict)  # that run it
    consumers: dict[int, Reports] = field(default_factory=dict)
    since_s: float = 0.0  # the same workers run it
    name: str = ""
    read_s: float = 0.0  # when it had consumers last
    load: Load | None = None  # None: nobody reads it, or there has been too little to go by
    judged_s: float = 0.0
    usual_rate: float = 0.0  # the largest that was judged, fading
    wanted: Wanted = NOBODY
    caused_s: float = 0.0  # since when it is wanted for the present cause
    by_worker: dict[int, WorkerShare] = field(default_factory=dict)  # as of `load`
    waits_for: dict[str, float] = field(default_factory=dict)  # share of the time, by cause
    stuck_s: dict[str, float] = field(default_factory=dict)  # since when they do little else
    bytes_per_s: float | None = None  # that consumers receive; None: they do not tell


class Loads:
    """Runs on the dispatcher's event loop."""

    def __init__(
        self, state: State, window_ms: int, gone_s: Callable[[int], float | None] = lambda _: None
    ) -> None:
        """`gone_s` says of a consumer how long it is gone, as the failure detector's."""
        self._state = state
        self._gone_s = gone_s
        self._window_s = window_ms / 1000
        self._jobs: dict[int, MeasuredJob] = {}
        self.memory: dict[int, tuple[int, dict[int, pb.JobLoad]]] = {}
        """By worker: its budget in bytes, and the newest load of each of its jobs."""
        self._told: dict[int, pb.WorkerHeartbeatRequest] = {}  # by worker, in the same way
        self.wanted: Wanted | None = None  # before the first judgement
        self._saves = WindowedMaximum(HOLDS * self._window_s)

    def jobs(self) -> list[tuple[int, MeasuredJob]]:
        """Jobs that are read, or were lately, by id: those of the last reads first."""
        return sorted(self._jobs.items(), key=lambda item: item[1].read_s, reverse=True)

    def consumer_told(self, consumer_id: int, told: pb.ConsumerLoad) -> None:
        """A consumer's heartbeat. Ignores consumers that have left."""
        state = self._state
        if (consumer := state.consumers.get(consumer_id)) is None:
            return
        job = self._job(state.iterations[consumer.iteration_id].job_id)
        counters: tuple[int, ...] = (told.open_ms, told.waited_ms, told.elements)
        if told.HasField("network_ms"):
            counters += told.network_ms, told.dispatcher_ms, told.no_task_ms, told.bytes
        job.consumers.setdefault(consumer_id, Reports()).add(time.monotonic(), counters)

    def worker_told(self, address: str, uid: int, told: pb.WorkerHeartbeatRequest) -> None:
        """A worker's heartbeat. Ignores workers that are not registered, and heartbeats that tell
        nothing of loads."""
        state, now_s = self._state, time.monotonic()
        worker = state.workers.get(state.worker_at.get(address, 0))
        if worker is None or worker.uid != uid or not told.memory_budget:
            return
        worker_id = worker.worker_id
        loads = {load.job_id: load for load in told.loads if load.job_id in state.jobs}
        self.memory[worker_id] = told.memory_budget, loads
        self._told[worker_id] = told
        if worker.draining:
            return  # its tasks go on elsewhere
        for job_id, job in self._jobs.items():
            if job_id not in loads and job.workers.pop(worker_id, None) is not None:
                job.since_s = now_s
        for job_id, load in loads.items():
            job = self._job(job_id)
            if worker_id not in job.workers:
                job.workers[worker_id] = Reports()
                job.since_s = now_s
            counters = load.working_ms, load.backpressured_ms, load.no_split_ms, load.elements
            job.workers[worker_id].add(now_s, counters)

    async def watch(self, hangs: Callable[[], bool]) -> None:
        """Judge now and then, until cancelled; but nothing of the time in which the storage
        `hangs`, as all wait for it."""
        while True:
            if hangs():
                for job in self._jobs.values():
                    job.since_s = time.monotonic()
            else:
                await in_slices(self.judge_all())
            await asyncio.sleep(self._window_s / LOOKS)

    def status(self) -> dict[str, Any]:
        """For the status: what is measured, which is no part of the state."""
        now_s = time.monotonic()
        return {
            "wanted_workers": (self.wanted and {**self.wanted._asdict(), "ready": self._ready()}),
            "loads": [
                {
                    "job_id": i,
                    "wanted": job.wanted._asdict(),
                    "since_s": now_s - job.caused_s,
                    "waits_for": job.waits_for,
                    "stuck_s": {cause: now_s - at_s for cause, at_s in job.stuck_s.items()},
                    "bytes_per_s": job.bytes_per_s,
                    "tells": len(job.consumers),
                    **({} if job.load is None else self._measured(job.load, job)),
                }
                for i, job in self.jobs()
            ],
            "memory": [
                {
                    "address": self._state.workers[worker_id].address,
                    "budget_bytes": budget,
                    "host": _host(self._told[worker_id]),
                    "cache": _numbers(self._told[worker_id], "cache"),
                    "jobs": [
                        {name: getattr(load, name) for name in MEMORY} for load in loads.values()
                    ],
                }
                for worker_id, (budget, loads) in self.memory.items()
                if worker_id in self._state.workers
            ],
        }

    def consumers(self, job_id: int) -> dict[int, dict[str, float | None]]:
        """What each consumer of a job received since it began; in the window, which share of its
        time it waited, and how many elements a second it received; and how long it is gone."""
        job = self._jobs.get(job_id)
        from_s = time.monotonic() - self._window_s
        found: dict[int, dict[str, float | None]] = {}
        for consumer_id, reports in ({} if job is None else job.consumers).items():
            if consumer_id not in self._state.consumers:
                continue
            elements, gone_s = reports.newest[2], self._gone_s(consumer_id)
            lately = reports.grown(from_s) if gone_s is None else ()
            open_ms, waited_ms, grown, *_ = lately or (0, 0, 0)
            found[consumer_id] = {
                "gone_s": gone_s,
                "elements": elements,
                "waits": min(waited_ms / open_ms, 1.0) if open_ms else None,
                "elements_per_s": 1000 * grown / open_ms if open_ms else None,
            }
        return found

    def waits(self, job_id: int) -> bool:
        """Whether all who read a job wait, and got nothing in the window, as far as is told. Of
        TensorFlow's consumers workers tell: they make nothing, though nothing holds them up."""
        if (job := self._jobs.get(job_id)) is None:
            return False
        from_s = time.monotonic() - self._window_s
        if read := [x for x in (x.grown(from_s) for x in self._there(job).values()) if x]:
            return all(not x[2] and x[1] + sum(x[3:6]) >= TELLING * x[0] for x in read)
        made = [x for x in (x.grown(from_s) for x in job.workers.values()) if x]
        return bool(made) and not any(elements or held for _, held, _, elements in made)

    def _there(self, job: MeasuredJob) -> dict[int, Reports]:
        """The reports of its consumers that are neither gone nor have left."""
        there = self._state.consumers
        return {i: x for i, x in job.consumers.items() if i in there and self._gone_s(i) is None}

    def _measured(self, load: Load, job: MeasuredJob) -> dict[str, Any]:
        workers = self._state.workers
        return {
            "waits": load.waits,
            "busy": load.busy,
            "no_split": load.no_split,
            "workers": load.workers,
            "elements_per_s": load.rate,
            "by_worker": [
                {"address": workers[i].address, **one._asdict()}
                for i, one in job.by_worker.items()
                if i in workers
            ],
        }

    def _job(self, job_id: int) -> MeasuredJob:
        if job_id not in self._jobs:
            judge = Judge(HOLDS * self._window_s)
            self._jobs[job_id] = MeasuredJob(judge, caused_s=time.monotonic())
        return self._jobs[job_id]

    def _ready(self) -> int:
        return sum(not worker.draining for worker in self._state.workers.values())

    def judge_all(self) -> Iterator[None]:
        """A step for each job."""
        state, now_s = self._state, time.monotonic()
        self.memory = {i: of for i, of in self.memory.items() if i in state.workers}
        self._told = {i: told for i, told in self._told.items() if i in state.workers}
        read = {
            state.iterations[c.iteration_id].job_id
            for i, c in state.consumers.items()
            if self._gone_s(i) is None
        }
        for job_id in {*self._jobs, *read}:
            job, of = self._job(job_id), state.jobs.get(job_id)
            cause = job.wanted.cause
            if job_id in read and of is not None:
                job.name, job.read_s = label_value(of.user_name), now_s
                self._judge(job, of, now_s)
            else:
                job.load, job.wanted = None, job.judge.hold(NOBODY, now_s)
                job.waits_for, job.bytes_per_s = {}, None
                if not job.wanted.workers and (of is None or now_s - job.read_s > LIMIT_S):
                    del self._jobs[job_id]
            if job.wanted.cause != cause:
                job.caused_s = now_s
            yield
        wanted = [(job.name, job.wanted) for job in self._jobs.values() if job.wanted.workers]
        ready = max(1, self._ready())
        written = Wanted(ready, "saves", "workers write saves")
        saves = self._saves.hold(written if state.saves else NO_SAVES, now_s)
        self.wanted = all_jobs(wanted, saves)

    def _judge(self, job: MeasuredJob, of: Job, now_s: float) -> None:
        """Judge a job, if the window has enough of it."""
        state = self._state
        job.consumers = {i: x for i, x in job.consumers.items() if i in state.consumers}
        told = self._there(job).values()
        grown = (x.grown(now_s - self._window_s) for x in told)
        job.waits_for, job.bytes_per_s = _waits([x for x in grown if len(x) > 3 and x[0]])
        stuck = (cause for cause, share in job.waits_for.items() if share > TELLING)
        job.stuck_s = {cause: job.stuck_s.get(cause, now_s) for cause in stuck}
        there = {
            i: x
            for i, x in job.workers.items()
            if (worker := state.workers.get(i)) is not None and not worker.draining
        }
        if len(there) < len(job.workers):
            job.workers, job.since_s = there, now_s
        from_s = max(job.since_s, now_s - self._window_s)
        if now_s - job.since_s >= self._window_s / 2:
            workers = {i: one for i, x in there.items() if (one := _worker(x.grown(from_s)))}
            consumers = [x for x in (x.grown(from_s) for x in told) if sum(x)]
            if workers and consumers:
                if job.load is None:
                    job.judge.hold(job.wanted, now_s)  # what was wanted so far
                room = _room(state, of, len(workers))
                load = _load(workers.values(), consumers, room)
                job.usual_rate = max(load.rate, FADES * job.usual_rate)
                stalls = _stalls(there.values(), load, job.usual_rate)
                job.load, job.judged_s = load._replace(stalls=stalls), now_s
                job.by_worker = workers
                job.wanted = job.judge.judge(job.load, now_s)
                return
        if not there or now_s - job.judged_s > 2 * self._window_s:
            job.load = None
        if job.load is None:
            if all(iteration.finished for iteration in _read(state, of)):
                job.wanted = job.judge.hold(Wanted(1, *MADE), now_s)
                return
            held = job.judge.hold(NOBODY, now_s)
            first = Wanted(max(1, self._ready()), *(MEASURING if there else NO_WORKER))
            job.wanted = first._replace(workers=max(first.workers, held.workers))


def _host(told: pb.WorkerHeartbeatRequest) -> dict[str, float] | None:
    found = _numbers(told, "host")  # None: it is not on Linux
    return None if found is None else {"busy": found.pop("busy_permille") / 1000, **found}


def _numbers(told: pb.WorkerHeartbeatRequest, name: str) -> dict[str, int] | None:
    """The fields of this message; None if the worker does not tell it."""
    message = getattr(told, name)
    there = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    return there if told.HasField(name) else None


def _worker(grown: tuple[int, ...]) -> WorkerShare | None:
    if not (open_ms := sum(grown[:3])):
        return None
    working, held, none, elements = (each / open_ms for each in grown)
    return WorkerShare(working, held, none, 1000 * elements)


def _waits(consumers: list[tuple[int, ...]]) -> tuple[dict[str, float], float | None]:
    """Shares of the time that they waited, by cause (client/metrics.py); bytes a second."""
    if not consumers:
        return {}, None
    open_ms, workers, _, network, dispatcher, no_task, received = map(
        sum, zip(*consumers, strict=True)
    )
    waited = {"workers": workers, "network": network, "dispatcher": dispatcher, "no_task": no_task}
    shares = {cause: min(1.0, ms / open_ms) for cause, ms in waited.items()}
    return shares, 1000 * len(consumers) * received / open_ms


def _load(
    workers: Collection[WorkerShare], consumers: Iterable[tuple[int, ...]], room: float
) -> Load:
    busy = sum(one.working for one in workers)
    no_split = sum(one.no_split for one in workers)
    rate = sum(one.elements_per_s for one in workers)
    taken = wish = opened = waited = 0.0
    for open_ms, waited_ms, elements, *_ in consumers:
        open_ms, waited_ms = max(open_ms, 1), min(waited_ms, open_ms)
        taken += elements / open_ms
        wish += elements / max(open_ms - waited_ms, 1)
        opened += open_ms
        waited += waited_ms
    # Of consumers that get nothing, their time; else those count more that take more.
    waits = 1 - taken / wish if wish else waited / max(opened, 1)
    return Load(len(workers), busy, no_split, waits, rate, room)


def _stalls(workers: Collection[Reports], load: Load, usual_rate: float) -> bool:
    """Whether workers work, and made nothing in the window, or for longer than UNLIKELY elements
    usually take."""
    since_s = max(x.told_s for x in workers) - max(x.made_s for x in workers)
    return load.busy >= BUSY and (not load.rate or since_s * usual_rate > UNLIKELY)


def _room(state: State, job: Job, workers: int) -> float:
    """How many further workers would get a split of the job."""
    if job.sharding in STATIC:
        return max(0, len(state.places) - workers)
    return max((_unleased_splits(i) for i in _read(state, job) if not i.finished), default=0)


def _read(state: State, job: Job) -> Iterator[Iteration]:
    """Those of its iterations that have consumers."""
    for iteration_id in job.iterations.values():
        iteration = state.iterations.get(iteration_id)
        if iteration is not None and iteration.consumers:
            yield iteration


def _unleased_splits(iteration: Iteration) -> float:
    """Its splits that no worker has; infinitely many if they never end, or all workers read all."""
    if iteration.claims is not None:
        return iteration.claims.unclaimed
    left = math.inf
    for ledger in iteration.ledgers:
        if ledger.size_together != ENDLESS and not ledger.grows and ledger.leased_with is None:
            waiting = ledger.size_together - ledger.next + ranges.total(ledger.returned)
            left = min(left, waiting + sum(map(ranges.total, ledger.left_over.values())))
    return left

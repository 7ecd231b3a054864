"""Garbage collection: iterations that nobody reads, jobs and datasets that nobody uses, and blobs.

The core decides and journals what is removed with an entity. This module decides when to remove it,
by the clock and the options.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import suppress

from ..core import commands as c
from ..core.iterations import first_epoch
from ..core.jobs import readers_of
from ..core.state import Iteration
from ..errors import FailedPrecondition, NotFound, Unavailable
from ..http.families import printable
from .decider import Decider, execute_some
from .graphs import Graphs

log = logging.getLogger(__name__)

CHECK_S = 0.5


class GarbageCollector:
    """The garbage collector of one dispatcher. Everything runs on its event loop."""

    def __init__(self, decider: Decider, graphs: Graphs) -> None:
        self._decider = decider
        self._graphs = graphs

    async def run(self) -> None:
        """Collect, until cancelled."""
        gc_s = self._decider.options.job_gc_check_interval_ms / 1000
        next_gc = time.monotonic() + gc_s
        collected = False
        while True:
            await asyncio.sleep(min(CHECK_S, gc_s))
            try:
                await self._bound_idle_iterations()
                if time.monotonic() >= next_gc:
                    if await self.collect_idle_iterations() or await self.remove_unused():
                        continue  # the next turn removes more
                    next_gc = time.monotonic() + gc_s
                    await self._graphs.delete_unused()
                    if not collected:  # peers that know lost events have reported them by now
                        collected = True
                        await self._graphs.collect()
            except Unavailable:
                if self._decider.stopped.is_set():
                    return

    async def collect_idle_iterations(self) -> bool:
        """Collect a batch of expired idle iterations; returns whether there may be more."""
        options, now_ms = self._decider.options, time.time_ns() // 1_000_000
        timeouts_ms = (options.job_gc_timeout_ms, options.dynamic_gc_timeout_ms)
        over = []
        for iteration in self._idle_iterations():
            timeout_ms = timeouts_ms[iteration.keeps_progress]
            if iteration.finished:
                timeout_ms = options.finished_retention_ms
            if 0 <= timeout_ms <= now_ms - iteration.idle_since_ms:
                over.append(iteration)
        return await execute_some(map(self._collect, over))

    async def remove_unused(self) -> bool:
        """Remove a batch of jobs and datasets unused for long; whether there may be more."""
        options = self._decider.options
        state, now_ms = self._decider.state, time.time_ns() // 1_000_000

        def is_old(used_ms: int, timeout_ms: float) -> bool:
            return used_ms > 0 and 0 <= timeout_ms <= now_ms - used_ms

        unused_ms = options.unused_retention_hours * 3_600_000
        unused: list[c.Command] = []
        being_read = set()
        for job in state.jobs.values():
            # A job without a name goes with its iteration, unless no consumer ever joined one.
            never_read = not job.name and is_old(job.used_ms, options.job_gc_timeout_ms)
            if readers_of(state, job):
                being_read.add(job.dataset_id)
            elif never_read or is_old(job.used_ms, unused_ms):
                unused.append(c.RemoveJob(job_id=job.job_id))
        for dataset in state.datasets.values():
            being_read |= {source.dataset_id for source in dataset.outline.mixture.sources}
        unused.extend(
            c.RemoveDataset(dataset_id=dataset.dataset_id)
            for dataset in state.datasets.values()
            if is_old(dataset.used_ms, unused_ms) and dataset.dataset_id not in being_read
        )
        return await execute_some(map(self._remove, unused))

    async def _remove(self, command: c.Command) -> None:
        with suppress(FailedPrecondition, NotFound):  # it got a reader, or was removed, meanwhile
            await self._decider.execute(command)
            if isinstance(command, c.RemoveDataset):
                log.info("dataset %s was removed: nobody has used it", command.dataset_id)

    async def _bound_idle_iterations(self) -> None:
        """Collect idle epochs beyond the latest `max_idle_iterations` of each job."""
        most = self._decider.options.max_idle_iterations
        if most >= 0:
            of_jobs: dict[int, list[Iteration]] = {}
            for iteration in filter(lambda i: i.tasks, self._idle_iterations()):
                of_jobs.setdefault(iteration.job_id, []).append(iteration)
            for idle in of_jobs.values():
                idle.sort(key=lambda i: (i.idle_since_ms, i.iteration_id), reverse=True)
            await execute_some(self._collect(i) for idle in of_jobs.values() for i in idle[most:])

    def _idle_iterations(self) -> Iterator[Iteration]:
        """Iterations without consumers that are not paused already."""
        for iteration in self._decider.state.iterations.values():
            paused = iteration.keeps_progress and not iteration.tasks and not iteration.finished
            if not iteration.consumers and not paused:
                yield iteration

    async def _collect(self, iteration: Iteration) -> None:
        state = self._decider.state
        if state.iterations.get(iteration.iteration_id) is not iteration or iteration.consumers:
            return  # a consumer joined, or it was removed, meanwhile
        job = state.jobs[iteration.job_id]
        if iteration.keeps_progress and not iteration.finished:
            log.warning(
                "epoch %d of job %s is paused, since nobody reads it: a consumer that joins it "
                "gets the splits that are left, not what workers have begun",
                iteration.epoch - first_epoch(job), printable(job.user_name),
            )  # fmt: skip
        await self._decider.execute(c.CollectIteration(iteration_id=iteration.iteration_id))

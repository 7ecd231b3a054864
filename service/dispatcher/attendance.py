"""Who is there: when workers and consumers were last heard of, and who is given up.

That is not state: after a replay everybody counts as seen so lately that those who live have time
to be heard. To give somebody up is a decision like any other. A worker that was given up and lives
after all registers again, and goes on with its tasks (core/state.py, LostTask).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..core import commands as c
from ..core.state import Iteration
from ..errors import Unavailable

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

log = logging.getLogger(__name__)

CHECK_S = 0.5
REDISCOVERIES = 3
"""How many times `reconnect_grace_ms` a worker has to find a dispatcher that has just begun."""


class Attendance:
    """Of the members of one dispatcher. Everything runs on its event loop."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        state, now = dispatcher.state, time.monotonic()
        self._seen: dict[int, float] = dict.fromkeys((*state.workers, *state.consumers), now)
        for worker in state.workers.values():
            if not worker.stock:  # it has lost its connection, and looks for us all the time
                self._seen[worker.worker_id] -= self._early_s(REDISCOVERIES)
        self._beats: dict[int, float] = {}  # when the last heartbeat came of those in touch

    def saw(self, member_id: int) -> float:
        """A worker's or a consumer's heartbeat has begun or ended; when, for `lost_touch`."""
        now = self._seen[member_id] = self._beats[member_id] = time.monotonic()
        return now

    def heard_of(self, task_id: int) -> None:
        """A task's worker has asked something else: it lives, though its heartbeat be late."""
        task = self._dispatcher.state.tasks.get(task_id)
        if task is not None:
            # Not for long, if its connection broke: this may be what it asked before it died.
            early_s = 0.0 if task.worker_id in self._beats else self._early_s(1)
            now = time.monotonic()
            self._seen[task.worker_id] = max(self._seen.get(task.worker_id, now), now - early_s)

    def lost_touch(self, member_id: int, beat: float) -> None:
        """Its connection broke: it has `reconnect_grace_ms` to come back, unless it has."""
        if self._beats.get(member_id) != beat:
            return
        del self._beats[member_id]
        # A trainer whose connection was cut must not lose its place: it has the whole timeout.
        if member_id in self._dispatcher.state.workers:
            self._seen[member_id] = time.monotonic() - self._early_s(1)

    def _early_s(self, graces: int) -> float:
        """How much of a worker's timeout is over for one that has `graces` to come back."""
        options = self._dispatcher.options
        return max(0, options.worker_timeout_ms - graces * options.reconnect_grace_ms) / 1000

    async def watch(self) -> None:
        """Give up who is silent for too long, and what nobody reads; until it is cancelled."""
        gc_s = self._dispatcher.options.job_gc_check_interval_ms / 1000
        interval_s = min(CHECK_S, gc_s)
        next_gc = time.monotonic() + gc_s
        while True:
            deaf_s = await self._listen(interval_s)
            if deaf_s >= interval_s:
                self._seen = {i: t + deaf_s for i, t in self._seen.items()}
            try:
                await self._expire_members()
                await self._bound_idle_iterations()
                if time.monotonic() >= next_gc:
                    next_gc = time.monotonic() + gc_s
                    await self._collect_idle_iterations()
            except Unavailable:
                if self._dispatcher.stopped.is_set():
                    return

    async def _listen(self, interval_s: float) -> float:
        """Wait; for how many seconds of that no sign of life could have been heard."""
        dispatcher, begun = self._dispatcher, time.monotonic()
        durable = dispatcher.position().sequence
        waiting = dispatcher.state.sequence > durable
        await asyncio.sleep(interval_s)
        paused_s = time.monotonic() - begun - interval_s  # what came lies in the sockets, unread
        stuck = waiting and dispatcher.position().sequence == durable
        if stuck or not dispatcher.leadership.known:  # the storage is away: no call is answered
            return paused_s + interval_s
        return paused_s

    async def _expire_members(self) -> None:
        now, options, state = time.monotonic(), self._dispatcher.options, self._dispatcher.state
        self._seen, self._beats = (
            {i: t for i, t in times.items() if i in state.workers or i in state.consumers}
            for times in (self._seen, self._beats)
        )
        for members, timeout_ms, lose in (
            (state.workers, options.worker_timeout_ms, self._lose_worker),
            (state.consumers, options.client_timeout_ms, self._lose_consumer),
        ):
            if timeout_ms < 0:
                continue
            for member_id in list(members):
                quiet_s = now - self._seen.setdefault(member_id, now)
                if quiet_s * 1000 > timeout_ms:
                    await lose(member_id)

    async def _lose_worker(self, worker_id: int) -> None:
        worker = self._dispatcher.state.workers.get(worker_id)
        if worker is None:  # it left while another one was given up
            return
        log.warning("worker %s does not answer and is given up", worker.address)
        await self._dispatcher.execute(c.LoseWorker(worker_id=worker_id, reason="no sign of life"))

    async def _lose_consumer(self, consumer_id: int) -> None:
        await self._dispatcher.execute(
            c.LeaveIteration(consumer_id=consumer_id, reason="no sign of life")
        )

    async def _collect_idle_iterations(self) -> None:
        options, now_ms = self._dispatcher.options, time.time_ns() // 1_000_000
        timeouts_ms = (options.job_gc_timeout_ms, options.dynamic_gc_timeout_ms)
        over = []
        for iteration in self._idle_iterations():
            timeout_ms = timeouts_ms[bool(iteration.providers)]
            if 0 <= timeout_ms <= now_ms - iteration.idle_since_ms:
                over.append(iteration)
        await self._collect(over)

    async def _bound_idle_iterations(self) -> None:
        """Epochs that trainers leave early are let go beyond the latest ones of each job."""
        most = self._dispatcher.options.max_idle_iterations
        if most >= 0:
            of_jobs: dict[int, list[Iteration]] = {}
            for iteration in self._idle_iterations():
                of_jobs.setdefault(iteration.job_id, []).append(iteration)
            for idle in of_jobs.values():
                idle.sort(key=lambda i: (i.idle_since_ms, i.iteration_id), reverse=True)
                await self._collect(idle[most:])

    def _idle_iterations(self) -> Iterator[Iteration]:
        """Those without consumers that anything can be taken from."""
        for iteration in self._dispatcher.state.iterations.values():
            if not iteration.consumers and (iteration.tasks or not iteration.providers):
                yield iteration

    async def _collect(self, iterations: list[Iteration]) -> None:
        for iteration in iterations:
            current = self._dispatcher.state.iterations.get(iteration.iteration_id)
            if current is iteration and not iteration.consumers:  # nobody has joined meanwhile
                await self._dispatcher.execute(
                    c.CollectIteration(iteration_id=iteration.iteration_id)
                )

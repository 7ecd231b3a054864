"""Who is there: when workers and consumers were last heard of, and who is given up.

That is not state: after a replay everybody who lives has time to find the dispatcher again,
whatever the timeouts. To give somebody up is a decision like any other. A worker that was given up
and lives after all registers again, and goes on with its tasks (core/state.py, Orphan).

A broken connection may be a process that died, or a network that hiccups; a worker that lives has
`reconnect_grace_ms` to come back, so that its tasks go on undisturbed. If a consumer that has been
connected to the worker is refused there besides, the process is gone: nobody listens at its
address any more. That is waited for only until news that overtook each other have arrived. Who has
not been connected to it may have met a firewall; that counts as a broken connection does, while the
worker does not wait for news here: what it was answered last may have reached nobody.

A consumer keeps its place for all of its timeout. But a worker that is about to end, and has lost
its connection to the consumer as well, waits for it no longer than `reconnect_grace_ms`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..core import commands as c
from ..core.jobs import readers_of
from ..core.state import Iteration, Worker
from ..errors import FailedPrecondition, NotFound, Unavailable

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

log = logging.getLogger(__name__)

CHECK_S = 0.5
AT_ONCE = 256
"""What nobody reads or uses goes so many at a time, in one commit. Members are seen to between."""

REDISCOVERIES = 3
"""How many times `reconnect_grace_ms` members have to find a dispatcher that has just begun:
TensorFlow's wait longer and longer between their attempts."""

REFUSED_GRACE_S = 1.0
"""For a worker whose connection has broken, and at whose address nobody listens."""

EXPECTED_S = 3600.0
"""For a stock client to begin to read."""

SILENT = "no sign of life"
GONE = "its connection broke, and its address refuses consumers"
REFUSES = "it asks for no news, and its address refuses consumers"


@dataclass
class _Presence:
    """What is known of a member."""

    until_s: float  # when it is given up, monotonic
    polls: int = 0  # that it has begun
    waiting: int = 0  # of them, those that are here
    waits: bool = False  # in the newest of them
    broken: bool = True  # the newest of them was, or there is none yet
    refuses: bool = False  # consumers that had been connected to it, since it spoke last
    refuses_strangers: bool = False  # consumers that had not been, since then
    gone_from_s: float = math.inf  # a consumer that does not come back, once its poll has broken


def _now_ms() -> int:
    """As events have it."""
    return time.time_ns() // 1_000_000


class Attendance:
    """Of the members of one dispatcher. Everything runs on its event loop."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._members: dict[int, _Presence] = {}
        for member_id in (*dispatcher.state.workers, *dispatcher.state.consumers):
            self._present(member_id)

    def saw(self, member_id: int) -> None:
        """A worker or a consumer gave a sign of life."""
        member = self._present(member_id)
        member.until_s = time.monotonic() + self._timeout_s(member_id)
        member.refuses = member.refuses_strangers = False
        member.gone_from_s = math.inf

    def is_gone(self, consumer_id: int) -> bool:
        """Whether nobody need wait for what the consumer may have to say: it has left, or its
        connection broke and it has not come back in time."""
        if consumer_id not in self._dispatcher.state.consumers:
            return True
        return time.monotonic() > self._present(consumer_id).gone_from_s

    def expects(self, consumer_id: int) -> None:
        """It will give signs of life once it begins to read, whenever that is. TensorFlow's do so:
        a trainer may make its iterator long before its first step."""
        until_s = time.monotonic() + max(EXPECTED_S, self._timeout_s(consumer_id))
        self._present(consumer_id).until_s = until_s

    def heard_of(self, task_id: int) -> None:
        """A task's worker has asked something else: it lives, though its heartbeat be late."""
        task = self._dispatcher.state.tasks.get(task_id)
        if task is not None:
            member = self._present(task.worker_id)
            member.refuses_strangers = False
            # Not for long, if its connection broke: this may be what it asked before it died.
            left_s = self._grace_s if member.broken else self._timeout_s(task.worker_id)
            member.until_s = max(member.until_s, time.monotonic() + left_s)

    @contextmanager
    def poll(self, member_id: int) -> Iterator[None]:
        """Around a heartbeat that waits, and its answer: a sign of life, and one of death if it
        breaks, or could not be answered, and the member does not come back.
        """
        self.saw(member_id)
        member = self._present(member_id)
        member.polls += 1
        member.waiting += 1
        number, member.waits, member.broken = member.polls, True, False
        broken = False
        try:
            yield
        except (asyncio.CancelledError, Unavailable):  # who is told to, asks again at once
            broken = True
            raise
        finally:
            member.waiting -= 1
            if number == member.polls:  # or it has come back already
                member.waits, member.broken = False, broken
                member.until_s = time.monotonic() + self._timeout_s(member_id)
                if broken:
                    member.gone_from_s = time.monotonic() + self._grace_s
                self._shorten(member_id, member)

    def refuses(self, worker_id: int, answered: bool) -> None:
        """A consumer finds nobody at the worker's address; `answered` if it had been connected."""
        member = self._present(worker_id)
        if answered:
            member.refuses = True
        else:
            member.refuses_strangers = True
        self._shorten(worker_id, member)

    def _present(self, member_id: int) -> _Presence:
        """Who is new has not been heard yet: its connection to whoever led before has broken."""
        member = self._members.get(member_id)
        if member is None:
            found_s, worker = REDISCOVERIES * self._grace_s, self._worker(member_id)
            timeout_s = max(self._timeout_s(member_id), found_s)
            if worker is not None and not worker.stock and timeout_s < math.inf:
                timeout_s = found_s  # it looks for us all the time
            now = time.monotonic()
            member = _Presence(now + timeout_s, gone_from_s=now + found_s)
            self._members[member_id] = member
        return member

    def _shorten(self, member_id: int, member: _Presence) -> None:
        """What a member that does not wait here is given, by what is known of it."""
        # A trainer whose connection was cut must not lose its place: it has the whole timeout.
        if member.waits or self._worker(member_id) is None or member.until_s == math.inf:
            return
        if member.broken and member.refuses:
            left_s = min(self._grace_s, REFUSED_GRACE_S)
        elif member.refuses or (member.broken and member.polls) or self._asks_no_more(member):
            left_s = self._grace_s
        else:
            return
        member.until_s = min(member.until_s, time.monotonic() + left_s)

    @staticmethod
    def _asks_no_more(member: _Presence) -> bool:
        """It has had an answer, has not come again since, and who comes to it is refused."""
        return member.refuses_strangers and member.polls > 0 and not member.waiting

    def _worker(self, member_id: int) -> Worker | None:
        """None if it is a consumer."""
        return self._dispatcher.state.workers.get(member_id)

    def _timeout_s(self, member_id: int) -> float:
        options = self._dispatcher.options
        worker = self._worker(member_id) is not None
        timeout_ms = options.worker_timeout_ms if worker else options.client_timeout_ms
        if timeout_ms < 0:
            return math.inf
        # Silence says less than a connection that broke.
        return max(timeout_ms / 1000, self._grace_s if worker else 0)

    @property
    def _grace_s(self) -> float:
        return self._dispatcher.options.reconnect_grace_ms / 1000

    async def watch(self) -> None:
        """Give up who is silent for too long, and what nobody reads; until it is cancelled."""
        gc_s = self._dispatcher.options.job_gc_check_interval_ms / 1000
        interval_s = min(CHECK_S, gc_s)
        next_gc = time.monotonic() + gc_s
        collected = False
        while True:
            deaf_s = await self._listen(interval_s)
            if deaf_s >= interval_s:
                for member in self._members.values():
                    member.until_s += deaf_s
                    member.gone_from_s += deaf_s
            try:
                await self._expire_members()
                await self._bound_idle_iterations()
                if time.monotonic() >= next_gc:
                    if await self._collect_idle_iterations() or await self._remove_unused():
                        continue  # with the others in the next turn
                    next_gc = time.monotonic() + gc_s
                    await self._dispatcher.graphs.delete_unused()
                    if not collected:  # who knows of events that were lost has said so by now
                        collected = True
                        await self._dispatcher.graphs.collect()
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
        state = self._dispatcher.state
        self._members = {
            i: member
            for i, member in self._members.items()
            if i in state.workers or i in state.consumers
        }
        now = time.monotonic()
        members = (*state.workers, *state.consumers)
        await _at_once(self._lose(i) for i in members if now > self._present(i).until_s)

    async def _lose(self, member_id: int) -> None:
        worker, member = self._worker(member_id), self._members[member_id]
        if worker is not None:
            reason = SILENT
            if member.refuses or self._asks_no_more(member):
                reason = GONE if member.broken else REFUSES
            log.warning("worker %s is given up: %s", worker.address, reason)
            await self._dispatcher.execute(c.LoseWorker(worker_id=member_id, reason=reason))
        elif member_id in self._dispatcher.state.consumers:  # or it left meanwhile
            await self._dispatcher.execute(c.LeaveIteration(consumer_id=member_id, reason=SILENT))

    async def _collect_idle_iterations(self) -> bool:
        """Whether there may be more."""
        options, now_ms = self._dispatcher.options, _now_ms()
        timeouts_ms = (options.job_gc_timeout_ms, options.dynamic_gc_timeout_ms)
        over = []
        for iteration in self._idle_iterations():
            timeout_ms = timeouts_ms[bool(iteration.ledgers)]
            if iteration.finished:
                timeout_ms = options.finished_retention_ms
            if 0 <= timeout_ms <= now_ms - iteration.idle_since_ms:
                over.append(iteration)
        return await _at_once(map(self._collect, over))

    async def _remove_unused(self) -> bool:
        """Jobs and datasets that nobody has used for long; whether there may be more."""
        options = self._dispatcher.options
        state, now_ms = self._dispatcher.state, _now_ms()

        def is_old(used_ms: int, timeout_ms: float) -> bool:
            return used_ms > 0 and 0 <= timeout_ms <= now_ms - used_ms

        unused_ms = options.unused_retention_hours * 3_600_000
        unused: list[c.Command] = []
        being_read = set()
        for job in state.jobs.values():
            # Without a name, it goes with its iteration, unless nobody has ever joined one.
            never_read = not job.name and is_old(job.used_ms, options.job_gc_timeout_ms)
            if readers_of(state, job):
                being_read.add(job.dataset_id)
            elif never_read or is_old(job.used_ms, unused_ms):
                unused.append(c.RemoveJob(job_id=job.job_id))
        unused.extend(
            c.RemoveDataset(dataset_id=dataset.dataset_id)
            for dataset in state.datasets.values()
            if is_old(dataset.used_ms, unused_ms) and dataset.dataset_id not in being_read
        )
        return await _at_once(map(self._remove, unused))

    async def _remove(self, command: c.Command) -> None:
        with suppress(FailedPrecondition, NotFound):  # it is read, or was removed, meanwhile
            await self._dispatcher.execute(command)
            if isinstance(command, c.RemoveDataset):
                log.info("dataset %s was removed: nobody has used it", command.dataset_id)

    async def _bound_idle_iterations(self) -> None:
        """Epochs that trainers leave early are let go beyond the latest ones of each job."""
        most = self._dispatcher.options.max_idle_iterations
        if most >= 0:
            of_jobs: dict[int, list[Iteration]] = {}
            for iteration in filter(lambda i: i.tasks, self._idle_iterations()):
                of_jobs.setdefault(iteration.job_id, []).append(iteration)
            for idle in of_jobs.values():
                idle.sort(key=lambda i: (i.idle_since_ms, i.iteration_id), reverse=True)
            await _at_once(self._collect(i) for idle in of_jobs.values() for i in idle[most:])

    def _idle_iterations(self) -> Iterator[Iteration]:
        """Those without consumers that anything can be taken from."""
        for iteration in self._dispatcher.state.iterations.values():
            paused = iteration.ledgers and not iteration.tasks and not iteration.finished
            if not iteration.consumers and not paused:
                yield iteration

    async def _collect(self, iteration: Iteration) -> None:
        state = self._dispatcher.state
        if state.iterations.get(iteration.iteration_id) is not iteration or iteration.consumers:
            return  # somebody has joined meanwhile
        if iteration.ledgers and not iteration.finished:
            log.warning(
                "epoch %d of job %s is paused, since nobody reads it: who joins it gets the splits "
                "that are left, not what workers have begun",
                iteration.epoch, state.jobs[iteration.job_id].name,
            )  # fmt: skip
        await self._dispatcher.execute(c.CollectIteration(iteration_id=iteration.iteration_id))


async def _at_once(work: Iterable[Coroutine[Any, Any, None]]) -> bool:
    """Do the first AT_ONCE, which share a commit; whether there may be more."""
    some = list(islice(work, AT_ONCE))
    await asyncio.gather(*some)
    return len(some) == AT_ONCE

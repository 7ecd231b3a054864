"""The failure detector: when members (workers, consumers) were last heard, and which are dead.

Times are not part of the state. After a replay every live member has time to find the dispatcher
again, whatever the timeouts. Presuming a member dead is a journaled decision. A worker that was
presumed dead but is alive registers again, and resumes its tasks (core/state.py, Orphan).

A broken connection means a dead process or a short network fault. A worker has
`reconnect_grace_ms` to reconnect, so that its tasks continue undisturbed. If its address also
refuses a consumer that was connected to it, the process has ended: nobody listens there. Then the
dispatcher waits only for messages in flight (REFUSED_GRACE_S). A consumer that was never connected
may have met a firewall. Its report counts like a broken connection while the worker has no poll
open: the worker may have missed the last answer.

A consumer keeps its place for its whole timeout. But a worker that is about to end, and has lost
its connection to the consumer, waits at most `reconnect_grace_ms` for it. In an ordered read
another consumer may take the place of one whose connection has been broken for so long, or that is
silent for twice as long (SILENCES).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...journal.reasons import SILENT
from ..connections.grpc_server import current_peer
from ..core import commands as c
from ..core.state import Worker
from ..errors import Unavailable
from .decider import Decider, execute_some

log = logging.getLogger(__name__)

CHECK_S = 0.5
REDISCOVERIES = 3
"""Members have this many times `reconnect_grace_ms` to find a new leader: TensorFlow's back off
between their attempts."""

SILENCES = 2
"""A consumer that is silent for so many times `reconnect_grace_ms` loses its place in a group to
another that asks for it. Its process may have been killed between two polls."""

REFUSED_GRACE_S = 1.0
"""The grace of a worker whose connection broke and whose address refuses consumers."""

UNUSUAL_S = 4.0
"""A worker that is silent for so long is worth a word: stopped, or without processor time."""

UNUSUAL_STOCK_S = 45.0
"""TensorFlow's own send a heartbeat each 30 s."""

UNREACHABLE_S = 12.0
"""Consumers repeat with each heartbeat which workers refuse them, or no longer do."""

EXPECTED_S = 3600.0
"""The time that a stock client has to begin to read."""

GONE = "its connection broke, and its address refuses consumers"
REFUSES = "it asks for no news, and its address refuses consumers"


@dataclass
class _Presence:
    """A member's signs of life."""

    until_s: float  # when it is presumed dead, monotonic
    heard_s: float = -math.inf  # when it gave its last sign of life
    polls: int = 0  # polls that it has begun
    waiting: int = 0  # open polls
    waits: bool = False  # the newest poll is open
    broken: bool = True  # the newest poll broke, or there was none yet
    refuses: bool = False  # it refused a consumer that was connected, since its last sign of life
    refuses_strangers: bool = False  # it refused a consumer that was never connected, since then
    unreachable_from_s: float = math.inf  # such consumers have said so since then, …
    unreachable_s: float = -math.inf  # … and did last
    gone_from_s: float = math.inf  # when a consumer whose poll broke counts as gone

    @property
    def has_stopped_polling(self) -> bool:
        """It has been answered, has no open poll, and refuses new consumers."""
        return self.refuses_strangers and self.polls > 0 and not self.waiting


class FailureDetector:
    """The failure detector of one dispatcher. Everything runs on its event loop."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self._members: dict[int, _Presence] = {}
        self.peers: dict[int, str] = {}  # whence members last called, by id
        self._looked_s = -math.inf  # when silent members were last looked for
        self._leads_from_s = time.monotonic()
        for member_id in (*decider.state.workers, *decider.state.consumers):
            self._present(member_id)

    def saw(self, member_id: int) -> None:
        """Record a sign of life of a worker or consumer."""
        member = self._present(member_id)
        if peer := current_peer():
            self.peers[member_id] = peer
        member.heard_s = time.monotonic()
        member.until_s = member.heard_s + self._timeout_s(member_id)
        member.refuses = member.refuses_strangers = False
        member.gone_from_s = math.inf

    def silent_s(self, member_id: int) -> float | None:
        """The time since its last sign of life; None: this dispatcher has not heard it yet. An open
        poll is one: the connection stands."""
        if (member := self._members.get(member_id)) is None or member.heard_s == -math.inf:
            return None
        return 0.0 if member.waits else time.monotonic() - member.heard_s

    def silent_workers(self) -> Iterator[dict[str, Any]]:
        """Those that have not been heard for longer than usual, and for how long. A worker that has
        been answered asks again at once. As the status tells them."""
        for worker in self._decider.state.workers.values():
            silent_s = self.silent_s(worker.worker_id) or 0.0
            if silent_s > (UNUSUAL_STOCK_S if worker.stock else UNUSUAL_S):
                yield {"address": worker.address, "silent_s": silent_s}

    def unreachable_workers(self) -> Iterator[dict[str, Any]]:
        """Those whose data addresses refuse consumers that never were connected, and since when."""
        now = time.monotonic()
        for worker in self._decider.state.workers.values():
            member = self._present(worker.worker_id)
            if now - member.unreachable_s <= UNREACHABLE_S:
                yield {"address": worker.address, "since_s": now - member.unreachable_from_s}

    def is_gone(self, consumer_id: int) -> bool:
        """Whether the consumer left, or its connection broke and it has not returned in time."""
        if consumer_id not in self._decider.state.consumers:
            return True
        return time.monotonic() > self._present(consumer_id).gone_from_s

    def may_be_replaced(self, consumer_id: int) -> bool:
        """Whether another consumer may take its place in a group: it is gone, or silent."""
        return self.is_gone(consumer_id) or self._is_long(self.silent_s(consumer_id) or 0.0)

    def _is_long(self, silent_s: float) -> bool:
        # If this process has just stood still, what members said meanwhile is still to be read.
        is_awake = time.monotonic() - self._looked_s <= 2 * CHECK_S
        return is_awake and silent_s > SILENCES * self._grace_s

    def gone_s(self, consumer_id: int) -> float | None:
        """How long a consumer is silent that seems to have ended and is not given up yet; at least,
        if this dispatcher never heard it. None: it is there, or nobody knows."""
        silent_s = self.silent_s(consumer_id)
        if silent_s is not None:
            return silent_s if self.may_be_replaced(consumer_id) else None
        if self._decider.state.consumers[consumer_id].stock:  # they say nothing before they read
            return None
        silent_s = time.monotonic() - self._leads_from_s
        return silent_s if self._is_long(silent_s) else None

    def expects(self, consumer_id: int) -> None:
        """Allow a TensorFlow consumer EXPECTED_S to begin: it sends no heartbeat before its first
        read, and a trainer may create its iterator long before its first step."""
        until_s = time.monotonic() + max(EXPECTED_S, self._timeout_s(consumer_id))
        self._present(consumer_id).until_s = until_s

    def saw_worker_of(self, task_id: int) -> None:
        """Record a sign of life of the task's worker: a request other than a heartbeat."""
        if (task := self._decider.state.tasks.get(task_id)) is not None:
            member = self._present(task.worker_id)
            member.refuses_strangers = False
            # Short after a broken connection: the worker may have sent this before it died.
            left_s = self._grace_s if member.broken else self._timeout_s(task.worker_id)
            member.until_s = max(member.until_s, time.monotonic() + left_s)

    @contextmanager
    def poll(self, member_id: int) -> Iterator[None]:
        """Wrap a long-polling heartbeat and its answer: a sign of life. If the poll breaks or
        cannot be answered, the member must return within the grace.
        """
        self.saw(member_id)
        member = self._present(member_id)
        member.polls += 1
        member.waiting += 1
        number, member.waits, member.broken = member.polls, True, False
        broken = False
        try:
            yield
        except (asyncio.CancelledError, Unavailable):  # a live member retries at once
            broken = True
            raise
        finally:
            member.waiting -= 1
            if number == member.polls:  # else a newer poll has begun
                now = time.monotonic()
                member.waits, member.broken = False, broken
                member.until_s = now + self._timeout_s(member_id)
                if broken:
                    member.gone_from_s = now + self._grace_s
                else:
                    member.heard_s = now
                self._shorten(member_id, member)

    def refuses(self, worker_id: int, answered: bool) -> None:
        """The worker's address refuses a consumer; `answered`: it was connected to it before."""
        member = self._present(worker_id)
        if answered:
            member.refuses = True
        else:
            member.refuses_strangers = True
            now = time.monotonic()
            if now - member.unreachable_s > UNREACHABLE_S:
                member.unreachable_from_s = now
            member.unreachable_s = now
        self._shorten(worker_id, member)

    def _present(self, member_id: int) -> _Presence:
        """The member's record. A new one counts as broken: the member lost the earlier leader."""
        if (member := self._members.get(member_id)) is None:
            found_s, worker = REDISCOVERIES * self._grace_s, self._worker(member_id)
            timeout_s = max(self._timeout_s(member_id), found_s)
            if worker is not None and not worker.stock and timeout_s < math.inf:
                timeout_s = found_s  # Forebay's workers keep trying to reconnect
            now = time.monotonic()
            member = _Presence(now + timeout_s, gone_from_s=now + found_s)
            self._members[member_id] = member
        return member

    def _shorten(self, member_id: int, member: _Presence) -> None:
        """Shorten the timeout of a worker without an open poll, by the evidence against it."""
        # Not a consumer's: a trainer whose connection was cut keeps its place for its timeout.
        if member.waits or self._worker(member_id) is None or member.until_s == math.inf:
            return
        if member.broken and member.refuses:
            left_s = min(self._grace_s, REFUSED_GRACE_S)
        elif member.refuses or (member.broken and member.polls) or member.has_stopped_polling:
            left_s = self._grace_s
        else:
            return
        member.until_s = min(member.until_s, time.monotonic() + left_s)

    def _worker(self, member_id: int) -> Worker | None:
        """The worker; None for a consumer."""
        return self._decider.state.workers.get(member_id)

    def _timeout_s(self, member_id: int) -> float:
        options = self._decider.options
        worker = self._worker(member_id) is not None
        timeout_ms = options.worker_timeout_ms if worker else options.client_timeout_ms
        if timeout_ms < 0:
            return math.inf
        # Silence is weaker evidence than a broken connection, so it gets no shorter time.
        return max(timeout_ms / 1000, self._grace_s if worker else 0)

    @property
    def _grace_s(self) -> float:
        return self._decider.options.reconnect_grace_ms / 1000

    async def watch(self) -> None:
        """Expire silent members, until cancelled."""
        interval_s = min(CHECK_S, self._decider.options.job_gc_check_interval_ms / 1000)
        while True:
            deaf_s = await self._listen(interval_s)
            now = self._looked_s = time.monotonic()
            if deaf_s >= interval_s:
                for member in self._members.values():
                    member.until_s += deaf_s
                    member.gone_from_s += deaf_s
                    member.heard_s = min(member.heard_s + deaf_s, now)
            try:
                await self._expire_members()
            except Unavailable:
                if self._decider.stopped.is_set():
                    return

    async def _listen(self, interval_s: float) -> float:
        """Sleep; returns the seconds in which no sign of life could have been recorded."""
        decider, begun = self._decider, time.monotonic()
        durable = decider.position().sequence
        waiting = decider.state.sequence > durable
        await asyncio.sleep(interval_s)
        paused_s = time.monotonic() - begun - interval_s  # requests lie unread in the sockets
        stuck = waiting and decider.position().sequence == durable
        if stuck or not decider.leadership.known:  # no storage, so no answers
            return paused_s + interval_s
        return paused_s

    async def _expire_members(self) -> None:
        state = self._decider.state
        self._members = {
            i: member
            for i, member in self._members.items()
            if i in state.workers or i in state.consumers
        }
        self.peers = {i: peer for i, peer in self.peers.items() if i in self._members}
        now = time.monotonic()
        members = (*state.workers, *state.consumers)
        await execute_some(self._lose(i) for i in members if now > self._present(i).until_s)

    async def _lose(self, member_id: int) -> None:
        worker, member = self._worker(member_id), self._members[member_id]
        if worker is not None:
            reason = SILENT
            if member.refuses or member.has_stopped_polling:
                reason = GONE if member.broken else REFUSES
            log.warning("worker %s is given up: %s", worker.address, reason)
            await self._decider.execute(c.LoseWorker(worker_id=member_id, reason=reason))
        elif member_id in self._decider.state.consumers:  # or it left meanwhile
            await self._decider.execute(c.LeaveIteration(consumer_id=member_id, reason=SILENT))

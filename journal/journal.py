"""The journal's writing end, with group commit: one append stores many decisions.

Events get their sequences at once. While an append is under way, new events gather in the next
group, which the journal appends as one batch afterwards. A decision's events are always in one
batch, so that a crash leaves all of them or none.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from ..storage import AppendFailed, Corrupt, Fenced, Missing, Storage, StorageError, Writer
from ..storage.durations import Durations
from ..storage.thread_pool import ThreadPool
from .codec import encode
from .proto.events_pb2 import Event
from .snapshots import Retention, decode_snapshot, encode_snapshot, plan_retention

log = logging.getLogger(__name__)

BATCH_BYTES = 8 << 20
FLUSH_S = 5.0
"""How long `close` waits for the last events to become durable."""
CLOSE_S = 10.0
"""How long it waits for the storage's calls to end: a disk that hangs does not let them."""


class _Group:
    """Events that become durable together."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.record_bytes = 0
        self.last = 0
        self.waiters: list[asyncio.Future[None]] = []


class Journal:
    """The appending end of a journal. All but the storage's blocking calls runs on one event loop.

    At most one append is under way. Groups wait in memory, without a limit: the backpressure is
    that callers await `wait_durable`.
    """

    def __init__(
        self,
        storage: Storage,
        writer: Writer,
        *,
        retention: Retention | None = None,
        on_failure: Callable[[StorageError], None] | None = None,
        append_executor: Executor | None = None,
        snapshot_executor: Executor | None = None,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        """Takes ownership of `writer`, which belongs to `storage`; `close` closes it.

        `retention` is applied after each snapshot; None keeps everything. `on_failure` is
        called once, on the loop, when an append has failed. Each executor runs the storage's
        blocking calls one at a time. By default each is a thread; a simulation passes its own.
        A new batch begins before one grows beyond `batch_bytes`.
        """
        self.sequence = writer.last_sequence  # of the last event that was appended
        self.durable_sequence = writer.last_sequence
        self.failed: StorageError | None = None
        self.appends = Durations()  # one for each group
        self.snapshot_sequence = 0  # of the last one that was written here
        self.snapshot_time_ms = 0  # of that event
        self.on_failure = on_failure
        self._storage = storage
        self._writer = writer
        self._retention = retention
        self._batch_bytes = batch_bytes
        self._groups: deque[_Group] = deque()  # the first one is under way if _committing
        self._committing = False
        self.append_began_s = math.inf  # monotonic; of the one under way
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._own_executors: list[ThreadPool] = []
        self._appends = append_executor or self._thread("forebay-append")
        self._snapshots = snapshot_executor or self._thread("forebay-snapshot")
        self._snapshot_times: dict[int, int] = {}  # ms, by sequence: a cache

    def append(self, events: Sequence[Event]) -> int:
        """Append the events of one decision; return the sequence of the last one.

        They are durable once `wait_durable` of that sequence returns. Raises the journal's
        failure if it has failed, and Fenced if it is closed.
        """
        if self.failed is not None or self._closed:
            self._check_usable()
        records = list(map(encode, events))
        if not records:
            return self.sequence
        size = sum(map(len, records))
        groups = self._groups
        begun = len(groups) > self._committing  # is there a group that is not under way?
        if not begun or groups[-1].record_bytes + size > self._batch_bytes:
            groups.append(_Group())
        group = groups[-1]
        group.records += records
        group.record_bytes += size
        self.sequence += len(records)
        group.last = self.sequence
        if not begun and not self._committing:
            # Commit after this turn of the loop, so that all of its decisions join one group.
            self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._commit)
        return self.sequence

    async def wait_durable(self, sequence: int) -> None:
        """Wait until every event up to `sequence` is durable.

        Raises the journal's failure if they never will be.
        """
        if sequence <= self.durable_sequence:
            return
        if sequence > self.sequence:
            raise ValueError(f"there is no event {sequence} yet; the last one is {self.sequence}")
        if self.failed is None:
            assert self._loop is not None  # since the append
            group = self._groups[0]
            if group.last < sequence:
                group = next(group for group in self._groups if group.last >= sequence)
            waiter = self._loop.create_future()
            group.waiters.append(waiter)
            await waiter
        if sequence > self.durable_sequence:
            self._raise_failure()

    async def write_snapshot(self, sequence: int, state: bytes, time_ms: int) -> None:
        """Store the dispatcher's state as of `sequence`, then apply the retention.

        Appends go on meanwhile. Raises StorageError if the snapshot could not be written.
        """
        await self.wait_durable(sequence)
        self._check_usable()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._snapshots, self._snapshot, sequence, state, time_ms)
        self.snapshot_sequence, self.snapshot_time_ms = sequence, time_ms

    async def close(self) -> None:
        """Flush, then close the writer. Idempotent.

        Waits FLUSH_S at most for an unreachable storage; pending waiters then get the failure.
        Calls that hang for CLOSE_S are left behind.
        Never raises for a failed journal: the waiters and `on_failure` already got the error.
        """
        if self._closed:
            return
        self._closed = True
        if self.failed is None:
            try:
                await asyncio.wait_for(self.wait_durable(self.sequence), FLUSH_S)
            except (StorageError, TimeoutError):
                pass  # on_failure gets it
        hangs = False
        try:
            await asyncio.wait_for(self._end_writing(), CLOSE_S)
        except TimeoutError:
            hangs = True
            log.warning("%s hangs: its threads end with this process", self._storage.url)
        for executor in self._own_executors:
            executor.shutdown(wait=not hangs)

    async def _end_writing(self) -> None:
        loop = asyncio.get_running_loop()
        # Runs after a snapshot that is under way; closing the writer ends a waiting append.
        await loop.run_in_executor(self._snapshots, self._writer.close)
        await loop.run_in_executor(self._appends, int)

    # -- the commit path ---------------------------------------------------------------------

    def _commit(self) -> None:
        assert self._loop is not None
        self._committing = True
        self.append_began_s = time.monotonic()
        append = self._loop.run_in_executor(
            self._appends, self._writer.append, self._groups[0].records
        )
        append.add_done_callback(self._committed)

    def _committed(self, append: asyncio.Future[int]) -> None:
        self._committing = False
        self.appends.add(time.monotonic() - self.append_began_s)
        self.append_began_s = math.inf
        error = append.exception()
        if error is None and append.result() != self._groups[0].last:
            error = AppendFailed(
                f"the storage counts {append.result()} records where {self._groups[0].last} were "
                "appended; another writer must be at work"
            )
        if error is not None:
            self._fail(error)
            return
        group = self._groups.popleft()
        self.durable_sequence = group.last
        if self._groups:
            self._commit()
        _wake(group.waiters)

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, StorageError):
            bug = AppendFailed(f"the storage failed in an unforeseen way: {error!r}")
            bug.__cause__ = error
            error = bug
        self.failed = error
        for group in self._groups:
            _wake(group.waiters)
        self._groups.clear()
        if self.on_failure is not None:
            self.on_failure(error)

    def _check_usable(self) -> None:
        if self.failed is not None:
            self._raise_failure()
        if self._closed:
            raise Fenced("the journal is closed")

    def _raise_failure(self) -> None:
        # Each caller gets a new exception, because a raised one accumulates tracebacks.
        assert self.failed is not None
        raise type(self.failed)(*self.failed.args) from self.failed

    # -- in the snapshot executor ------------------------------------------------------------

    def _snapshot(self, sequence: int, state: bytes, time_ms: int) -> None:
        self._writer.write_snapshot(sequence, encode_snapshot(state, time_ms))
        if self._retention is None:
            return
        times = {}
        for kept in self._storage.snapshots():
            known = self._snapshot_times.get(kept)
            try:
                times[kept] = known or self._read_snapshot_time(kept)
            except (Corrupt, Missing):
                continue  # keep a damaged one, but don't count it: `verify` reports it
        self._snapshot_times = times
        plan = plan_retention(list(times.items()), time_ms, self._retention)
        for old in plan.delete:
            self._writer.delete_snapshot(old)
        self._writer.trim(plan.trim_before)  # last, so that each snapshot's records outlive it

    def _read_snapshot_time(self, sequence: int) -> int:
        return decode_snapshot(sequence, self._storage.read_snapshot(sequence)).time_ms

    def _thread(self, name: str) -> Executor:
        executor = ThreadPool(1, name)
        self._own_executors.append(executor)
        return executor


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():  # cancelled
            waiter.set_result(None)

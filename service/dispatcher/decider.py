"""The decider: the single owner of the state, and the only way to change it.

    command → decide → events → apply → journal.append → (durable) → reply

`decide` and `apply` run synchronously on the event loop, so the next decision sees this one. Only
the replies wait until the journal is durable. The parts of a dispatcher (failure_detector.py,
saves.py and so on) hold the decider.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from itertools import islice
from typing import Any

from ...journal.journal import Journal
from ...journal.proto import events_pb2 as ev
from ...journal.snapshots import Retention
from ...storage import Fenced, Storage, StorageError, Writer
from ...storage.thread_pool import ThreadPool
from .. import tracing
from ..core import commands as c
from ..core.encoding import encode_state
from ..core.machine import EVENTS, apply, decide
from ..core.saves import size_of_saves
from ..core.state import State
from ..errors import Unavailable
from ..proto import forebay_pb2 as pb
from . import positions
from .leadership import Leadership
from .options import DispatcherOptions
from .storage_watch import StorageWatch

log = logging.getLogger(__name__)

AT_ONCE = 256
"""The batch size of removals."""

STORAGE_THREADS = 8
"""For reads and writes of graphs. asyncio's own pool is for computation: a storage that hangs must
not use it up."""


class Decider:
    """Decides, journals and notifies. Everything runs on one event loop."""

    def __init__(
        self, storage: Storage, writer: Writer, state: State, options: DispatcherOptions
    ) -> None:
        self.state = state
        self.options = options
        self.stopped = asyncio.Event()  # set when it must not serve any longer
        self.displaced = False  # another dispatcher leads
        self._broken = False  # the state differs from the journal
        self._storage = storage
        self.writer = writer
        self.journal = Journal(storage, writer, retention=Retention(options.retention_hours))
        self.journal.on_failure = self._journal_failed
        self._tracer = tracing.tracer("dispatcher")
        self._position = pb.JournalPosition()  # the last one told
        self._subscribers: list[Callable[[ev.Event], None]] = []
        # Long polls: what each waits for.
        self.waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._snapshot_due = self._next_snapshot()  # the sequence that triggers it
        self.snapshot_task: asyncio.Task[None] | None = None
        self.leadership = Leadership(writer, self._journal_failed, storage.url)
        self.storage_watch = StorageWatch(storage, self.journal, self.leadership)
        self.storage_threads = ThreadPool(STORAGE_THREADS, "forebay-storage")

    async def execute(self, command: c.Command) -> Any:
        """Decide a command, and return its answer once its events are durable.

        Raises the command's domain errors, and Unavailable when the journal has failed: then
        the outcome is unknown, and the caller retries with the same request number. If the command
        led to no events, the caller must await `settled` before it sends the answer.
        """
        if self.stopped.is_set():
            raise self.unavailable()
        events, answer = decide(self.state, command, time.time_ns() // 1_000_000)
        if events:
            try:
                for event in events:
                    apply(self.state, event)
                self.journal.append(events)  # after apply: an invalid event is not journaled
                self._tell(events)
                if log.isEnabledFor(logging.DEBUG):
                    self._log(command, events)
            except BaseException:  # a bug: the state now differs from the journal
                log.critical("an event could not be applied, so this dispatcher stops serving")
                self._broken = True
                self.stop()
                raise
            sent_s = time.monotonic()
            with tracing.child(self._tracer, "forebay.append", self.state.sequence):
                await self.durable()
            self.leadership.led(sent_s)
        return answer

    def _log(self, command: c.Command, events: Sequence[ev.Event]) -> None:
        """Not what is in them: `forebay journal show` has that."""
        name, kinds = type(command).__name__, [e.WhichOneof("event") for e in events]
        about = {"command": name, "sequence": self.state.sequence, "events": kinds}
        log.debug("%s: %s, up to event %d", name, kinds, self.state.sequence, extra=about)

    async def settled(self, since_s: float = math.inf) -> None:
        """Call before sending an answer: wait until everything decided so far is durable, and the
        storage proves that this dispatcher led at `since_s` or later (monotonic; default: now).
        Raises Unavailable.
        """
        if self._broken:
            raise self.unavailable()
        await self.durable()
        try:
            await self.leadership.prove(since_s)
        except StorageError as error:
            raise self.unavailable() from error

    async def durable(self) -> None:
        """Wait until everything decided so far is durable. Raises Unavailable."""
        try:
            await self.journal.wait_durable(self.journal.sequence)
        except StorageError as error:
            raise self.unavailable() from error

    def subscribe(self, callback: Callable[[ev.Event], None]) -> None:
        """Call `callback` with each event after its decision is applied. It must not block."""
        self._subscribers.append(callback)

    async def wait_until(self, changed: Callable[[], bool], wait_ms: int) -> None:
        """Wait until `changed()` holds after some decision, for at most `wait_ms`."""
        if changed() or wait_ms <= 0 or self.stopped.is_set():
            return
        future = asyncio.get_running_loop().create_future()
        self.waiting[future] = changed
        try:
            await asyncio.wait_for(future, wait_ms / 1000)
        except TimeoutError:
            return
        finally:
            self.waiting.pop(future, None)

    def stop(self) -> None:
        """Decide nothing more, and wake every `wait_until`."""
        self.stopped.set()
        for future in self.waiting:
            if not future.done():
                future.set_result(None)

    def _tell(self, events: list[ev.Event]) -> None:
        for callback in self._subscribers:
            for event in events:
                callback(event)
        if not all(EVENTS[event.WhichOneof("event") or ""].is_quiet for event in events):
            self.look_again()
        self._snapshot_if_due()

    def look_again(self) -> None:
        """Wake each `wait_until` whose condition holds now: something is not as it was."""
        for future, changed in self.waiting.items():
            if not future.done() and changed():
                future.set_result(None)

    def position(self) -> pb.JournalPosition:
        """The last durable event, with a proof: peers may learn of it. Not to be changed."""
        sequence, journal_id = self.journal.durable_sequence, self.state.journal_id
        if (sequence, journal_id) != (self._position.sequence, self._position.journal_id):
            self._position = pb.JournalPosition(
                journal_id=journal_id, sequence=sequence, lasting=self._storage.lasting
            )
            positions.prove(self.state.position_key, self._position)
        return self._position

    # -- snapshots and failure ---------------------------------------------------------------

    def _snapshot_if_due(self) -> None:
        state = self.state
        if state.sequence < self._snapshot_due:
            return
        if self.snapshot_task is None or self.snapshot_task.done():
            self._snapshot_due = self._next_snapshot()
            self.snapshot_task = asyncio.create_task(
                self._snapshot(state.sequence, encode_state(state), state.time_ms),
                name="forebay-snapshot",
            )
            self.snapshot_task.add_done_callback(self.task_ended)

    def _next_snapshot(self) -> int:
        """The next snapshot's sequence. The distance grows with the state, so that the amortised
        cost of snapshots per event is bounded."""
        state = self.state
        ledgers = (ledger for i in state.iterations.values() for ledger in i.ledgers)
        names = sum(len(ledger.names) for ledger in ledgers)  # many come with one event
        lengths = sum(len(known) for d in state.datasets.values() for known in d.lengths.values())
        live = len(state.tasks) + len(state.leases) + len(state.iterations) + names + lengths
        live += size_of_saves(state)
        return state.sequence + max(self.options.snapshot_events, 2 * live)

    async def _snapshot(self, sequence: int, state: bytes, time_ms: int) -> None:
        try:
            await self.journal.write_snapshot(sequence, state, time_ms)
        except StorageError as error:
            # The journal is complete without it; the next snapshot is tried as usual.
            log.error("no snapshot at sequence %d: %s", sequence, error)

    def task_ended(self, task: asyncio.Task[None]) -> None:
        """A done callback for background tasks: an exception is a bug and stops the dispatcher."""
        if not task.cancelled() and (bug := task.exception()) is not None:
            log.critical("%s failed, so this dispatcher stops", task.get_name(), exc_info=bug)
            self.stop()

    def _journal_failed(self, error: StorageError) -> None:
        if isinstance(error, Fenced):
            self.displace(error)
            return
        log.critical("the journal cannot be written, so this dispatcher stops serving: %s", error)
        self.stop()

    def displace(self, error: StorageError) -> None:
        """Another dispatcher leads: stop serving. Idempotent."""
        if self.displaced:
            return
        self.displaced = True
        log.warning("another dispatcher leads now, so this one stops serving: %s", error)
        self.stop()

    def unavailable(self) -> Unavailable:
        """Why it cannot serve."""
        failed = self.journal.failed
        if failed is not None and not self.displaced:
            return Unavailable(f"the dispatcher's journal cannot be written: {failed}")
        if self.stopped.is_set():
            return Unavailable("the dispatcher is stopping")
        return Unavailable("the journal cannot be reached, so nobody knows whether this one leads")


async def execute_some(work: Iterable[Coroutine[Any, Any, None]]) -> bool:
    """Run the first AT_ONCE of these, which share a commit. Returns whether there may be more.

    Other requests are decided between such batches.
    """
    some = list(islice(work, AT_ONCE))
    await asyncio.gather(*some)
    return len(some) == AT_ONCE

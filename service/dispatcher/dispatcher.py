"""The dispatcher: the one owner of the state, and the only way to change it.

    command → decide → events → journal.append → apply → (durable) → reply

`decide` and `apply` run at once, on the event loop, so that the next decision sees this
one; only the replies wait until the journal is durable. What is not state lives beside it:
who waits for a change, who is there (attendance.py), whether this one leads (leadership.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from ...journal import Journal, Retention, replay
from ...journal.journal import FLUSH_S
from ...journal.proto import events_pb2 as ev
from ...storage import Corrupt, Fenced, Storage, StorageError, Writer
from ..core import commands as c
from ..core.encoding import decode_state, encode_state
from ..core.lifecycles import WrongTransition
from ..core.machine import apply, decide
from ..core.saves import size_of_saves
from ..core.state import Consumer, State
from ..core.status import Stranger
from ..errors import AnotherJournal, NotFound, Unavailable
from ..proto import forebay_pb2 as pb
from .attendance import Attendance
from .graphs import Graphs
from .growth import Growth
from .leadership import Leadership
from .options import DispatcherOptions
from .saves import Saves
from .task_removal import TaskRemovals
from .user_metrics import UserMetrics

log = logging.getLogger(__name__)

_QUIET = frozenset(
    {
        *("splits_leased", "lease_begun", "lease_returned", "pass_started"),
        *("splits_found", "save_split_assigned", "chunk_committed"),
    }
)
"""Events that nobody waits for."""

REFUSAL_PAUSE_MS = 1_000
MAX_STRANGERS = 10_000
MAX_LEFT = 10_000
STRANGER_MS = 60_000
"""Who has not asked again for so long has gone, or has begun anew."""


class Dispatcher:
    """Decides, journals, answers. Everything runs on one event loop.

    `candidate.take_over` makes one; `close` gives the journal up.
    """

    def __init__(
        self, storage: Storage, writer: Writer, state: State, options: DispatcherOptions
    ) -> None:
        self.state = state
        self.options = options
        self.stopped = asyncio.Event()  # set when it must not serve any longer
        self._broken = False  # the state is not what the journal says
        self.displaced = False  # because another leads
        self._storage = storage
        self._writer = writer
        self._journal = Journal(storage, writer, retention=Retention(options.retention_hours))
        self._subscribers: list[Callable[[ev.Event], None]] = []
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._snapshot_due = self._next_snapshot()  # the event after which there is one
        self._snapshot_task: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._journal.on_failure = self._journal_failed
        self._strangers: dict[str, Stranger] = {}  # by who, the latest last
        # Why, of consumers that left lately, the latest last; also while another one led.
        self.left = {
            event.consumer_left.consumer_id: event.consumer_left.reason
            for _, event in state.recent
            if event.HasField("consumer_left")
        }
        self._condemning: asyncio.Task[None] | None = None
        self.leadership = Leadership(writer, on_lost=self._journal_failed)
        self.attendance = Attendance(self)
        self._keeper: asyncio.Task[None] | None = None
        self.removals = TaskRemovals(self)
        self.graphs = Graphs(self, storage, writer)
        self.saves = Saves(self)
        self.growth = Growth(self)
        self.user_metrics = UserMetrics(state)
        self._saver: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        storage: Storage,
        writer: Writer,
        state: State,
        options: DispatcherOptions,
        address: str,
    ) -> Dispatcher:
        """Begin the writer's term, from the state that the journal leads to. Raises Unavailable."""
        self = cls(storage, writer, state, options)
        self._keeper = asyncio.create_task(self.leadership.keep(), name="forebay-leadership")
        self._keeper.add_done_callback(self.task_ended)
        elect = c.ElectLeader(
            term=writer.term,
            address=address,
            version=version("forebay"),
            journal_id=uuid.uuid4().hex,
            worker_addresses=options.workers,
        )
        before = [place.configured for place in state.places]
        try:
            await self.execute(elect)
        except BaseException:
            await self.close()
            raise
        if before != list(options.workers) and (before or options.workers):
            log.warning(
                "static sharding divides among the workers [%s], and no longer among [%s]; what "
                "was being divided has ended",
                ", ".join(options.workers), ", ".join(before),
            )  # fmt: skip
        self._watcher = asyncio.create_task(self.attendance.watch(), name="forebay-attendance")
        self._watcher.add_done_callback(self.task_ended)
        self._saver = asyncio.create_task(self.saves.follow(), name="forebay-saves")
        self._saver.add_done_callback(self.task_ended)
        return self

    async def finish(self) -> None:
        """Decide nothing more; return once the answers to all that was decided may leave, or
        the journal cannot take it within FLUSH_S.
        """
        self.stopped.set()
        self.wake_all()
        with contextlib.suppress(Unavailable, TimeoutError):
            await asyncio.wait_for(self.durable(), FLUSH_S)

    async def close(self) -> None:
        """Flush and give up the journal. Call it when no request is being served any more."""
        self.stopped.set()
        self.wake_all()
        for task in (self._watcher, self._saver, self._snapshot_task, self._keeper):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self.growth.close()
        await self.saves.close()
        await self.leadership.close()
        await self._journal.close()

    # -- decisions ---------------------------------------------------------------------------

    async def execute(self, command: c.Command) -> Any:
        """Decide a command, and return its answer once what it led to is durable.

        Raises the command's domain errors, and Unavailable when the journal has failed: then
        the outcome is unknown, and the caller asks again with the same request number. If nothing
        was decided, the answer is one to a question, and waits for `settled` before it leaves.
        """
        if self.stopped.is_set():
            raise self._unavailable()
        events, answer = decide(self.state, command, time.time_ns() // 1_000_000)
        if events:
            try:
                for event in events:
                    apply(self.state, event)
                self._journal.append(events)  # not before: what does not apply is not journaled
                self._tell(events)
            except BaseException:  # a bug: the state is not what the journal says any more
                log.critical("an event could not be applied, so this dispatcher stops serving")
                self._broken = True
                self.stopped.set()
                self.wake_all()
                raise
            sent_s = time.monotonic()
            await self.durable()
            self.leadership.led(sent_s)
        return answer

    async def settled(self, since_s: float = math.inf) -> None:
        """For an answer: wait until everything decided so far is durable, and it is certain that
        this has been the leader at some time since `since_s` (monotonic; now, at the latest).
        Raises Unavailable.
        """
        if self._broken:
            raise self._unavailable()
        await self.durable()
        try:
            await self.leadership.prove(since_s)
        except StorageError as error:
            raise self._unavailable() from error

    async def durable(self) -> None:
        """Wait until everything decided so far is durable. Raises Unavailable."""
        try:
            await self._journal.wait_durable(self._journal.sequence)
        except StorageError as error:
            raise self._unavailable() from error

    def subscribe(self, callback: Callable[[ev.Event], None]) -> None:
        """Have `callback` called with each event as it is applied. It may not block."""
        self._subscribers.append(callback)

    async def wait_until(self, changed: Callable[[], bool], wait_ms: int) -> None:
        """Wait until `changed()` holds after some decision, at the longest `wait_ms`."""
        if changed() or wait_ms <= 0 or self.stopped.is_set():
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = changed
        try:
            await asyncio.wait_for(future, wait_ms / 1000)
        except TimeoutError:
            return
        finally:
            self._waiting.pop(future, None)

    def wake_all(self) -> None:
        """End every `wait_until`, so that the server can stop."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    def _tell(self, events: list[ev.Event]) -> None:
        for event in events:
            if event.HasField("consumer_left"):
                self.left[event.consumer_left.consumer_id] = event.consumer_left.reason
        while len(self.left) > MAX_LEFT:
            del self.left[next(iter(self.left))]
        for callback in self._subscribers:
            for event in events:
                callback(event)
        if not all(event.WhichOneof("event") in _QUIET for event in events):
            for future, changed in self._waiting.items():
                if not future.done() and changed():
                    future.set_result(None)
        self._snapshot_if_due()

    def find_consumer(self, consumer_id: int) -> Consumer:
        """Raises NotFound, with the reason why it is there no longer."""
        consumer = self.state.consumers.get(consumer_id)
        if consumer is None:
            why = self.left.get(consumer_id) or (
                "it left, or was given up after too long a silence, or its dataset was removed by "
                "force, or it belongs to another dispatcher, or this one lost its state (it was in "
                "memory, or was repaired); read the dataset again"
            )
            raise NotFound(
                f"Unknown iteration client id, or consumer: client id {consumer_id} not found: "
                f"{why}"
            )
        return consumer

    # -- history -----------------------------------------------------------------------------

    def position(self) -> pb.JournalPosition:
        """The last event that anybody may be told of."""
        return pb.JournalPosition(
            journal_id=self.state.journal_id,
            sequence=self._journal.durable_sequence,
            lasting=self._storage.lasting,
        )

    async def check_history(self, who: str, known: pb.JournalPosition) -> None:
        """If `who` knows of an event that this journal lacks, acknowledged events were lost:
        the storage is condemned, and this dispatcher stops. Raises Unavailable.

        Who knows another journal, which was meant to last, is refused, unless this one continues
        that after a repair: either the storage came back empty, or `who` is a stray of another
        cluster. Raises AnotherJournal, after a pause, since `who` asks again at once.
        """
        last = self._journal.durable_sequence
        if known.journal_id != self.state.journal_id:
            if known.journal_id and known.lasting and not continues(self.state, known.journal_id):
                await self._refuse(who, known)
            return
        if known.sequence <= last:
            return
        reason = (
            f"{who} was told of event {known.sequence}, and the journal ends at {last}: events "
            "that were acknowledged are gone"
        )
        if self._condemning is None:
            self._condemning = asyncio.create_task(self._condemn(reason), name="forebay-condemn")
        await asyncio.shield(self._condemning)
        raise self._unavailable()

    @property
    def condemns(self) -> bool:
        """Whether it has heard that the journal lacks events that were acknowledged."""
        return self._condemning is not None

    async def _refuse(self, who: str, known: pb.JournalPosition) -> None:
        state = self.state
        reason = (
            f"{who} knows the journal {known.journal_id} up to event {known.sequence}, and this "
            f"dispatcher has the journal {state.journal_id}, which {birth(state)}. If {who} "
            "belongs to it, its storage came back empty or was replaced: stop the dispatcher and "
            f"bring the right one back, or, if that is gone for good, restart {who}"
        )
        if self._strangers.pop(who, None) is None:
            log.error("refused: %s", reason)
        now_ms = time.time_ns() // 1_000_000
        self._strangers[who] = Stranger(who, known.journal_id, known.sequence, now_ms)
        if len(self._strangers) > MAX_STRANGERS:
            del self._strangers[next(iter(self._strangers))]
        await self.wait_until(lambda: False, REFUSAL_PAUSE_MS)
        raise AnotherJournal(reason)

    def strangers(self) -> list[Stranger]:
        """Who has been refused lately, since it knows another journal."""
        since_ms = time.time_ns() // 1_000_000 - STRANGER_MS
        return [stranger for stranger in self._strangers.values() if stranger.time_ms > since_ms]

    async def _condemn(self, reason: str) -> None:
        try:
            await asyncio.to_thread(self._writer.condemn, reason)
        except Fenced as error:
            self._displaced(error)  # they were told by a later leader
            return
        except StorageError as error:
            log.error("that the journal lacks events could not be noted: %s", error)
        log.critical("%s; restore the storage from a backup, or repair the journal", reason)
        self.stopped.set()
        self.wake_all()

    # -- snapshots and failure ---------------------------------------------------------------

    def _snapshot_if_due(self) -> None:
        state = self.state
        if state.sequence < self._snapshot_due:
            return
        if self._snapshot_task is None or self._snapshot_task.done():
            self._snapshot_due = self._next_snapshot()
            self._snapshot_task = asyncio.create_task(
                self._snapshot(state.sequence, encode_state(state), state.time_ms),
                name="forebay-snapshot",
            )
            self._snapshot_task.add_done_callback(self.task_ended)

    def _next_snapshot(self) -> int:
        """So far away that what snapshots cost an event is bounded: one adds one thing to them."""
        state = self.state
        ledgers = (ledger for i in state.iterations.values() for ledger in i.ledgers)
        names = sum(len(ledger.names) for ledger in ledgers)  # many come with one event
        live = len(state.tasks) + len(state.leases) + len(state.iterations) + names
        live += size_of_saves(state)
        return state.sequence + max(self.options.snapshot_events, 2 * live)

    async def _snapshot(self, sequence: int, state: bytes, time_ms: int) -> None:
        try:
            await self._journal.write_snapshot(sequence, state, time_ms)
        except StorageError as error:
            # The journal is whole without it; the next one is tried as usual.
            log.error("no snapshot at sequence %d: %s", sequence, error)

    def task_ended(self, task: asyncio.Task[None]) -> None:
        """For tasks that never end by themselves: if one does, it is a bug, and is not hidden."""
        if not task.cancelled() and (bug := task.exception()) is not None:
            log.critical("%s failed, so this dispatcher stops", task.get_name(), exc_info=bug)
            self.stopped.set()
            self.wake_all()

    def _journal_failed(self, error: StorageError) -> None:
        if isinstance(error, Fenced):
            self._displaced(error)
            return
        log.critical("the journal cannot be written, so this dispatcher stops serving: %s", error)
        self.stopped.set()
        self.wake_all()

    def _displaced(self, error: StorageError) -> None:
        if self.displaced:
            return
        self.displaced = True
        log.warning("another dispatcher leads now, so this one stops serving: %s", error)
        self.stopped.set()
        self.wake_all()

    def _unavailable(self) -> Unavailable:
        failed = self._journal.failed
        if failed is not None and not self.displaced:
            return Unavailable(f"the dispatcher's journal cannot be written: {failed}")
        if self.stopped.is_set():
            return Unavailable("the dispatcher is stopping")
        return Unavailable("the journal cannot be reached, so nobody knows whether this one leads")


def continues(state: State, journal_id: str) -> bool:
    """Whether the journal of this state is what a repair has made of that one."""
    # A repair that found nothing cannot say of what; but a person has declared that to be all.
    return journal_id in state.predecessors or "" in state.predecessors


def birth(state: State) -> str:
    """When the journal of this state began, in words."""
    if not state.born_ms:
        return "began at a time that is not known"
    born = datetime.fromtimestamp(state.born_ms / 1000, UTC).isoformat(" ", "seconds")
    return f"began on {born}"


def recover(storage: Storage, at: int | None = None) -> tuple[State, int]:
    """The state as of event `at` (default: the last one), and how many events were replayed."""
    recovered = replay(storage, at, _state_of_snapshot)
    state = State() if recovered.state is None else recovered.state
    events = 0
    for sequence, event in recovered.events:
        apply_journaled(state, sequence, event)
        events += 1
    return state, events


def _state_of_snapshot(sequence: int, data: bytes) -> State:
    state = decode_state(data)
    if state.sequence != sequence:
        raise ValueError(f"it holds the state as of event {state.sequence}")
    return state


def apply_journaled(state: State, sequence: int, event: ev.Event) -> None:
    """Apply what a journal holds; raises Corrupt if it cannot follow what came before it."""
    try:
        apply(state, event)
    except (WrongTransition, LookupError, ValueError, AssertionError) as error:
        raise Corrupt(
            f"record {sequence} is whole, and cannot follow what came before it: {error!r}. "
            "Another program wrote it, or Forebay has a bug, which please report: begin with the "
            "version that wrote it, or restore the storage from a backup"
        ) from error

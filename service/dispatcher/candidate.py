"""Becoming the leader: follow the journal while another writes it, take over when it is silent.

A warm standby keeps a replayed state. To take over it becomes the writer, applies the last
few events, and begins its own term.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time

from ...journal.codec import decode
from ...journal.verification import holds_anything
from ...storage import (
    Corrupt,
    Fenced,
    Locked,
    Missing,
    NewerFormat,
    Storage,
    StorageError,
    StorageUnavailable,
    StorageUnusable,
    Writer,
)
from ...storage.errors import REPAIR
from ...storage.thread_pool import ThreadPool
from ..connections.grpc_server import is_listened_on, resolved
from ..core.state import State
from ..errors import Unavailable
from ..proto import forebay_pb2 as pb
from .decider import STORAGE_THREADS
from .dispatcher import Dispatcher
from .history import beginning, continues
from .leadership import RENEWALS_A_LEASE
from .options import DispatcherOptions
from .recovery import apply_journaled, recover

log = logging.getLogger(__name__)

POLLS_A_LEASE = 40
LONGEST_POLL_S = 0.05  # however long the lease: its holder may end before
LISTENS_S = 0.2  # a refusal takes a round trip
PATIENCE_LEASES = 2.0
"""A dispatcher that is no standby waits this many leases to see if the current leader is alive."""

NO_LEADER = "no leader is known yet"


class Follower:
    """A state that follows a journal. Blocking; for one thread at a time."""

    def __init__(self, storage: Storage) -> None:
        self.state = State()
        self.replayed = 0  # events replayed for the current state
        self.known = pb.JournalPosition()  # an acknowledged event
        self._storage = storage

    def catch_up(self) -> None:
        """Apply newly appended events.

        An event read while a writer appends may vanish if its append fails. So each call checks the
        last applied event again. If an event of a later term has replaced it, the state is
        recovered from scratch. Raises StorageError.
        """
        while not (self.state.sequence and self._go_on()):
            snapshots = self._storage.snapshots()
            try:
                self.state, self.replayed = recover(self._storage)
                return
            except Corrupt:
                if self._storage.snapshots() == snapshots:
                    raise
                # The events to replay were trimmed meanwhile, behind a newer snapshot.

    def _go_on(self) -> bool:
        """Apply new events; False if the journal no longer contains this state's last event."""
        state = self.state
        try:
            records = self._storage.read(state.sequence - 1)
            last = next(records, None)
            # A term's first append elects its leader, so the state knows its last event's term.
            if last is None or (last.sequence, last.term) != (state.sequence, state.term):
                return False
            for record in records:
                # A writer appends only after its previous append was acknowledged.
                self.known = pb.JournalPosition(journal_id=state.journal_id, sequence=last.sequence)
                apply_journaled(state, record.sequence, decode(record.sequence, record.data))
                self.replayed += 1
        except Missing:  # trimmed: this state is too far behind
            return False
        return True


class Candidate:
    """A dispatcher that competes for the lead, repeatedly. `address` is announced to clients."""

    def __init__(
        self, storage: Storage, options: DispatcherOptions, address: str, place: str = ""
    ) -> None:
        """For `place` see `Storage.open_writer`."""
        self.standby = options.standby
        self.dashboard = ""  # this one's, as a URL; told when it leads
        self._storage = storage
        self._options = options
        self._address = address
        self._place = place
        # Not asyncio's pool, which a storage that hangs must not use up.
        self._threads = ThreadPool(STORAGE_THREADS, "forebay-candidate")
        self._follower = Follower(storage)
        self._known = pb.JournalPosition()  # the newest acknowledged event known here
        self.trouble = ""  # why the journal cannot be followed now
        self._exists = False  # a journal was found
        self._resolved: tuple[tuple[int, str], str] = (0, ""), ""  # a leader, and its IP address
        storage.listens = self._listens

    @property
    def state(self) -> State:
        """The followed journal's. Another thread changes it: read numbers and texts only."""
        return self._follower.state

    def leader(self) -> str:
        """The leader's address by the followed journal; "" if unknown or this one."""
        leader = self._follower.state.leader
        return leader if leader != self._address else ""

    def stands_by(self) -> str:
        """Who leads, as far as it knows, or why it does not know; for those who ask it."""
        leader = self.leader()
        where = f"ask {leader}" if leader else f"{NO_LEADER}; ask again"
        return f"{where}. Its storage does not answer: {self.trouble}" if self.trouble else where

    def _listens(self, term: int) -> bool | None:
        """See `Storage.listens`. Called by `open_writer`, while nobody follows."""
        leader = self.leader()
        if self._follower.state.term != term or not leader:
            return None
        if self._resolved[0] != (term, leader):  # later the name may be gone, and slow to ask for
            self._resolved = (term, leader), resolved(leader)
        return is_listened_on(self._resolved[1], LISTENS_S)

    async def take_over(self) -> Dispatcher:
        """Wait until this process becomes the writer, and lead.

        A standby waits without limit; others give up once they see that the current leader is
        alive. Raises Locked, StorageUnusable, NewerFormat, Corrupt; without `standby` also Fenced
        and Unavailable.
        """
        while True:
            self._follower = Follower(self._storage)
            writer = await self._wait_for_place()
            try:
                return await self._begin(writer)
            except (Unavailable, StorageUnavailable, Fenced) as error:
                if not self.standby:
                    raise
                log.warning("could not begin to lead, and stands by again: %s", error)
                await asyncio.sleep(writer.lease_ms / 1000 / POLLS_A_LEASE)

    async def _begin(self, writer: Writer) -> Dispatcher:
        begun = time.monotonic()
        try:
            await self._catch_up_as(writer)
            await self._check_history(writer)
            dispatcher = await Dispatcher.open(
                self._storage, writer, self._follower.state, self._options, self._address,
                self.dashboard,
            )  # fmt: skip
        except BaseException:
            await self._threads.run(writer.close)
            raise
        log.info(
            "leads journal %s in term %d from sequence %d; replayed %d events, in %.0f ms since "
            "it became the writer",
            dispatcher.state.journal_id, writer.term, dispatcher.state.sequence,
            self._follower.replayed, 1000 * (time.monotonic() - begun),
        )  # fmt: skip
        return dispatcher

    async def _catch_up_as(self, writer: Writer) -> None:
        """Catch up while renewing the lease: a cold replay may take longer than a lease."""
        replay = asyncio.create_task(self._threads.run(self._follower.catch_up))
        interval_s = writer.lease_ms / 1000 / RENEWALS_A_LEASE
        while not (await asyncio.wait([replay], timeout=interval_s))[0]:
            try:
                await self._threads.run(writer.renew)
            except StorageUnavailable as error:
                self._complain(error)
        await replay

    def remember(self, position: pb.JournalPosition) -> None:
        """Record an acknowledged event: this process refuses to lead a journal without it."""
        known = self._known
        if position.sequence and (
            position.journal_id != known.journal_id or position.sequence > known.sequence
        ):
            self._known = position

    async def _check_history(self, writer: Writer) -> None:
        """Check that the journal holds all events known here. Raises Corrupt, StorageUnusable."""
        state, known = self._follower.state, self._known
        if state.sequence != writer.last_sequence:
            raise Corrupt(
                f"{self._storage.url}: ends at record {state.sequence} for who reads it, and at "
                f"{writer.last_sequence} for its writer; restart the dispatcher, and if that does "
                "not help, verify the journal"
            )
        if not state.sequence and self._options.existing:
            raise no_journal(self._storage)
        if known.sequence and state.sequence and state.journal_id != known.journal_id:
            if not continues(state, known.journal_id):
                raise Corrupt(
                    f"{self._storage.url}: holds the journal {state.journal_id}, which "
                    f"{beginning(state)}, and held {known.journal_id} up to event {known.sequence} "
                    "before: bring that back, or restart this dispatcher to go on with the other"
                )
            log.warning(
                "the storage holds the journal %s now, to which %s was repaired",
                state.journal_id, known.journal_id,
            )  # fmt: skip
        elif state.sequence < known.sequence:
            reason = (
                f"this dispatcher knows of event {known.sequence} of journal {known.journal_id}, "
                f"and the log ends at {state.sequence}: events that were acknowledged are gone"
            )
            await self._threads.run(writer.condemn, reason)
            raise Corrupt(
                f"{self._storage.url}: {reason}; restore the storage from a backup, {REPAIR}"
            )

    async def _wait_for_place(self) -> Writer:
        options = self._options
        owner = f"the dispatcher {self._address} on {socket.gethostname()}"
        lease_s = options.leader_lease_ms / 1000
        give_up_s = time.monotonic() + PATIENCE_LEASES * lease_s
        held_by = ""
        while True:
            try:
                return await self._open_writer(owner)
            except Locked as error:
                if not options.standby and time.monotonic() > give_up_s:
                    raise
                by = f"{self._storage.url} is led by {error.owner}" if error.owner else str(error)
                if options.standby and by != held_by:
                    held_by = by
                    log.info("stands by: %s", held_by)
            except StorageUnavailable as error:
                if not options.standby:
                    raise
                self._complain(error)
            if options.standby:
                await self._follow()
            await asyncio.sleep(min(lease_s / POLLS_A_LEASE, LONGEST_POLL_S))

    async def _open_writer(self, owner: str) -> Writer:
        opening = asyncio.create_task(self._threads.run(self._open_writer_now, owner))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            (writer,) = await asyncio.gather(opening, return_exceptions=True)
            if isinstance(writer, Writer):
                await self._threads.run(writer.close)  # else nobody leads until lease expiry
            raise

    def _open_writer_now(self, owner: str) -> Writer:
        if self._options.existing and not self._exists:
            if not holds_anything(self._storage):  # before anything is written
                raise no_journal(self._storage)
            self._exists = True
        return self._storage.open_writer(
            owner, lease_ms=self._options.leader_lease_ms, place=self._place
        )

    async def _follow(self) -> None:
        try:
            await self._threads.run(self._follower.catch_up)
            self.remember(self._follower.known)
        except (Corrupt, NewerFormat):
            raise
        except StorageError as error:
            self._complain(error)
        else:
            self.trouble = ""

    def _complain(self, error: StorageError) -> None:
        if not self.trouble:
            log.warning("the journal cannot be followed, and is tried again: %s", error)
        self.trouble = str(error)


def no_journal(storage: Storage) -> StorageUnusable:
    """The error for `--existing` without a journal."""
    return StorageUnusable(
        f"{storage.url} holds no journal, and --existing says that it does: is its disk mounted, "
        "its data there? To begin a new journal, leave --existing out once"
    )


def place_of(address: str) -> str:
    """An id of the listener on `address` of this machine; only one process can listen there."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return ""  # not Linux: the next process must wait for lease expiry
    return f"{boot}/{network}/{address}"

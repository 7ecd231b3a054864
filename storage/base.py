"""The contract between the journal and whatever keeps it.

A storage is three things under one URL: a *log* of opaque records, numbered 1, 2, 3 … by
their sequence; *snapshots* of the state as of a sequence; and *blobs*, whose names say their
content. Anybody may read at any time. At most one `Writer` may append, and it is fenced:
each writer has a term larger than all before it, and once a later term exists the storage
itself refuses the earlier writer's appends.

A writer's place is its own as long as it gives signs of life: it renews, within its lease. That
decides only who may *try*: two that believe to be the writer harm nothing, since every append
is fenced. No two clocks are compared. A storage object notes what it sees of the present writer
each time that `open_writer` is called, and by its own monotonic clock how long that has stayed
the same.

All methods block, and may be called from any thread; `Writer.append` from one at a time.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .errors import StorageUnusable

LEASE_MS = 2_000
"""How long a writer's place is respected without a sign of life, unless it says otherwise."""


REGISTER = "restore it from a backup, or register the dataset again"
"""What to do about a blob that is not as it was written."""


class Record(NamedTuple):
    """A record of the log, as it is read back."""

    sequence: int
    term: int
    data: bytes


class Extent(NamedTuple):
    """What the log holds: the records first … last; last < first when there are none."""

    first: int
    last: int


class Holdings(NamedTuple):
    """What a storage holds, for people to look at."""

    segments: int  # pieces that the log is kept in
    log_bytes: int
    torn_bytes: int  # of log_bytes: behind the last whole batch, left there by a crash
    snapshots: int
    snapshot_bytes: int
    blobs: int
    blob_bytes: int


def blob_digest(data: bytes) -> str:
    """What the name of a blob begins with: its SHA-256, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def blob_name(data: bytes, mark: str = "") -> str:
    """The name of a blob: its digest, and behind a point its mark, if it has one."""
    return f"{blob_digest(data)}.{mark}" if mark else blob_digest(data)


def is_blob(name: str, data: bytes) -> bool:
    """Whether a blob of that name holds this."""
    return name.partition(".")[0] == blob_digest(data)


class Storage(ABC):
    """A place for one journal. Opening it changes nothing in it."""

    url: str
    lasting = True  # what it holds is expected to be there when its dispatcher is started again

    @abstractmethod
    def open_writer(self, owner: str, *, lease_ms: int = LEASE_MS, place: str = "") -> Writer:
        """Become the only writer, with a term that no earlier writer had.

        The term is durable before this returns, and so is all that `read` then yields. A torn
        tail (an append that a crash cut off, and that was therefore never acknowledged) is
        removed here, with a log line. A storage that does not exist is made. `owner` says who
        asks, for the message that a second writer gets.

        Raises Locked while another writer may be at work: one that has not closed, whose
        process is not known to have ended, and that this storage object has not seen silent for
        as long as its lease. So who wants its place calls again and again, a few times a lease.
        A writer opened with the same `place` has ended: a place is something that only one
        process can have, such as an address that it listens on ("" is no place).

        Raises Locked, StorageUnusable, NewerFormat, Corrupt.
        """

    @abstractmethod
    def read(self, after: int = 0) -> Iterator[Record]:
        """Yield the records with a sequence above `after`, in order, then stop.

        Safe while a writer appends: each record that was acknowledged before the call is
        seen, and batches are seen whole. A batch may be seen a moment before it is durable,
        and vanishes again if its append fails: who acts on what it reads beside a writer must
        stay behind what the writer acknowledged. A torn tail is passed over. While iterating,
        raises Corrupt and NewerFormat, and Missing if records above `after` were trimmed.
        """

    @abstractmethod
    def first_sequence(self) -> int:
        """The sequence of the oldest record that is kept, or of the next one if none is.

        Cheap, and works on a log that is corrupt further on.
        """

    @abstractmethod
    def extent(self) -> Extent:
        """The first and last sequence that `read` would yield now. Raises Corrupt."""

    def check(self) -> None:
        """Raise what `open_writer` would raise of an end that is not as it was written.

        Beside what `extent` reads, that is what else says how long the log was, and which term
        its last writer had. Changes nothing. Safe while a writer appends. Raises Corrupt.
        """
        self.extent()

    @abstractmethod
    def snapshots(self) -> list[int]:
        """The sequences that have a snapshot, ascending."""

    @abstractmethod
    def read_snapshot(self, sequence: int) -> bytes:
        """The snapshot's data. Raises Missing, Corrupt."""

    @abstractmethod
    def blobs(self) -> list[str]:
        """The names of all blobs, in no order. One that is written meanwhile may be missing."""

    @abstractmethod
    def read_blob(self, name: str) -> bytes:
        """The blob of that name. Raises Missing, Corrupt."""

    @abstractmethod
    def holdings(self) -> Holdings:
        """How much of what is kept here. Counts what is corrupt as well."""

    @abstractmethod
    def condemned(self) -> str:
        """Why no writer may begin (`Writer.condemn`); "" if one may."""

    def cut(self, after: int, owner: str) -> str:
        """Move what is behind the record `after` aside, with its snapshots, and say where to.

        For the repair of a corrupt log, when what cannot be read must go. Cuts between
        batches: of a batch that `after` lies in, nothing stays. Nothing is deleted. Lifts what
        `Writer.condemn` said. Needs the writer's place for itself, so it raises Locked, like
        `open_writer`. A storage that ends with its process need not offer it.
        """
        raise StorageUnusable(f"{self.url}: nothing can be cut off here (records after {after})")

    @abstractmethod
    def close(self) -> None:
        """Release what reading holds. Writers are closed on their own. Idempotent."""


class Writer(ABC):
    """The one appender of a storage. Everything that it wrote is durable when it returns."""

    term: int
    last_sequence: int
    lease_ms: int  # how long its place is respected without a sign of life

    @abstractmethod
    def renew(self) -> None:
        """Give a sign of life: for `lease_ms` from when this was called, nobody takes over.

        May run while other threads append or write. Raises Fenced, and StorageError when the
        storage cannot be reached; the place is not lost by that, and the next try may succeed.
        """

    @abstractmethod
    def append(self, records: Sequence[bytes]) -> int:
        """Append the records as one atomic batch after `last_sequence`; return the new last.

        When it returns, the batch is durable and `last_sequence` has moved. After a crash
        during the call the whole batch is there, or nothing of it. Raises Fenced (the batch was
        not acknowledged, and is only there if the later writer found it), Corrupt (acknowledged
        records are gone), or AppendFailed (outcome unknown; every further append fails as well). A
        batch of no records changes nothing.
        """

    @abstractmethod
    def write_snapshot(self, sequence: int, data: bytes) -> None:
        """Store a snapshot atomically. May run while another thread appends.

        Replaces one of the same sequence. `sequence` is at least 1 and not above
        `last_sequence`, else OutOfSequence is raised. Raises Fenced, and StorageError when it
        could not be written; then an earlier one is untouched, and appends go on.
        """

    @abstractmethod
    def delete_snapshot(self, sequence: int) -> None:
        """Remove a snapshot; none of that sequence is no error. Raises Fenced."""

    @abstractmethod
    def trim(self, before: int) -> None:
        """Allow records with a sequence below `before` to be forgotten.

        Forgetting may be coarser and later, never further. A snapshot of at least
        `before − 1` must exist, else OutOfSequence is raised and nothing is removed. Sequences
        go on where they were, even if every record is gone. Raises Fenced.
        """

    @abstractmethod
    def write_blob(self, data: bytes, mark: str = "") -> str:
        """Store a blob atomically, unless it is there; return its name.

        A `mark`, of letters, digits and "-", makes another blob of the same data. Raises Fenced,
        and StorageError when it could not be written.
        """

    @abstractmethod
    def delete_blob(self, name: str) -> None:
        """Remove a blob; none of that name is no error. Raises Fenced, StorageError.

        It may happen although Fenced is raised, or later, if this writer is displaced meanwhile:
        so a name that may have been deleted must not be written again, by whomever.
        """

    @abstractmethod
    def condemn(self, reason: str) -> None:
        """Note durably that acknowledged records are gone, if this is still the writer.

        From now on `open_writer` raises Corrupt with the reason, until `cut` has declared what
        is there to be all that there is. Appends of this writer fail. Raises StorageError when
        it could not be noted.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up the writer's place. Idempotent; a later append raises Fenced.

        May be called while an append waits, which then ends soon, its outcome unknown.
        """

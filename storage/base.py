"""The interface of a storage, which keeps a journal.

A storage is three things under one URL: a *log* of opaque records, numbered 1, 2, 3 … by
their sequence; *snapshots* of the state as of a sequence; and content-addressed *blobs*. Anybody
may read at any time. At most one `Writer` may append, and it is fenced: its term is larger than
all earlier ones. Once a later term exists, the storage refuses the earlier writer's appends.

On a server, a writer stays the writer by renewing its lease. The lease decides only who may *try*
to write: two processes that both believe to be the writer do no harm, since every append is fenced.
No two clocks are compared. Each `open_writer` call notes the present writer's last sign of life,
and measures by its own monotonic clock how long that has stayed the same. On local files a lock
that ends with its process decides, and nobody displaces a process that lives.

All methods block, and may be called from any thread; `Writer.append` from one at a time.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .durations import Durations
from .errors import Missing, OutOfSequence, StorageUnusable

LEASE_MS = 2_000
"""The default lease: how long a writer stays the writer without renewing."""


REGISTER = "restore it from a backup, or register the dataset again"
"""What the operator can do about a missing or damaged blob."""


class Record(NamedTuple):
    """A record of the log, as `read` yields it."""

    sequence: int
    term: int
    data: bytes


class Extent(NamedTuple):
    """The log holds the records first … last; last < first means that it is empty."""

    first: int
    last: int


class Holdings(NamedTuple):
    """Counts and sizes of what a storage holds, for people."""

    segments: int  # of the log
    log_bytes: int
    torn_bytes: int  # part of log_bytes: a crash left them after the last whole batch
    snapshots: int
    snapshot_bytes: int
    blobs: int
    blob_bytes: int


def blob_digest(data: bytes) -> str:
    """The digest that a blob's name begins with: its SHA-256, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def blob_name(data: bytes, mark: str = "") -> str:
    """The name of a blob: its digest, then, if it has a mark, a dot and the mark."""
    return f"{blob_digest(data)}.{mark}" if mark else blob_digest(data)


def check_snapshot_fits(sequence: int, last: int) -> None:
    """Raise OutOfSequence unless a log that ends at `last` may have a snapshot there."""
    if not 1 <= sequence <= last:
        raise OutOfSequence(f"a snapshot at {sequence} does not fit a log that ends at {last}")


def trimmed(url: str, first: int, wanted: int) -> Missing:
    """The error for a read from record `wanted` of a log that begins with `first`."""
    return Missing(f"{url}: records before {first} were trimmed, so none can be read from {wanted}")


def refuse_trim(before: int, newest: int) -> OutOfSequence:
    """The error for a trim before `before`, with the newest snapshot at `newest`."""
    return OutOfSequence(f"no trimming before {before}: the newest snapshot is at {newest}")


def is_blob(name: str, data: bytes) -> bool:
    """Whether `data` is the content of the blob `name`."""
    return name.partition(".")[0] == blob_digest(data)


Listens = Callable[[int], bool | None]
"""Whether somebody listens at the address of this term's leader; None if nobody knows."""


class Storage(ABC):
    """A place for one journal. Opening it changes nothing in it."""

    url: str
    lasting = True  # whether the content survives a restart of the dispatcher
    listens: Listens | None = None
    """Set by a standby. A storage that sees who is connected to it may ask, and displace a writer
    whose process has ended before its lease expires (`Writer.query_ms`)."""

    @abstractmethod
    def open_writer(self, owner: str, *, lease_ms: int = LEASE_MS, place: str = "") -> Writer:
        """Become the only writer, with a term that no earlier writer had.

        The term is durable before this returns, and so is all that `read` then yields. Removes
        and logs a torn tail: an append that a crash cut off, and that was never acknowledged.
        Creates a storage that does not exist. `owner` names the caller in the error message that
        a second writer gets.

        Raises Locked while another writer may be at work: it has not closed, its process is not
        known to have ended, and this storage object has not seen its lease expire. A writer that
        renewed less than its `query_ms` ago counts as at work, unless it has closed. To take over,
        poll a few times per lease. A `place` is something that only one process can have, such as
        an address that it listens on. So an earlier writer with the same `place` must have ended
        ("" is no place).

        Raises Locked, StorageUnusable, NewerFormat, Corrupt.
        """

    @abstractmethod
    def read(self, after: int = 0) -> Iterator[Record]:
        """Yield the records with a sequence above `after`, in order, to the present end.

        Safe while a writer appends: yields each record that was acknowledged before the call,
        and only whole batches. It may yield a batch just before that is durable, and the batch
        vanishes if its append fails. So a reader beside a writer must act only on records that
        the writer acknowledged. Skips a torn tail. While iterating, raises Corrupt and
        NewerFormat, and Missing if records above `after` were trimmed.
        """

    @abstractmethod
    def first_sequence(self) -> int:
        """The sequence of the oldest record, or of the next one if the log is empty.

        Cheap, and works on a log that is corrupt further on.
        """

    @abstractmethod
    def extent(self) -> Extent:
        """The first and last sequence that `read` would yield now. Raises Corrupt."""

    def check(self) -> None:
        """Raise what `open_writer` would raise about a damaged end of the log.

        Compares what `extent` reads with the other notes of the log's length and last term.
        Changes nothing. Safe while a writer appends. Raises Corrupt.
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
        """The names of all blobs, unordered. One that is written meanwhile may be missing."""

    @abstractmethod
    def read_blob(self, name: str) -> bytes:
        """The blob of that name. Raises Missing, Corrupt."""

    @abstractmethod
    def holdings(self) -> Holdings:
        """Counts and sizes, including those of corrupt parts."""

    @abstractmethod
    def condemned(self) -> str:
        """The reason why no writer may open this (`Writer.condemn`); "" without one."""

    def cut(self, after: int, owner: str) -> str:
        """Move the log after record `after` aside, with its snapshots, and say where to.

        For the repair of a corrupt log. Cuts between batches: if `after` lies within a batch, the
        whole batch goes. Deletes nothing. Undoes `Writer.condemn`. Becomes the writer meanwhile,
        so it raises Locked, like `open_writer`. Optional for a storage that ends with its process.
        """
        raise StorageUnusable(f"{self.url}: nothing can be cut off here (records after {after})")

    @abstractmethod
    def close(self) -> None:
        """Release what reading holds, but close no writers. Idempotent."""


class Writer(ABC):
    """The one appender of a storage. What a method wrote is durable when it returns."""

    term: int
    last_sequence: int
    lease_ms: int  # how long it stays the writer without renewing
    syncs: Durations | None = None  # of appends to the disk; None: a server does that, or nobody

    @property
    def query_ms(self) -> int:
        """How long after a renewal was sent nobody else can be the writer: at most `lease_ms`.

        Less, if the storage displaces a writer that seems to have ended before its lease expires.
        """
        return self.lease_ms

    @abstractmethod
    def renew(self) -> None:
        """Renew the lease: nobody takes over for `query_ms` from the time of the call, and nobody
        for `lease_ms` unless this process seems to have ended.

        May run while other threads append or write. Raises Fenced, and StorageError if the
        storage is unreachable. It is still the writer then: a retry may succeed.
        """

    @abstractmethod
    def append(self, records: Sequence[bytes]) -> int:
        """Append the records as one atomic batch after `last_sequence`; return the new last.

        When it returns, the batch is durable and `last_sequence` has moved. After a crash
        during the call the whole batch is there, or nothing of it. Raises Fenced (the batch was
        not acknowledged, and is only there if the later writer found it), Corrupt (acknowledged
        records are gone), or AppendFailed (outcome unknown; every further append fails as well).
        An empty batch changes nothing.
        """

    @abstractmethod
    def write_snapshot(self, sequence: int, data: bytes) -> None:
        """Store a snapshot atomically. May run while another thread appends.

        Replaces one of the same sequence. Raises OutOfSequence unless
        1 <= `sequence` <= `last_sequence`. Raises Fenced, and StorageError if the write failed;
        then an earlier snapshot is untouched, and appends go on.
        """

    @abstractmethod
    def delete_snapshot(self, sequence: int) -> None:
        """Remove a snapshot, if it exists. Raises Fenced."""

    @abstractmethod
    def trim(self, before: int) -> None:
        """Allow the storage to delete records with a sequence below `before`.

        It may delete fewer of them, or later. Raises OutOfSequence and removes nothing unless a
        snapshot of at least `before − 1` exists. Sequences go on where they were, even if every
        record is gone. Raises Fenced.
        """

    @abstractmethod
    def write_blob(self, data: bytes, mark: str = "") -> str:
        """Store a blob atomically, unless it is there; return its name.

        A `mark`, of letters, digits and "-", makes another blob of the same data. Raises Fenced,
        and StorageError if the write failed.
        """

    @abstractmethod
    def delete_blob(self, name: str) -> None:
        """Remove a blob, if it exists. Raises Fenced, StorageError.

        If this writer is displaced meanwhile, the deletion may happen although Fenced is raised,
        or later. So no writer may write a name again that may have been deleted.
        """

    @abstractmethod
    def condemn(self, reason: str) -> None:
        """Note durably that acknowledged records are gone, if this is still the writer.

        From now on `open_writer` raises Corrupt with the reason, until `cut` repairs the log.
        Appends of this writer fail. Raises StorageError if the note could not be written.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop being the writer. Idempotent; a later append raises Fenced.

        May be called while an append waits. That append then ends soon; its outcome is unknown.
        """

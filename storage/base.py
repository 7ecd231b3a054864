"""The contract between the journal and whatever keeps it.

A storage is three things under one URL: a *log* of opaque records, numbered 1, 2, 3 … by
their sequence; *snapshots* of the state as of a sequence; and *blobs*, named by their
content. Anybody may read at any time. At most one `Writer` may append, and it is fenced:
each writer has a term larger than all before it, and once a later term exists the storage
itself refuses the earlier writer's appends.

All methods block, and may be called from any thread; `Writer.append` from one at a time.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Record(NamedTuple):
    """A record of the log, as it is read back."""

    sequence: int
    term: int
    data: bytes


class Extent(NamedTuple):
    """What the log holds: the records first … last; last < first when there are none."""

    first: int
    last: int


def blob_digest(data: bytes) -> str:
    """The name of a blob: its SHA-256, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


class Storage(ABC):
    """A place for one journal. Opening it changes nothing in it."""

    url: str

    @abstractmethod
    def open_writer(self, owner: str) -> Writer:
        """Become the only writer, with a term that no earlier writer had.

        The term is durable before this returns. A torn tail (an append that a crash cut
        off, and that was therefore never acknowledged) is removed here, with a log line.
        `owner` says who asks, for the message that a second writer gets.

        Raises Locked, StorageUnusable, NewerFormat, Corrupt.
        """

    @abstractmethod
    def read(self, after: int = 0) -> Iterator[Record]:
        """Yield the durable records with a sequence above `after`, in order, then stop.

        Safe while a writer appends: each record that was acknowledged before the call is
        seen, and batches are seen whole. A torn tail is passed over. Raises Corrupt, and
        Missing if records above `after` were trimmed.
        """

    @abstractmethod
    def extent(self) -> Extent:
        """The first and last sequence that `read` would yield now."""

    @abstractmethod
    def snapshots(self) -> list[int]:
        """The sequences that have a snapshot, ascending."""

    @abstractmethod
    def read_snapshot(self, sequence: int) -> bytes:
        """The snapshot's data. Raises Missing, Corrupt."""

    @abstractmethod
    def read_blob(self, digest: str) -> bytes:
        """The blob whose `blob_digest` this is. Raises Missing, Corrupt."""

    @abstractmethod
    def close(self) -> None:
        """Release what reading holds. Writers are closed on their own. Idempotent."""


class Writer(ABC):
    """The one appender of a storage. Everything that it wrote is durable when it returns."""

    term: int
    last_sequence: int

    @abstractmethod
    def append(self, records: Sequence[bytes]) -> int:
        """Append the records as one atomic batch after `last_sequence`; return the new last.

        When it returns, the batch is durable and `last_sequence` has moved. After a crash
        during the call the whole batch is there, or nothing of it. Raises Fenced (nothing
        written), or AppendFailed (outcome unknown; every further append fails as well).
        """

    @abstractmethod
    def write_snapshot(self, sequence: int, data: bytes) -> None:
        """Store a snapshot atomically. May run while another thread appends.

        `sequence` must not be above `last_sequence`. Raises Fenced, StorageError.
        """

    @abstractmethod
    def delete_snapshot(self, sequence: int) -> None:
        """Remove a snapshot; none of that sequence is no error."""

    @abstractmethod
    def trim(self, before: int) -> None:
        """Allow records with a sequence below `before` to be forgotten.

        Forgetting may be coarser and later, never further. A snapshot of at least
        `before − 1` must exist, else OutOfSequence is raised and nothing is removed.
        """

    @abstractmethod
    def write_blob(self, data: bytes) -> str:
        """Store a blob atomically, unless it is there; return its digest."""

    @abstractmethod
    def close(self) -> None:
        """Give up the writer's place. Idempotent; a later append raises Fenced."""

"""An in-memory storage, for tests, trials and `memory:` dispatchers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .base import (
    LEASE_MS,
    Extent,
    Holdings,
    Record,
    Storage,
    Writer,
    blob_name,
    check_snapshot_fits,
    refuse_trim,
    trimmed,
)
from .errors import Corrupt, Fenced, Locked, Missing


class MemoryStorage(Storage):
    """Keeps everything in the object. `read` yields what was there at the call."""

    lasting = False

    def __init__(self) -> None:
        self.url = "memory:"
        self._lock = threading.Lock()  # guards everything below
        self._records: list[Record] = []  # of the sequences _first, _first + 1, …
        self._first = 1
        self._snapshots: dict[int, bytes] = {}
        self._blobs: dict[str, bytes] = {}
        self._term = 0
        self._writer: MemoryWriter | None = None
        self._owner = ""
        self._condemned = ""

    def open_writer(self, owner: str, *, lease_ms: int = LEASE_MS, place: str = "") -> MemoryWriter:
        with self._lock:
            if self._condemned:
                raise Corrupt(f"{self.url}: {self._condemned}")
            if self._writer is not None:
                what = f"{self.url} is in use by {self._owner}; stop that first"
                raise Locked(what, owner=self._owner)
            self._term += 1
            self._owner = owner
            self._writer = MemoryWriter(self, self._term, self._next - 1, lease_ms)
            return self._writer

    @property
    def _next(self) -> int:
        return self._first + len(self._records)

    def read(self, after: int = 0) -> Iterator[Record]:
        with self._lock:
            if after + 1 < self._first:
                raise trimmed(self.url, self._first, after + 1)
            return iter(self._records[after + 1 - self._first :])

    def first_sequence(self) -> int:
        return self._first

    def extent(self) -> Extent:
        with self._lock:
            return Extent(self._first, self._next - 1)

    def snapshots(self) -> list[int]:
        with self._lock:
            return sorted(self._snapshots)

    def read_snapshot(self, sequence: int) -> bytes:
        try:
            return self._snapshots[sequence]
        except KeyError:
            raise Missing(f"{self.url} has no snapshot {sequence}") from None

    def blobs(self) -> list[str]:
        with self._lock:
            return list(self._blobs)

    def read_blob(self, name: str) -> bytes:
        try:
            return self._blobs[name]
        except KeyError:
            raise Missing(f"{self.url} has no blob {name}") from None

    def holdings(self) -> Holdings:
        with self._lock:
            return Holdings(
                segments=int(bool(self._records)),
                log_bytes=sum(len(record.data) for record in self._records),
                torn_bytes=0,
                snapshots=len(self._snapshots),
                snapshot_bytes=sum(map(len, self._snapshots.values())),
                blobs=len(self._blobs),
                blob_bytes=sum(map(len, self._blobs.values())),
            )

    def condemned(self) -> str:
        return self._condemned

    def close(self) -> None:
        pass


class MemoryWriter(Writer):
    """The writer of a MemoryStorage. Data is durable once it is in the object."""

    def __init__(
        self, storage: MemoryStorage, term: int, last_sequence: int, lease_ms: int
    ) -> None:
        self.term = term
        self.last_sequence = last_sequence
        self.lease_ms = lease_ms
        self._storage = storage

    def renew(self) -> None:
        self._require_claim()  # no lease: the writer lives in this process

    def append(self, records: Sequence[bytes]) -> int:
        with self._acting() as storage:
            storage._records += [
                Record(sequence, self.term, bytes(data))
                for sequence, data in enumerate(records, self.last_sequence + 1)
            ]
            self.last_sequence += len(records)
            return self.last_sequence

    def write_snapshot(self, sequence: int, data: bytes) -> None:
        with self._acting() as storage:
            check_snapshot_fits(sequence, self.last_sequence)
            storage._snapshots[sequence] = bytes(data)

    def delete_snapshot(self, sequence: int) -> None:
        with self._acting() as storage:
            storage._snapshots.pop(sequence, None)

    def trim(self, before: int) -> None:
        with self._acting() as storage:
            if before <= storage._first:
                return
            newest = max(storage._snapshots, default=0)
            if newest < before - 1:
                raise refuse_trim(before, newest)
            storage._records = storage._records[before - storage._first :]
            storage._first = before

    def write_blob(self, data: bytes, mark: str = "") -> str:
        with self._acting() as storage:
            name = blob_name(data, mark)
            storage._blobs[name] = bytes(data)
            return name

    def delete_blob(self, name: str) -> None:
        with self._acting() as storage:
            storage._blobs.pop(name, None)

    def condemn(self, reason: str) -> None:
        with self._acting() as storage:
            storage._condemned = reason
            storage._writer = None

    def close(self) -> None:
        with self._storage._lock:
            if self._storage._writer is self:
                self._storage._writer = None

    @contextmanager
    def _acting(self) -> Iterator[MemoryStorage]:
        """The storage, with its lock held, while this is its writer."""
        with self._storage._lock:
            self._require_claim()
            yield self._storage

    def _require_claim(self) -> None:
        if self._storage._writer is not self:
            raise Fenced(f"{self._storage.url}: the writer of term {self.term} gave up its place")

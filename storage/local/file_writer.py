"""The writer of a storage in a directory.

The writer syncs a batch before `append` returns, every other file before it gets its name, and
every name before anything relies on it.

Should its lock be lost (file_opening.py), another writer may replace TERM at any instant, and then
read the log. So before this writer acknowledges a change, it checks that TERM is still the file
that it wrote. If so, the change was there in time for the other writer to read it. The check also
shows that the storage's files were removed or replaced.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ..base import Writer, blob_name, check_snapshot_fits, refuse_trim
from ..batches import encode_batch
from ..durations import Durations
from ..errors import AppendFailed, Corrupt, Fenced, StorageError
from ..tfrecord import frame
from .durable import (
    FileLock,
    check_is_file,
    create,
    remedy,
    sync_directory,
    write_all,
    write_atomically,
)
from .layout import LogDirectory, StoragePaths
from .segments import Position
from .term import HeldTerm, Term

log = logging.getLogger(__name__)

_SMALL_SEGMENT_BYTES = 1 << 20  # a snapshot ends the segment, unless it is this small


class WriterClaim(NamedTuple):
    """The lock and the TERM that a writer holds, and where it writes."""

    layout: StoragePaths
    log: LogDirectory
    lock: FileLock  # of that directory
    held_term: HeldTerm
    term: int
    lease_ms: int


class FileWriter(Writer):
    """The writer of a FileStorage."""

    def __init__(
        self, claim: WriterClaim, segment_bytes: int, end: Position, segment: int | None
    ) -> None:
        """Continue at `end`. `segment` is the last segment's descriptor, None without segments."""
        self.syncs = self._syncs = Durations()
        self.term = claim.term
        self.lease_ms = claim.lease_ms
        self.last_sequence = end.sequence - 1
        self._claim = claim
        self._path = claim.layout.path
        self._log = claim.log
        self._segment_bytes = segment_bytes
        self._segment = segment
        self._size = end.offset
        self._roll = False  # begin a new segment with the next append
        self._named = False  # whether TERM names a record of this segment and term
        self._failed = ""  # why no append can follow
        self._closed = False
        # Also `close`'s: nobody may use a closed descriptor, whose number may be reused.
        self._appending = threading.Lock()

    def append(self, records: Sequence[bytes]) -> int:
        with self._appending:
            return self._append(records)

    def _append(self, records: Sequence[bytes]) -> int:
        self._require_claim()
        if self._failed:
            raise AppendFailed(f"an earlier append failed: {self._failed}")
        if not records:
            return self.last_sequence
        data = encode_batch(self.term, self.last_sequence + 1, records)
        last = self.last_sequence + len(records)
        self._failed = "it was interrupted"  # until it is known to be durable
        durable = False
        try:
            if self._segment is None or self._is_full(len(data)):
                self.begin_segment()
            assert self._segment is not None
            write_all(self._segment, data)
            since_s = time.monotonic()
            os.fdatasync(self._segment)
            self._syncs.add(time.monotonic() - since_s)
            durable = True
            if not self._named:  # reveals the loss of a segment
                self._claim.held_term.raise_last(last)
                self._named = True
        except OSError as error:
            self._failed = f"{self._path}: {error.strerror}"
            self._require_claim()
            if not durable:
                self._discard_partial()
            raise AppendFailed(
                f"{self._failed}; {remedy(error, self._path)}, then start the dispatcher again"
            ) from error
        self._require_claim()
        self._failed = ""
        self._size += len(data)
        self.last_sequence = last
        return last

    def renew(self) -> None:
        self._require_claim()

    def condemn(self, reason: str) -> None:
        with self._appending, self._acting():
            self._failed = reason
            write_atomically(self._log.condemned, reason.encode())

    def write_snapshot(self, sequence: int, data: bytes) -> None:
        with self._acting():
            check_snapshot_fits(sequence, self.last_sequence)
            write_atomically(self._log.snapshot(sequence), frame(data))
        self._roll = True

    def delete_snapshot(self, sequence: int) -> None:
        with self._acting():
            self._log.snapshot(sequence).unlink(missing_ok=True)

    def trim(self, before: int) -> None:
        with self._acting():
            segments = self._log.list_segments()
            # A segment ends where the next one begins; the last one stays.
            passed = [s for s, after in itertools.pairwise(segments) if after.first <= before]
            if segments and before > segments[0].first:
                newest = max(self._log.list_snapshots(), default=0)
                if newest < before - 1:
                    raise refuse_trim(before, newest)
            for segment in passed:
                segment.path.unlink()
                sync_directory(segment.path.parent)  # in order: a crash must not leave a gap

    def write_blob(self, data: bytes, mark: str = "") -> str:
        name = blob_name(data, mark)
        path = self._claim.layout.blobs / name
        with self._acting():
            check_is_file(path)
            try:
                there = path.read_bytes() == data
            except FileNotFoundError:
                there = False
            if there:
                sync_directory(path.parent)
            else:
                write_atomically(path, data)
        return name

    def delete_blob(self, name: str) -> None:
        if (path := self._claim.layout.blob(name)) is not None:
            with self._acting():
                path.unlink(missing_ok=True)
                sync_directory(path.parent)

    def close(self) -> None:
        with self._appending:
            if self._closed:
                return
            self._closed = True
            if self._segment is not None:
                os.close(self._segment)
            self._claim.held_term.close()
            self._claim.lock.release()

    @contextmanager
    def _acting(self) -> Iterator[None]:
        """Run the block only as the present writer; translate its errors."""
        self._require_claim()
        try:
            yield
        except (OSError, StorageError) as error:
            self._require_claim()  # files may be missing because this writer was displaced
            if isinstance(error, OSError):
                raise _storage_error(error, self._path) from error
            raise
        self._require_claim()

    def _require_claim(self) -> None:
        if self._closed:
            raise Fenced(f"{self._path}: the writer of term {self.term} gave up its place")
        try:
            held = self._claim.held_term.is_current()
        except OSError as error:
            raise _storage_error(error, self._path) from error
        if not held:
            raise self._why_displaced()

    def _why_displaced(self) -> StorageError:
        """The error that explains why TERM has changed."""
        path = self._claim.layout.term
        try:
            term = Term.read(path)
        except StorageError as error:
            return error
        if term is not None and term.number > self.term:
            return Fenced(
                f"{self._path}: another writer has taken over from term {self.term}; this one "
                "must stop"
            )
        reason = (
            f"{path} is missing or older than term {self.term}: the storage's files were removed "
            f"or replaced, and record {self.last_sequence} had been acknowledged"
        )
        with suppress(OSError):  # so that nobody continues on the damaged log
            write_atomically(self._claim.layout.log().condemned, reason.encode())
        return Corrupt(f"{reason}; bring them back")

    def _is_full(self, more: int) -> bool:
        limit = self._segment_bytes
        if self._roll and self._size > min(limit, _SMALL_SEGMENT_BYTES):
            return True
        return self._size > 0 and self._size + more > limit

    def begin_segment(self) -> None:
        path = self._log.segment(self.last_sequence + 1)
        # O_APPEND: two writers never overwrite each other, even if the lock failed.
        segment = create(path, os.O_WRONLY | os.O_EXCL | os.O_APPEND)
        if self._segment is not None:
            os.close(self._segment)
        self._segment = segment
        self._size = 0
        self._roll = self._named = False
        sync_directory(path.parent)

    def _discard_partial(self) -> None:
        """Remove the remains of a failed append, so that the next writer need not judge them.

        The worst case is a whole frame whose fsync failed: a reader would get it from the page
        cache and take it for durable.
        """
        if self._segment is None:
            return
        try:
            os.ftruncate(self._segment, self._size)
            os.fsync(self._segment)
        except OSError as error:
            log.error("%s: the failed append could not be undone: %s", self._path, error)


def _storage_error(error: OSError, path: Path) -> StorageError:
    return StorageError(f"{error.filename or path}: {error.strerror}; {remedy(error, path)}")

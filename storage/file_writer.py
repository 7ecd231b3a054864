"""The writer of a storage in a directory.

What is acknowledged is synced: a batch before `append` returns, every other file before it gets
its name, every name before it is relied upon. The lock keeps a second writer out. The term is
the second guard, for when a lock does not hold: `append` looks whether TERM is still the file
that this writer wrote.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .base import Writer, blob_digest
from .durable import FileLock, sync_directory, write_all, write_atomically
from .errors import AppendFailed, Fenced, OutOfSequence, StorageError
from .layout import Layout
from .proto.segment_pb2 import Batch
from .segments import BATCH_FORMAT, Position
from .tfrecord import frame

log = logging.getLogger(__name__)

_SMALL_SEGMENT_BYTES = 1 << 20  # a snapshot ends the segment, unless it is as small as this


class FileWriter(Writer):
    """The writer of a FileStorage."""

    def __init__(
        self,
        layout: Layout,
        segment_bytes: int,
        lock: FileLock,
        term: int,
        end: Position,
        segment: int | None,
        lease_ms: int,
    ) -> None:
        """Go on at `end`. `segment` is the last one's descriptor, None if there is none yet."""
        self.term = term
        self.lease_ms = lease_ms
        self.last_sequence = end.sequence - 1
        self._layout = layout
        self._segment_bytes = segment_bytes
        self._lock = lock
        self._segment = segment
        self._size = end.offset
        self._roll = False  # begin a new segment with the next append
        self._failed = ""  # why no append can follow
        self._closed = False
        # Held open, so that no later file can have the same identity.
        self._term_fd = os.open(layout.term, os.O_RDONLY | os.O_CLOEXEC)
        self._term_identity = _identity(os.fstat(self._term_fd))

    def append(self, records: Sequence[bytes]) -> int:
        self._check_place()
        if self._failed:
            raise AppendFailed(f"an earlier append failed: {self._failed}")
        if not records:
            return self.last_sequence
        batch = Batch(
            format=BATCH_FORMAT,
            term=self.term,
            first_sequence=self.last_sequence + 1,
            records=records,
        )
        data = frame(batch.SerializeToString())
        self._failed = "it was interrupted"  # until it is known to be durable
        try:
            if self._segment is None or self._is_full(len(data)):
                self._begin_segment()
            assert self._segment is not None
            write_all(self._segment, data)
            os.fdatasync(self._segment)
        except OSError as error:
            self._failed = f"{self._layout.path}: {error.strerror}"
            self._discard_partial()
            raise AppendFailed(
                f"{self._failed}; make room or replace the disk, then start the dispatcher again"
            ) from error
        self._failed = ""
        self._size += len(data)
        self.last_sequence += len(records)
        return self.last_sequence

    def renew(self) -> None:
        self._check_place()

    def condemn(self, reason: str) -> None:
        self._check_place()
        self._write_file(self._layout.condemned, reason.encode())
        self._failed = reason

    def write_snapshot(self, sequence: int, data: bytes) -> None:
        self._check_place()
        if not 1 <= sequence <= self.last_sequence:
            raise OutOfSequence(
                f"a snapshot at {sequence} does not fit a log that ends at {self.last_sequence}"
            )
        self._write_file(self._layout.snapshot(sequence), frame(data))
        self._roll = True

    def delete_snapshot(self, sequence: int) -> None:
        self._check_place()
        with _storage_errors():
            self._layout.snapshot(sequence).unlink(missing_ok=True)

    def trim(self, before: int) -> None:
        self._check_place()
        segments = self._layout.list_segments()
        # A segment ends where the next one begins; the last one stays.
        passed = [s for s, following in itertools.pairwise(segments) if following.first <= before]
        if segments and before > segments[0].first:
            newest = max(self._layout.list_snapshots(), default=0)
            if newest < before - 1:
                raise OutOfSequence(
                    f"no trimming before {before}: the newest snapshot is at {newest}"
                )
        with _storage_errors():
            for segment in passed:
                segment.path.unlink()
                sync_directory(segment.path.parent)  # in order: a crash must not leave a gap

    def write_blob(self, data: bytes) -> str:
        self._check_place()
        digest = blob_digest(data)
        path = self._layout.blobs / digest
        try:
            there = path.read_bytes() == data
        except FileNotFoundError:
            there = False
        if there:
            sync_directory(path.parent)
        else:
            self._write_file(path, data)
        return digest

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._segment is not None:
            os.close(self._segment)
        os.close(self._term_fd)
        self._lock.release()

    def _check_place(self) -> None:
        path = self._layout.path
        if self._closed:
            raise Fenced(f"{path}: the writer of term {self.term} gave up its place")
        try:
            fenced = _identity(os.stat(self._layout.term)) != self._term_identity
        except FileNotFoundError:
            fenced = True
        if fenced:
            raise Fenced(
                f"{path}: another writer has taken over from term {self.term}; this one must stop"
            )

    def _is_full(self, more: int) -> bool:
        limit = self._segment_bytes
        if self._roll and self._size > min(limit, _SMALL_SEGMENT_BYTES):
            return True
        return self._size > 0 and self._size + more > limit

    def _begin_segment(self) -> None:
        path = self._layout.segment(self.last_sequence + 1)
        # Appending even if the lock did not hold: two writers never overwrite each other.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        segment = os.open(path, flags, 0o666)
        if self._segment is not None:
            os.close(self._segment)
        self._segment = segment
        self._size = 0
        self._roll = False
        sync_directory(path.parent)

    def _discard_partial(self) -> None:
        """Remove what a failed append left, so that the next writer need not judge it.

        Above all a whole frame that fsync failed on: it could be read back from memory, and
        taken for durable.
        """
        if self._segment is None:
            return
        try:
            os.ftruncate(self._segment, self._size)
            os.fsync(self._segment)
        except OSError as error:
            log.error("%s: the failed append could not be undone: %s", self._layout.path, error)

    def _write_file(self, path: Path, data: bytes) -> None:
        try:
            write_atomically(path, data)
        except OSError as error:
            raise StorageError(
                f"{path}: {error.strerror}; make room, or give the dispatcher's user write access"
            ) from error


@contextmanager
def _storage_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{error.filename}: {error.strerror}; mend the disk") from error


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino

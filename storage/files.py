"""A storage in a directory of local files: reading it, opening its writer, cutting it.

layout.py says what lies where, segments.py how the log is read, file_writer.py how it is written.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

from .base import LEASE_MS, Extent, Holdings, Record, Storage, blob_digest
from .durable import TEMPORARY, FileLock, make_directory, sync_directory, write_atomically
from .errors import Corrupt, Missing, NewerFormat, StorageUnusable
from .file_writer import FileWriter
from .layout import Layout
from .segments import Position, Scan
from .tfrecord import unframe

log = logging.getLogger(__name__)

FORMAT = 1
SEGMENT_BYTES = 64 << 20

_MARKER = re.compile(rb"forebay storage (\d+)\n")
_TERM = re.compile(rb"(\d+)(?: (\d+))?\n")  # the term, and the last record as it began


class FileStorage(Storage):
    """The storage in the directory `path`, which `open_writer` makes if need be."""

    def __init__(self, path: str | Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Segments are begun anew before they grow beyond `segment_bytes`.

        Raises StorageUnusable, NewerFormat.
        """
        self.path = Path(path).absolute()
        self.url = self.path.as_uri()
        self._segment_bytes = segment_bytes
        self._layout = Layout(self.path)
        # Where the last `read` to the end stood before its last batch (which may still vanish,
        # if its append fails), so that a follower need not read the segment again.
        self._resume: Position | None = None
        self._check_format()

    # -- reading -----------------------------------------------------------------------------

    def read(self, after: int = 0) -> Iterator[Record]:
        scan = self._scan(after)
        if scan is None:
            return
        for batch in scan:
            first = batch.first_sequence
            records = list(batch.records)
            if first <= after:
                records = records[after + 1 - first :]
                first = after + 1
            yield from map(Record, itertools.count(first), itertools.repeat(batch.term), records)
        self._resume = scan.previous

    def first_sequence(self) -> int:
        self._check_format()
        segments = self._layout.list_segments()
        return segments[0].first if segments else 1

    def extent(self) -> Extent:
        first = self.first_sequence()
        scan = self._scan_tail()
        return Extent(first, scan.position.sequence - 1 if scan else 0)

    def snapshots(self) -> list[int]:
        self._check_format()
        return self._layout.list_snapshots()

    def read_snapshot(self, sequence: int) -> bytes:
        self._check_format()
        path = self._layout.snapshot(sequence)
        data = unframe(_contents(path))
        if data is None:
            raise Corrupt(f"{path}: byte 0: the snapshot's checksum does not match", str(path))
        return data

    def read_blob(self, digest: str) -> bytes:
        self._check_format()
        path = self._layout.blob(digest)
        if path is None:
            raise Missing(f"{digest!r} is not the name of a blob, a SHA-256 in hexadecimal")
        data = _contents(path)
        if blob_digest(data) != digest:
            raise Corrupt(f"{path}: byte 0: the blob's content does not match its name", str(path))
        return data

    def holdings(self) -> Holdings:
        self._check_format()
        segments = [segment.path for segment in self._layout.list_segments()]
        snapshots = [self._layout.snapshot(s) for s in self._layout.list_snapshots()]
        blobs = self._layout.list_blobs()
        try:
            scan = self._scan_tail()
        except Corrupt:
            scan = None
        return Holdings(
            segments=len(segments),
            log_bytes=_bytes(segments),
            torn_bytes=scan.torn_bytes if scan else 0,
            snapshots=len(snapshots),
            snapshot_bytes=_bytes(snapshots),
            blobs=len(blobs),
            blob_bytes=_bytes(blobs),
        )

    def close(self) -> None:
        pass  # nothing stays open between calls

    def _check_format(self) -> int:
        """The format found, 0 if there is none yet."""
        path = self._layout.format
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            if self._layout.segments.is_dir():
                raise Corrupt(
                    f"{path}: is missing; restore it from a backup (its one line says "
                    f"'forebay storage {FORMAT}')",
                    str(path),
                ) from None
            return 0
        except NotADirectoryError:
            raise StorageUnusable(f"{self.path} is not a directory; name one") from None
        except OSError as error:
            raise StorageUnusable(f"{path} cannot be read: {error.strerror}") from error
        marker = _MARKER.fullmatch(content)
        if marker is None:
            raise Corrupt(f"{path}: byte 0: {content[:40]!r} is no format of Forebay's", str(path))
        if int(marker[1]) > FORMAT:
            raise NewerFormat(
                f"{self.path} has format {int(marker[1])}, newer than {FORMAT}, the newest that "
                "this version knows; upgrade Forebay"
            )
        return int(marker[1])

    def _scan(self, after: int) -> Scan | None:
        """A pass that begins at or before the batch with the record `after + 1`."""
        self._check_format()
        segments = self._layout.list_segments()
        if not segments:
            return None
        if after + 1 < segments[0].first:
            raise Missing(
                f"{self.url}: records before {segments[0].first} were trimmed, so none can be "
                f"read from {after + 1}"
            )
        segments = segments[bisect_right(segments, after + 1, key=lambda s: s.first) - 1 :]
        resume = self._resume
        if resume and resume.sequence <= after + 1 and resume.segment == segments[0].first:
            return Scan(segments, resume)
        return Scan(segments)

    def _scan_tail(self) -> Scan | None:
        """A finished pass over the end of the log; None if there is no log yet."""
        segments = self._layout.list_segments()
        if not segments:
            return None
        after = segments[-1].first - 1
        if self._resume and self._resume.segment == segments[-1].first:
            after = self._resume.sequence - 1
        scan = self._scan(after)
        if scan is not None:
            for _ in scan:
                pass
            self._resume = scan.previous
        return scan

    # -- writing -----------------------------------------------------------------------------

    def open_writer(self, owner: str, *, lease_ms: int = LEASE_MS, place: str = "") -> FileWriter:
        lock = self._take_lock(owner)
        try:
            return self._open_writer(lock, lease_ms)
        except OSError as error:
            lock.release()
            raise StorageUnusable(_unusable(self.path, error)) from error
        except BaseException:
            lock.release()
            raise

    def _take_lock(self, owner: str) -> FileLock:
        self._check_format()  # before anything is touched
        try:
            make_directory(self.path)
            return FileLock(self._layout.lock, owner)
        except OSError as error:
            raise StorageUnusable(_unusable(self.path, error)) from error

    def _open_writer(self, lock: FileLock, lease_ms: int) -> FileWriter:
        if not self._check_format():
            write_atomically(self._layout.format, f"forebay storage {FORMAT}\n".encode())
        layout = self._layout
        for directory in (layout.snapshots, layout.blobs, layout.segments):
            make_directory(directory)
        for directory in (layout.path, layout.snapshots, layout.blobs):
            for leftover in directory.glob(f"{TEMPORARY}*"):
                leftover.unlink()
        scan = self._scan_tail()
        end = scan.position if scan else Position(1, 0, 1, 0)
        newest = max(self.snapshots(), default=0)
        if newest >= end.sequence:
            path = layout.snapshot(newest)
            raise Corrupt(
                f"{path}: the log ends at record {end.sequence - 1}, before this snapshot, so "
                "records were lost; restore them from a backup, or repair the journal",
                str(path),
            )
        term = self._next_term(end)
        segment = None
        if scan:
            path = layout.segment(end.segment)
            segment = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            if scan.torn_bytes:
                log.warning(
                    "%s: byte %d: removed %d bytes of an append that a crash cut off",
                    path, end.offset, scan.torn_bytes,
                )  # fmt: skip
                os.ftruncate(segment, end.offset)
            os.fsync(segment)  # what was read may not have been durable yet
            sync_directory(layout.segments)
        self._write_term(term, end.sequence - 1)
        return FileWriter(layout, self._segment_bytes, lock, term, end, segment, lease_ms)

    def _next_term(self, end: Position) -> int:
        path = self._layout.term
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            content = b"0\n" if end.sequence == 1 else b""
        number = _TERM.fullmatch(content)
        if number is None or int(number[1]) < end.term:
            raise Corrupt(
                f"{path}: byte 0: {content[:40]!r} is not the latest term, which is at least "
                f"{end.term}; write into it a number that no writer can have had",
                str(path),
            )
        last = end.sequence - 1
        if int(number[2] or 0) > last:
            raise Corrupt(
                f"{self._layout.segments}: the log ends at record {last}, and held "
                f"{int(number[2])} when term {int(number[1])} began, so records were lost; "
                "restore the segments from a backup",
                str(self._layout.segments),
            )
        return int(number[1]) + 1

    def _write_term(self, term: int, last: int) -> None:
        write_atomically(self._layout.term, f"{term} {last}\n".encode())

    def cut(self, after: int, owner: str) -> str:
        lock = self._take_lock(owner)
        try:
            return self._cut(after)
        except OSError as error:
            raise StorageUnusable(_unusable(self.path, error)) from error
        finally:
            lock.release()

    def _cut(self, after: int) -> str:
        self._resume = None
        scan = self._scan(after)
        if scan is None:
            raise Missing(f"{self.url}: there is no log to cut")
        place = scan.position
        try:
            for batch in scan:
                if batch.first_sequence + len(batch.records) - 1 > after:
                    break
                place = scan.position
        except Corrupt:
            pass  # which is why it is cut
        numbers = (self._layout.cuts / str(n) for n in itertools.count(1))
        aside = next(path for path in numbers if not path.exists())
        make_directory(aside)
        last = place.sequence - 1
        # What goes on after the cut must never be taken for what is moved: so snapshots go
        # first, then segments from the end. A crash in between leaves a log to be cut again.
        for sequence in self.snapshots():
            if sequence > last:
                self._move(self._layout.snapshot(sequence), aside)
        for segment in reversed(self._layout.list_segments()):
            if segment.first > place.segment:
                self._move(segment.path, aside)
        path = self._layout.segment(place.segment)
        copy = aside / f"{path.name}.from-byte-{place.offset}"
        with path.open("rb+") as file, copy.open("xb") as tail:
            file.seek(place.offset)
            shutil.copyfileobj(file, tail)
            tail.flush()
            os.fsync(tail.fileno())
            sync_directory(aside)
            file.truncate(place.offset)
            os.fsync(file.fileno())
            moved_bytes = tail.tell()
        term = _TERM.fullmatch(self._layout.term.read_bytes())
        if term is not None and int(term[2] or 0) > last:
            self._write_term(int(term[1]), last)
        return (
            f"the log ends at record {last} now; {moved_bytes} bytes of {path.name} from byte "
            f"{place.offset}, and all later segments and snapshots, were moved to {aside}"
        )

    @staticmethod
    def _move(path: Path, aside: Path) -> None:
        path.rename(aside / path.name)
        sync_directory(aside)
        sync_directory(path.parent)


def _contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise Missing(f"{path}: there is no such file") from None
    except OSError as error:
        raise StorageUnusable(f"{path} cannot be read: {error.strerror}") from error


def _unusable(path: Path, error: OSError) -> str:
    return (
        f"{error.filename or path}: {error.strerror}; give the dispatcher's user write access to "
        f"{path}, or choose another storage"
    )


def _bytes(paths: list[Path]) -> int:
    total = 0
    for path in paths:
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue  # trimmed while we looked
    return total

"""A storage in a directory of local files; this module reads it.

layout.py has the paths, segments.py reads the log, file_opening.py opens a writer,
file_writer.py is the writer, and file_cut.py repairs the log.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ..base import LEASE_MS, REGISTER, Extent, Holdings, Record, Storage, is_blob, trimmed
from ..batches import records_above
from ..errors import Corrupt, Missing, StorageUnusable
from ..tfrecord import unframe
from .durable import check_is_directory, check_is_file, make_directory, remedy, unreadable
from .file_cut import cut
from .file_opening import check_end, open_writer
from .file_writer import FileWriter
from .layout import LogDirectory, Segment, StoragePaths
from .segments import Position, Scan
from .term import Term

SEGMENT_BYTES = 64 << 20


class Resume(NamedTuple):
    """Where to continue reading, if the segment is the same file: a repair replaces the file."""

    position: Position
    inode: int

    @classmethod
    def of(cls, scan: Scan) -> Resume | None:
        """The position before the last batch of a finished pass."""
        if scan.inode is None or scan.previous.segment != scan.position.segment:
            return None
        return cls(scan.previous, scan.inode)

    def fits(self, segment: Segment) -> bool:
        if self.position.segment != segment.first:
            return False
        try:
            status = segment.path.stat()
            return status.st_ino == self.inode and status.st_size >= self.position.offset
        except FileNotFoundError:
            return False  # the scan reports the error


class FileStorage(Storage):
    """The storage in the directory `path`, which `open_writer` creates if it is missing."""

    def __init__(self, path: str | Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        """A new segment begins before one grows beyond `segment_bytes`.

        Raises StorageUnusable, NewerFormat.
        """
        self.path = Path(path).absolute()
        self.url = self.path.as_uri()
        self._segment_bytes = segment_bytes
        self._layout = StoragePaths(self.path)
        # The position before the last batch of the last complete `read`, so that a follower need
        # not read the segment again. That batch may vanish, if its append fails. Earlier batches
        # were acknowledged, so they keep their offsets.
        self._resume: Resume | None = None
        self._layout.read_format()

    # -- reading -----------------------------------------------------------------------------

    def read(self, after: int = 0) -> Iterator[Record]:
        scan = self._scan(self._log(), after)
        for batch in scan:
            yield from records_above(batch, after)
        self._resume = Resume.of(scan)

    def first_sequence(self) -> int:
        return _first(self._log().list_segments())

    def extent(self) -> Extent:
        log = self._log()
        first = _first(log.list_segments())
        return Extent(first, self._scan_tail(log).position.sequence - 1)

    def check(self) -> None:
        log = self._log()
        check_is_file(log.lock)
        for path in (log.segments, log.snapshots, self._layout.blobs):
            check_is_directory(path)
        while True:  # retry if a writer opened, or wrote a snapshot, meanwhile
            before = Term.read(self._layout.term), log.list_snapshots()
            end = self._scan_tail(log).position
            try:
                check_end(self._layout, log, end)
                return
            except Corrupt:
                if (Term.read(self._layout.term), log.list_snapshots()) == before:
                    raise

    def snapshots(self) -> list[int]:
        return self._log().list_snapshots()

    def read_snapshot(self, sequence: int) -> bytes:
        path = self._log().snapshot(sequence)
        if (data := unframe(_content(path))) is None:
            raise Corrupt(f"{path}: byte 0: the snapshot's checksum does not match")
        return data

    def blobs(self) -> list[str]:
        self._layout.read_format()
        return [path.name for path in self._layout.list_blobs()]

    def read_blob(self, name: str) -> bytes:
        self._layout.read_format()
        if (path := self._layout.blob(name)) is None:
            raise Missing(f"{name!r} is not the name of a blob, a SHA-256 in hexadecimal")
        try:
            data = _content(path)
        except Missing as error:
            raise Missing(f"{error}; {REGISTER}") from None
        if not is_blob(name, data):
            raise Corrupt(f"{path}: byte 0: the blob's content does not match its name; {REGISTER}")
        return data

    def holdings(self) -> Holdings:
        log = self._log()
        segments = _count([segment.path for segment in log.list_segments()])
        snapshots = _count([log.snapshot(sequence) for sequence in log.list_snapshots()])
        try:
            torn_bytes = self._scan_tail(log).torn_bytes
        except Corrupt:
            torn_bytes = 0
        return Holdings(*segments, torn_bytes, *snapshots, *_count(self._layout.list_blobs()))

    def condemned(self) -> str:
        return self._log().why_condemned()

    def close(self) -> None:
        pass  # nothing stays open between calls

    def _log(self) -> LogDirectory:
        self._layout.read_format()
        return self._layout.log()

    def _scan(self, log: LogDirectory, after: int) -> Scan:
        """A pass that begins at or before the batch with record `after + 1`."""
        segments = log.list_segments()
        if segments and after + 1 < segments[0].first:
            raise trimmed(self.url, segments[0].first, after + 1)
        passed = bisect_right(segments, after + 1, key=lambda s: s.first) - 1
        segments = segments[max(0, passed) :]
        resume = self._resume
        if (
            segments
            and resume
            and resume.position.sequence <= after + 1
            and resume.fits(segments[0])
        ):
            return Scan(segments, resume.position)
        return Scan(segments)

    def _scan_tail(self, log: LogDirectory) -> Scan:
        """A finished pass over the end of the log."""
        segments = log.list_segments()
        after = segments[-1].first - 1 if segments else 0
        if segments and self._resume and self._resume.position.segment == segments[-1].first:
            after = self._resume.position.sequence - 1
        scan = self._scan(log, after)
        for _ in scan:
            pass
        self._resume = Resume.of(scan)
        return scan

    # -- writing -----------------------------------------------------------------------------

    def open_writer(self, owner: str, *, lease_ms: int = LEASE_MS, place: str = "") -> FileWriter:
        self._layout.read_format()  # before anything is touched
        with self._usable():
            if not self.path.is_dir():
                make_directory(self.path)
            return open_writer(self._layout, self._scan_tail, self._segment_bytes, owner, lease_ms)

    def cut(self, after: int, owner: str) -> str:
        self._layout.read_format()
        self._resume = None
        with self._usable():
            make_directory(self.path)
            return cut(self._layout, lambda log: self._scan_before_cut(log, after), after, owner)

    def _scan_before_cut(self, log: LogDirectory, after: int) -> Scan:
        # Begin at the batch that ends with `after`: its segment may be the damaged one.
        return self._scan(log, max(after, _first(log.list_segments())) - 1)

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            other = ", or choose another storage"
            if os.path.exists(self._layout.term):  # on another one, the journal would be empty
                other = ", and the journal goes on where it was"
            raise StorageUnusable(
                f"{error.filename or self.path}: {error.strerror}; {remedy(error, self.path)}"
                f"{other}"
            ) from error


def _first(segments: list[Segment]) -> int:
    return segments[0].first if segments else 1


def _content(path: Path) -> bytes:
    check_is_directory(path.parent)
    check_is_file(path)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise Missing(f"{path}: there is no such file") from None
    except OSError as error:
        raise unreadable(path, error) from error


def _count(paths: list[Path]) -> tuple[int, int]:
    """How many files, and their bytes."""
    total = 0
    for path in paths:
        try:
            total += path.stat().st_size
        except OSError:
            continue  # trimmed meanwhile, or unreadable
    return len(paths), total

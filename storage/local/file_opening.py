"""Becoming the writer of a storage in a directory.

The writer holds the lock of the log's directory and wrote TERM last. A lock ends with its
process. So a process that gets the lock knows that nobody else writes there, and continues at
the log's end. A process that does not get the lock *displaces* the holder once the holder's lease
has expired:

1. It replaces TERM. The displaced writer checks TERM before it acknowledges anything, so
   from here on it acknowledges nothing.
2. It makes its own directory: a copy of the last segment, and links to all the rest. That
   includes everything acknowledged before step 1.
3. It names that directory `takeover-<term>`. From then on the log is there.

The displaced writer may wake up between any two of its instructions. It still works in its own
directory, which nobody reads any more: it may finish or undo an append, begin a segment, trim,
rename a snapshot, or condemn the log. It cannot change the new directory. It writes only to its
last segment, which was copied, never to the linked files. The name of a blob that it removes is
never used again.

The opening process may stall as well, and be displaced in turn. A process changes TERM and the
takeover's name only under the lock of OPENING, which it holds briefly, and only if TERM is as it
left it. So no term is given twice, and an outdated log never becomes the log.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import Corrupt, Locked, StorageError
from .durable import (
    TEMPORARY,
    FileLock,
    HeldFile,
    check_is_file,
    check_is_ours,
    copy,
    link,
    make_directory,
    make_one,
    remove,
    sync_directory,
    temporary,
    write_atomically,
)
from .file_writer import FileWriter, WriterClaim
from .layout import FORMAT, RESTORE, LogDirectory, StoragePaths
from .segments import Position, Scan
from .term import Term

log = logging.getLogger(__name__)

_OPENING_SECONDS = 5.0

UNUSED_TERMS = 1000
"""An upper bound of the terms that can begin without leaving a trace in the log."""


class Sighting:
    """The last sign of life that was seen of a writer, and when it was first seen."""

    def __init__(self) -> None:
        self._sign: tuple[int, int, int] | None = None
        self._first_seen_s = 0.0  # monotonic

    def silent_s(self, path: Path) -> float:
        """For how long the file `path` has been seen unchanged."""
        status = os.stat(path)
        sign = status.st_dev, status.st_ino, status.st_mtime_ns
        now_s = time.monotonic()
        if sign != self._sign:
            self._sign, self._first_seen_s = sign, now_s
        return now_s - self._first_seen_s


@contextmanager
def opening_alone(layout: StoragePaths) -> Iterator[None]:
    """Hold the lock for changing the writer. Raises Locked if another process keeps it too long."""
    until_s = time.monotonic() + _OPENING_SECONDS
    while True:
        try:
            lock = FileLock(layout.opening)
            break
        except BlockingIOError:
            if time.monotonic() > until_s:
                raise Locked(
                    f"{layout.path} is being opened by another process, which does not get on; "
                    "stop that first, or choose another storage"
                ) from None
            time.sleep(0.01)
    try:
        yield
    finally:
        lock.release()


def lock_log(where: LogDirectory, owner: str) -> FileLock:
    """Lock a log's directory. Raises BlockingIOError while another process has it, and OSError."""
    lock = FileLock(where.lock)
    lock.sign(f"process {os.getpid()}, {owner}")
    return lock


def in_use(layout: StoragePaths, where: LogDirectory, silence_ms: int = 0) -> Locked:
    """The error that names the holder of the lock."""
    owner = _holder(where)
    advice = "stop that first, or choose another storage"
    return Locked(f"{layout.path} is in use by {owner}; {advice}", silence_ms, owner)


def _holder(where: LogDirectory) -> str:
    holder = where.lock.read_text(errors="replace").strip() if where.lock.exists() else ""
    return holder or "another process"


def open_writer(
    layout: StoragePaths,
    sighting: Sighting,
    scan_tail: Callable[[LogDirectory, Callable[[], None]], Scan | None],
    segment_bytes: int,
    owner: str,
    lease_ms: int,
    place: str,
) -> FileWriter:
    """Implements Storage.open_writer. `scan_tail` finds a log's end, and calls its callback often.

    Raises Locked, NewerFormat, Corrupt, OSError.
    """
    opening = _Opening(layout, owner, lease_ms, place)
    try:
        opening.take_place(sighting)
        where = opening.prepare()
        end, segment = opening.recover(scan_tail(where, opening.touch))
        return opening.finish(end, segment, segment_bytes)
    except BaseException as error:
        lost = opening.abandon(error)
        if lost and isinstance(error, Exception):
            raise in_use(layout, layout.log()) from error  # the lost place explains the error
        raise


def check_end(layout: StoragePaths, where: LogDirectory, end: Position) -> Term:
    """Read TERM; check that it and the snapshots fit a log that ends at `end`.

    Raises Corrupt, StorageUnusable.
    """
    last = end.sequence - 1
    newest = max(where.list_snapshots(), default=0)
    if newest > last:
        path = where.snapshot(newest)
        raise Corrupt(
            f"{path}: the log ends at record {last}, before this snapshot, so records were lost; "
            "restore them from a backup, or repair the journal",
            str(path),
        )
    path = layout.term
    found = Term.read(path)
    if found is None and not last and not path.exists():
        found = Term(0)
    least = max(end.term, where.term)
    if found is None or found.number < least:
        content = path.read_bytes() if path.exists() else b""
        raise Corrupt(
            f"{path}: byte 0: {content[:40]!r} is not the latest term, which is at least {least}; "
            f"let its one line say '{least + UNUSED_TERMS}', a term that no writer can have had",
            str(path),
        )
    if found.last > last:
        raise Corrupt(
            f"{where.segments}: the log ends at record {last}, and held {found.last} in term "
            f"{found.number}, as {path} says, so records were lost; {RESTORE}",
            str(where.segments),
        )
    if not last and layout.list_blobs():
        raise Corrupt(
            f"{where.segments}: the log is empty, and there are blobs in {layout.blobs}, which "
            f"records name, so records were lost; {RESTORE}",
            str(where.segments),
        )
    return found


class _Opening:
    """One attempt to become the writer."""

    def __init__(self, layout: StoragePaths, owner: str, lease_ms: int, place: str) -> None:
        self._layout = layout
        self._owner = owner
        self._lease_ms = lease_ms
        self._place = place
        self._old = self._log = layout.log()
        self._predecessor = ""  # the displaced writer's name
        self._lock: FileLock | None = None
        self._term: HeldFile | None = None  # TERM, which must not change until the end
        self._segment: int | None = None

    def take_place(self, sighting: Sighting) -> None:
        """Take the lock, or do step 1 if the holder's lease has expired. Raises Locked.

        A standby calls this many times a second. So nothing is synced while another holds the lock.
        """
        with opening_alone(self._layout):
            self._old = self._log = self._layout.log()
            lock_is_gone = self._lock_is_gone()
            try:
                if lock_is_gone:
                    raise BlockingIOError
                self._lock = lock_log(self._log, self._owner)
            except BlockingIOError:
                self._displace(sighting, lock_is_gone)
            self._make_storage()
            self._term = HeldFile(self._layout.term)

    def _make_storage(self) -> None:
        """Create the missing directories and FORMAT."""
        layout, where = self._layout, self._log
        make_directory(layout.path)
        check_is_ours(layout.path)
        if not layout.read_format():
            write_atomically(layout.format, f"forebay storage {FORMAT}\n".encode())
        for directory in (where.snapshots, layout.blobs, where.segments):
            make_directory(directory)

    def _lock_is_gone(self) -> bool:
        """Whether somebody has removed LOCK. Its holder may live, and does not notice."""
        term = Term.read(self._layout.term)
        return term is not None and term.lease_ms is not None and not self._log.lock.exists()

    def _displace(self, sighting: Sighting, lock_is_gone: bool) -> None:
        term = Term.read(self._layout.term)
        if term is None or term.lease_ms is None:
            raise in_use(self._layout, self._log)
        if self._place and self._place == term.place:
            why = f"which must have ended, as this process has its place {term.place!r}"
        elif sighting.silent_s(self._layout.term) * 1000 >= term.lease_ms:
            why = f"which gave no sign of life for its lease of {term.lease_ms} ms"
        else:
            raise in_use(self._layout, self._log, term.lease_ms if lock_is_gone else 0)
        self._predecessor = _holder(self._log)
        log.warning("%s: taking over from %s, %s", self._layout.path, self._predecessor, why)
        term = Term(term.number + 1, term.last, self._lease_ms, self._place)
        term.write(self._layout.term)

    def touch(self) -> None:
        """Give a sign of life."""
        if self._term is not None:
            self._term.touch()

    def prepare(self) -> LogDirectory:
        """Step 2: return a log directory that nobody else writes to."""
        old = self._old
        if reason := old.why_condemned():
            raise Corrupt(f"{old.condemned}: {reason}", str(old.condemned))
        if not self._predecessor:
            return old
        new = LogDirectory(temporary(self._layout.path), old.term)
        for directory in (new.path, new.segments, new.snapshots):
            make_one(directory)
        self._log = new
        self._lock = lock_log(new, self._owner)
        self._take_segments(old, new)
        for sequence in old.list_snapshots():
            try:
                check_is_file(old.snapshot(sequence))
                link(old.snapshot(sequence), new.snapshot(sequence), self.touch)
            except (FileNotFoundError, Corrupt):
                continue  # just deleted, or unusable
        sync_directory(new.snapshots)
        sync_directory(new.path)
        return new

    def _take_segments(self, old: LogDirectory, new: LogDirectory) -> None:
        segments = old.list_segments()
        while segments:
            try:
                copy(segments[-1].path, new.segment(segments[-1].first), self.touch)
                break
            except FileNotFoundError:
                trimmed, segments = segments, old.list_segments()
                if trimmed == segments:
                    raise
        # Backwards, because the displaced writer may be trimming from the first one on.
        for segment in reversed(segments[:-1]):
            try:
                link(segment.path, new.segment(segment.first), self.touch)
            except FileNotFoundError:
                break

    def recover(self, scan: Scan | None) -> tuple[Position, int | None]:
        """Make the records that were read durable, and remove a torn tail.

        Returns the log's end and the descriptor of its last segment.
        """
        where = self._log
        end = scan.position if scan else Position(1, 0, 1, 0)
        before = check_end(self._layout, where, end)
        if before.number and end.sequence == 1:
            log.warning(
                "%s holds no record, and none was acknowledged, as %s says: a new journal begins",
                self._layout.path, self._layout.term,
            )  # fmt: skip
        if scan:
            path = where.segment(end.segment)
            self._segment = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            if scan.torn_bytes:
                what = "left out %d bytes of an append that was not done"
                if not self._predecessor:
                    what = "removed %d bytes of an append that a crash cut off"
                segment = self._old.segment(end.segment)
                log.warning(f"%s: byte %d: {what}", segment, end.offset, scan.torn_bytes)
                os.ftruncate(self._segment, end.offset)
            os.fsync(self._segment)  # the records may have been read before they were durable
            sync_directory(where.segments)
        return end, self._segment

    def finish(self, end: Position, segment: int | None, segment_bytes: int) -> FileWriter:
        """Do step 3, then write TERM."""
        layout = self._layout
        assert self._lock is not None and self._term is not None
        with opening_alone(layout):
            if self._is_displaced():
                raise in_use(layout, layout.log())
            number = check_end(layout, self._log, end).number
            if self._predecessor:
                superseded, published = self._old, layout.takeover(number)
                os.rename(self._log.path, published.path)
                self._old = self._log = published
                sync_directory(layout.path)
            else:
                number += 1
            Term(number, end.sequence - 1, self._lease_ms, self._place).write(layout.term)
            before, self._term = self._term, HeldFile(layout.term)
            before.close()
            if self._predecessor:  # it may still write there: nobody may continue that log
                reason = f"{published.path} took its place, and is gone; {RESTORE}"
                write_atomically(superseded.condemned, reason.encode())
            where = self._log
            for directory in (layout.path, where.segments, where.snapshots, layout.blobs):
                for leftover in directory.glob(f"{TEMPORARY}*"):
                    remove(leftover)
        claim = WriterClaim(layout, self._log, self._lock, self._term, number, self._lease_ms)
        return FileWriter(claim, segment_bytes, end, segment)

    def abandon(self, error: BaseException) -> bool:
        """Undo what can be undone; return whether another process has taken the place."""
        lost = self._is_displaced()
        if self._term is not None:
            self._term.close()
        if self._segment is not None:
            os.close(self._segment)
        if self._lock is not None:
            self._lock.release()
        if self._log.path.name.startswith(TEMPORARY):
            remove(self._log.path)
            _rename_in(error, self._log.path, self._old.path)  # the original still exists
        return lost

    def _is_displaced(self) -> bool:
        if self._term is None:
            return False
        # A process that displaced us may have crashed between the rename and writing TERM.
        return not self._term.is_current() or self._layout.log() != self._old


def _rename_in(error: BaseException, path: Path, name: Path) -> None:
    if isinstance(error, StorageError):
        error.args = (str(error).replace(str(path), str(name)),)
    if isinstance(error, Corrupt):
        error.file = error.file.replace(str(path), str(name))

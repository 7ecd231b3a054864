"""Becoming the writer of a storage in a directory.

The lock of LOCK decides who may: it ends with its process, so whoever gets it goes on at the log's
end. A writer that is paused keeps it, and nobody displaces it.

TERM is for a lock that is lost, because somebody removed LOCK or a network file system forgot who
had it. A new writer replaces TERM, and then looks at the log's end once more. The writer before
checks that TERM is still its own before it acknowledges anything. So what it has acknowledged was
there for the new one to read. What it may still write, unacknowledged, must not come between the
new one's records: where LOCK is missing, the new one goes on in files that the old one has not open
and cannot make.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress

from ..errors import ACCEPT_LOSS, REPAIR, Corrupt, Locked
from .durable import (
    TEMPORARY,
    FileLock,
    check_is_ours,
    make_directory,
    sync_directory,
    write_atomically,
)
from .file_writer import FileWriter, WriterClaim
from .layout import FORMAT, RESTORE, LogDirectory, StoragePaths
from .segments import Position, Scan
from .term import HeldTerm, Term

log = logging.getLogger(__name__)

UNUSED_TERMS = 1000
"""An upper bound of the terms that can begin without leaving a trace in the log."""


def lock_log(layout: StoragePaths, where: LogDirectory, owner: str) -> FileLock:
    """Lock a log's directory. Raises Locked, OSError, Corrupt."""
    check_is_ours(layout.path)  # before LOCK, which may be a link of somebody else's
    try:
        return FileLock(where.lock, f"process {os.getpid()}, {owner}")
    except BlockingIOError:
        raise _in_use(layout, where) from None


def _in_use(layout: StoragePaths, where: LogDirectory) -> Locked:
    """The error that names the holder of the lock."""
    try:
        owner = where.lock.read_text(errors="replace").strip()
    except FileNotFoundError:
        owner = ""
    owner = owner or "another process"
    what = f"{layout.path} is in use by {owner}; stop that first, or choose another storage"
    return Locked(what, owner=owner)


def open_writer(
    layout: StoragePaths,
    scan_tail: Callable[[LogDirectory], Scan],
    segment_bytes: int,
    owner: str,
    lease_ms: int,
) -> FileWriter:
    """Implements Storage.open_writer. `scan_tail` finds a log's end.

    Raises Locked, NewerFormat, Corrupt, OSError. A standby calls this many times a second, so
    nothing is synced while another process holds the lock.
    """
    where = layout.log()
    lock_was_lost = layout.term.exists() and not where.lock.exists()
    with ExitStack() as undo:
        lock = lock_log(layout, where, owner)
        undo.callback(lock.release)
        _make_storage(layout, where)
        if reason := where.why_condemned():
            remedy = f"restore a backup that has them, or {ACCEPT_LOSS}"
            raise Corrupt(f"{where.condemned}: {reason}; {remedy}")
        end = scan_tail(where).position
        try:
            before = check_end(layout, where, end)
        except Corrupt:
            if scan_tail(where).position != end:  # a writer whose lock was lost has appended
                raise _in_use(layout, where) from None
            raise
        if (segment := _open_segment(where, end)) is not None:
            undo.callback(os.close, segment)
        number = before.number + 1
        Term(number, end.sequence - 1).write(layout.term)
        held = HeldTerm(layout.term, number)
        undo.callback(held.close)
        tail = scan_tail(where)
        if tail.position != end:  # as above
            raise _in_use(layout, where)
        if tail.torn_bytes and segment is not None:
            log.warning(
                "%s: byte %d: removed %d bytes of an append that a crash cut off",
                where.segment(end.segment), end.offset, tail.torn_bytes,
            )  # fmt: skip
            os.ftruncate(segment, end.offset)
            os.fsync(segment)
        if before.number and end.sequence == 1:
            log.warning(
                "%s holds no record, and none was acknowledged, as %s says: a new journal begins",
                layout.path, layout.term,
            )  # fmt: skip
        if lock_was_lost and segment is not None:
            _replace_segment(where, end, segment)
        claim = WriterClaim(layout, where, lock, held, number, lease_ms)
        writer = FileWriter(claim, segment_bytes, end, segment)
        undo.pop_all()
        undo.callback(writer.close)
        if lock_was_lost and (end.offset or segment is None):
            writer.begin_segment()
        undo.pop_all()
        return writer


def _make_storage(layout: StoragePaths, where: LogDirectory) -> None:
    """Create the missing directories and FORMAT; remove what a crash left half written."""
    make_directory(layout.path)
    check_is_ours(layout.path)
    if not layout.read_format():
        write_atomically(layout.format, f"forebay storage {FORMAT}\n".encode())
    for directory in (where.snapshots, layout.blobs, where.segments):
        make_directory(directory)
    for directory in (layout.path, where.segments, where.snapshots, layout.blobs):
        for leftover in directory.glob(f"{TEMPORARY}*"):
            with suppress(OSError):  # it is harmless, and the next one tries again
                if leftover.is_dir():  # of a takeover by an earlier version
                    shutil.rmtree(leftover)
                else:
                    leftover.unlink()


def _open_segment(where: LogDirectory, end: Position) -> int | None:
    """Open the log's last segment, if there is one, and sync it: a record may have been read before
    it was durable."""
    path = where.segment(end.segment)
    if not path.exists():
        return None
    segment = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    os.fsync(segment)
    sync_directory(where.segments)
    return segment


def _replace_segment(where: LogDirectory, end: Position, segment: int) -> None:
    """Put a copy of the last segment in its place, also behind this descriptor. Whoever has the old
    one open writes to a file that is no longer in the log."""
    path = where.segment(end.segment)
    write_atomically(path, path.read_bytes()[: end.offset])
    copy = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        os.dup2(copy, segment, inheritable=False)
    finally:
        os.close(copy)


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
            f"restore them from a backup, {REPAIR}"
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
            f"let its one line say '{least + UNUSED_TERMS}', a term that no writer can have had"
        )
    if found.last > last:
        raise Corrupt(
            f"{where.segments}: the log ends at record {last}, and held {found.last} in term "
            f"{found.number}, as {path} says, so records were lost; {RESTORE}"
        )
    if not last and layout.list_blobs():
        raise Corrupt(
            f"{where.segments}: the log is empty, and there are blobs in {layout.blobs}, which "
            f"records name, so records were lost; {RESTORE}"
        )
    return found

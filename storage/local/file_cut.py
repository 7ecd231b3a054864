"""Repairs a log on local files: moves everything after a record aside."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

from ..errors import Corrupt
from .durable import make_directory, sync_directory, write_atomically
from .file_opening import lock_log
from .layout import LogDirectory, StoragePaths
from .segments import Position, Scan
from .term import Term


def cut(
    layout: StoragePaths, scan_log: Callable[[LogDirectory], Scan], after: int, owner: str
) -> str:
    """Implements Storage.cut. `scan_log` begins a pass at or before the batch with record `after`.

    Raises Locked, NewerFormat, StorageUnusable, OSError.
    """
    where = layout.log()
    lock = lock_log(layout, where, owner)
    try:
        term = Term.read(layout.term)
        end = _end(scan_log(where), after)
        aside = _make_aside(layout)
        moved_bytes = _cut(where, end, aside)
        last = end.sequence - 1
        for blob in () if last else layout.list_blobs():
            _move(blob, aside)  # no record names it any more
        if term is not None and term.last > last:
            Term(term.number, last).write(layout.term)
        if where.condemned.exists():  # last: after a crash before this, the cut must be repeated
            _move(where.condemned, aside)
    finally:
        lock.release()
    return (
        f"the log ends at record {last} now; {moved_bytes} bytes of "
        f"{where.segment(end.segment).name} from byte {end.offset}, and all later segments and "
        f"snapshots, were moved to {aside}"
    )


def _end(scan: Scan, after: int) -> Position:
    """The end of the last batch whose records are all at or before `after`."""
    end = scan.position
    try:
        for batch in scan:
            if batch.first_sequence + len(batch.records) - 1 > after:
                break
            end = scan.position
    except Corrupt:
        pass  # the damage is why we cut
    return end


def _make_aside(layout: StoragePaths) -> Path:
    numbers = (layout.cuts / str(n) for n in itertools.count(1))
    aside = next(path for path in numbers if not path.exists())
    make_directory(aside)
    return aside


def _cut(where: LogDirectory, end: Position, aside: Path) -> int:
    """Move everything after `end` aside; return how many bytes of its segment were moved.

    Snapshots go first, then segments from the end, so that nothing moved can be mistaken for
    part of the log. After a crash in between, the cut must be repeated.
    """
    for sequence in where.list_snapshots():
        if sequence >= end.sequence:
            _move(where.snapshot(sequence), aside)
    for segment in reversed(where.list_segments()):
        if segment.first > end.segment:
            _move(segment.path, aside)
    path = where.segment(end.segment)
    if not path.exists():  # the log had only snapshots left
        return 0
    data = path.read_bytes()
    if len(data) == end.offset:
        return 0
    write_atomically(aside / f"{path.name}.from-byte-{end.offset}", data[end.offset :])
    # Replace, don't truncate: a superseded log may share the file, and a reader may use it.
    write_atomically(path, data[: end.offset])
    return len(data) - end.offset


def _move(path: Path, aside: Path) -> None:
    path.rename(aside / path.name)
    sync_directory(aside)
    sync_directory(path.parent)

"""Finds the record of a file that cannot be read, and says what is wrong with it."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ....storage.errors import Corrupt
from ...errors import FailedPrecondition, ForebayError
from .formats import Ints, RecordFile
from .open_files import of_the_system

PART_RECORDS, MOST_TRIES = 64, 1 << 12
"""A damaged record is sought in so many parts of a file, of so many records."""

_ABOUT_A_PATH = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENAMETOOLONG}


class Damage(NamedTuple):
    """What cannot be read."""

    fault: ForebayError  # names it
    records: Ints  # of those that were to be read
    whole: tuple[int, int] | None = None
    """The first record, and the number, of what is read at once with them and is damaged as a
    whole; None if other reasons cannot be excluded."""
    why: str = ""


def damage(
    path: str, file: RecordFile, records: Ints, error: Exception, *, row_groups: bool
) -> Damage:
    """The first record that cannot be read, or the records that are read with it."""
    bad = None if of_the_system(error) else _first_bad(file, records, row_groups)
    found, error = bad or (records, error)
    first, last = int(found.min()), int(found.max())
    why = said(error)
    if of_the_system(error):
        return Damage(FailedPrecondition(f"{path} cannot be read: {why}"), found)
    if bad is None:
        return Damage(
            FailedPrecondition(
                f"records {first} to {last} of {path} cannot be read at once: {why}. Register the "
                "files with smaller split_records, or write the file again"
            ),
            found,
        )
    which = f"record {first}" if first == last else f"a record from {first} to {last}"
    fault = Corrupt(
        f"{which} of {path} cannot be read: {why}. Write the file again, register the others "
        'without it, or leave out what cannot be read with on_error="skip"'
    )
    if row_groups:
        group = file.group_of(first)
        return Damage(fault, found, (group.start, len(group)), why)
    return Damage(fault, found, (first, 1) if first == last else None, why)


def _first_bad(file: RecordFile, records: Ints, row_groups: bool) -> tuple[Ints, Exception] | None:
    for group in itertools.islice(_groups(file, records, row_groups), MOST_TRIES):
        if (error := _failure(file, group[:1] if row_groups else group)) is None:
            continue
        for record in () if row_groups else group:
            if (alone := _failure(file, np.array([record]))) is not None:
                return np.array([record]), alone
        return group, error
    return None


def _groups(file: RecordFile, records: Ints, row_groups: bool) -> Iterator[Ints]:
    """The records, in parts that are read at once."""
    if not row_groups:
        yield from (records[at : at + PART_RECORDS] for at in range(0, len(records), PART_RECORDS))
        return
    while len(records):
        is_in = records < file.group_of(int(records.min())).stop
        yield records[is_in]
        records = records[~is_in]


def _failure(file: RecordFile, records: Ints) -> Exception | None:
    try:
        file.take(records)
    except Exception as error:  # noqa: BLE001 - a library's reader may raise anything
        return error
    return None


def is_of_record(error: BaseException) -> bool:
    """Whether a mapped function fails for what is in a record, rather than for the machine."""
    if isinstance(error, OSError) and error.errno:
        return error.errno in _ABOUT_A_PATH
    return not isinstance(error, MemoryError)


def said(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__

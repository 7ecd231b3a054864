"""ArrayRecord files, by array_record's own reader: a record is bytes."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np

from ....storage.extras import install
from ...blocks import Block
from ...errors import FailedPrecondition
from .formats import TEXT, Damaged, Facts, Format, Ints, NumberedFile, Options, texts

_MAGIC = bytes.fromhex("83af70d10d884a3f")  # of Riegeli, in which ArrayRecord is written


def _opened(path: str) -> tuple[Any, int]:
    """A reader, and how many records there are. Raises FailedPrecondition without the library, and
    Damaged."""
    try:
        from array_record.python import array_record_module
    except ImportError as error:
        raise FailedPrecondition(
            f"{path} is an ArrayRecord file, and array_record is not installed here ({error}): "
            f"{install('arrayrecord')}"
        ) from error
    try:
        reader = array_record_module.ArrayRecordReader(path)
        if not reader.ok():
            reader.close()  # raises what is wrong
        return reader, int(reader.num_records())
    except Exception as error:
        raise Damaged(
            f"array_record cannot open it ({error}): it is cut, damaged or not closed by its "
            "writer. Write it again, or leave it out"
        ) from error


def _inspect(path: str, _: Options) -> Facts:
    reader, records = _opened(path)
    reader.close()
    return Facts(records, TEXT)


class ArrayRecordFile(NumberedFile):
    def __init__(self, path: str, _: Options) -> None:
        self._reader, records = _opened(path)
        super().__init__(os.path.getsize(path) / max(1, records))

    def take(self, records: Ints) -> Block:
        first, count = int(records[0]), len(records)
        if (np.diff(records) == 1).all():
            found = self._reader.read(first, first + count)
        else:
            found = self._reader.read(records.tolist())
        return Block(count, (texts(found),))

    def close(self) -> None:
        with contextlib.suppress(Exception):  # it raises what an earlier read has raised
            self._reader.close()


FORMAT = Format(
    suffixes=(".array_record", ".arrayrecord"),
    is_it=lambda begin: begin.startswith(_MAGIC),
    inspect=_inspect,
    open=ArrayRecordFile,
    is_native=True,
)

"""ArrayRecord files, by array_record's own reader: a record is bytes."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ...blocks import Block
from ...errors import FailedPrecondition
from .formats import TEXT, Damaged, Facts, Format, Ints, NumberedFile, Options, texts

_MAGIC = bytes.fromhex("83af70d10d884a3f")  # of Riegeli, in which ArrayRecord is written


def _opened(path: str) -> Any:
    """Raises FailedPrecondition without the library, and Damaged."""
    try:
        from array_record.python import array_record_module
    except ImportError as error:
        raise FailedPrecondition(
            f"{path} is an ArrayRecord file, and array_record is not installed here ({error}): "
            "pip install 'forebay[arrayrecord]'"
        ) from error
    try:
        return array_record_module.ArrayRecordReader(path)
    except Exception as error:
        raise Damaged(
            f"array_record cannot open it ({error}): it is cut, damaged or not closed by its "
            "writer. Write it again, or leave it out"
        ) from error


def _inspect(path: str, _: Options) -> Facts:
    reader = _opened(path)
    try:
        return Facts(int(reader.num_records()), TEXT)
    finally:
        reader.close()


class ArrayRecordFile(NumberedFile):
    def __init__(self, path: str, _: Options) -> None:
        self._reader = _opened(path)
        super().__init__(os.path.getsize(path) / max(1, self._reader.num_records()))

    def take(self, records: Ints) -> Block:
        first, count = int(records[0]), len(records)
        if (np.diff(records) == 1).all():
            found = self._reader.read(first, first + count)
        else:
            found = self._reader.read(records.tolist())
        return Block(count, (texts(found),))

    def close(self) -> None:
        self._reader.close()


FORMAT = Format(
    suffixes=(".array_record", ".arrayrecord"),
    is_it=lambda begin: begin.startswith(_MAGIC),
    inspect=_inspect,
    open=ArrayRecordFile,
)

"""ArrayRecord files, by array_record's own reader: a record is bytes."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from ...blocks import Block
from ...extras import imported
from .byte_sources import ByteSource
from .formats import TEXT, Damaged, Facts, Format, Ints, Options, RandomAccessFile, texts

_MAGIC = bytes.fromhex("83af70d10d884a3f")  # of Riegeli, in which ArrayRecord is written


def _opened(source: ByteSource) -> tuple[Any, int]:
    """A reader, and how many records there are. Raises FailedPrecondition without the library, and
    Damaged."""
    module = imported("array_record.python.array_record_module", "arrayrecord", source.path)
    path = source.local_path()
    try:
        reader = module.ArrayRecordReader(path)
        if not reader.ok():
            reader.close()  # raises what is wrong
        return reader, int(reader.num_records())
    except Exception as error:
        raise Damaged(
            f"array_record cannot open it ({error}): it is cut, damaged or not closed by its "
            "writer. Write it again, or leave it out"
        ) from error


def _inspect(source: ByteSource, _: Options) -> Facts:
    reader, records = _opened(source)
    reader.close()
    return Facts(records, TEXT)


class ArrayRecordFile(RandomAccessFile):
    def __init__(self, source: ByteSource, _: Options) -> None:
        self._reader, records = _opened(source)
        self.held_bytes = 0 if source.local_path() == source.path else source.size
        super().__init__(source, source.size / max(1, records))

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
        super().close()


FORMAT = Format(
    suffixes=(".array_record", ".arrayrecord"),
    matches=lambda begin: begin.startswith(_MAGIC),
    inspect=_inspect,
    open=ArrayRecordFile,
    native=True,
)

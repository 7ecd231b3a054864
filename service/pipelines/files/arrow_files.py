"""Files of Arrow's record batches, by pyarrow: IPC streams, which Hugging Face's datasets save, and
IPC files (Feather). A record is a row, as of Parquet, and a record batch is a group.

A stream does not say where its batches are. Registration reads the headers of its messages, and
writes an index (record_index.py): where each message begins, and its rows and nulls.
"""

from __future__ import annotations

import contextlib
import struct
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from . import record_index
from .arrow_types import ArrowColumn, columns_of, pyarrow, wanted, without_nulls
from .byte_sources import ByteSource
from .formats import WRONG, Damaged, Facts, Format, Options, dict_of, read_at
from .row_groups import RowGroups, facts_of

_MAGIC, _MORE = b"ARROW1", 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # kinds of messages
_END = "Write it again, or leave it out"


def _walk(source: ByteSource) -> tuple[array[int], bytes]:
    """Where messages begin; of each its kind, and its numbers of rows and of nulls."""
    offsets, said, at = array("Q"), array("q"), 0
    if bytes(source.read(0, 6)) == _MAGIC:
        at = 8
        if bytes(source.read(source.size - 6, 6)) != _MAGIC:
            raise Damaged(f"it lacks the end of an Arrow file: it is cut. {_END}")
    while at < source.size:
        more, size = struct.unpack("<Ii", read_at(source, at, 8))
        if more == _MORE and not size:
            break
        offsets.append(at)
        if more != _MORE or size < 0:
            raise Damaged(f"no message begins at byte {at}: it is damaged, or of Arrow < 0.15")
        kind, body, rows, nulls = _header(bytes(read_at(source, at + 8, size)))
        at += 8 + size + body
        if at > source.size or body < 0:
            raise Damaged(f"the message at byte {offsets[-1]} is cut. {_END}")
        said.extend((kind, rows, nulls))
    offsets.append(at)
    return offsets, said.tobytes()


def _header(message: bytes) -> tuple[int, int, int, int]:
    """Of a message's flatbuffer: its kind, the size of its body, and of a batch rows and nulls."""

    def field(table: int, number: int) -> int:
        (back,) = struct.unpack_from("<i", message, table)
        (size,) = struct.unpack_from("<H", message, table - back)
        if 4 + 2 * number >= size:
            return 0
        (offset,) = struct.unpack_from("<H", message, table - back + 4 + 2 * number)
        return table + int(offset) if offset else 0

    def number(at: int, kind: str) -> int:
        return int(struct.unpack_from(kind, message, at)[0]) if at else 0

    (table,) = struct.unpack_from("<I", message)
    kind, body = number(field(table, 1), "<B"), number(field(table, 3), "<q")
    if kind != _BATCH:
        return kind, body, 0, 0
    batch = (at := field(table, 2)) + number(at, "<I")
    rows, nodes = number(field(batch, 0), "<q"), field(batch, 1)
    nodes += number(nodes, "<I")
    count = number(nodes, "<I")
    found = np.frombuffer(message, "<i8", 2 * count, nodes + 4)
    if (found[:1] != rows).any():
        raise Damaged(f"a batch of {rows} rows has {found[0]} values in its first column. {_END}")
    return kind, body, rows, int(found[1::2].sum())


class ArrowRows(RowGroups):
    """An open file of record batches, with its index."""

    def __init__(self, source: ByteSource, options: Options) -> None:
        """Raises Damaged, InvalidArgument, OSError."""
        self._source, self._arrow = source, pyarrow(source.path)
        self.index = record_index.indexed(source, options, _walk)
        with contextlib.ExitStack() as undone:
            undone.callback(self.index.close)
            said = np.frombuffer(self.index.said(), "<i8").reshape(-1, 3)
            self._offsets, kinds = self.index.offsets(0, len(said) + 1), said[:, 0]
            self._dictionaries, batches = np.flatnonzero(kinds == _DICTIONARY), kinds == _BATCH
            self._places, self.rows = np.flatnonzero(batches), said[batches, 1].tolist()
            self.doubtful = np.flatnonzero(said[batches, 2] + len(self._dictionaries)).tolist()
            """Batches that may have nulls."""
            if kinds[:1].tolist() != [_SCHEMA]:
                raise Damaged(f"it does not begin with a schema. {_END}")
            self._before = 0, self._bytes(0)  # so many dictionaries, and these behind the schema
            self._schema = self._stream(self._before[1]).schema
            self.columns = columns_of(source.path, self._schema, options)
            if "structure" in options:  # it is registered
                self.columns = [one for one in self.columns if one.name in options["columns"]]
            elif any(self.rows):  # else its writer may not know its types
                self.columns = wanted(source.path, self.columns, options)
            undone.pop_all()
        super().__init__(source, options, self.columns, np.cumsum([0, *self.rows]))

    def _bytes(self, message: int) -> bytes:
        begin, end = self._offsets[message : message + 2]
        return bytes(read_at(self._source, begin, end - begin))

    def _stream(self, data: bytes, columns: Iterable[ArrowColumn] = ()) -> Any:
        arrow = self._arrow
        fields = {self._schema.get_field_index(one.keys[0]) for one in columns}
        options = arrow.ipc.IpcReadOptions(included_fields=sorted(fields), use_threads=False)
        try:
            return arrow.ipc.open_stream(arrow.py_buffer(data), options=options)
        except (arrow.ArrowException, OSError) as error:
            raise Damaged(f"pyarrow cannot read it ({error}). {_END}") from error

    def batch(self, number: int, columns: Iterable[ArrowColumn]) -> Any:
        """With these columns. Raises Damaged, and what pyarrow raises."""
        place = self._places[number]
        before = self._dictionaries[self._dictionaries < place].tolist()
        if self._before[0] != len(before):
            self._before = len(before), b"".join(map(self._bytes, [0, *before]))
        stream = self._stream(self._before[1] + self._bytes(place), columns)
        batch = stream.read_next_batch()
        batch.validate(full=True)  # offsets that are wrong would be read as they are
        return batch

    def batches(self, groups: range) -> Iterator[Any]:
        return (self.batch(number, self.columns) for number in groups)

    def table(self, group: int) -> Any:
        return self._arrow.Table.from_batches([self.batch(group, self.columns)])

    def plan(self, groups: Iterable[int]) -> None:
        places = [self._places[number] for number in groups]
        self._source.plan([(self._offsets[at], self._offsets[at + 1]) for at in places])

    def close(self) -> None:
        self.index.close()
        self._source.close()


def _inspect(source: ByteSource, options: Options) -> Facts:
    record_index.made(source, options, _walk, says=True)
    source.plan(())
    file = ArrowRows(source, options)
    with contextlib.closing(file.index):
        rows = [*file.rows]
        if not any(rows):
            return Facts(0, dict_of({}))
        strict = [one for one in file.columns if not one.takes_nulls]
        for number in file.doubtful if strict else ():
            batch = file.batch(number, strict)
            if options.get("nulls") == "drop":
                rows[number] = without_nulls(batch, strict).num_rows
                continue
            for column in strict:
                [*column.components(batch.column(column.keys[0]))]
        return facts_of(file.columns, rows, sum(file.rows))


def _matches(begin: bytes) -> bool:
    """A stream begins with a schema."""
    try:
        return begin.startswith(_MAGIC) or (
            begin.startswith(b"\xff" * 4) and _header(begin[8:])[0] == _SCHEMA
        )
    except WRONG:
        return False


FORMAT = Format(
    suffixes=(".arrow", ".feather"),
    matches=_matches,
    inspect=_inspect,
    open=ArrowRows,
    row_groups=True,
    native=True,
    options=("columns", "fill", "index_dir", "nulls"),
)

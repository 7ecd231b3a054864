"""Parquet files, by pyarrow: a record is a dict of columns, and columns become columns of blocks
(arrow_types.py). A split begins with a row group, so that each is decoded once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .arrow_types import ArrowColumn, columns_of, payload_bytes, pyarrow, wanted, without_nulls
from .byte_sources import PART_BYTES, ByteSource
from .formats import LARGE_BYTES, Damaged, Facts, Format, Options, dict_of
from .row_groups import RowGroups, facts_of

PROBED_ROWS = 256
"""Rows that tell how large strings are that lie in a dictionary."""

_HOLE_BYTES = 8 << 10
"""Between columns that are asked for at once; as Arrow's."""

_BLOCK_BYTES, _COLUMN_BYTES = 4 << 20, 512 << 10
"""Of a block, and of one of many columns, each of which costs a block a little. Smaller blocks
decode faster, as they stay in the processor's cache, and cost worker and trainer more."""

_DICTIONARY_BYTES = 2 << 20
"""More than writers let a column's dictionary have."""


def _opened(source: ByteSource) -> Any:
    arrow = pyarrow(source.path)
    try:
        return arrow.parquet.ParquetFile(
            source.view(), page_checksum_verification=True, pre_buffer=False
        )
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # of the system
        raise Damaged(
            f"pyarrow cannot open it ({error}): it is cut, damaged or not closed by its writer. "
            "Write it again, or leave it out"
        ) from error


def _inspect(source: ByteSource, options: Options) -> Facts:
    path = source.path
    with _opened(source) as file:
        schema, about = file.schema_arrow, file.metadata
        if not about.num_rows:  # writers may not know its types
            return Facts(0, dict_of({}))
        columns = columns_of(path, schema, options)
        read = wanted(path, columns, options)
        strict = [one for one in read if not one.takes_nulls]
        doubtful = {at: one for at, one in enumerate(columns) if one in strict}
        rows = [about.row_group(number).num_rows for number in range(about.num_row_groups)]
        if options.get("nulls") == "drop":
            rows = [_rows_without_nulls(file, number, doubtful) for number in range(len(rows))]
        else:
            _require_no_nulls(file, doubtful)
        return facts_of(read, rows, about.num_rows)


def _require_no_nulls(file: Any, columns: dict[int, ArrowColumn]) -> None:
    """As far as statistics tell, of the file's own columns. Raises InvalidArgument."""
    of_lists: dict[int, int] = {}  # in which row group
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        for at, column in columns.items():
            statistics = group.column(at).statistics
            if statistics is None or not statistics.null_count:
                continue
            if column.has_lists:  # empty ones are counted like null ones
                of_lists.setdefault(at, number)
            else:
                column.require_no_nulls(statistics.null_count)
    for at, number in of_lists.items():
        for batch in _batches(file, [number], [at]):
            [*columns[at].components(batch.column(0))]


def _rows_without_nulls(file: Any, number: int, columns: dict[int, ArrowColumn]) -> int:
    """Of a row group."""
    group = file.metadata.row_group(number)
    doubtful = {}
    for at, column in columns.items():
        statistics = group.column(at).statistics
        if statistics is None or not statistics.has_null_count or statistics.null_count:
            doubtful[at] = column
    if not doubtful:
        return int(group.num_rows)
    batches = _batches(file, [number], [*doubtful])
    return sum(without_nulls(batch, doubtful.values()).num_rows for batch in batches)


def _batches(file: Any, groups: list[int], columns: Iterable[int], rows: int = 1 << 16) -> Any:
    """Of row groups, only these of the file's own columns."""
    return file.iter_batches(
        rows, row_groups=groups, columns=_paths(file, columns), use_threads=False
    )


def _paths(file: Any, columns: Iterable[int]) -> list[str]:
    """Names of the file's own columns, as Arrow takes them."""
    return [file.schema.column(at).path for at in columns]


class ParquetRows(RowGroups):
    """An open Parquet file."""

    def __init__(self, source: ByteSource, options: Options) -> None:
        self._source = source
        self._file = _opened(source)
        schema, about = self._file.schema_arrow, self._file.metadata
        names, columns = {*options["columns"]}, columns_of(source.path, schema, options)
        self._columns = {at: one for at, one in enumerate(columns) if one.name in names}
        sizes = [about.row_group(number).num_rows for number in range(about.num_row_groups)]
        self._rows = np.cumsum([0, *sizes])  # before each row group
        super().__init__(source, options, [*self._columns.values()], self._rows)
        self._row_bytes = self._bytes_of_a_row()
        self._probed = False  # a group's first rows

    def _bytes_of_a_row(self) -> float:
        """About so many in memory."""
        about = self._file.metadata
        size = sum(column.fixed_bytes for column in self._columns.values())
        for number in range(about.num_row_groups):
            group = about.row_group(number)
            size += sum(
                group.column(at).total_uncompressed_size / about.num_rows
                for at, column in self._columns.items()
                if column.varies
            )
        return size

    def _repeated_bytes(self, number: int) -> float:
        """Of a row: strings of a row group that are there once for many rows, by its first rows."""
        group = self._file.metadata.row_group(number)
        most = _DICTIONARY_BYTES + 4 * group.num_rows
        once = [
            at
            for at, column in zip(self._columns, map(group.column, self._columns), strict=True)
            if column.physical_type == "BYTE_ARRAY"
            and column.has_dictionary_page
            and column.total_uncompressed_size <= most
        ]
        if not once:
            return 0.0
        batch = next(_batches(self._file, [number], once, PROBED_ROWS))
        return float(sum(map(payload_bytes, batch.columns)) / max(1, batch.num_rows))

    def expect(self, first: int, stop: int) -> range:
        if not self._probed:
            self._row_bytes = max(self._row_bytes, self._repeated_bytes(self._group(first)))
            self._probed = True
        return super().expect(first, stop)

    def batches(self, groups: range) -> Any:
        rows = int(self._rows[groups.stop] - self._rows[groups.start])
        most_bytes = min(LARGE_BYTES, max(_BLOCK_BYTES, len(self._columns) * _COLUMN_BYTES))
        blocks = -(-int(rows * self._row_bytes) // most_bytes)
        size = -(-rows // max(1, blocks))  # of one size, so that memory is used again
        return _batches(self._file, [*groups], self._columns, size)

    def table(self, group: int) -> Any:
        paths = _paths(self._file, self._columns)
        return self._file.read_row_group(group, columns=paths, use_threads=False)

    def plan(self, groups: Iterable[int]) -> None:
        ranges: list[tuple[int, int]] = []
        for number in groups:
            group = self._file.metadata.row_group(number)
            for column in map(group.column, self._columns):
                begin = column.data_page_offset
                if column.has_dictionary_page:
                    begin = min(begin, column.dictionary_page_offset)
                end = begin + column.total_compressed_size
                follows = ranges and 0 <= begin - ranges[-1][1] <= _HOLE_BYTES
                if follows and end - ranges[-1][0] <= PART_BYTES:  # or a column is put together
                    ranges[-1] = ranges[-1][0], end
                else:
                    ranges.append((begin, end))
        self._source.plan(ranges)

    def close(self) -> None:
        self._file.close()
        self._source.close()


FORMAT = Format(
    suffixes=(".parquet", ".pq"),
    matches=lambda begin: begin.startswith(b"PAR1"),
    inspect=_inspect,
    open=ParquetRows,
    row_groups=True,
    native=True,
    reads_ends=True,
    options=("columns", "partitioning", "fill", "nulls"),
)

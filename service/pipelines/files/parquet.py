"""Parquet files, by pyarrow: a record is a dict of columns, and columns become columns of blocks
(parquet_types.py). A split begins with a row group, so that each is decoded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ...blocks import Block
from .byte_sources import ByteSource
from .formats import LARGE_BYTES, Damaged, Facts, Format, Ints, Options, chosen, dict_of
from .parquet_types import ParquetColumn, cut, leaves, payload_bytes, pyarrow, wide

PROBED_ROWS = 256
"""Rows that tell how large strings are that lie in a dictionary."""

_HOLE_BYTES = 8 << 10
"""Between columns that are asked for at once; as Arrow's."""

_DICTIONARY_BYTES = 2 << 20
"""More than writers let a column's dictionary have."""


def _opened(source: ByteSource) -> Any:
    """Raises Damaged."""
    arrow = pyarrow(source.path)
    try:
        return arrow.parquet.ParquetFile(source.view(), page_checksum_verification=True)
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
        names = chosen(path, schema.names, options)
        columns = {name: ParquetColumn(path, schema.field(name)) for name in names}
        fill = options.get("fill") or {}
        for name, value in fill.items():
            if name in columns:
                columns[name].require_fill(value)
        unfilled = {name: column for name, column in columns.items() if name not in fill}
        _require_no_nulls(file, unfilled)
        rows = [about.row_group(number).num_rows for number in range(about.num_row_groups)]
        cuts = np.cumsum([0, *rows]).tolist()
        times = {name: one.time for name, one in columns.items() if one.time}
        return Facts(
            about.num_rows, dict_of({n: one.node for n, one in columns.items()}), cuts, times
        )


def _require_no_nulls(file: Any, columns: dict[str, ParquetColumn]) -> None:
    """As far as statistics tell. Raises InvalidArgument."""
    about, names = file.metadata, leaves(file.schema_arrow)
    doubtful: dict[str, int] = {}  # row groups
    for number in range(about.num_row_groups):
        group = about.row_group(number)
        for at in range(group.num_columns):
            statistics, column = group.column(at).statistics, columns.get(names[at])
            if column is None or statistics is None or not statistics.null_count:
                continue
            if column.is_list and column.varies:  # empty ones are counted like null ones
                doubtful.setdefault(column.name, number)
            else:
                column.require_no_nulls(statistics.null_count)
    for name, number in doubtful.items():
        for batch in file.iter_batches(row_groups=[number], columns=[name], use_threads=False):
            columns[name].component(batch.column(name), {})


class ParquetRows:
    """An open Parquet file."""

    def __init__(self, source: ByteSource, options: Options) -> None:
        self._source = source
        self._names: list[str] = options["columns"]
        self._fill: dict[str, Any] = options.get("fill") or {}
        self._file = _opened(source)
        schema, about = self._file.schema_arrow, self._file.metadata
        self._columns = [ParquetColumn(source.path, schema.field(name)) for name in self._names]
        self._leaves = leaves(schema)
        sizes = [about.row_group(number).num_rows for number in range(about.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])
        self._row_bytes = self._bytes_of_a_row()
        self._probed = False  # a group's first rows

    def _bytes_of_a_row(self) -> float:
        """About so many in memory."""
        about = self._file.metadata
        varying = {column.name for column in self._columns if column.varies}
        size = sum(column.fixed_bytes for column in self._columns)
        for number in range(about.num_row_groups):
            group = about.row_group(number)
            size += sum(
                group.column(at).total_uncompressed_size / about.num_rows
                for at, name in enumerate(self._leaves)
                if name in varying
            )
        return size

    def _repeated_bytes(self, number: int) -> float:
        """Of a row: strings of a row group that are there once for many rows, by its first rows."""
        group = self._file.metadata.row_group(number)
        most = _DICTIONARY_BYTES + 4 * group.num_rows
        once = {
            name
            for name, column in zip(
                self._leaves, map(group.column, range(group.num_columns)), strict=True
            )
            if column.physical_type == "BYTE_ARRAY"
            and column.has_dictionary_page
            and column.total_uncompressed_size <= most
        }
        named = [name for name in self._names if name in once]
        if not named:
            return 0.0
        batches = self._file.iter_batches(
            PROBED_ROWS, row_groups=[number], columns=named, use_threads=False
        )
        batch = next(batches)
        return float(sum(map(payload_bytes, batch.columns)) / max(1, batch.num_rows))

    def read(self, first: int, stop: int) -> Iterator[Block]:
        begin, end = np.searchsorted(self._starts, [first, stop - 1], "right").tolist()
        at, end_row = int(self._starts[begin - 1]), int(self._starts[end])
        self._plan(range(begin - 1, end))
        if not self._probed:
            self._row_bytes = max(self._row_bytes, self._repeated_bytes(begin - 1))
            self._probed = True
        blocks = -(-int((end_row - at) * self._row_bytes) // LARGE_BYTES)
        batches = self._file.iter_batches(
            -(-(end_row - at) // max(1, blocks)),  # of one size, so that memory is used again
            row_groups=[*range(begin - 1, end)],
            columns=self._names,
            use_threads=False,
        )
        for batch in batches:
            low, high = max(0, first - at), min(batch.num_rows, stop - at)
            at += batch.num_rows
            if low < high:
                yield from map(self._block, cut(batch.slice(low, high - low), LARGE_BYTES))

    def take(self, records: Ints) -> Block:
        if not self._names:  # a table without columns has no rows, either
            return Block(len(records), ())
        arrow = pyarrow(self._source.path)
        tables = []
        groups = self._by_group(records)
        self._plan(number for number, _ in groups)
        for number, places in groups:
            table = self._file.read_row_group(number, columns=self._names, use_threads=False)
            table = table.cast(wide(table.schema))  # or the rows may be too many bytes for one
            tables.append(table.take(arrow.array(records[places] - self._starts[number])))
        order = np.concatenate([places for _, places in groups])
        places = np.empty(len(records), np.int64)
        places[order] = np.arange(len(records))
        table = arrow.concat_tables(tables).take(arrow.array(places)).combine_chunks()
        (batch,) = table.to_batches()
        return self._block(batch)

    def parts(self, records: Ints) -> list[Ints]:
        return [records[places] for _, places in self._by_group(records)]

    def read_with(self, record: int) -> range:
        number = int(np.searchsorted(self._starts, record, "right"))
        return range(int(self._starts[number - 1]), int(self._starts[number]))

    def _by_group(self, records: Ints) -> list[tuple[int, Ints]]:
        """Row groups, and where the records of each are."""
        groups = np.searchsorted(self._starts, records, "right") - 1
        by_group = np.argsort(groups, kind="stable")
        numbers, begins = np.unique(groups[by_group], return_index=True)
        return [*zip(numbers.tolist(), np.split(by_group, begins[1:]), strict=True)]

    def _block(self, batch: Any) -> Block:
        return Block(
            batch.num_rows,
            tuple(one.component(batch.column(one.name), self._fill) for one in self._columns),
        )

    def _plan(self, groups: Iterable[int]) -> None:
        """The bytes that reading these row groups takes."""
        ranges: list[tuple[int, int]] = []
        wanted = {*self._names}
        for number in groups:
            group = self._file.metadata.row_group(number)
            for at, name in enumerate(self._leaves):
                if name in wanted:
                    column = group.column(at)
                    begin = column.data_page_offset
                    if column.has_dictionary_page:
                        begin = min(begin, column.dictionary_page_offset)
                    end = begin + column.total_compressed_size
                    if ranges and 0 <= begin - ranges[-1][1] <= _HOLE_BYTES:
                        ranges[-1] = ranges[-1][0], end
                    else:
                        ranges.append((begin, end))
        self._source.plan(ranges)

    def close(self) -> None:
        self._file.close()
        self._source.close()


FORMAT = Format(
    suffixes=(".parquet", ".pq"),
    is_it=lambda begin: begin.startswith(b"PAR1"),
    inspect=_inspect,
    open=ParquetRows,
    by_groups=True,
    is_native=True,
    takes=("columns", "fill"),
)

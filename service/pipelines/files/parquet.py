"""Parquet files, by pyarrow: a record is a dict of columns, and columns become columns of blocks.

Numbers keep their types; times and dates are int64 in their unit; strings and bytes are bytes;
lists are arrays of one dimension. A split begins with a row group, so that each is decoded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...blocks import Array, Block, Component, Strings
from ...errors import FailedPrecondition, InvalidArgument
from .formats import (
    LARGE_BYTES,
    TEXT,
    Damaged,
    Facts,
    Format,
    Ints,
    Node,
    Options,
    chosen,
    dict_of,
)

_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}
"""Arrow's names."""

PROBED_ROWS = 256
"""Rows that tell how large strings are that lie in a dictionary."""

_DICTIONARY_BYTES = 2 << 20
"""More than writers let a column's dictionary have."""

_NOT_OF_A_TYPE = (ValueError, TypeError, OverflowError, NotImplementedError, AttributeError)
"""What pyarrow raises for a value that a type cannot have; its own errors are among them."""


def _pyarrow(path: str) -> Any:
    try:
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise FailedPrecondition(
            f"{path} is a Parquet file, and pyarrow is not installed here ({error}): "
            "pip install 'forebay[parquet]'"
        ) from error
    return pyarrow


def _opened(path: str) -> Any:
    """Raises Damaged."""
    arrow = _pyarrow(path)
    try:
        return arrow.parquet.ParquetFile(path, page_checksum_verification=True)
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # of the system
        raise Damaged(
            f"pyarrow cannot open it ({error}): it is cut, damaged or not closed by its writer. "
            "Write it again, or leave it out"
        ) from error


def _inspect(path: str, options: Options) -> Facts:
    with _opened(path) as file:
        schema, about = file.schema_arrow, file.metadata
        columns = chosen(path, schema.names, options)
        fill = options.get("fill") or {}
        _require_fill(path, {name: schema.field(name).type for name in columns}, fill)
        nodes = {name: _node(path, name, schema.field(name).type) for name in columns}
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
        for group in groups:
            for number in range(group.num_columns):
                column = group.column(number)
                name, counted = column.path_in_schema, column.statistics
                if name in nodes and name not in fill and counted is not None:
                    _require_no_nulls(path, name, counted.null_count or 0)
        cuts = np.cumsum([0, *(group.num_rows for group in groups)]).tolist()
        kinds = {name: schema.field(name).type for name in columns}
        times = {name: str(kind) for name, kind in kinds.items() if _is_time(kind)}
        return Facts(about.num_rows, dict_of(nodes), cuts, times)


def _require_fill(path: str, kinds: dict[str, Any], fill: dict[str, Any]) -> None:
    """Raises InvalidArgument."""
    arrow = _pyarrow(path)
    for name, value in fill.items():
        if name not in kinds:
            raise InvalidArgument(
                f"fill has column {name!r}, and of {path} are read {sorted(kinds)}: leave it out"
            )
        try:
            arrow.scalar(value, kinds[name])
        except _NOT_OF_A_TYPE as error:
            raise InvalidArgument(
                f"fill={{{name!r}: {value!r:.50}}} is no {kinds[name]}, which that column of "
                f"{path} is: give one"
            ) from error


def _require_no_nulls(path: str, name: str, nulls: int) -> None:
    """Raises InvalidArgument."""
    if nulls:
        raise InvalidArgument(
            f"{path} has {nulls} nulls in column {name!r}: give fill={{{name!r}: …}}, a value in "
            "their place, or other `columns`"
        )


def _node(path: str, name: str, kind: Any) -> Node:
    """Raises InvalidArgument."""
    types = _pyarrow(path).types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if _is_text(kind):
        return TEXT
    if (dtype := _dtype(kind)) is not None:
        return {"tensor": dtype, "shape": []}
    if _is_list(kind):
        inner = kind.value_type
        size = kind.list_size if types.is_fixed_size_list(kind) else None
        dtype = "string" if _is_text(inner) else _dtype(inner)
        if dtype is not None:
            return {"tensor": dtype, "shape": [size]}
    raise InvalidArgument(
        f"{path} has column {name!r} of type {kind}, which is no number, string or list of them: "
        "read others by `columns`, or flatten it"
    )


def _dtype(kind: Any) -> str | None:
    from pyarrow import types

    if types.is_boolean(kind):
        return "bool"
    if types.is_integer(kind) or types.is_floating(kind):
        return _FLOATS.get(str(kind), str(kind))
    if types.is_temporal(kind) and not types.is_interval(kind):
        return "int64"
    return None


def _is_time(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_temporal(kind) or (_is_list(kind) and _is_time(kind.value_type)))


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return any(
        is_it(kind)
        for is_it in (
            *(types.is_string, types.is_large_string, types.is_string_view, types.is_binary),
            *(types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary),
        )
    ) and not types.is_decimal(kind)


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


class ParquetRows:
    """An open Parquet file."""

    def __init__(self, path: str, options: Options) -> None:
        self._path = path
        self._columns: list[str] = options["columns"]
        self._fill: dict[str, Any] = options.get("fill") or {}
        self._file = _opened(path)
        about = self._file.metadata
        sizes = [about.row_group(number).num_rows for number in range(about.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])
        self._row_bytes = self._bytes_of_a_row()
        self._probed = False  # a group's first rows

    def _bytes_of_a_row(self) -> float:
        """About so many in memory."""
        about, schema = self._file.metadata, self._file.schema_arrow
        size, varying = 0.0, set()
        for name in self._columns:
            try:
                size += schema.field(name).type.bit_width / 8
            except ValueError:  # not the same for each row
                varying.add(name)
        for number in range(about.num_row_groups):
            group = about.row_group(number)
            columns = map(group.column, range(group.num_columns))
            size += sum(
                column.total_uncompressed_size / about.num_rows
                for column in columns
                if any(_is_of(column.path_in_schema, name) for name in varying)
            )
        return size

    def _repeated_bytes(self, number: int) -> float:
        """Of a row: strings of a row group that are there once for many rows, by its first rows."""
        group = self._file.metadata.row_group(number)
        most = _DICTIONARY_BYTES + 4 * group.num_rows
        paths = [
            column.path_in_schema
            for column in map(group.column, range(group.num_columns))
            if column.physical_type == "BYTE_ARRAY"
            and column.has_dictionary_page
            and column.total_uncompressed_size <= most
        ]
        named = [name for name in self._columns if any(_is_of(path, name) for path in paths)]
        if not named:
            return 0.0
        batches = self._file.iter_batches(
            PROBED_ROWS, row_groups=[number], columns=named, use_threads=False
        )
        batch = next(batches)
        return float(sum(map(_bytes, batch.columns)) / max(1, batch.num_rows))

    def read(self, first: int, stop: int) -> Iterator[Block]:
        begin, end = np.searchsorted(self._starts, [first, stop - 1], "right").tolist()
        at, end_row = int(self._starts[begin - 1]), int(self._starts[end])
        if not self._probed:
            self._row_bytes = max(self._row_bytes, self._repeated_bytes(begin - 1))
            self._probed = True
        blocks = -(-int((end_row - at) * self._row_bytes) // LARGE_BYTES)
        batches = self._file.iter_batches(
            -(-(end_row - at) // max(1, blocks)),  # of one size, so that memory is used again
            row_groups=[*range(begin - 1, end)],
            columns=self._columns,
            use_threads=False,
        )
        for batch in batches:
            low, high = max(0, first - at), min(batch.num_rows, stop - at)
            at += batch.num_rows
            if low < high:
                yield from map(self._block, _cut(batch.slice(low, high - low)))

    def take(self, records: Ints) -> Block:
        arrow = _pyarrow(self._path)
        tables = []
        groups = self._by_group(records)
        for number, places in groups:
            table = self._file.read_row_group(number, columns=self._columns, use_threads=False)
            table = table.cast(_wide(table.schema))  # or the rows may be too many bytes for one
            tables.append(table.take(arrow.array(records[places] - self._starts[number])))
        order = np.concatenate([places for _, places in groups])
        places = np.empty(len(records), np.int64)
        places[order] = np.arange(len(records))
        table = arrow.concat_tables(tables).take(arrow.array(places)).combine_chunks()
        (batch,) = table.to_batches()
        return self._block(batch)

    def parts(self, records: Ints) -> list[Ints]:
        return [records[places] for _, places in self._by_group(records)]

    def _by_group(self, records: Ints) -> list[tuple[int, Ints]]:
        """Row groups, and where the records of each are."""
        groups = np.searchsorted(self._starts, records, "right") - 1
        by_group = np.argsort(groups, kind="stable")
        numbers, begins = np.unique(groups[by_group], return_index=True)
        return [*zip(numbers.tolist(), np.split(by_group, begins[1:]), strict=True)]

    def _block(self, batch: Any) -> Block:
        named = [(name, batch.column(name)) for name in self._columns]
        return Block(batch.num_rows, tuple(self._component(*one) for one in named))

    def _component(self, name: str, column: Any) -> Component:
        arrow = _pyarrow(self._path)
        if name in self._fill:
            try:
                column = column.fill_null(arrow.scalar(self._fill[name], column.type))
            except _NOT_OF_A_TYPE as error:
                raise InvalidArgument(
                    f"fill={{{name!r}: {self._fill[name]!r:.50}}} fits no {column.type}, which "
                    f"that column of {self._path} is ({error}): give another one"
                ) from error
        _require_no_nulls(self._path, name, column.null_count)
        if arrow.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if not _is_list(column.type):
            return Component(_values(column))
        values = column.flatten()
        _require_no_nulls(self._path, name, values.null_count)
        if arrow.types.is_fixed_size_list(column.type):
            lengths = np.full(len(column), column.type.list_size, np.int64)
        else:
            lengths = arrow.compute.list_value_length(column).to_numpy().astype(np.int64)
        found = _values(values)
        if (lengths == lengths[0]).all():
            shape = (len(column), int(lengths[0]))
            if isinstance(found, Strings):
                return Component(Strings(found.lengths.reshape(shape), found.data))
            return Component(found.reshape(shape))
        return Component(found, lengths[:, np.newaxis])

    def close(self) -> None:
        self._file.close()


def _is_of(path: str, name: str) -> bool:
    """Whether a column of the file is of a column of the schema, whose name may have dots."""
    return f"{path}.".startswith(f"{name}.")


def _cut(batch: Any) -> Iterator[Any]:
    """Parts of a batch of up to about LARGE_BYTES: it may be larger than its file says."""
    if batch.num_rows < 2 or sum(map(_bytes, batch.columns)) < 2 * LARGE_BYTES:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _cut(batch.slice(0, half))
    yield from _cut(batch.slice(half))


def _bytes(column: Any) -> int:
    """In a block."""
    import pyarrow as arrow

    if not arrow.types.is_dictionary(column.type):
        return int(column.nbytes)
    values = column.dictionary
    if not _is_text(values.type):
        return len(column) * int(values.nbytes) // max(1, len(values))
    lengths = arrow.compute.binary_length(values).take(column.indices)
    return arrow.compute.sum(lengths).as_py() or 0


def _wide(schema: Any) -> Any:
    """The schema, with strings whose bytes may be more than 2 GiB."""
    import pyarrow as arrow

    for at, field in enumerate(schema):
        kind = field.type
        types = arrow.types
        if _is_text(kind):
            schema = schema.set(at, arrow.field(field.name, arrow.large_binary()))
        elif (types.is_list(kind) or types.is_large_list(kind)) and _is_text(kind.value_type):
            wide = arrow.large_list(arrow.large_binary())
            schema = schema.set(at, arrow.field(field.name, wide))
    return schema


def _values(column: Any) -> Array | Strings:
    """Of an array without nulls."""
    import pyarrow as arrow

    kind = column.type
    if _is_text(kind):
        if arrow.types.is_fixed_size_binary(kind) or not arrow.types.is_large_binary(kind):
            column = column.cast(arrow.large_binary())
        _, offsets, data = column.buffers()
        ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
        if not len(ends):
            return Strings(np.zeros(0, np.int64), np.zeros(0, np.uint8))
        found = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
        return Strings(np.diff(ends), found[ends[0] : ends[-1]])
    if arrow.types.is_temporal(kind):
        wide = kind.bit_width == 64
        column = column.view(arrow.int64()) if wide else column.view(arrow.int32())
    values: Array = column.to_numpy(zero_copy_only=False)
    return values.astype(np.int64) if arrow.types.is_temporal(kind) else values


FORMAT = Format(
    suffixes=(".parquet", ".pq"),
    is_it=lambda begin: begin.startswith(b"PAR1"),
    inspect=_inspect,
    open=ParquetRows,
    by_groups=True,
)

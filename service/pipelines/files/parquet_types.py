"""Columns of Parquet as tensors: their types, and what Arrow's arrays are as components.

Numbers keep their types; times and dates are int64 in their unit; strings and bytes are bytes;
lists are arrays of one dimension. Extension types are what they are stored as; tensors of one shape
(Arrow's, Ray's) have that shape, and bool8 is bool.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ....storage.extras import install
from ...blocks import Array, Component, Strings
from ...errors import FailedPrecondition, InvalidArgument
from .formats import TEXT, Damaged, Node

_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}
"""Arrow's names."""


def pyarrow(path: str) -> Any:
    """Raises FailedPrecondition where it is not installed."""
    try:
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise FailedPrecondition(
            f"{path} is a Parquet file, and pyarrow is not installed here ({error}): "
            f"{install('parquet')}"
        ) from error
    return pyarrow


class ParquetColumn:
    """A column of a file, or of its directory's name, as it is read."""

    def __init__(self, path: str, field: Any) -> None:
        """`field` is Arrow's. Raises InvalidArgument for what is no tensor."""
        self._path, self.name = path, str(field.name)
        self._arrow = pyarrow(path)
        types = self._arrow.types
        extension, about = _extension(field)
        self._is_bool8 = extension == "arrow.bool8"
        self.kind = self._arrow.bool_() if self._is_bool8 else unwrapped(field.type)
        self.is_list = is_list(self.kind)
        """Then `value_kind` is that of its values, and else its own."""
        self.value_kind = unwrapped(self.kind.value_type) if self.is_list else self.kind
        self._size = self.kind.list_size if types.is_fixed_size_list(self.kind) else None
        self._shape, self._axes = _tensor(field.type, extension, about)
        text = is_text(self.value_kind)
        dtype = "string" if text else _dtype(self.value_kind)
        if dtype is None:
            what = (
                "whose values are all nulls"
                if types.is_null(self.kind)
                else ("which is no number, string or list of them")
            )
            raise InvalidArgument(
                f"{path} has column {self.name!r} of type {field.type!s:.100}, {what}: read others "
                "by `columns`, or write it otherwise"
            )
        shape: list[int | None] = [self._size] if self.is_list else []
        if self._shape is not None:
            shape = [self._shape[axis] for axis in self._axes]
        self.node: Node = TEXT if text and not shape else {"tensor": dtype, "shape": shape}

    @property
    def varies(self) -> bool:
        """Whether rows may have different sizes."""
        return is_text(self.value_kind) or (self.is_list and self._size is None)

    @property
    def fixed_bytes(self) -> float:
        """Of a row, if it does not vary."""
        values = 1 if self._size is None else self._size
        return 0.0 if self.varies else values * float(self.value_kind.bit_width) / 8

    @property
    def time(self) -> str | None:
        """What its numbers are, if they are times."""
        return str(self.kind) if self._arrow.types.is_temporal(self.value_kind) else None

    def require_fill(self, value: Any) -> None:
        """Raises InvalidArgument for what cannot stand for a null."""
        try:
            self._arrow.scalar(value, self.value_kind)
        except (ValueError, TypeError, OverflowError, NotImplementedError, AttributeError) as error:
            raise InvalidArgument(
                f"fill={{{self.name!r}: {value!r:.50}}} is no {self.value_kind}, which that column "
                f"of {self._path} is: give one"
            ) from error

    def component(self, column: Any, fill: dict[str, Any]) -> Component:
        """The array's values; of a list, `fill` is for its values, and a null list is empty, or
        full of it. Raises InvalidArgument for nulls without a value, and Damaged."""
        column = _unwrapped_array(column)
        if self._is_bool8:
            column = column.cast(self.kind)
        if not self.is_list:
            return Component(_values(self._filled(column, fill)))
        if column.null_count and self.name in fill:
            empty = [fill[self.name]] * (self._size or 0)
            column = column.fill_null(self._arrow.scalar(empty, column.type))
        self.require_no_nulls(column.null_count)
        values = _values(self._filled(_unwrapped_array(column.flatten()), fill))
        if self._size is not None:
            lengths = np.full(len(column), self._size, np.int64)
        else:
            lengths = self._arrow.compute.list_value_length(column).to_numpy().astype(np.int64)
        if (lengths == lengths[:1]).all():
            return self._stacked(values, len(column), int(lengths[0]))
        if self._shape is not None:
            raise Damaged(f"column {self.name!r} has lists of several lengths for {self._shape}")
        return Component(values, lengths[:, np.newaxis])

    def _stacked(self, values: Array | Strings, rows: int, size: int) -> Component:
        shape = [size] if self._shape is None else self._shape
        if math.prod(shape) != size:
            raise Damaged(f"column {self.name!r} has lists of {size} values for {shape}")
        if isinstance(values, Strings):
            return Component(Strings(values.lengths.reshape(rows, *shape), values.data))
        values = values.reshape(rows, *shape)
        if self._shape is not None and self._axes != [*range(len(shape))]:
            values = np.ascontiguousarray(values.transpose(0, *(1 + axis for axis in self._axes)))
        return Component(values)

    def _filled(self, values: Any, fill: dict[str, Any]) -> Any:
        if values.null_count and self.name in fill:
            values = values.fill_null(self._arrow.scalar(fill[self.name], values.type))
        self.require_no_nulls(values.null_count)
        return values

    def require_no_nulls(self, nulls: int) -> None:
        """Raises InvalidArgument."""
        if nulls:
            raise InvalidArgument(
                f"{self._path} has {nulls} nulls in column {self.name!r}: give "
                f"fill={{{self.name!r}: …}}, a value in their place, or other `columns`"
                + (". A list that is null is empty then" if self.is_list else "")
            )


def leaves(schema: Any) -> list[str]:
    """By the file's own columns, the column of the schema that each belongs to. (Their paths do not
    say it: names may have dots.)"""
    return [field.name for field in schema for _ in range(_leaves(field.type))]


def _leaves(kind: Any) -> int:
    from pyarrow import types

    kind = unwrapped(kind)
    if types.is_struct(kind):
        return sum(_leaves(kind.field(at).type) for at in range(kind.num_fields))
    if types.is_map(kind):
        return _leaves(kind.key_type) + _leaves(kind.item_type)
    return _leaves(kind.value_type) if is_list(kind) else 1


def unwrapped(kind: Any) -> Any:
    """What an extension type is stored as, and what a dictionary has."""
    import pyarrow as arrow

    while True:
        if isinstance(kind, arrow.BaseExtensionType):
            kind = kind.storage_type
        elif arrow.types.is_dictionary(kind):
            kind = kind.value_type
        else:
            return kind


def _unwrapped_array(column: Any) -> Any:
    import pyarrow as arrow

    while True:
        if isinstance(column.type, arrow.BaseExtensionType):
            column = column.storage
        elif arrow.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        else:
            return column


def _extension(field: Any) -> tuple[str, bytes]:
    """The name of its extension type, and what it says of itself; also of one that is not known
    here, such as Ray's."""
    import pyarrow as arrow

    if isinstance(field.type, arrow.ExtensionType):  # in Python
        return field.type.extension_name, field.type.__arrow_ext_serialize__()
    if isinstance(field.type, arrow.BaseExtensionType):
        return field.type.extension_name, b""
    about = field.metadata or {}
    name = about.get(b"ARROW:extension:name", b"").decode(errors="replace")
    return name, about.get(b"ARROW:extension:metadata", b"")


def _tensor(kind: Any, extension: str, about: bytes) -> tuple[list[int] | None, list[int]]:
    """The shape of a tensor's values, and which of its axes each of the tensor's is."""
    shape: Any = None
    axes: Any = None
    if extension == "arrow.fixed_shape_tensor" and hasattr(kind, "shape"):
        shape, axes = kind.shape, kind.permutation
    elif extension.startswith("ray.data.arrow_tensor"):
        try:
            shape = json.loads(about)
        except ValueError:  # it was pickled: then it is a list
            pass
    shape = None if shape is None else [*map(int, shape)]
    return shape, [*(axes or range(len(shape or ())))]


def _dtype(kind: Any) -> str | None:
    from pyarrow import types

    if types.is_boolean(kind):
        return "bool"
    if types.is_integer(kind) or types.is_floating(kind):
        return _FLOATS.get(str(kind), str(kind))
    if types.is_temporal(kind) and not types.is_interval(kind):
        return "int64"
    return None


def is_text(kind: Any) -> bool:
    from pyarrow import types

    return any(
        is_it(kind)
        for is_it in (
            *(types.is_string, types.is_large_string, types.is_string_view, types.is_binary),
            *(types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary),
        )
    ) and not types.is_decimal(kind)


def is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def wide(schema: Any) -> Any:
    """The schema as it is stored, with strings whose bytes may be more than 2 GiB."""
    import pyarrow as arrow

    for at, field in enumerate(schema):
        kind = field.type
        while isinstance(kind, arrow.BaseExtensionType):
            kind = kind.storage_type
        if is_text(kind):
            kind = arrow.large_binary()
        elif (arrow.types.is_list(kind) or arrow.types.is_large_list(kind)) and is_text(
            kind.value_type
        ):
            kind = arrow.large_list(arrow.large_binary())
        schema = schema.set(at, arrow.field(field.name, kind))
    return schema


def cut(batch: Any, most_bytes: int) -> Iterator[Any]:
    """Parts of a batch of up to about `most_bytes`: it may be larger than its file says."""
    if batch.num_rows < 2 or sum(map(payload_bytes, batch.columns)) < 2 * most_bytes:
        yield batch
        return
    half = batch.num_rows // 2
    yield from cut(batch.slice(0, half), most_bytes)
    yield from cut(batch.slice(half), most_bytes)


def payload_bytes(column: Any) -> int:
    """In a block."""
    import pyarrow as arrow

    if not arrow.types.is_dictionary(column.type):
        return int(column.nbytes)
    values = column.dictionary
    if not is_text(values.type):
        return len(column) * int(values.nbytes) // max(1, len(values))
    lengths = arrow.compute.binary_length(values).take(column.indices)
    return arrow.compute.sum(lengths).as_py() or 0


def _values(column: Any) -> Array | Strings:
    """Of an array without nulls."""
    import pyarrow as arrow

    kind = column.type
    if is_text(kind):
        if arrow.types.is_fixed_size_binary(kind) or not arrow.types.is_large_binary(kind):
            column = column.cast(arrow.large_binary())
        _, offsets, data = column.buffers()
        ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
        if not len(ends):
            return Strings(np.zeros(0, np.int64), np.zeros(0, np.uint8))
        found = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
        return Strings(np.diff(ends), found[ends[0] : ends[-1]])
    if arrow.types.is_temporal(kind):
        wide_enough = kind.bit_width == 64
        column = column.view(arrow.int64()) if wide_enough else column.view(arrow.int32())
    values: Array = column.to_numpy(zero_copy_only=False)
    return values.astype(np.int64) if arrow.types.is_temporal(kind) else values

"""Columns of Arrow and Parquet as tensors: their types, and what Arrow's arrays are as components.

Numbers keep their types; times and dates are int64 in their unit; strings, bytes and decimals are
bytes. A column of structs is a dict. A column of maps is a dict of keys and values. Lists are
arrays of one dimension, and lists of structs a dict of such arrays. Lists of lists are ragged
tensors, unless the inner ones have a fixed size, which is a further dimension. Extension types are
what they are stored as; tensors of one shape (Arrow's, Ray's) have that shape, and bool8 is bool.

So a field is one or several columns, its *leaves*: numbers or texts at the end of a path of structs
and lists. Each is a component of blocks, or several where it is ragged.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...blocks import Array, Block, Component, Strings
from ...errors import InvalidArgument
from ...extras import imported
from .formats import Damaged, Ints, Node, Options, chosen, dict_of, of_rows

_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}
_TEXTS = {
    *("string", "large_string", "string_view", "binary", "large_binary", "binary_view"),
    "fixed_size_binary",
}
"""Arrow's names."""


def pyarrow(path: str) -> Any:
    """Raises FailedPrecondition where it is not installed."""
    for module in ("pyarrow.compute", "pyarrow.parquet"):
        imported(module, "parquet", path)
    return imported("pyarrow", "parquet", path)


Keys = tuple[str, ...]
"""Of the dicts above a leaf, and its own."""


class Dimensions(NamedTuple):
    """Of the lists on the way to a leaf."""

    sizes: list[int | None]
    shape: list[int] | None = None  # of a tensor's values in memory
    axes: Sequence[int] = ()  # of those, the tensor's


class ArrowColumn:
    """A leaf of a field of a file, or of its directory's name, as it is read."""

    def __init__(
        self, path: str, field: Any, keys: Keys, steps: Sequence[str | Dimensions], options: Options
    ) -> None:
        """`field` is Arrow's, of the leaf. `steps` lead to it: fields of structs, and lists."""
        self._path, self._field, self.keys, self._steps = path, field, keys, steps
        self.name = ".".join(keys)
        self._arrow = pyarrow(path)
        types = self._arrow.types
        self._is_bool8 = _extension(field)[0] == "arrow.bool8"
        self.kind = self._arrow.bool_() if self._is_bool8 else unwrapped(field.type)
        self.is_text = is_text(self.kind) or types.is_decimal(self.kind)
        self._lists = [step for step in steps if isinstance(step, Dimensions)]
        self._sizes = [size for one in self._lists for size in one.sizes]
        self._fill = (options.get("fill") or {}).get(self.name)
        self._is_masked = options.get("nulls") == "mask" and self._fill is None
        self.takes_nulls = self._is_masked or self._fill is not None

    @functools.cached_property
    def nodes(self) -> dict[Keys, Node]:
        """What a record has of it. Raises InvalidArgument for what is no tensor."""
        dtype = "string" if self.is_text else _dtype(self.kind)
        if dtype is None:
            what = (
                "whose values are all nulls"
                if self._arrow.types.is_null(self.kind)
                else "which is no number, string, or list or struct of them"
            )
            raise InvalidArgument(
                f"{self._path} has column {self.name!r} of type {self._field.type!s:.100}, {what}: "
                "read others by `columns`, or write it otherwise"
            )
        found = {self.keys: self._node(dtype)}
        if self._is_masked:
            found[self._keys_valid] = self._node("bool")
        return found

    @property
    def _keys_valid(self) -> Keys:
        return (*self.keys[:-1], self.keys[-1] + ".valid")

    def _node(self, dtype: str) -> Node:
        if not self._ragged_rank:
            return {"tensor": dtype, "shape": self._sizes}
        return {"ragged": dtype, "shape": self._sizes, "ragged_rank": self._ragged_rank}

    @property
    def _ragged_rank(self) -> int:
        """The last dimension whose sizes vary within a row."""
        return max((at for at, size in enumerate(self._sizes) if size is None), default=0)

    @property
    def has_lists(self) -> bool:
        """Whether a row may have no value, without a null."""
        return not all(self._sizes)

    @property
    def varies(self) -> bool:
        """Whether rows may have different sizes."""
        return self.is_text or None in self._sizes

    @property
    def fixed_bytes(self) -> float:
        """Of a row, if it does not vary."""
        values = math.prod(size or 0 for size in self._sizes)
        return 0.0 if self.varies else values * float(self.kind.bit_width) / 8

    @property
    def time(self) -> str | None:
        """What its numbers are, if they are times."""
        return str(self.kind) if self._arrow.types.is_temporal(self.kind) else None

    def _stages(self, column: Any) -> Iterator[tuple[list[Ints], Any]]:
        """The lists on the way to the leaf's values, and these, of a field's array, each with the
        lengths of the lists above. A null struct is nulls of its fields."""
        lengths: list[Ints] = []
        column = _unwrapped_array(column)
        for step in self._steps:
            if isinstance(step, str):
                column = column.flatten()[column.type.get_field_index(step)]
            else:
                if self._arrow.types.is_map(column.type):
                    column = column.cast(_stored(column.type))
                yield lengths, column
                own, column = _within(column)
                if step.shape is not None and (wrong := own[own != math.prod(step.shape)]).size:
                    raise Damaged(
                        f"column {self.name!r} has lists of {wrong[0]} values for {step.shape}"
                    )
                lengths = [*lengths, own]
            column = _unwrapped_array(column)
        yield lengths, column

    def mark_nulls(self, column: Any, rows: Array) -> None:
        """Sets the rows, of a field's array, in which the leaf or a list above it is a null."""
        for lengths, array in self._stages(column) if not self.takes_nulls else ():
            if array.null_count:
                places = np.arange(len(column))
                for own in lengths:
                    places = np.repeat(places, own)
                rows[places[array.is_null().to_numpy(zero_copy_only=False)]] = True

    def components(self, column: Any) -> Iterator[tuple[Keys, list[Component]]]:
        """A field's array. Null lists are empty, or of a fixed size full of nulls, where nulls are
        taken. Raises InvalidArgument for other nulls, and Damaged."""
        for stage in self._stages(column):
            self.require_no_nulls(stage[1].null_count)
        lengths, array = stage[0], self._plain(stage[1])
        if self._is_masked:
            valid = array.is_valid().to_numpy(zero_copy_only=False)
            yield self._keys_valid, self._shaped(valid, lengths)
        if array.null_count:
            value = (b"" if self.is_text else 0) if self._fill is None else self._fill
            if not self.is_text:
                value = np.dtype(_dtype(array.type)).type(value)
            array = array.fill_null(self._arrow.scalar(value, array.type))
        yield self.keys, self._shaped(_values(array), lengths)

    def _plain(self, array: Any) -> Any:
        """Numbers, or large binaries."""
        if self._is_bool8:
            return array.cast(self.kind)
        if self.is_text:
            if self._arrow.types.is_decimal(array.type):
                array = array.cast(self._arrow.string())
            return array.cast(self._arrow.large_binary())
        if self._arrow.types.is_temporal(array.type):
            bits = array.type.bit_width
            array = array.view(self._arrow.int64() if bits == 64 else self._arrow.int32())
            return array.cast(self._arrow.int64())
        return array

    def _shaped(self, values: Array | Strings, lengths: list[Ints]) -> list[Component]:
        """`lengths` are those of the lists of each level. Of a tensor, one of them is several
        dimensions."""
        if not self._lists:
            return [Component(values)]
        if (shape := self._lists[-1].shape) is not None:
            order, axes = [*range(len(shape))], [*self._lists[-1].axes]
            if axes != order:
                assert not isinstance(values, Strings)
                values = values.reshape(-1, *shape).transpose(0, *(1 + axis for axis in axes))
                values = values.reshape(-1)
        counts, splits = lengths[0], []
        if self._sizes[0] is not None:
            counts = np.full(len(counts), self._sizes[0])
        for own in lengths[1 : 1 + self._ragged_rank]:
            rows = np.repeat(np.arange(len(counts)), 1 + counts)
            begins, ends = np.cumsum([0, *counts]), np.cumsum([0, *own])
            splits_of = ends[np.arange(len(rows)) - rows] - ends[begins[:-1]][rows]
            splits.append(of_rows(splits_of, 1 + counts, []))
            counts = np.diff(ends[begins])
        inner = [size or 0 for size in self._sizes[1 + self._ragged_rank :]]
        return [of_rows(values, counts, inner), *splits]

    def require_no_nulls(self, nulls: int) -> None:
        """Raises InvalidArgument, unless nulls are taken."""
        if nulls and not self.takes_nulls:
            raise InvalidArgument(
                f"{self._path} has {nulls} nulls in column {self.name!r}: give "
                f'fill={{{self.name!r}: …}}, a value in their place, nulls="drop" to leave out '
                'these rows, nulls="mask", or other `columns`'
                + (". A list that is null is empty then" if self._lists else "")
            )


def columns_of(path: str, schema: Iterable[Any], options: Options) -> list[ArrowColumn]:
    """Of a file, in the order of a Parquet file's own columns."""
    return [
        ArrowColumn(path, leaf, keys, steps, options)
        for field in schema
        for leaf, keys, steps in _leaves(field, (field.name,), ())
    ]


def _leaves(field: Any, keys: Keys, steps: tuple[Any, ...]) -> Iterator[tuple[Any, Keys, Any]]:
    from pyarrow import types

    kind = unwrapped(field.type)
    if types.is_struct(kind):
        for at in range(kind.num_fields):
            inner = kind.field(at)
            yield from _leaves(inner, (*keys, inner.name), (*steps, inner.name))
    elif types.is_map(kind):
        for name, inner in (("keys", kind.key_field), ("values", kind.item_field)):
            yield from _leaves(inner, (*keys, name), (*steps, Dimensions([None]), inner.name))
    elif is_list(kind):
        size = kind.list_size if types.is_fixed_size_list(kind) else None
        tensor = _tensor(field)
        yield from _leaves(kind.value_field, keys, (*steps, tensor or Dimensions([size])))
    else:
        yield field, keys, steps


def wanted(path: str, columns: Sequence[ArrowColumn], options: Options) -> list[ArrowColumn]:
    """Those to read. A name of `columns` may be that of a dict, and then is all in it. Raises
    InvalidArgument."""
    names = options.get("columns")
    below: dict[str, list[str]] = {}
    for one in columns:
        for parent in itertools.accumulate(one.keys[:-1], "{}.{}".format):
            below.setdefault(parent, []).append(one.name)
    if names is not None:
        names = [leaf for name in names for leaf in below.get(name, [name])]
    found = {*chosen(path, [one.name for one in columns], options | {"columns": names})}
    read = [one for one in columns if one.name in found]
    structure_of(read)
    return read


def structure_of(columns: Iterable[ArrowColumn]) -> Node:
    """Of a record. Raises InvalidArgument."""
    return _dict({keys: node for one in columns for keys, node in one.nodes.items()})


def _dict(nodes: dict[Keys, Node]) -> Node:
    inner: dict[str, dict[Keys, Node]] = {}
    for (first, *keys), node in nodes.items():
        inner.setdefault(first, {})[*keys,] = node
    return dict_of({key: of[()] if () in of else _dict(of) for key, of in inner.items()})


def block(batch: Any, columns: Iterable[ArrowColumn]) -> Block:
    """Raises InvalidArgument, Damaged."""
    found = {
        keys: components
        for column in sorted(columns, key=lambda one: one.keys)
        for keys, components in column.components(batch.column(column.keys[0]))
    }
    return Block(batch.num_rows, (*itertools.chain(*(found[keys] for keys in sorted(found))),))


def without_nulls(batch: Any, columns: Iterable[ArrowColumn]) -> Any:
    """The rows of which no column has a null that is not taken."""
    nulls = np.zeros(batch.num_rows, np.bool_)
    for column in columns:
        column.mark_nulls(batch.column(column.keys[0]), nulls)
    return batch.filter(pyarrow("").array(~nulls)) if nulls.any() else batch


def _within(lists: Any) -> tuple[Ints, Any]:
    """The lengths of lists, and their values. A null is empty, or of a fixed size full of nulls."""
    import pyarrow as arrow

    if not arrow.types.is_fixed_size_list(lists.type):
        return lists.value_lengths().fill_null(0).to_numpy().astype(np.int64), lists.flatten()
    size = lists.type.list_size
    lengths = np.full(len(lists), size, np.int64)
    if not lists.null_count:
        return lengths, lists.flatten()
    nulls = np.repeat(lists.is_null().to_numpy(zero_copy_only=False), size)
    places = np.arange(len(nulls)) + lists.offset * size
    return lengths, lists.values.take(arrow.array(places, mask=nulls))


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


def _tensor(field: Any) -> Dimensions | None:
    """Of a list that has a tensor's values."""
    kind, (extension, about) = field.type, _extension(field)
    shape: Any = None
    axes: Any = None
    if extension == "arrow.fixed_shape_tensor" and hasattr(kind, "shape"):
        shape, axes = kind.shape, kind.permutation
    elif extension.startswith("ray.data.arrow_tensor"):
        with contextlib.suppress(ValueError):  # it was pickled: then it is a list
            shape = json.loads(about)
    if not shape:
        return None
    shape = [*map(int, shape)]
    axes = [*(axes or range(len(shape)))]
    return Dimensions([shape[axis] for axis in axes], shape, axes)


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
    return str(kind).partition("[")[0] in _TEXTS


def is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def wide(schema: Any) -> Any:
    """The schema as it is stored, with lists and texts that may have more than 2 GiB."""
    import pyarrow as arrow

    return arrow.schema([_wide(field) for field in schema])


def _wide(field: Any) -> Any:
    import pyarrow as arrow

    kind = _stored(field.type)
    if is_text(kind):
        kind = arrow.large_binary()
    elif arrow.types.is_struct(kind):
        kind = arrow.struct([_wide(kind.field(at)) for at in range(kind.num_fields)])
    elif arrow.types.is_fixed_size_list(kind):
        kind = arrow.list_(_wide(kind.value_field), kind.list_size)
    elif is_list(kind):
        kind = arrow.large_list(_wide(kind.value_field))
    return arrow.field(field.name, kind)


def _stored(kind: Any) -> Any:
    """What an extension type is stored as, and a map."""
    import pyarrow as arrow

    while isinstance(kind, arrow.BaseExtensionType):
        kind = kind.storage_type
    if arrow.types.is_map(kind):
        return arrow.list_(arrow.struct([kind.key_field, kind.item_field]))
    return kind


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
    """Of numbers or large binaries, without nulls."""
    import pyarrow as arrow

    if not arrow.types.is_large_binary(column.type):
        values: Array = column.to_numpy(zero_copy_only=False)
        return values
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    if not len(ends):
        return Strings(np.zeros(0, np.int64), np.zeros(0, np.uint8))
    found = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return Strings(np.diff(ends), found[ends[0] : ends[-1]])

"""From elements to blocks: what a child does with what the user's function yields.

An element is flattened to its leaves by the registered structure (structure.py); a column, the
leaves of many elements, becomes a component's arrays, written one after another into one payload.
Whatever is not what was registered is a `Misfit`, which says of which element.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...block_limits import DTYPES, padding
from ...blocks import Array, Block, Component, Strings, buffers, numpy_dtype

Leaves = list[Any]
Flatten = Callable[[Any, Leaves], None]
Header = list[list[Any]]
"""Of each component: [strings?, varying?, [dtype, shape] of each of its arrays]."""

_PLAIN: dict[str, set[type]] = {
    "b": {bool},
    "i": {int},
    "u": {int},
    "f": {int, float},
    "V": {int, float},  # ml_dtypes' floats
    "c": {int, float, complex},
}
"""Which of Python's numbers an array of this kind is made of."""


_NUMBERS: dict[str, type] = {"b": bool, "i": int, "u": int, "f": float, "c": complex}


class Misfit(ValueError):
    """An element is not what was registered; `row` is its place in the column."""

    def __init__(self, message: str, row: int = 0) -> None:
        super().__init__(message)
        self.row = row


class Field(NamedTuple):
    """A leaf of the elements."""

    path: str  # for people: element['image']
    dtype: np.dtype[Any] | None  # None: strings
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        sizes = ", ".join("?" if n is None else str(n) for n in self.shape)
        return f"{'string' if self.dtype is None else self.dtype.name}[{sizes}]"

    @property
    def bytes(self) -> int | None:
        """Of a leaf; None if they differ."""
        if self.dtype is None or None in self.shape:
            return None
        return self.dtype.itemsize * int(np.prod([n or 0 for n in self.shape], dtype=np.int64))


def fields_of(structure: str) -> tuple[list[Field], Flatten]:
    """The leaves of a structure, and what takes them out of an element, or raises Misfit.

    Raises ValueError for what no Python dataset has.
    """
    fields: list[Field] = []
    return fields, _flatten(json.loads(structure), "element", fields)


def _flatten(node: dict[str, Any], path: str, fields: list[Field]) -> Flatten:
    match node:
        case {"tensor": name, "shape": shape} if shape is not None:
            if name != "string" and name not in DTYPES:
                raise ValueError(f"{path} is of {name}, which NumPy does not have")
            fields.append(Field(path, None if name == "string" else numpy_dtype(name), (*shape,)))
            return lambda element, leaves: leaves.append(element)
        case {"none": _}:
            return lambda element, _: _require(element is None, path, "None", element)
        case {"dict": items}:
            members = [(key, _flatten(item, f"{path}[{key!r}]", fields)) for key, item in items]
            return _of_dict(members, path)
        case {"tuple": items}:
            parts = [_flatten(item, f"{path}[{i}]", fields) for i, item in enumerate(items)]
            return _of_tuple(parts, path)
        case {"named": _, "fields": items}:
            return _of_tuple([_flatten(x, f"{path}.{name}", fields) for name, x in items], path)
    raise ValueError(
        f"{path} is registered as {node}, which no Python function yields: give dense tensors of "
        "a known rank, in dicts and tuples"
    )


def iterated(found: Any) -> Iterator[Any]:
    """The elements that a function has returned. Raises Misfit for what is rather one of them."""
    if not isinstance(found, str | bytes | Mapping):
        try:
            elements: Iterator[Any] = iter(found)
        except TypeError:
            pass
        else:
            return elements
    raise Misfit(
        f"the function returned {_described(found)}, and is to return an iterable of elements: "
        "yield each element, or return a list of them"
    )


def _of_dict(members: list[tuple[str, Flatten]], path: str) -> Flatten:
    keys = [key for key, _ in members]

    def flatten(element: Any, leaves: Leaves) -> None:
        fits = isinstance(element, Mapping) and element.keys() == set(keys)
        _require(fits, path, f"a dict of {keys}", element)
        for key, part in members:
            part(element[key], leaves)

    return flatten


def _of_tuple(parts: list[Flatten], path: str) -> Flatten:
    def flatten(element: Any, leaves: Leaves) -> None:
        fits = isinstance(element, tuple) and len(element) == len(parts)
        _require(fits, path, f"a tuple of {len(parts)}", element)
        for part, value in zip(parts, element, strict=True):
            part(value, leaves)

    return flatten


def _require(fits: bool, path: str, wanted: str, element: Any) -> None:
    if not fits:
        raise Misfit(f"{path} is {_described(element)}, and was registered as {wanted}")


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {[*value][:20]}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    text = repr(value)
    return f"{text if len(text) < 80 else f'{text[:80]}…'} ({type(value).__qualname__})"


# -- columns --------------------------------------------------------------------------------------


class Column(NamedTuple):
    """The leaves of one field, of all elements of a block."""

    strings: bool
    arrays: list[tuple[np.dtype[Any], tuple[int, ...], Sequence[Array]]]
    """Each: its dtype, its shape, and the parts that it is joined of."""
    varying: bool = False

    @property
    def size(self) -> int:
        """In a payload."""
        sizes = (dtype.itemsize * int(np.prod(shape)) for dtype, shape, _ in self.arrays)
        return sum(size + padding(size) for size in sizes)


def column_of(field: Field, values: Sequence[Any]) -> Column:
    """Raises Misfit."""
    kinds = set(map(type, values))
    dtype = field.dtype
    if dtype is None:
        if kinds <= {bytes, str} and not field.shape:
            return _strings(list(map(_encoded, values)), (len(values),))
        return _columns_of_strings(field, values)
    if not field.shape and (kinds <= _PLAIN[dtype.kind] or kinds == {dtype.type}):
        try:
            array = np.array(values, dtype)
        except (OverflowError, TypeError, ValueError):
            pass  # one of them is at fault, and is found below
        else:
            return Column(False, [(dtype, array.shape, [array])])
    arrays = [_array(field, value, row) for row, value in enumerate(values)]
    first = arrays[0].shape
    if all(array.shape == first for array in arrays):
        return Column(False, [(dtype, (len(arrays), *first), arrays)])
    total = sum(array.size for array in arrays)
    return Column(False, [(dtype, (total,), arrays), _shapes(arrays)], varying=True)


def _array(field: Field, value: Any, row: int) -> Array:
    """Of NumPy's own values the dtype has to be the registered one; Python's numbers are taken
    as it."""
    assert field.dtype is not None
    array = None
    if isinstance(value, bool | int | float | complex | list):
        made = _attempt(value)
        number = None if made is None else _NUMBERS.get(made.dtype.kind)
        if made is not None and (not made.size or number in _PLAIN[field.dtype.kind]):
            array = _attempt(value, field.dtype)
    elif isinstance(value, np.ndarray | np.generic) or hasattr(value, "__array__"):
        array = _attempt(value)
        if array is not None and array.dtype.newbyteorder("=") == field.dtype:
            array = array.astype(field.dtype, copy=False)
        else:
            array = None
    if array is None or not _fits(array.shape, field.shape):
        raise Misfit(f"{field.path} is {_said(value)}, and was registered as {field}", row)
    return array


def _attempt(value: Any, dtype: np.dtype[Any] | None = None) -> Array | None:
    try:
        return np.asarray(value, dtype)
    except Exception:  # noqa: BLE001 - of the user's own class, whatever it raises
        return None


def _said(value: Any) -> str:
    array = _attempt(value)
    if array is None or array.dtype == object or not isinstance(value, list | np.ndarray):
        return _described(value)
    sizes = ", ".join(map(str, array.shape))
    return f"{array.dtype.name}[{sizes}]"


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        b is None or a == b for a, b in zip(shape, wanted, strict=True)
    )


def _encoded(value: str | bytes) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return value.encode(errors="surrogateescape")  # a file's name as it is on the disk
    except UnicodeEncodeError:
        return value.encode(errors="surrogatepass")


def _strings(values: list[bytes], shape: tuple[int, ...]) -> Column:
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    data = np.frombuffer(b"".join(values), np.uint8)
    arrays = [(lengths.dtype, shape, [lengths]), (data.dtype, data.shape, [data])]
    return Column(True, arrays)  # type: ignore[arg-type]


def _columns_of_strings(field: Field, values: Sequence[Any]) -> Column:
    arrays = []
    for row, value in enumerate(values):
        array = _attempt(value, np.dtype(object))  # one of strings has no NULs at their ends
        flat = [] if array is None else array.ravel().tolist()
        if (
            array is None
            or not _fits(array.shape, field.shape)
            or not all(isinstance(text, str | bytes) for text in flat)
        ):
            said = _described(value) if isinstance(value, list) else _said(value)
            raise Misfit(f"{field.path} is {said}, and was registered as {field}", row)
        arrays.append((array.shape, list(map(_encoded, flat))))
    joined = [text for _, texts in arrays for text in texts]
    first = arrays[0][0]
    if all(shape == first for shape, _ in arrays):
        return _strings(joined, (len(arrays), *first))
    found = _strings(joined, (len(joined),))
    shapes = np.array([shape for shape, _ in arrays], np.int64)
    return Column(True, [*found.arrays, (shapes.dtype, shapes.shape, [shapes])], varying=True)


def _shapes(arrays: Iterable[Array]) -> tuple[np.dtype[Any], tuple[int, ...], Sequence[Array]]:
    shapes = np.array([array.shape for array in arrays], np.int64)
    return shapes.dtype, shapes.shape, [shapes]


def columns_of(block: Block) -> list[Column]:
    """Of a block that is there already."""
    return [
        Column(
            isinstance(component.values, Strings),
            [(array.dtype, array.shape, [array]) for array in buffers(component)],
            component.shapes is not None,
        )
        for component in block.components
    ]


# -- payloads -------------------------------------------------------------------------------------


def write(columns: Iterable[Column], payload: Array) -> Header:
    """Join the columns' parts in `payload`, uint8 of the sum of their sizes at least."""
    start, header = 0, []
    for column in columns:
        said = []
        for dtype, shape, parts in column.arrays:
            size = dtype.itemsize * int(np.prod(shape))
            target = payload[start : start + size].view(dtype)
            if len(parts) == 1:
                np.copyto(target, parts[0].reshape(-1))
            elif parts:
                np.concatenate([part.reshape(-1) for part in parts], out=target)
            said.append([dtype.name, list(shape)])
            start += size + padding(size)
        header.append([column.strings, column.varying, said])
    return header


def read(count: int, header: Header, payload: Array) -> Block:
    """The block of `count` elements in a payload, as views of it."""
    start, components = 0, []
    for strings, varying, said in header:
        arrays = []
        for name, shape in said:
            dtype = DTYPES[name]
            size = dtype.itemsize * int(np.prod(shape))
            arrays.append(payload[start : start + size].view(dtype).reshape(shape))
            start += size + padding(size)
        shapes = arrays.pop() if varying else None
        values = Strings(*arrays) if strings else arrays[0]
        components.append(Component(values, shapes))
    return Block(count, tuple(components))

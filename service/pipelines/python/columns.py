"""Converts the elements that a user's function yields into blocks.

Flatten an element to its leaves by the registered structure (structure.py). A column has the leaves
of many elements, and becomes a component's arrays, written consecutively into one payload. An
element that does not fit the registered structure raises `Misfit`, which names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...block_limits import DTYPES, MAX_RANK, padding
from ...blocks import Array, Block, Component, Strings, buffers, numpy_dtype
from ...structure import Ragged

Leaves = list[Any]
Flatten = Callable[[Any, Leaves], None]
Header = list[list[Any]]
"""For each component: [strings?, varying?, [dtype, shape] of each of its arrays]."""

_NUMBERS = (bool, int, float, complex)
"""Python's numbers. NumPy converts each to the next one where a list has both."""

LISTS = (list, range, deque)
"""Sequences of numbers that are a tensor."""


class Misfit(ValueError):
    """An element does not fit the registered structure; `row` is its index in the column."""

    def __init__(self, message: str, row: int = 0) -> None:
        super().__init__(message)
        self.row = row


class Field(NamedTuple):
    """A leaf of the elements."""

    path: str  # for people: element['image']
    dtype: np.dtype[Any] | None  # None: strings
    shape: tuple[int | None, ...]
    inferred: bool = False  # then elements may have other sizes

    def __str__(self) -> str:
        sizes = ", ".join("?" if n is None else str(n) for n in self.shape)
        return f"{'string' if self.dtype is None else self.dtype.name}[{sizes}]"

    @property
    def source(self) -> str:
        """Where it is from, for an error."""
        return ", which was inferred: give an element_spec if it is wrong" if self.inferred else ""

    @property
    def bytes(self) -> int | None:
        """The size of a leaf; None if sizes differ."""
        if self.dtype is None or None in self.shape or (self.inferred and self.shape):
            return None
        return self.dtype.itemsize * int(np.prod([n or 0 for n in self.shape], dtype=np.int64))

    def fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self.shape) and (
            self.inferred
            or all(b is None or a == b for a, b in zip(shape, self.shape, strict=True))
        )


def fields_of(structure: str) -> tuple[list[Field], Flatten]:
    """The leaves of a structure, and a function that takes them out of an element or raises Misfit.

    Raises ValueError for a structure that no Python dataset has.
    """
    fields: list[Field] = []
    return fields, _flatten(json.loads(structure), "element", fields)


def _flatten(node: dict[str, Any], path: str, fields: list[Field]) -> Flatten:
    match node:
        case {"tensor": name, "shape": shape} if shape is not None:
            if name != "string" and name not in DTYPES:
                raise ValueError(f"{path} is of {name}, which NumPy does not have")
            if len(shape) >= MAX_RANK:  # a block adds a dimension
                raise ValueError(
                    f"{path} has {len(shape)} dimensions, and at most {MAX_RANK - 1} can be sent: "
                    "reshape it"
                )
            fields.append(Field(path, None if name == "string" else numpy_dtype(name), (*shape,)))
            return lambda element, leaves: leaves.append(element)
        case {"ragged": name, "shape": shape, "ragged_rank": rank} if shape is not None:
            _flatten({"tensor": name, "shape": shape[rank:]}, f"{path}.values", fields)
            fields += [Field(f"{path}.row_splits", np.dtype(np.int64), (None,))] * rank
            return lambda element, leaves: _of_ragged(element, rank, path, leaves)
        case {"none": _}:
            return lambda element, _: _require(element is None, path, "None", element)
        case {"dict": items}:
            members = [(key, _flatten(item, f"{path}[{key!r}]", fields)) for key, item in items]
            return _of_dict(members, path)
        case {"tuple": items}:
            parts = [_flatten(item, f"{path}[{i}]", fields) for i, item in enumerate(items)]
            return _of_tuple(parts, path)
        case {"named": kind, "fields": items}:
            own = {name: _flatten(item, f"{path}.{name}", fields) for name, item in items}
            return _of_named(kind, own, path)
    raise ValueError(
        f"{path} is registered as {node}, which no Python function yields: give dense tensors of "
        "a known rank, in dicts and tuples"
    )


def iterated(found: Any) -> Iterator[Any]:
    """The elements that a function has returned. Raises Misfit if it returned a single element."""
    if not isinstance(found, str | bytes | Mapping):
        with contextlib.suppress(TypeError):
            return iter(found)
    raise Misfit(
        f"the function returned {_described(found)}, and is to return an iterable of elements: "
        "yield each element, or return a list of them"
    )


def _of_ragged(element: Any, rank: int, path: str, leaves: Leaves) -> None:
    splits = []
    for _ in range(rank):
        _require(isinstance(element, Ragged), path, f"Ragged of {rank} row_splits", element)
        element, row_splits = element
        splits.append(row_splits)
    leaves += [element, *splits]


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


def _of_named(kind: str, members: dict[str, Flatten], path: str) -> Flatten:
    """Compares the fields' names, as values of other fields must not be mixed up. The type's own
    name may differ, unlike in tf.data: a module may have changed, or a class may have been made
    again."""
    names = (*members,)
    made: Any = namedtuple("_", names, rename=True)  # type: ignore[misc]
    renamed = made._fields  # the names that `assemble` gives

    def flatten(element: Any, leaves: Leaves) -> None:
        fits = field_names(element) in (names, renamed)
        _require(fits, path, f"{kind}({', '.join(names)})", element)
        is_tuple = isinstance(element, tuple)
        values = element if is_tuple else [getattr(element, name) for name in names]
        for part, value in zip(members.values(), values, strict=True):
            part(value, leaves)

    return flatten


def field_names(element: Any) -> tuple[str, ...] | None:
    """The fields of a named tuple, a class of `attrs` or `dataclasses`, or an extension type."""
    kind = type(element)
    if isinstance(element, tuple):
        return getattr(kind, "_fields", None)
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    fields = getattr(kind, "__attrs_attrs__", None)
    if fields is None and hasattr(kind, "_tf_extension_type_fields"):
        fields = kind._tf_extension_type_fields()
    return None if fields is None else tuple(field.name for field in fields)


def _require(fits: bool, path: str, wanted: str, element: Any) -> None:
    if not fits:
        raise Misfit(f"{path} is {_described(element)}, and was registered as {wanted}")


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {[*value][:20]}"
    if (names := field_names(value)) is not None:
        return f"{type(value).__name__}({', '.join(names)})"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    text = repr(value)
    return f"{text if len(text) < 80 else f'{text[:80]}…'} ({type(value).__qualname__})"


# -- columns --------------------------------------------------------------------------------------


class Column(NamedTuple):
    """The leaves of one field, for all elements of a block."""

    strings: bool
    arrays: list[tuple[np.dtype[Any], tuple[int, ...], Sequence[Array]]]
    """For each array its dtype, its shape, and the parts to concatenate."""
    varying: bool = False

    @property
    def size(self) -> int:
        """In a payload, in bytes."""
        sizes = (dtype.itemsize * int(np.prod(shape)) for dtype, shape, _ in self.arrays)
        return sum(size + padding(size) for size in sizes)


def column_of(field: Field, values: Sequence[Any] | Array) -> Column:
    """Raises Misfit."""
    dtype = field.dtype
    if isinstance(values, np.ndarray):  # of a mapped batch
        if values.dtype == dtype and field.fits(values.shape[1:]) and not is_masked(values):
            return Column(False, [(dtype, values.shape, [np.ascontiguousarray(values)])])
        values = [*values]
    kinds = set(map(type, values))
    if dtype is None:
        if kinds <= {bytes, str} and not field.shape:
            return _strings(list(map(_encoded, values)), (len(values),))
        return _columns_of_strings(field, values)
    if not field.shape and (kinds <= _plain(dtype) or kinds == {dtype.type}):
        array = _attempt(values, dtype)
        if array is not None and (kinds == {dtype.type} or _holds(array)):
            return Column(False, [(dtype, array.shape, [array])])
        # One of them is at fault; `_array` finds it.
    arrays = [_array(field, value, row) for row, value in enumerate(values)]
    first = arrays[0].shape
    if all(array.shape == first for array in arrays):
        return Column(False, [(dtype, (len(arrays), *first), arrays)])
    total = sum(array.size for array in arrays)
    return Column(False, [(dtype, (total,), arrays), _shapes(arrays)], varying=True)


def _array(field: Field, value: Any, row: int) -> Array:
    assert field.dtype is not None
    array = None if isinstance(value, tuple) else _taken(value, field.dtype)
    if array is None or not field.fits(array.shape):
        wrong = f"{field.path} is {said(value)}, and was registered as {field}"
        raise Misfit(f"{wrong}{_advice(field, value)}{field.source}", row)
    return array


def _advice(field: Field, value: Any) -> str:
    """Advice about a value that does not fit a field of numbers."""
    assert field.dtype is not None
    if is_masked(value):
        return MASKED
    if value is None:
        return "; None has no place beside numbers: yield one that means it, such as -1 or nan"
    array, kinds = _attempt(value), kinds_of(value)
    if array is None or (isinstance(value, LISTS) and array.dtype.kind in "OSU"):
        return ONE_TENSOR if isinstance(value, LISTS) else ""
    if not field.fits(array.shape) or isinstance(value, tuple):
        return ""
    if kinds <= _plain(field.dtype):
        return ", which cannot hold it: give an element_spec that can"
    return f": convert it to {field.dtype.name} where that loses nothing"


ONE_TENSOR = "; a list is one tensor: yield a tuple or a dict of several"


def _taken(value: Any, dtype: np.dtype[Any]) -> Array | None:
    """The value as an array of this dtype, or None if it has another.

    Values with a dtype (an array, a NumPy scalar, or one in a list) must have this dtype. Python's
    numbers have none: NumPy rounds them to this dtype, and they must not overflow.
    """
    if isinstance(value, np.ndarray):
        fits = value.dtype.newbyteorder("=") == dtype
        return _attempt(value, dtype) if fits else None
    kinds = kinds_of(value)
    numbers = [kind for kind in _NUMBERS if kind in kinds]
    if kinds - {*numbers, dtype} or (numbers and numbers[-1] not in _plain(dtype)):
        return None
    array = _attempt(value, dtype)
    if array is None or not numbers or _holds(array):
        return array
    wide = _attempt(value, np.dtype(_WIDE[numbers[-1]]))
    same = wide is not None and _is_same(array, wide)
    return array if same else None


_WIDE: dict[type, str] = {int: "float64", float: "float64", complex: "complex128"}


_PLAIN: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "c": {int, float, complex}}
"""By the kind of dtype; others are floats."""


def _plain(dtype: np.dtype[Any]) -> set[type]:
    """The Python types of numbers that fit an array of this dtype."""
    if dtype.kind == "V" and dtype.name.startswith(("int", "uint")):  # ml_dtypes' own
        return {int}
    return _PLAIN.get(dtype.kind, {int, float})


_WRAPS = np.lib.NumpyVersion(np.__version__) < "2.0.0"


def _holds(array: Array) -> bool:
    """Whether no Python number can have overflowed in an array of numbers.

    ml_dtypes' integers wrap around; NumPy's own raise OverflowError, before NumPy 2 int64 alone.
    """
    if array.dtype.kind in "biu":
        return not _WRAPS or array.dtype.kind == "b" or array.dtype == np.int64
    is_integer = array.dtype.kind == "V" and _plain(array.dtype) == {int}
    return not is_integer and bool(np.isfinite(array).all())


def _is_same(array: Array, wide: Array) -> bool:
    """Whether an array equals `wide`, except for rounding."""
    if _plain(array.dtype) == {int}:
        return bool((array.astype(wide.dtype) == wide).all())
    pairs = [(array, wide)]
    if array.dtype.kind == "c":
        pairs = [(array.real, wide.real), (array.imag, wide.imag)]
    tests: tuple[Any, ...] = (np.isfinite, np.isnan)
    return all(np.array_equal(test(a), test(b)) for a, b in pairs for test in tests)


def kinds_of(value: Any) -> set[Any]:
    """The types of Python's numbers in a tensor's value, and the dtypes of all others in it."""
    if isinstance(value, (*LISTS, tuple)):
        kinds: set[Any] = set(map(type, value))
        return kinds if kinds <= {*_NUMBERS} else set().union(*map(kinds_of, value))
    if isinstance(value, _NUMBERS) and not isinstance(value, np.generic):
        return {next(kind for kind in _NUMBERS if isinstance(value, kind))}
    array = _attempt(value)
    return {None if array is None else array.dtype.newbyteorder("=")}


def is_masked(value: Any) -> bool:
    """Whether it is an array that hides some of its items; np.asarray would reveal them."""
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())  # importing it takes 10 ms
    return isinstance(value, masked) and bool(np.ma.is_masked(value))


MASKED = "; a mask does not travel: yield value.filled(…), and the mask as another tensor"


def _attempt(value: Any, dtype: np.dtype[Any] | None = None) -> Array | None:
    if is_masked(value):
        return None
    try:
        with np.errstate(over="ignore"):  # `_holds` checks for overflow
            return np.asarray(value, dtype)
    except Exception:  # noqa: BLE001 - a user's class may raise anything
        return None


def said(value: Any) -> str:
    array = _attempt(value)
    if array is None or array.dtype == object or not isinstance(value, list | np.ndarray):
        return _described(value)
    sizes = ", ".join(map(str, array.shape))
    return f"{array.dtype.name}[{sizes}]"


def _encoded(value: str | bytes) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return value.encode(errors="surrogateescape")  # restores the bytes of a file's name
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
        array = _attempt(value, np.dtype(object))  # an array of strings would strip final NULs
        flat = [] if array is None else array.ravel().tolist()
        if (
            array is None
            or not field.fits(array.shape)
            or not all(isinstance(text, str | bytes) for text in flat)
        ):
            shown = _described(value) if isinstance(value, list) else said(value)
            advice = MASKED if is_masked(value) else ""
            advice = ONE_TENSOR if isinstance(value, LISTS) else advice
            wrong = f"{field.path} is {shown}, and was registered as {field}"
            raise Misfit(f"{wrong}{advice}{field.source}", row)
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
    """The columns of an existing block."""
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
    """Join the columns' parts in `payload`, a uint8 array of at least the sum of their sizes."""
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

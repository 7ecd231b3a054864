"""Blocks: groups of elements as they are sent, as NumPy arrays.

An element is a list of *components*, which are dense tensors: its nested structure is flattened
(structure.py keeps the nesting), and composite tensors (ragged, sparse) are expanded into dense
ones. A block stores `count` elements by component, so that Python never handles single elements:

- *stacked*: every element has the same shape; one array [count, *shape];
- *varying*: shapes differ; the flattened values of all elements one after another, and an
  int64 array [count, rank] of shapes.

A block of one element is always stacked. Numeric types are those of NumPy and ml_dtypes (bfloat16,
float8_…). Strings stay lengths and one run of bytes until somebody asks for objects.
"""

from __future__ import annotations

import functools
import io
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BLOCK_BYTES = 8 << 20
"""The size up to which pipelines fill a block; a larger element has a block of its own. Large
enough to spread Python's work for a block over many images; small enough to wait for."""


class PassableMemory(Protocol):
    """Another process's memory that may be passed on to a third process (shared.py)."""

    descriptor: int

    def is_spare(self) -> bool: ...

    def pass_on(self) -> None: ...

    def abandon(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Strings:
    """An array of byte strings: their lengths (int64, any shape) and their bytes, joined."""

    lengths: Array
    data: Array  # uint8 [lengths.sum()]

    def __len__(self) -> int:
        return len(self.lengths)

    def elements(self) -> Iterator[Any]:
        """Along the first dimension, `bytes` or object arrays of them."""
        if self.lengths.ndim == 1:
            return self._each()
        return iter(self.to_numpy())

    def to_numpy(self) -> Array:
        """An object array of `bytes`, of the shape of `lengths`."""
        shape = self.lengths.shape
        return np.fromiter(self._each(), object, self.lengths.size).reshape(shape)

    def _each(self) -> Iterator[bytes]:
        # BytesIO.read runs in C, at a fifth of the cost of slices in Python.
        return map(io.BytesIO(self.data.data).read, self.lengths.ravel().tolist())


class Texts(Strings):
    """Byte strings that are joined once somebody asks for that."""

    each: list[bytes]

    def __init__(self, each: list[bytes]) -> None:
        object.__setattr__(self, "each", each)

    @functools.cached_property
    def lengths(self) -> Array:
        return np.fromiter(map(len, self.each), np.int64, len(self.each))

    @functools.cached_property
    def data(self) -> Array:
        return np.frombuffer(b"".join(self.each), np.uint8)

    def _each(self) -> Iterator[bytes]:
        return iter(self.each)

    def __reduce__(self) -> tuple[type[Strings], tuple[Array, Array]]:
        return Strings, (self.lengths, self.data)


@dataclass(frozen=True, slots=True)
class Component:
    """One component of all elements of a block."""

    values: Array | Strings
    shapes: Array | None = None  # int64 [count, rank] if varying

    @property
    def nbytes(self) -> int:
        """Of its buffers."""
        return sum(array.nbytes for array in buffers(self))

    def elements(self) -> Iterator[Any]:
        """Each element's tensor in turn: views, and NumPy scalars (`bytes` for strings)."""
        values = self.values
        if self.shapes is None:
            return values.elements() if isinstance(values, Strings) else iter(values)
        if isinstance(values, Strings):
            values = values.to_numpy()
        stops = np.cumsum(self.shapes.prod(axis=1)).tolist()
        slices = map(slice, [0, *stops], stops)
        if self.shapes.shape[1] == 1:
            return map(values.__getitem__, slices)
        return map(np.reshape, map(values.__getitem__, slices), self.shapes.tolist())

    @property
    def rank(self) -> int:
        """Of one element."""
        if self.shapes is not None:
            return int(self.shapes.shape[1])
        values = self.values
        return (values.lengths if isinstance(values, Strings) else values).ndim - 1

    def part(self, first: int, count: int) -> Component:
        """`count` elements from `first` on, as views."""
        values, shapes = self.values, self.shapes
        if shapes is None:
            return Component(_cut(values, first, first + count))
        shapes = shapes[: first + count]
        stops = np.prod(shapes, axis=1, dtype=np.int64).cumsum()
        start = int(stops[first - 1]) if first else 0
        return _varying(_cut(values, start, int(stops[-1])), shapes[first:])


class Rows(Component):
    """A component of large elements that were not put together: `values` and `shapes` are made
    once somebody asks for them, by a copy."""

    rows: list[Array]

    def __init__(self, rows: list[Array]) -> None:
        """By element; all of one rank. No strings."""
        object.__setattr__(self, "rows", rows)

    @functools.cached_property
    def _together(self) -> Component:
        return _joined([Component(row[np.newaxis]) for row in self.rows])

    @property
    def values(self) -> Array | Strings:
        return self._together.values

    @property
    def shapes(self) -> Array | None:
        return self._together.shapes

    def elements(self) -> Iterator[Any]:
        return iter(self.rows)

    @property
    def rank(self) -> int:
        return self.rows[0].ndim

    def part(self, first: int, count: int) -> Component:
        return Rows(self.rows[first : first + count])

    def __reduce__(self) -> tuple[type[Rows], tuple[list[Array]]]:
        return Rows, (self.rows,)


class Picked(Component):
    """Elements of other components, by ascending indexes. They are copied once somebody asks for
    them: what chooses them holds a lock. Until then it keeps all of the other components. Two
    threads may copy them at a time."""

    state: Component | list[_Part]  # a copy; or of what, and a slice or indexes, and how many

    def __init__(self, parts: list[_Part]) -> None:
        """Several parts must have `rows` of one dtype and shape."""
        nbytes = sum(_chosen_bytes(c.values, c.shapes, *chosen) for c, *chosen in parts)
        object.__setattr__(self, "state", parts)
        object.__setattr__(self, "_count", sum(count for *_, count in parts))
        object.__setattr__(self, "_nbytes", nbytes)
        object.__setattr__(self, "_rank", parts[0][0].rank)

    def copied(self) -> Component:
        """The elements in memory of their own."""
        state = self.state
        if isinstance(state, Component):
            return state
        if len(state) == 1:
            copy = _picked(*state[0][:2])
            object.__setattr__(self, "state", copy)
            return copy
        return self.copy_to(np.empty(self.nbytes, np.uint8))

    @property
    def rows(self) -> Array | None:
        """An array with such rows; None if they are strings, or of several shapes."""
        state = self.state
        return rows_of(state if isinstance(state, Component) else state[0][0])

    def copy_to(self, memory: Array) -> Component:
        """Copy them there, if they are rows. If there was no copy yet, these `nbytes` bytes are
        their memory from now on."""
        state = self.state
        parts = [(state, slice(None), -1)] if isinstance(state, Component) else state
        rows = rows_of(parts[0][0])
        assert rows is not None
        copy = memory.view(rows.dtype).reshape(self.__dict__["_count"], *rows.shape[1:])
        start = 0
        for component, chosen, count in parts:
            place = copy[start:] if count < 0 else copy[start : start + count]
            array = component.values
            assert isinstance(array, np.ndarray)
            if isinstance(chosen, slice):
                np.copyto(place, array[chosen])
            else:
                array.take(chosen, axis=0, out=place, mode="clip")  # other modes copy twice
            start += count
        copied = Component(copy)
        if not isinstance(state, Component):
            object.__setattr__(self, "state", copied)
        return copied

    @property
    def values(self) -> Array | Strings:
        return self.copied().values

    @property
    def shapes(self) -> Array | None:
        return self.copied().shapes

    @property
    def nbytes(self) -> int:
        return self.__dict__["_nbytes"]  # type: ignore[no-any-return]

    def elements(self) -> Iterator[Any]:
        return self.copied().elements()

    @property
    def rank(self) -> int:
        return self.__dict__["_rank"]  # type: ignore[no-any-return]

    def part(self, first: int, count: int) -> Component:
        return self.copied().part(first, count)

    def __reduce__(self) -> tuple[type[Component], tuple[Any, ...]]:
        return Component, (self.values, self.shapes)


_Part = tuple[Component, Any, int]


class Encodings:
    """A cache of a block's encodings, for blocks with several consumers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[str, bytes | None] | None = {}  # None: no longer kept

    def get(self, codec: str, encode: Callable[[], bytes | None]) -> bytes | None:
        """The encoding by this codec; concurrent callers wait for the one that encodes."""
        made = self._made
        if made is None:
            return encode()
        with self._lock:
            if codec not in made:
                made[codec] = encode()
            return made[codec]

    def forget(self) -> None:
        """Keep no encodings from now on, to free their memory. Never waits."""
        self._made = None


@dataclass(frozen=True, slots=True)
class Block:
    """`count` elements of one task."""

    count: int
    components: tuple[Component, ...]
    bundle: int | None = None
    """The bundle of its elements; None if they may come from several splits' leases."""
    index: int = 0
    """Of its first element, in the bundle."""
    position: int = field(default=0, compare=False, kw_only=True)
    """Of its first element among those of its output (in_flight.py). It stays on the worker."""
    skipped: int = 0
    """Elements before it that were evicted from a cache before its reader got them."""
    encodings: Encodings | None = field(default=None, compare=False, repr=False)
    """A cache for other consumers of this block, if there may be any."""
    loan: PassableMemory | None = field(default=None, compare=False, repr=False)
    """Another process's memory that holds exactly its buffers, padded as in a frame. Only for
    blocks with a single consumer."""

    @property
    def payload_bytes(self) -> int:
        """The size of its buffers, without padding."""
        return sum(component.nbytes for component in self.components)

    @property
    def values_bytes(self) -> int:
        """`payload_bytes` without shapes, so that the sizes of a block's parts add up to its own:
        a part of one element has no shapes.
        """
        return self.payload_bytes - sum(
            c.shapes.nbytes for c in self.components if c.shapes is not None
        )


def split(block: Block, count: int) -> tuple[Block, Block]:
    """Split into the first `count` elements and the rest, as views; `count` < `block.count`."""
    return part(block, 0, count), part(block, count, block.count - count)


def part(block: Block, first: int, count: int) -> Block:
    """`count` elements from `first` on, as views."""
    if count == block.count:
        return block
    components = tuple(component.part(first, count) for component in block.components)
    position = block.position + first
    return Block(count, components, block.bundle, block.index + first, position=position)


def _cut(values: Array | Strings, start: int, stop: int) -> Array | Strings:
    if not isinstance(values, Strings):
        return values[start:stop]
    if isinstance(values, Texts):
        return Texts(values.each[start:stop])
    lengths, data = values.lengths, values.data
    begin = int(lengths[:start].sum()) if start else 0
    size = int(lengths[start:stop].sum())
    return Strings(lengths[start:stop], data[begin : begin + size])


def _varying(values: Array | Strings, shapes: Array) -> Component:
    if len(shapes) > 1:
        return Component(values, shapes)
    shape = (1, *shapes[0].tolist())
    if isinstance(values, Strings):
        return Component(Strings(values.lengths.reshape(shape), values.data))
    return Component(values.reshape(shape))


def strided(block: Block, first: int, stride: int, count: int) -> Block:
    """A block of the elements `first`, `first + stride`, …, `count` of them: as `picked`."""
    return picked(block, range(first, first + (count - 1) * stride + 1, stride))


def picked(block: Block, indexes: range | Array) -> Block:
    """A block of the elements at these ascending indexes, at least one.

    A range without gaps gives views. Others are copied once they are needed, so that they don't
    keep the elements between in memory: see `Picked`. `index` is the first element's.
    """
    if isinstance(indexes, range) and (indexes.step == 1 or len(indexes) == 1):
        return part(block, indexes[0], len(indexes))
    return gathered([(block, indexes)])


def gathered(parts: Sequence[tuple[Block, range | Array]]) -> Block:
    """A block of the elements at these ascending indexes of each block, copied once they are
    needed. If there are several blocks, they must be `alike`."""
    chosen = [slice(at.start, at.stop, at.step) if isinstance(at, range) else at for _, at in parts]
    counts = [len(at) for _, at in parts]
    columns = zip(*(block.components for block, _ in parts), strict=True)
    components = tuple(Picked([*zip(c, chosen, counts, strict=True)]) for c in columns)
    block, at = parts[0]
    return Block(sum(counts), components, block.bundle, block.index + int(at[0]))


def alike(one: Block, other: Block) -> bool:
    """Whether all components of both are rows of the same dtypes and shapes."""
    pairs = zip(map(rows_of, one.components), map(rows_of, other.components), strict=False)
    return len(one.components) == len(other.components) and all(
        a is not None and b is not None and (a.dtype, a.shape[1:]) == (b.dtype, b.shape[1:])
        for a, b in pairs
    )


def rows_of(component: Component) -> Array | None:
    """The component's values if they are numbers, a row an element."""
    values = component.values
    if isinstance(values, Strings) or component.shapes is not None or not values.dtype.isnative:
        return None
    return values


def _chosen_bytes(values: Array | Strings, shapes: Array | None, chosen: Any, count: int) -> int:
    """What a copy of the chosen elements will have."""
    if shapes is None and not isinstance(values, Strings):
        return int(count * values.itemsize * math.prod(values.shape[1:]))
    if shapes is None:
        assert isinstance(values, Strings)
        lengths: Array = values.lengths[chosen]
        return lengths.nbytes + int(lengths.sum())
    sizes = np.prod(shapes, axis=1, dtype=np.int64)
    chosen_values = int(sizes[chosen].sum())
    size = count * shapes.shape[1] * shapes.itemsize if count > 1 else 0
    if not isinstance(values, Strings):
        return size + chosen_values * values.itemsize
    lengths = _cut_out(values.lengths, sizes, np.arange(len(sizes))[chosen])
    return size + lengths.nbytes + int(lengths.sum())


def _picked(component: Component, chosen: Any) -> Component:
    values, shapes = component.values, component.shapes
    if shapes is None and not isinstance(values, Strings):
        rows: Array = values[chosen]  # of a slice it is a view, of indexes a copy
        return Component(rows.copy() if isinstance(chosen, slice) else rows)
    found = _in_order(component, np.arange(len(values if shapes is None else shapes))[chosen])
    return found if found.shapes is None else _varying(found.values, found.shapes)


def joined(blocks: Sequence[Block]) -> Block:
    """Join blocks of the same components and ranks; copies, except for a single block."""
    if len(blocks) == 1:
        return blocks[0]
    columns = zip(*(block.components for block in blocks), strict=True)
    count = sum(block.count for block in blocks)
    return Block(count, tuple(map(_joined, columns)), blocks[0].bundle, blocks[0].index)


def _joined(parts: Sequence[Component]) -> Component:
    if any(isinstance(part, Rows) for part in parts):
        return Rows([row for part in parts for row in part.elements()])
    arrays = [p.values.lengths if isinstance(p.values, Strings) else p.values for p in parts]
    varying = any(part.shapes is not None for part in parts)
    varying = varying or len({array.shape[1:] for array in arrays}) > 1
    stacked = np.concatenate([array.reshape(-1) for array in arrays] if varying else arrays)
    values: Array | Strings = stacked
    if isinstance(parts[0].values, Strings):
        data = [part.values.data for part in parts if isinstance(part.values, Strings)]
        values = Strings(stacked, np.concatenate(data))
    if not varying:
        return Component(values)
    shapes = [
        np.tile(np.array(array.shape[1:], np.int64), (len(array), 1))
        if part.shapes is None
        else part.shapes
        for part, array in zip(parts, arrays, strict=True)
    ]
    return Component(values, np.concatenate(shapes))


def merged(
    parts: Sequence[tuple[Block, Array]], row_bytes: float = math.inf, *, stacks: bool = False
) -> Block:
    """The elements of several blocks in one: those of each go to the places that are given with it,
    ascending, which together are all places from 0 on. Components and ranks must be the same.

    A component whose elements have at least `row_bytes` is not copied, unless it `stacks` those of
    one shape.
    """
    if len(parts) == 1:
        return parts[0][0]
    count = sum(block.count for block, _ in parts)
    columns = zip(*(block.components for block, _ in parts), strict=True)
    places = [places for _, places in parts]
    return Block(count, tuple(_merged(c, places, count, row_bytes, stacks) for c in columns))


def _merged(
    parts: Sequence[Component], places: Sequence[Array], count: int, row_bytes: float, stacks: bool
) -> Component:
    values = [part.values for part in parts]
    arrays = [v for v in values if not isinstance(v, Strings)]
    stacked = all(part.shapes is None for part in parts)
    of_one_shape = stacked and len({array.shape[1:] for array in arrays}) == 1
    size = sum(array.nbytes for array in arrays)
    if arrays and size >= count * row_bytes and not (stacks and of_one_shape):
        return Rows(_elements_at(parts, places))
    if of_one_shape and arrays[0].itemsize * count < size < 128 * count:
        # Short rows are faster read at distances than written.
        return Component(np.concatenate(arrays).take(_order_of(places), axis=0))
    if of_one_shape:
        found = np.empty((count, *arrays[0].shape[1:]), arrays[0].dtype)
        for array, at in zip(arrays, places, strict=True):
            found[at] = array
        return Component(found)
    if stacked and not arrays and parts[0].rank == 0:
        return Component(Texts(_elements_at(parts, places)))
    return _in_order(_joined(parts), _order_of(places))


def _elements_at(parts: Sequence[Component], places: Sequence[Array]) -> list[Any]:
    elements = [*chain.from_iterable(part.elements() for part in parts)]
    return [*map(elements.__getitem__, _order_of(places).tolist())]


def _order_of(places: Sequence[Array]) -> Array:
    """Of each place, where its element is in the parts."""
    at = np.concatenate(places)
    order = np.empty_like(at)
    order[at] = np.arange(len(at))
    return order


def _in_order(component: Component, order: Array) -> Component:
    """The component's elements in this order."""
    values, shapes = component.values, component.shapes
    if isinstance(values, Strings):
        lengths = values.lengths
        if shapes is None:
            sizes = lengths.reshape(len(lengths), -1).sum(axis=1)
            return Component(Strings(lengths[order], _cut_out(values.data, sizes, order)))
        sizes = np.prod(shapes, axis=1, dtype=np.int64)
        stops = np.concatenate([[0], np.cumsum(lengths)])
        ends = np.cumsum(sizes)
        data_sizes = stops[ends] - stops[ends - sizes]
        data = _cut_out(values.data, data_sizes, order)
        return Component(Strings(_cut_out(lengths, sizes, order), data), shapes[order])
    if shapes is None:
        return Component(values[order])
    sizes = np.prod(shapes, axis=1, dtype=np.int64)
    return Component(_cut_out(values, sizes, order), shapes[order])


def _cut_out(values: Array, sizes: Array, order: Array) -> Array:
    """Pieces of `sizes` values each, joined in this order."""
    stops = np.cumsum(sizes)
    starts = stops - sizes
    if len(values) < 64 * len(sizes):  # an index for each value; else a slice for each piece
        lengths = sizes[order]
        shift = np.repeat(starts[order] - (np.cumsum(lengths) - lengths), lengths)
        return values[shift + np.arange(len(shift))]
    pairs = zip(starts[order].tolist(), stops[order].tolist(), strict=True)
    return np.concatenate([values[start:stop] for start, stop in pairs])


def buffers(component: Component) -> list[Array]:
    """The arrays that are sent for a component, in the order of transfer.proto."""
    values = component.values
    arrays = [values.lengths, values.data] if isinstance(values, Strings) else [values]
    return arrays if component.shapes is None else [*arrays, component.shapes]


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of a component's `dtype` field. Raises TypeError for an unknown name."""
    extension = getattr(ml_dtypes, name, None)
    return np.dtype(name if extension is None else extension)


def as_bytes(array: Array) -> memoryview:
    """The array's memory in C order and native byte order; copied only if necessary."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data

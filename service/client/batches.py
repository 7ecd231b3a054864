"""Makes elements and batches in NumPy, from whole blocks, for trainers without TensorFlow.

A batch is itself a block: views of the received block, or one copy if its elements come from
several blocks. `Layout` says how blocks look to a trainer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..blocks import Block, Component, Rows, Strings, joined, numpy_dtype, split
from ..errors import InvalidArgument
from ..structure import assemble, leaves, members_of
from .progress import Progress, Runs

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Convert = Callable[[Any], Any]
Each = Callable[[Component], Iterator[Any]]
_Column = Callable[[Iterator[Component], int], Any]

SHORT = 64
"""Rows with fewer values than this are padded all at once; a Python loop over them is slower."""


def laid_out(
    blocks: Iterable[Block],
    progress: Progress,
    *,
    layout: Layout,
    batch_size: int | None,
    drop_remainder: bool = False,
) -> Iterator[Any]:
    """The elements of `blocks`, as `Runs`, or their batches, for `EpochIterator`."""
    if batch_size is None:
        return Runs(progress.counted(layout.elements(block), block.count) for block in blocks)
    return map(
        layout.batch, batched(blocks, progress, size=batch_size, drop_remainder=drop_remainder)
    )


def batched(
    blocks: Iterable[Block],
    progress: Progress | None = None,
    *,
    size: int,
    drop_remainder: bool = False,
) -> Iterator[Block]:
    """Blocks of `size` elements each. The last one is smaller, unless `drop_remainder`.

    A batch is begun when it is asked for, so that between batches this keeps only the rest of one
    block. Raises InvalidArgument for elements of several ranks in one batch.
    """
    set_left = progress.set_left if progress is not None else lambda _: None
    parts: list[Block] = []
    missing = size
    for block in blocks:
        rest = block
        while rest.count > missing:
            head, rest = split(rest, missing)
            set_left(rest.count)
            yield _whole([*parts, head])
            parts, missing = [], size
        set_left(0)
        parts.append(rest)
        missing -= rest.count
        if not missing:
            yield _whole(parts)
            parts, missing = [], size
    if parts and not drop_remainder:
        yield _whole(parts)


def in_whole_batches(
    blocks: Iterable[Block], size: int, is_over: Callable[[], bool]
) -> Iterator[Block]:
    """The blocks, cut so that what was given is always whole batches of `size` elements. The last
    batch is smaller only if `is_over()` then: elsewhere the blocks were broken off, and the
    elements of a batch that was begun are left out."""
    held: list[Block] = []  # of a batch that was begun
    count = 0
    for block in blocks:
        if not block.count:
            yield block
            continue
        given = (count + block.count) // size * size - count
        count = (count + block.count) % size
        if given <= 0:
            held.append(block)
            continue
        yield from held
        held.clear()
        if given < block.count:
            block, rest = split(block, given)
            held.append(rest)
        yield block
    if is_over():
        yield from held


def _whole(parts: list[Block]) -> Block:
    for column in zip(*(part.components for part in parts), strict=True):
        if len(ranks := {component.rank for component in column}) > 1:
            raise InvalidArgument(
                f"a batch has elements of ranks {sorted(ranks)}: read them one by one, without "
                "batch_size, or give them one rank before they are registered"
            )
    return joined(parts)


class Layout:
    """How a dataset's elements look to a trainer: nested as they were registered.

    `convert` gets each array of an element's or a batch's component, or an element's NumPy scalar
    or `bytes`. Strings come as object arrays of `bytes`.

    In a batch, a component has one more dimension in front. If its shape was not registered in
    full, it is a list of the elements' arrays. With a `pad_value` it is one array instead, in which
    elements are padded at the end to the largest (strings with b"", unless the value is bytes). A
    `pad_value` may be nested like the elements, with None for lists. Ragged and sparse tensors come
    as lists. Raises InvalidArgument for a pad_value that does not fit.
    """

    def __init__(
        self,
        structure: str,
        convert: Convert | None = None,
        pad_value: Any = None,
        each: Each | None = None,
        *,
        widens: bool = True,
    ) -> None:
        """`each`, if given, converts all elements of a component faster than one by one. If an
        element has another shape than was inferred of others, that is a warning where it `widens`,
        and an error otherwise."""
        convert = convert or (lambda value: value)
        self._convert = convert
        self._each = each or (lambda component: map(convert, component.elements()))
        self._assemble = assemble(structure)
        self._widens, self._warned = widens, False
        self._shapes = _shapes_of(structure)
        self._columns: list[_Column] = []
        reduced = json.loads(structure)
        self._add_columns(reduced, pad_value, "element")
        self._assemble_batch = assemble(json.dumps(reduced))

    def elements(self, block: Block) -> Iterator[Any]:
        """The elements of a block, one by one."""
        self._compare(block)
        return self._assemble([*map(self._each, block.components)], block.count)

    def batch(self, block: Block) -> Any:
        """All elements of a block as one batch."""
        self._compare(block)
        components = iter(block.components)
        columns = [[column(components, block.count)] for column in self._columns]
        return next(self._assemble_batch(columns, 1))

    def _compare(self, block: Block) -> None:
        """Raises InvalidArgument for shapes that nobody has registered, unless it widens."""
        if self._warned:
            return
        for (path, shape), component in zip(self._shapes, block.components, strict=False):
            if shape is None or (wrong := _other_shape(component, shape)) is None:
                continue
            said = (
                f"element{path} has the shape {wrong}, and {tuple(shape)} was inferred of others: "
                f"{WIDER}"
            )
            if not self._widens:
                raise InvalidArgument(said)
            log.warning("%s", said)
            self._warned = True

    def _add_columns(self, node: dict[str, Any], pad: Any, path: str) -> None:
        """Adds the columns of the node's tensors. Each tensor of any kind becomes one component."""
        members = members_of(node)
        keys = [key for key, _, _ in members]
        if (
            "dict" in node
            and isinstance(pad, Mapping)
            and (wrong := [k for k in pad if k not in keys])
        ):
            raise InvalidArgument(f"pad_value names {wrong}, and {path} has {keys}")
        for key, step, member in members:
            self._add_columns(member, _of_member(pad, key), path + step)
        match node:
            case {"tensor": dtype, "shape": shape}:
                if shape is not None and None not in shape:
                    self._columns.append(self._stacked(pad, dtype, path))
                elif pad is None:
                    self._columns.append(self._listed)
                else:
                    self._columns.append(self._padded(_filling(pad, dtype, path)))
            case {"ragged": _} | {"sparse": _}:
                self._columns.append(self._composite(node))
                node.clear()
                node.update(tensor="", shape=None)

    def _stacked(self, pad: Any, dtype: str, path: str) -> _Column:
        def column(components: Iterator[Component], count: int) -> Any:
            component = next(components)
            shapes = component.shapes
            if shapes is not None and not (shapes == shapes[0]).all():  # one shape was inferred
                if pad is None:
                    raise InvalidArgument(
                        f"a batch has {path} of the shapes "
                        f"{np.unique(shapes, axis=0)[:5].tolist()}: {WIDER}; or read "
                        "with a pad_value, or without batch_size"
                    )
                return self._convert(padded(component, _filling(pad, dtype, path)))
            values = component.values
            if isinstance(values, Strings):
                values = values.to_numpy()
            if shapes is not None:
                values = values.reshape(len(shapes), *shapes[0])
            return self._convert(values)

        return column

    def _listed(self, components: Iterator[Component], count: int) -> Any:
        return [*self._each(next(components))]

    def _padded(self, filling: Any) -> _Column:
        return lambda components, count: self._convert(padded(next(components), filling))

    def _composite(self, node: dict[str, Any]) -> _Column:
        """The column of a ragged or a sparse tensor, which has several components."""
        number = 1 + node["ragged_rank"] if "ragged" in node else 3
        build = assemble(json.dumps(node))

        def column(components: Iterator[Component], count: int) -> Any:
            own = [self._each(next(components)) for _ in range(number)]
            return [*build(own, count)]

        return column


WIDER = "where the dataset is registered, give an element_spec with None for such a dimension"

Shape = Sequence[int | None]


def _shapes_of(structure: str) -> list[tuple[str, Shape | None]]:
    """Of each component its path, and its shape if that has any known size."""
    found: list[tuple[str, Shape | None]] = []
    for path, node in leaves(structure):
        shape = node["shape"] if "tensor" in node else None
        known = shape and any(size is not None for size in shape)
        count = 1 + node["ragged_rank"] if "ragged" in node else 3 if "sparse" in node else 1
        found += [(path, shape if known else None)] * count
    return found


def _other_shape(component: Component, shape: Shape) -> tuple[int, ...] | None:
    if isinstance(component, Rows):  # not put together yet
        return next((found for row in component.rows if not _is(found := row.shape, shape)), None)
    if component.shapes is not None:
        for size, sizes in zip(shape, component.shapes.T, strict=False):
            if size is not None and (wrong := np.flatnonzero(sizes != size)).size:
                return tuple(component.shapes[wrong[0]].tolist())
        return None
    values = component.values
    there = (values.lengths if isinstance(values, Strings) else values).shape[1:]
    return None if _is(there, shape) else tuple(there)


def _is(there: tuple[int, ...], shape: Shape) -> bool:
    return all(a is None or a == b for a, b in zip(shape, there, strict=False))


def _of_member(pad: Any, key: Any) -> Any:
    """The part of a pad_value that is of a member of a dict, tuple or named tuple."""
    if isinstance(pad, Mapping):
        return pad.get(key)
    if not isinstance(pad, tuple):
        return pad
    if isinstance(key, str):
        return getattr(pad, key, None)
    return pad[key] if key < len(pad) else None


def _filling(pad: Any, dtype: str, path: str) -> Any:
    """The pad_value as a scalar of this dtype. Raises InvalidArgument."""
    if dtype == "string":
        return pad if isinstance(pad, bytes) else b""
    kind = numpy_dtype(dtype)
    try:
        filling = np.full((), pad, kind)
        if kind.kind in "fc" or filling == pad or pad != pad:  # the last: NaN
            return filling[()]
    except (OverflowError, TypeError, ValueError):
        pass
    raise InvalidArgument(f"pad_value={pad!r} is no value of {path}, which is of {dtype}")


def padded(component: Component, filling: Any) -> Array:
    """The component's elements in one array, each padded to the largest. No copy if all are equal
    in size."""
    values, shapes = component.values, component.shapes
    if isinstance(values, Strings):
        values = values.to_numpy()
    if shapes is None:
        return values
    count, rank = shapes.shape
    found: Array = np.full((count, *shapes.max(axis=0)), filling, values.dtype)
    if rank == 1 and len(values) < SHORT * count:
        found[np.arange(found.shape[1]) < shapes] = values
        return found
    for row, element in zip(found, Component(values, shapes).elements(), strict=True):
        row[tuple(map(slice, element.shape))] = element
    return found

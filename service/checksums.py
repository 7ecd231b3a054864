"""Checksums of elements: equal for equal elements, however blocks divide them."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator

import numpy as np

from .blocks import Array, Block, Component, Strings

WHOLE_BYTES = 32 << 10
"""Of a larger component of an element, pieces are read: reading all of it took a third more of a
worker's processor time (decision 219)."""

PIECES, PIECE_BYTES = 16, 512
"""So many, evenly from its beginning to its end."""


class Checksum:
    """The CRC-32 of the elements that were added, in order: values (pieces of large ones), shapes
    and, of strings, lengths."""

    def __init__(self) -> None:
        self._streams: list[list[int]] = []  # by component

    def add(self, block: Block) -> None:
        if not self._streams:
            self._streams = [[0, 0, 0] for _ in block.components]
        for component, crcs in zip(block.components, self._streams, strict=True):
            for number, part in _parts(component, block.count):
                crcs[number] = zlib.crc32(part.data, crcs[number])

    @property
    def value(self) -> int:
        """32 bits."""
        return zlib.crc32(np.array(self._streams, "<u4").tobytes())


def _parts(component: Component, count: int) -> Iterator[tuple[int, Array]]:
    """Bytes of three streams, each of which is the same however the elements are divided: shapes,
    lengths of strings, and values."""
    values, shapes = component.values, component.shapes
    if shapes is None and not isinstance(values, Strings):
        yield 0, _bytes_of(np.array([values.shape[1:]] * count, np.int64))
        size = values.nbytes // max(1, count)
        data = _bytes_of(values)
        yield 2, data if size <= WHOLE_BYTES else _pieces(data.reshape(count, size))
        return
    array = values.lengths if isinstance(values, Strings) else values
    if shapes is None:
        shapes = np.tile(np.array(array.shape[1:], np.int64), (count, 1))
    yield 0, _bytes_of(shapes)
    if isinstance(values, Strings):
        yield 1, _bytes_of(values.lengths)
    data = _bytes_of(values.data if isinstance(values, Strings) else values)
    if len(data) <= WHOLE_BYTES:
        yield 2, data
        return
    counts = shapes.prod(axis=1, dtype=np.int64)  # numbers, or strings, of each element
    stops = np.cumsum(counts)
    if isinstance(values, Strings):
        stops = np.concatenate([[0], np.cumsum(values.lengths.ravel())])[stops]
    else:
        stops *= values.itemsize
    sizes = np.diff(stops, prepend=0)
    if sizes.max() <= WHOLE_BYTES:
        yield 2, data
        return
    for stop, size in zip(stops.tolist(), sizes.tolist(), strict=True):
        element = data[stop - size : stop]
        yield 2, element if size <= WHOLE_BYTES else _pieces(element.reshape(1, size))


def _pieces(elements: Array) -> Array:
    """Those bytes of each element that are read, from elements of one size."""
    starts = _starts(elements.shape[1])
    return _bytes_of(np.concatenate([elements[:, at : at + PIECE_BYTES] for at in starts], axis=1))


@functools.lru_cache(64)
def _starts(size: int) -> list[int]:
    """Of the pieces of so many bytes."""
    return [*map(int, np.linspace(0, size - PIECE_BYTES, PIECES))]


def _bytes_of(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)

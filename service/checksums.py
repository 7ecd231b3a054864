"""Checksums of elements: equal for equal elements, however blocks divide them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np

from .blocks import Array, Block, Component, Strings


class Checksum:
    """The CRC-32 of the elements that were added, in order: values, shapes and, of strings,
    lengths. It costs about 0.25 ms/MB, without the interpreter lock."""

    def __init__(self) -> None:
        self._streams: list[list[int]] = []  # by component

    def add(self, block: Block) -> None:
        if not self._streams:
            self._streams = [[0, 0, 0] for _ in block.components]
        for component, crcs in zip(block.components, self._streams, strict=True):
            for number, array in enumerate(_streams(component, block.count)):
                crcs[number] = zlib.crc32(_bytes_of(array), crcs[number])

    @property
    def value(self) -> int:
        """32 bits."""
        return zlib.crc32(np.array(self._streams, "<u4").tobytes())


def _streams(component: Component, count: int) -> Iterator[Array]:
    """Arrays that are, joined over all blocks, the same however the elements are divided."""
    values, shapes = component.values, component.shapes
    array = values.lengths if isinstance(values, Strings) else values
    yield array
    yield shapes if shapes is not None else np.tile(np.array(array.shape[1:], np.int64), count)
    if isinstance(values, Strings):
        yield values.data


def _bytes_of(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data

"""Blocks for tests, and how to compare them."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from forebay.service.blocks import Block, Component, Strings, buffers


def numbered(number: int, size: int = 8) -> Block:
    """A block that says its number, with `size` bytes of payload."""
    return Block(1, (Component(np.full((1, size // 8), number, np.int64)),), bundle=0, index=number)


def strings(values: Sequence[bytes], *shape: int) -> Strings:
    """An array of this shape; flat without one."""
    lengths = np.array([len(v) for v in values], np.int64).reshape(shape or -1)
    return Strings(lengths, np.frombuffer(b"".join(values), np.uint8))


SAMPLES = {
    "no components": Block(3, ()),
    "no elements": Block(0, (Component(np.zeros((0, 4), np.float32)),)),
    "empty elements": Block(2, (Component(np.zeros((2, 3, 0), np.int16)),)),
    "scalars": Block(3, (Component(np.array([1, 2, 3], np.uint8)),), bundle=3, index=7),
    "stacked": Block(2, (Component(np.arange(12.0).reshape(2, 3, 2)),)),
    "big-endian": Block(2, (Component(np.arange(2, dtype=">i4")),)),
    "not contiguous": Block(3, (Component(np.arange(12).reshape(4, 3).T),)),
    "booleans": Block(2, (Component(np.array([[True], [False]])),)),
    "complex": Block(1, (Component(np.array([1 + 2j], np.complex64)),)),
    "bfloat16": Block(2, (Component(np.array([[1.5], [2.5]], ml_dtypes.bfloat16)),)),
    "float8": Block(2, (Component(np.array([1.5, 2], ml_dtypes.float8_e4m3fn)),)),
    "int4": Block(2, (Component(np.array([1, -2], ml_dtypes.int4)),)),
    "varying": Block(
        3, (Component(np.arange(7, dtype=np.int32), np.array([[2, 3], [0, 5], [1, 1]], np.int64)),)
    ),
    "varying scalars": Block(2, (Component(np.arange(2.0), np.zeros((2, 0), np.int64)),)),
    "strings": Block(3, (Component(strings([b"a", b"", b"\0long" * 50])),)),
    "strings in a matrix": Block(
        2,
        (
            Component(
                Strings(np.array([[1, 0], [2, 3]], np.int64), np.frombuffer(b"abbccc", np.uint8))
            ),
        ),
    ),
    "varying strings": Block(2, (Component(strings([b"x", b"yy", b""]), np.array([[1], [2]])),)),
    "many": Block(
        2,
        (
            Component(np.ones((2, 5), np.uint8)),
            Component(strings([b"a", b"b"])),
            Component(np.arange(3), np.array([[1], [2]], np.int64)),
        ),
    ),
}


def assert_same(got: Block, expected: Block) -> None:
    assert (got.count, got.bundle, got.index) == (expected.count, expected.bundle, expected.index)
    assert len(got.components) == len(expected.components)
    for a, b in zip(got.components, expected.components, strict=True):
        assert isinstance(a.values, Strings) == isinstance(b.values, Strings)
        assert (a.shapes is None) == (b.shapes is None)
        for x, y in zip(buffers(a), buffers(b), strict=True):
            assert x.dtype == y.dtype.newbyteorder("=")
            assert x.shape == y.shape
            assert x.astype(np.complex128).tolist() == y.astype(np.complex128).tolist()
            assert x.size == 0 or x.ctypes.data % 64 == 0


def elements(block: Block) -> list[list[object]]:
    columns = [[np.asarray(e, object).tolist() for e in c.elements()] for c in block.components]
    return [list(row) for row in zip(*columns, strict=True)]

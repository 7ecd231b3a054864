"""Checksums depend on the elements, and not on how blocks divide them."""

from __future__ import annotations

import zlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.service.blocks import Block, Component, Strings, joined, split
from forebay.service.checksums import Checksum

from .transport.samples import strings

DTYPES = [np.dtype(each) for each in ("f4", "i8", "?", "u1", ml_dtypes.bfloat16)]


@st.composite
def elements(draw: st.DrawFn) -> list[Block]:
    """Elements of one kind, each in a block of its own."""
    dtype = draw(st.sampled_from(DTYPES))
    rank = draw(st.integers(0, 2))
    found = []
    for _ in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 3), min_size=rank, max_size=rank)))
        numbers = np.array(draw(st.integers(0, 100)) + np.arange(np.prod(shape, dtype=int)))
        words = draw(st.lists(st.binary(max_size=4), min_size=len(numbers), max_size=len(numbers)))
        components = (
            Component(numbers.astype(dtype).reshape(1, *shape)),
            Component(strings(words, 1, *shape)),
        )
        found.append(Block(1, components))
    return found


def checksum(*blocks: Block) -> int:
    found = Checksum()
    for block in blocks:
        found.add(block)
    return found.value


@given(elements(), st.data())
def test_it_is_the_same_however_elements_are_divided(
    each: list[Block], data: st.DataObject
) -> None:
    whole = joined(each)
    assert checksum(*each) == checksum(whole)
    if whole.count > 1:
        cut = data.draw(st.integers(1, whole.count - 1))
        assert checksum(*split(whole, cut)) == checksum(whole)


A = Block(2, (Component(np.array([[1, 2], [3, 4]], np.int32)),))
TEXT = Block(2, (Component(Strings(np.array([1, 2]), np.frombuffer(b"abc", np.uint8))),))
RAGGED = Block(
    2, (Component(np.array([1, 2, 3], np.int32), np.array([[1], [2]], np.int64)),)
)  # fmt: skip


@pytest.mark.parametrize(
    ("one", "another"),
    {
        "values": (A, Block(2, (Component(np.array([[1, 2], [3, 5]], np.int32)),))),
        "order": (A, Block(2, (Component(np.array([[3, 4], [1, 2]], np.int32)),))),
        "shape": (A, Block(4, (Component(np.array([1, 2, 3, 4], np.int32)),))),
        "number of elements": (A, split(A, 1)[0]),
        "lengths of strings": (
            TEXT,
            Block(2, (Component(Strings(np.array([2, 1]), np.frombuffer(b"abc", np.uint8))),)),
        ),
        "shapes": (
            RAGGED,
            Block(2, (Component(np.array([1, 2, 3], np.int32), np.array([[2], [1]], np.int64)),)),
        ),
    }.values(),
)
def test_another_element_has_another_checksum(one: Block, another: Block) -> None:
    assert checksum(one) != checksum(another)


@pytest.mark.parametrize("at", [0, 70_000, 149_999])
def test_a_byte_of_a_large_element(at: int) -> None:
    one = np.zeros((2, 150_000), np.uint8)
    another = one.copy()
    another[1, at] = 1
    assert checksum(Block(2, (Component(one),))) != checksum(Block(2, (Component(another),)))


def test_it_is_a_crc_32() -> None:
    """As zlib has it, so that processes of any kind agree."""
    values = np.array([[1, 2], [3, 4]], np.int32)
    shapes = np.array([[2], [2]], np.int64)
    streams = [zlib.crc32(values.tobytes()), zlib.crc32(shapes.tobytes()), 0]
    expected = zlib.crc32(np.array(streams, "<u4").tobytes())
    assert checksum(Block(2, (Component(values),))) == expected

"""Checksums depend on the elements, and not on how blocks divide them."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.service import checksums
from forebay.service.blocks import Block, Component, Strings, joined, split
from forebay.service.checksums import Checksum

from .transport.samples import strings

AROUND = 4 * checksums.WHOLE_BYTES // checksums.PIECES
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


@pytest.fixture(params=[checksums.WHOLE_BYTES, 5], ids=["whole", "pieces"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Elements are small, or of some of them pieces are read."""
    monkeypatch.setattr(checksums, "WHOLE_BYTES", request.param)
    monkeypatch.setattr(checksums, "PIECE_BYTES", 2)
    checksums._starts.cache_clear()
    yield
    checksums._starts.cache_clear()


@pytest.mark.usefixtures("pieces")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.mark.parametrize("at", [0, 2 * checksums.WHOLE_BYTES, 4 * checksums.WHOLE_BYTES - 1])
def test_a_large_element_that_differs_in_a_part(at: int) -> None:
    """The part is larger than what lies between two pieces."""
    size = 4 * checksums.WHOLE_BYTES
    one = np.zeros((2, size), np.uint8)
    another = one.copy()
    another[1, max(0, at - AROUND) : at + AROUND] = 1
    assert checksum(Block(2, (Component(one),))) != checksum(Block(2, (Component(another),)))

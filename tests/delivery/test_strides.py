"""Picking elements of blocks, and merging them: put together again, they are the whole."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.service.block_limits import check_block
from forebay.service.blocks import (
    Block,
    Component,
    Picked,
    Strings,
    buffers,
    joined,
    merged,
    picked,
    split,
    strided,
)

from ..transport.samples import elements, strings


def array(data: st.DataObject, size: int) -> Any:
    """`size` values, numbers or strings."""
    if data.draw(st.booleans()):
        return np.arange(size, dtype=data.draw(st.sampled_from(["u1", "<i8", ">f4"])))
    return strings(data.draw(st.lists(st.binary(max_size=3), min_size=size, max_size=size)))


def component(data: st.DataObject, count: int) -> Component:
    rank = data.draw(st.integers(0, 2))
    if data.draw(st.booleans()) and count > 1:
        shape = st.lists(st.integers(0, 3), min_size=rank, max_size=rank)
        shapes = np.array([data.draw(shape) for _ in range(count)], np.int64).reshape(count, rank)
        return Component(array(data, int(shapes.prod(axis=1).sum())), shapes)
    inner = data.draw(st.lists(st.integers(0, 3), min_size=rank, max_size=rank))
    values = array(data, count * int(np.prod(inner, dtype=int)))
    if isinstance(values, Strings):
        return Component(Strings(values.lengths.reshape(count, *inner), values.data))
    return Component(values.reshape(count, *inner))


@given(st.data(), st.integers(1, 12), st.integers(1, 5))
def test_strides_are_the_whole(data: st.DataObject, count: int, stride: int) -> None:
    """Of any block, cut anywhere, with views for nobody to keep."""
    block = Block(count, tuple(component(data, count) for _ in range(2)), bundle=4, index=100)
    whole = elements(block)
    found: dict[int, list[Any]] = {}
    for first in range(min(stride, count)):
        left, at = -((first - count) // stride), first
        while left:
            size = data.draw(st.integers(1, left))
            part = strided(block, at, stride, size)
            check_block(part)
            assert (part.count, part.bundle, part.index) == (size, 4, 100 + at)
            assert part.count > 1 or all(c.shapes is None for c in part.components)
            found |= zip(range(at, at + size * stride, stride), elements(part), strict=True)
            left, at = left - size, at + size * stride
    assert [found[i] for i in range(count)] == whole


@pytest.mark.parametrize("stride", [1, 3])
def test_what_is_kept_alive(stride: int) -> None:
    """A stride is copied, so that it does not keep what is for others; a run is not."""
    values = np.arange(12)
    text = Strings(np.full(12, 2), np.arange(24, dtype=np.uint8))
    ragged = Component(np.arange(24), np.full((12, 1), 2))
    block = Block(12, (Component(values), Component(text), ragged))
    part = strided(block, 1, stride, 3)
    owners = [a for c in block.components for a in buffers(c)]
    parts = [a for c in part.components for a in buffers(c)]
    for owner, taken in zip(owners, parts, strict=True):
        assert np.shares_memory(owner, taken) == (stride == 1)


@given(st.data(), st.integers(1, 6))
def test_elements_are_joined_again(data: st.DataObject, count: int) -> None:
    block = Block(count, tuple(component(data, count) for _ in range(2)), index=100)
    again = joined([strided(block, at, 1, 1) for at in range(count)])
    check_block(again)
    assert (again.count, again.index) == (count, 100)
    assert elements(again) == elements(block)


@given(st.data(), st.integers(1, 12))
def test_whatever_is_picked(data: st.DataObject, count: int) -> None:
    block = Block(count, tuple(component(data, count) for _ in range(2)), bundle=4, index=100)
    indexes = data.draw(st.sets(st.integers(0, count - 1), min_size=1).map(sorted))
    part = picked(block, np.array(indexes))
    size, ranks = part.payload_bytes, [c.rank for c in part.components]
    assert all(isinstance(c, Picked) and isinstance(c.state, list) for c in part.components)
    check_block(part)
    memory = [np.empty(c.nbytes, np.uint8) for c in part.components]
    for each, place in zip(part.components, memory, strict=True):
        if isinstance(each, Picked) and each.rows is not None and data.draw(st.booleans()):
            each.copy_to(place)
            assert np.ascontiguousarray(each.values).tobytes() == place.tobytes()
            place ^= 255  # who sends with checksums has a copy of its own: it must not change
    assert size == sum(array.nbytes for c in part.components for array in buffers(c))
    assert (part.count, part.bundle, part.index) == (len(indexes), 4, 100 + indexes[0])
    assert elements(part) == [elements(block)[i] for i in indexes]
    assert part.count > 1 or all(c.shapes is None for c in part.components)
    assert ranks == [c.rank for c in block.components]


def test_what_is_picked_keeps_nothing_else_in_memory() -> None:
    values = np.arange(12)
    text = Strings(np.full(12, 2), np.arange(24, dtype=np.uint8))
    ragged = Component(np.arange(24), np.full((12, 1), 2))
    block = Block(12, (Component(values), Component(text), ragged))
    for indexes in ([3], [0, 5], [1, 2, 7]):
        part = picked(block, np.array(indexes))
        for owner, taken in zip(block.components, part.components, strict=True):
            pairs = zip(buffers(owner), buffers(taken), strict=False)
            assert not any(np.shares_memory(*pair) for pair in pairs)


@given(st.data(), st.integers(1, 12), st.integers(1, 4))
def test_what_was_picked_is_merged(data: st.DataObject, count: int, parts: int) -> None:
    """In whatever order the parts come, whatever their shapes are, and whether they are copied."""
    block = Block(count, tuple(component(data, count) for _ in range(2)), bundle=4, index=100)
    of = data.draw(st.lists(st.integers(0, parts - 1), min_size=count, max_size=count))
    places = [np.array([i for i in range(count) if of[i] == part]) for part in range(parts)]
    found = [(picked(block, at), at) for at in places if len(at)]
    found = data.draw(st.permutations(found))
    again = merged(found, data.draw(st.sampled_from([0, 3, math.inf])))
    cut = data.draw(st.integers(1, count))
    for each in (again, joined([*split(again, cut)] if cut < count else [again])):
        assert elements(each) == elements(block)  # before anything is put together
        assert [c.rank for c in each.components] == [c.rank for c in block.components]
        whole = Block(count, tuple(Component(c.values, c.shapes) for c in each.components))
        check_block(whole)
        assert elements(whole) == elements(block)


def test_large_elements_are_not_copied() -> None:
    large = np.arange(24).reshape(4, 6)
    first, second = split(Block(4, (Component(large),)), 2)
    again = merged([(first, np.array([1, 2])), (second, np.array([0, 3]))], row_bytes=48)
    found = [*again.components[0].elements()]
    assert np.array_equal(found, large[[2, 0, 1, 3]])
    assert all(np.shares_memory(row, large) for row in found)

"""Batches made by the block, against those made of elements in Python."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.service.block_limits import check_block
from forebay.service.blocks import Block, Component, buffers
from forebay.service.client.batches import Layout, batched, in_whole_batches, padded
from forebay.service.errors import InvalidArgument
from forebay.service.structure import Ragged, Sparse

from ..transport.samples import strings

STRUCTURE = json.dumps(
    {
        "dict": [
            ["fixed", {"tensor": "float32", "shape": [2]}],
            ["none", {"none": True}],
            ["text", {"tensor": "string", "shape": []}],
            ["tokens", {"tensor": "int64", "shape": [None]}],
            ["words", {"tuple": [{"tensor": "string", "shape": [None, 2]}]}],
        ]
    }
)


def element(number: int, length: int) -> dict[str, Any]:
    words = np.array([[b"a" * j, b"b" * number] for j in range(length)], object).reshape(-1, 2)
    return {
        "fixed": np.array([number, -number], np.float32),
        "none": None,
        "text": b"%d" % number,
        "tokens": np.arange(length) + number,
        "words": (words,),
    }


def block(elements: list[dict[str, Any]]) -> Block:
    """As a pipeline makes it: stacked where the shapes are equal."""
    count, lengths = len(elements), [len(e["tokens"]) for e in elements]
    words = [text for e in elements for text in e["words"][0].ravel()]
    tokens = np.concatenate([e["tokens"] for e in elements])
    varying = [Component(tokens, np.array([[n] for n in lengths]))]
    varying += [Component(strings(words), np.array([[n, 2] for n in lengths]))]
    if len({*lengths}) == 1:
        stacked = tokens.reshape(count, lengths[0])
        shape = (count, lengths[0], 2)
        varying = [Component(stacked), Component(strings(words, *shape))]
    found = Block(
        count,
        (
            Component(np.stack([e["fixed"] for e in elements])),
            Component(strings([e["text"] for e in elements])),
            *varying,
        ),
    )
    check_block(found)
    return found


def plain(value: Any) -> Any:
    """To be compared: arrays as their dtype and contents."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(plain, value)]
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tolist()
    return value


def filled(arrays: list[Any], filling: Any) -> Any:
    shape = np.max([a.shape for a in arrays], axis=0)
    found = np.full((len(arrays), *shape), filling, arrays[0].dtype)
    for row, array in zip(found, arrays, strict=True):
        row[tuple(map(slice, array.shape))] = array
    return found


sizes = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5), max_size=6)


@given(sizes, st.integers(1, 7), st.booleans(), st.booleans())
def test_batches_are_what_elements_are(
    lengths: list[list[int]], size: int, drop_remainder: bool, pad: bool
) -> None:
    """Wherever blocks begin and end, and whether their elements' shapes are equal."""
    numbers = iter(range(1000))
    elements = [[element(next(numbers), length) for length in one] for one in lengths]
    layout = Layout(STRUCTURE, pad_value={"tokens": -1, "words": (b"-",)} if pad else None)
    blocks = [block(one) for one in elements]
    whole = [e for one in elements for e in one]
    assert plain([e for b in blocks for e in layout.elements(b)]) == plain(whole)
    expected = []
    for at in range(0, len(whole), size):
        of = whole[at : at + size]
        if len(of) < size and drop_remainder:
            break
        tokens, words = [e["tokens"] for e in of], [e["words"][0] for e in of]
        expected.append(
            {
                "fixed": np.stack([e["fixed"] for e in of]),
                "none": None,
                "text": np.array([e["text"] for e in of], object),
                "tokens": filled(tokens, -1) if pad else tokens,
                "words": (filled(words, b"-") if pad else words,),
            }
        )
    found = [layout.batch(b) for b in batched(blocks, size=size, drop_remainder=drop_remainder)]
    assert plain(found) == plain(expected)


def test_a_batch_within_a_block_is_a_view_of_it() -> None:
    values, tokens = np.arange(24).reshape(12, 2), np.arange(24)
    whole = Block(12, (Component(values), Component(tokens, np.full((12, 1), 2))))
    first, second, third = batched([whole, whole], size=8)
    for owner, views in ((whole, first), (whole, third)):
        for component, view in zip(owner.components, views.components, strict=True):
            for one, other in zip(buffers(component), buffers(view), strict=True):
                assert np.shares_memory(one, other)
    assert not np.shares_memory(second.components[0].values, values)


@pytest.mark.parametrize("longest", [3, 200])
def test_padding(longest: int) -> None:
    """Short rows at once, long ones each on its own: the same."""
    lengths = np.arange(longest)[:, None]
    values = np.arange(lengths.sum())
    component = Component(values, lengths)
    assert plain(padded(component, 7)) == plain(filled([*component.elements()], 7))


def test_ragged_and_sparse_tensors_are_lists() -> None:
    structure = {
        "tuple": [
            {"ragged": "int64", "shape": [None, None], "ragged_rank": 1},
            {"sparse": "int64", "shape": [None]},
            {"tensor": "int64", "shape": []},
        ]
    }
    counts = np.array([[1], [2]])
    varying = Component(np.arange(3), counts)
    splits = Component(np.array([0, 1, 0, 0, 2]), np.array([[2], [3]]))
    indices = Component(np.arange(3), np.array([[1, 1], [2, 1]]))
    dense = Component(np.array([[5], [5]]))
    found = Layout(json.dumps(structure), np.asarray, pad_value=0).batch(
        Block(2, (varying, splits, indices, varying, dense, Component(np.arange(2))))
    )
    assert plain(found) == plain(
        (
            [
                Ragged(np.array([0]), np.array([0, 1])),
                Ragged(np.array([1, 2]), np.array([0, 0, 2])),
            ],
            [
                Sparse(np.array([[0]]), np.array([0]), np.array([5])),
                Sparse(np.array([[1], [2]]), np.array([1, 2]), np.array([5])),
            ],
            np.arange(2),
        )
    )
    assert isinstance(found[0][0], Ragged) and isinstance(found[1][1], Sparse)


def test_elements_of_several_ranks_are_no_batch() -> None:
    blocks = [Block(1, (Component(np.zeros((1, *shape))),)) for shape in ((2,), (2, 2))]
    with pytest.raises(InvalidArgument, match=r"elements of ranks \[1, 2\]: read them one by one"):
        list(batched(blocks, size=2))


@pytest.mark.parametrize("value", [-1, 256, 0.5, "text", b"bytes", [1, 2], np.zeros(3)])
def test_a_pad_value_that_fits_nothing(value: Any) -> None:
    structure = json.dumps({"dict": [["x", {"tensor": "uint8", "shape": [None]}]]})
    with pytest.raises(InvalidArgument, match=r"element\['x'\], which is of uint8"):
        Layout(structure, pad_value=value)


def test_a_pad_value_of_what_is_not_there_or_too_wide() -> None:
    structure = json.dumps({"dict": [["x", {"tensor": "int4", "shape": [None]}]]})
    with pytest.raises(InvalidArgument, match=r"names \['y'\], and element has \['x'\]"):
        Layout(structure, pad_value={"y": 0})
    with pytest.raises(InvalidArgument, match=r"pad_value=9 is no value of element\['x'\]"):
        Layout(structure, pad_value={"x": 9})
    Layout(structure, pad_value={"x": -8})


@pytest.mark.parametrize("counts", [[1] * 9, [9], [4, 5], [2, 3, 4], [6, 3]])
@pytest.mark.parametrize("is_over", [True, False])
def test_a_read_that_is_broken_off_ends_behind_a_whole_batch(
    counts: list[int], is_over: bool
) -> None:
    numbers = iter(range(9))
    blocks = [
        Block(count, (Component(np.array([next(numbers) for _ in range(count)])),))
        for count in counts
    ]
    found_blocks = in_whole_batches(blocks, 4, lambda: is_over)
    found = np.concatenate([block.components[0].values for block in found_blocks])
    assert found.tolist() == [*range(9 if is_over else 8)]

"""Shapes of elements: given in NumPy's words, or inferred of some and widened by others."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from forebay.service.blocks import Block, Component, Rows
from forebay.service.client.batches import Layout
from forebay.service.client.tf_elements import dataset_of_blocks
from forebay.service.errors import InvalidArgument, PipelineError
from forebay.service.pipelines import SplitRange
from forebay.service.pipelines.kinds.functions import definition, python_dataset, request_of
from forebay.service.pipelines.python.element_structures import element_spec_of, structure_of_spec
from forebay.service.pipelines.tf_data.element_specs import encode_element_spec
from forebay.service.structure import encode

from ..record_files import running
from .functions import pipeline_of

Pair = namedtuple("Pair", ["left", "right"])


@pytest.mark.parametrize(
    ("spec", "same"),
    [
        (("uint8", (None, None, 3)), tf.TensorSpec([None, None, 3], tf.uint8)),
        (np.float32, tf.TensorSpec([], tf.float32)),
        ({"b": ("<i8", [2]), "a": str}, {"a": tf.TensorSpec([], tf.string),
                                         "b": tf.TensorSpec([2], tf.int64)}),
        (("int64", "bool"), (tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.bool))),
        (Pair((bool, ()), None), Pair(tf.TensorSpec([], tf.bool), None)),
        (np.zeros([2, 3], np.int8), tf.TensorSpec([2, 3], tf.int8)),
        ((("bfloat16", (None,)), object), (tf.TensorSpec([None], tf.bfloat16),
                                           tf.TensorSpec([], tf.string))),
    ],
)  # fmt: skip
def test_a_spec_in_numpys_words_is_that_of_tensorflow(spec: Any, same: Any) -> None:
    structure = structure_of_spec(spec)
    assert structure == structure_of_spec(same) == encode(same)
    assert element_spec_of(structure) == encode_element_spec(same)


def test_a_specs_name_is_no_dtype() -> None:
    named = tf.TensorSpec([3], tf.int64, name="float32")
    assert structure_of_spec(named) == structure_of_spec(("int64", [3]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"x": ("uint9", (3,))},
        {"x": ("uint8", (-1,))},
        {"x": 5},
        {"x": [("uint8", (3,))]},
        {"x": tf.TensorSpec(None, tf.uint8)},
        {"x": tf.RaggedTensorSpec([2, None], tf.uint8)},
        {3: "uint8"},
    ],
)
def test_a_wrong_spec_names_its_place(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"element_spec: element(\['x'\]| has the key 3)"):
        structure_of_spec(wrong)


def images(split: int) -> Any:
    """The last splits have others."""
    yield {"image": np.full((4, 4 if split < 40 else 3), split), "boxes": [split] * 2}


def test_several_splits_say_which_dimensions_differ() -> None:
    def shapes(function: Any, splits: Any) -> Any:
        return json.loads(definition(python_dataset(splits)(function)).structure)

    leaf = {"tensor": "int64"}
    boxes = leaf | {"shape": [2]}
    assert shapes(images, range(40)) == {
        "dict": [["boxes", boxes], ["image", leaf | {"shape": [4, 4]}]]
    }
    assert shapes(images, range(60))["dict"][1] == ["image", leaf | {"shape": [4, None]}]

    def ends(split: int) -> Any:
        if split:
            os._exit(3) if split % 2 else time.sleep(3600)  # killed, as it takes too long
        yield [1, 2]

    assert shapes(ends, range(60)) == leaf | {"shape": [2]}


def blocks_of(**how: Any) -> tuple[list[Block], str]:
    """As a worker makes them of two elements of each shape."""
    dataset = python_dataset(range(38, 42), **how)(images)
    request = request_of(dataset, dataset.splits)
    spec = dataset.element_spec or {"image": ("int64", (4, 4)), "boxes": ("int64", (2,))}
    request.structure = structure_of_spec(spec)
    with running(request, may_skip=lambda _: False) as pipeline:
        return [*pipeline.bundle(SplitRange(0, 4, 0), number=0, seed=1).blocks()], request.structure


def test_another_size_widens_what_was_inferred_and_not_what_was_given(
    caplog: pytest.LogCaptureFixture,
) -> None:
    blocks, structure = blocks_of()
    layout = Layout(structure)
    with caplog.at_level(logging.WARNING):
        found = [element["image"].shape for block in blocks for element in layout.elements(block)]
    assert found == [(4, 4)] * 2 + [(4, 3)] * 2
    (warning,) = caplog.messages
    assert "element['image'] has the shape (4, 3), and (4, 4) was inferred of others" in warning
    assert "give an element_spec with None" in warning
    with pytest.raises(InvalidArgument, match="element_spec with None"):
        [*map(Layout(structure, widens=False).elements, blocks)]
    wide = {"image": ("int64", (4, None)), "boxes": ("int64", (2,))}
    assert sum(block.count for block in blocks_of(element_spec=wide)[0]) == 4
    for strict in ({"image": ("int64", (4, 4)), "boxes": ("int64", (2,))},):
        with pytest.raises(PipelineError, match=r"element\['image'\] is int64\[4, 3\], and was"):
            blocks_of(element_spec=strict)


def test_where_files_are_written_shapes_are_kept() -> None:
    structure = structure_of_spec({"image": ("int64", (4, 4)), "boxes": ("int64", (2,))})
    with (
        contextlib.closing(pipeline_of(images, range(38, 42), structure)) as pipeline,
        pytest.raises(PipelineError, match=r"element\['image'\] is int64\[4, 3\]"),
    ):
        [*pipeline.bundle(SplitRange(0, 4, 0), number=0, seed=1).blocks()]


@pytest.mark.parametrize("promised", [(4, 4), (None, 4)])
def test_a_graph_gets_no_element_of_another_shape_than_it_was_promised(promised: Any) -> None:
    unread = [blocks_of()[0]]
    spec = {"boxes": tf.TensorSpec([2], tf.int64), "image": tf.TensorSpec(promised, tf.int64)}

    def opened() -> Any:  # which is kept for ever, so it keeps no blocks
        return iter(unread.pop())

    with pytest.raises(
        tf.errors.OpError, match=r"instead of .*\(4, 3\): give an element_spec with"
    ):
        [*dataset_of_blocks(opened, spec)]


def test_a_batch_of_several_shapes_is_padded_or_an_error() -> None:
    values = np.arange(4 * 4 + 4 * 3)
    mixed = Block(2, (Component(values, np.array([[4, 4], [4, 3]])),))
    structure = structure_of_spec(("int64", (4, 4)))
    with pytest.raises(InvalidArgument, match=r"\[\[4, 3\], \[4, 4\]\]: .* element_spec"):
        Layout(structure).batch(mixed)
    assert Layout(structure, pad_value=-1).batch(mixed)[1, :, 3].tolist() == [-1] * 4
    same = Block(2, (Component(np.arange(24), np.array([[4, 3], [4, 3]])),))
    assert Layout(structure).batch(same).shape == (2, 4, 3)
    large = Block(2, (Rows([np.zeros((4, 4), np.int64), np.zeros((3, 4), np.int64)]),))
    with pytest.raises(InvalidArgument, match=r"has the shape \(3, 4\)"):
        Layout(structure, widens=False).elements(large)


def test_a_function_whose_spec_is_given_is_not_called() -> None:
    def never(split: int) -> Any:
        raise AssertionError("it was called")

    spec = {"x": ("uint8", (None, 3))}
    request = definition(python_dataset(range(3), element_spec=spec)(never))
    assert json.loads(request.structure) == {
        "dict": [["x", {"tensor": "uint8", "shape": [None, 3]}]]
    }

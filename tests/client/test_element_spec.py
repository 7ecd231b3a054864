"""Which element_spec may be given for a registered dataset, and what a wrong one gets."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from forebay.service.blocks import Block, Component, Strings
from forebay.service.client.tf_elements import dataset_of_blocks
from forebay.service.errors import InvalidArgument
from forebay.service.pipelines.tf_data.element_specs import check_element_spec

Spec = tf.TensorSpec
Ragged = tf.RaggedTensorSpec
Sparse = tf.SparseTensorSpec
Point = namedtuple("Point", ["x", "y"])
SamePoint = namedtuple("Point", ["x", "y"])  # type: ignore[name-match]
Other = namedtuple("Other", ["x", "y"])
NUMBER = Spec([], tf.int32)


@pytest.mark.parametrize(
    ("registered", "given"),
    [
        (Spec([2, 3], tf.int32), Spec([None, 3], tf.int32)),
        (Spec([2, 3], tf.int32), Spec(None, tf.int32)),
        (Spec([None], tf.int32), Spec([3], tf.int32)),
        (Spec([], tf.int32, name="a"), Spec([], tf.int32, name="b")),
        (Ragged([2, None], tf.int32), Ragged([None, None], tf.int32)),
        (Sparse([None, 3], tf.int32), Sparse([None, None], tf.int32)),
        ({"a": NUMBER, "b": NUMBER}, OrderedDict(b=NUMBER, a=NUMBER)),
        (Point(NUMBER, NUMBER), SamePoint(NUMBER, NUMBER)),
        ((NUMBER, tf.NoneTensorSpec()), (NUMBER, None)),
    ],
)
def test_specs_that_say_less_or_more_of_shapes_fit(registered: Any, given: Any) -> None:
    check_element_spec(given, registered)


@pytest.mark.parametrize(
    ("registered", "given"),
    [
        (Spec([], tf.float32), NUMBER),
        (Spec([], tf.float32), Spec([], tf.bool)),
        (Spec([], tf.int64), Spec([], tf.int8)),
        (Spec([], tf.string), NUMBER),
        (Spec([2, 3], tf.int32), Spec([2, 4], tf.int32)),
        (Spec([2, 3], tf.int32), Spec([None], tf.int32)),
        ({"a": NUMBER}, {"b": NUMBER}),
        ({"a": NUMBER}, {"a": NUMBER, "b": NUMBER}),
        ((NUMBER, NUMBER), (NUMBER,)),
        ((NUMBER, NUMBER), [NUMBER, NUMBER]),
        ((NUMBER,), NUMBER),
        (Point(NUMBER, NUMBER), Other(NUMBER, NUMBER)),
        (NUMBER, tf.NoneTensorSpec()),
        (tf.NoneTensorSpec(), NUMBER),
        (Spec([2, None], tf.int32), Ragged([2, None], tf.int32)),
        (Ragged([2, None], tf.int32), Spec([2, None], tf.int32)),
        (Ragged([2, None, None], tf.int32), Ragged([2, None, None], tf.int32, ragged_rank=1)),
        (Ragged([2, None], tf.int32), Ragged([2, None], tf.int32, row_splits_dtype=tf.int32)),
        (Sparse([2, 3], tf.int32), Sparse([2, 3], tf.int64)),
        (NUMBER, {"a": 3}),
        (NUMBER, tf.int32),
    ],
)
def test_others_are_refused_with_both(registered: Any, given: Any) -> None:
    with pytest.raises(InvalidArgument) as raised:
        check_element_spec(given, registered)
    assert str(given) in str(raised.value) and str(registered) in str(raised.value)


FLOATS = Component(np.array([0.75, 2], np.float32))
PAIRS = Component(np.ones([2, 2], np.int32))
VARYING = Component(np.ones([3], np.int32), np.array([[1], [2]]))
STRINGS = Component(Strings(np.array([1, 0]), np.zeros(1, np.uint8)))


@pytest.mark.parametrize(
    ("components", "spec", "message"),
    [
        ([FLOATS], NUMBER, "int32 instead of float32"),
        ([FLOATS], Spec([], tf.bool), "bool instead of float32"),
        ([FLOATS], Spec([], tf.string), "string instead of float32"),
        ([STRINGS], NUMBER, "int32 instead of string"),
        ([PAIRS], Spec([3], tf.int32), r"\(3,\) instead of \(2,\)"),
        ([PAIRS], Spec([1, 2], tf.int32), r"\(1, 2\) instead of \(2,\)"),
        ([VARYING], Spec([2], tf.int32), r"\(2,\) instead of several shapes"),
        ([STRINGS], Spec([1], tf.string), r"\(1,\) instead of \(\)"),
        ([FLOATS, PAIRS], Spec([], tf.float32), "1 tensors instead of 2"),
    ],
)
def test_elements_of_another_kind_are_an_error(
    components: list[Component], spec: Any, message: str
) -> None:
    """Where nothing is registered to compare with, or shapes say too much."""

    def blocks() -> Generator[Block, None, None]:
        yield Block(2, tuple(components))

    dataset = dataset_of_blocks(blocks, spec)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        list(dataset)

"""What the elements of a Python function are, against what TensorFlow says of the same."""

from __future__ import annotations

import collections
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import struct_pb2
from tensorflow.python.data.util import nest
from tensorflow.python.saved_model import nested_structure_coder

from forebay.service.block_limits import TYPES
from forebay.service.errors import InvalidArgument
from forebay.service.pipelines.python.element_structures import element_spec_of, inferred
from forebay.service.pipelines.tf_data.element_specs import decode_element_spec, encode_element_spec
from forebay.service.structure import encode

Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "elements",
    [
        [3],
        [True, False],
        [2.5],
        [b"bytes", "text"],
        [np.array(["a", "b"])],
        [np.zeros([2, 0], np.float16)],
        [np.zeros([2, 3]), np.zeros([4, 3])],
        [(1, None, ())],
        [{"b": 1, "a": (np.uint16(2), {"z": "text", "y": None})}],
        [Point(1, np.zeros(3, ml_dtypes.bfloat16))],
        [{f"key {i}": np.zeros(i) for i in range(20)}],
    ],
    ids=repr,
)
def test_tensorflow_says_the_same(elements: list[Any]) -> None:
    structure = inferred(elements)
    found = element_spec_of(structure)
    spec = nested_structure_coder.decode_proto(struct_pb2.StructuredValue.FromString(found))
    assert encode(spec) == structure
    assert encode_element_spec(spec) == found
    assert encode(decode_element_spec(found)) == structure
    for element in elements:
        nest.assert_same_structure(spec, element)
        for leaf, value in zip(nest.flatten(spec), nest.flatten(element), strict=True):
            assert (leaf is None) == (value is None)
            if leaf is not None:
                array = np.asarray(value)
                assert leaf.shape.is_compatible_with(array.shape)
                assert leaf.dtype == (tf.string if array.dtype.kind in "SU" else array.dtype)


def test_numbers_of_dtypes() -> None:
    assert {name: tf.as_dtype(name).as_datatype_enum for name in TYPES} == TYPES


@pytest.mark.parametrize(
    ("elements", "wrong"),
    [
        ([1, 2.5], r"element is of different types or ranks .*\['float64', 'int64'\]"),
        ([[1], [[1]]], r"element is of different types or ranks .*\[1, 2\]"),
        ([{"a": 1}, {"b": 1}], "element differs among the first elements"),
        ([(1,), (1, 2)], "element differs among the first elements"),
        ([{"a": (1, object())}], r"element\['a'\]\[1\] is <object .* which is no array"),
        ([np.datetime64("2020-01-01")], "which is no array"),
        ([{1: 2}], "element has the key 1, and only strings of Unicode can be registered"),
        ([{"\ud800": 2}], r"element has the key '\\ud800', and only strings of Unicode can"),
    ],
)
def test_what_elements_have_not_in_common(elements: list[Any], wrong: str) -> None:
    with pytest.raises(InvalidArgument, match=wrong):
        inferred(elements)

"""What a record has is what TensorFlow makes and parses, whatever its dtype and shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from forebay.service import structure
from forebay.service.block_limits import TYPES
from forebay.service.materialized.layout import ComponentSpec
from forebay.service.materialized.records import Records, names_of

ELEMENT: dict[str, Any] = {
    **{
        f"a scalar {dtype.name}": np.array(7).astype(dtype.as_numpy_dtype)[()]
        for dtype in (tf.bool, tf.int8, tf.uint64, tf.float16, tf.bfloat16, tf.complex64)
    },
    "image": np.arange(6).reshape(2, 3).astype(tf.bfloat16.as_numpy_dtype),
    "nothing": np.zeros([0, 2], np.int16),
    "text": b"\xff\x00",
    "texts": np.array([b"", b"a\x00"], object),
}


def test_a_record_is_what_tensorflow_makes_and_parses() -> None:
    dtypes = {
        name: "string" if np.asarray(part).dtype.kind in "SO" else np.asarray(part).dtype.name
        for name, part in ELEMENT.items()
    }
    components = [ComponentSpec(name, dtype) for name, dtype in dtypes.items()]
    record = Records(components).encode(tuple(ELEMENT.values()))
    wanted = {name: tf.io.FixedLenFeature([], tf.string) for name in ELEMENT}
    features = tf.io.parse_single_example(record, wanted)
    for name, tensor in ELEMENT.items():
        parsed = tf.io.parse_tensor(features[name], dtypes[name]).numpy()
        assert np.shape(parsed) == np.shape(tensor)
        assert np.asarray(parsed).tolist() == np.asarray(tensor).tolist()


def test_types_are_tensorflows() -> None:
    assert {name: tf.dtypes.as_dtype(name).as_datatype_enum for name in TYPES} == TYPES


def test_components_have_names_that_differ() -> None:
    ragged = tf.RaggedTensorSpec([None, None, None], tf.int8)
    sparse = tf.SparseTensorSpec([3], tf.int8)
    scalar = tf.TensorSpec([], tf.int8)

    def names(spec: Any) -> list[str]:
        return names_of(structure.encode(spec))

    assert names({"r": ragged, "s": (sparse, scalar)}) == [
        *("r.values", "r.row_splits.0", "r.row_splits.1"),
        *("s.0.indices", "s.0.values", "s.0.dense_shape", "s.1"),
    ]
    assert names(scalar) == ["element"]
    assert names({"a.b": scalar, "a": {"b": scalar}}) == ["0", "1"]

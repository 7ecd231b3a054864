"""Components of different shapes: through the queue, and back in bulk or one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from forebay.service.pipelines.tf_data.columns import column

NUMBERS = [tf.bool, tf.bfloat16, tf.half, tf.float64, tf.complex64, tf.complex128]
NUMBERS += [tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.uint32, tf.int64]
NUMBERS += [tf.uint64, tf.qint8, tf.quint8, tf.qint16, tf.quint16, tf.qint32]


def through(spec: Any, tensors: list[Any]) -> Any:
    """The component of a block of these."""
    own = column(spec)
    encoded = [own.encode(tensor)[0] for tensor in tensors]
    return own.decode([tf.raw_ops.Pack(values=part) for part in zip(*encoded, strict=True)])


@pytest.mark.parametrize("dtype", NUMBERS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("sizes", [(2, 0, 3), (2, 0, 20_000), (20_000,)])
def test_values_come_back_whatever_they_are_joined_by(dtype: Any, sizes: tuple[int, ...]) -> None:
    bits = {1: tf.int8, 2: tf.int16, 4: tf.int32}[dtype.size] if dtype.is_quantized else dtype
    drawn = [np.random.default_rng(0).integers(0, 2, size) for size in sizes]
    plain = [tf.cast(numbers, bits) for numbers in drawn]
    tensors = [tf.bitcast(own, dtype) if dtype.is_quantized else own for own in plain]
    component = through(tf.TensorSpec([None], dtype), tensors)
    found = [own.astype(np.complex128).real.tolist() for own in component.elements()]
    assert found == [numbers.tolist() for numbers in drawn]


def test_elements_without_a_rank_are_one_by_one() -> None:
    """TensorFlow copies joined ones wherever there is too little room for them."""
    spec, tensors = tf.TensorSpec(None, tf.int64), [tf.zeros([2, 3], tf.int64)] * 2
    (found,) = through(spec, tensors[:1]).elements()
    assert found.shape == (2, 3)
    with pytest.raises(AssertionError, match="travels alone"):
        through(spec, tensors)

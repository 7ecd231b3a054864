"""How one component gets out of TensorFlow: element by element into a queue, out in bulk.

`encode` is traced into the function that C++ runs for every element; what it returns goes
through a FIFOQueue, which stacks it. `decode` gets such stacks and makes a blocks.Component.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from ...blocks import Component, Strings, numpy_dtype
from .element_specs import carrier

Tensor = Any


class Column(Protocol):
    """One component of the elements."""

    queued: list[tuple[Any, list[int]]]
    """(dtype, shape) of what `encode` returns."""
    fixed_bytes: int | None
    """The size of every element's component, or None if they differ."""

    def encode(self, tensor: Tensor) -> list[Tensor]: ...

    def size(self, tensor: Tensor) -> Tensor:
        """In bytes, an int64 scalar."""
        ...

    def decode(self, stacked: list[Tensor]) -> Component: ...


def column(spec: Any) -> Column:
    """The column for a component of this TensorSpec."""
    if spec.dtype == tf.variant:
        return Opaque(spec)
    return Fixed(spec) if spec.shape.is_fully_defined() else Varying(spec)


class Fixed(Column):
    """Every element has the same shape: the queue stacks them."""

    def __init__(self, spec: Any) -> None:
        self._dtype = spec.dtype
        self._carrier = carrier(spec.dtype)
        self.queued = [(self._carrier.dtype, spec.shape.as_list())]
        elements = spec.shape.num_elements()
        self.fixed_bytes = None if spec.dtype == tf.string else elements * self._carrier.dtype.size

    def encode(self, tensor: Tensor) -> list[Tensor]:
        return [self._carrier.to(tensor)]

    def size(self, tensor: Tensor) -> Tensor:
        return tensor_bytes(tensor)

    def decode(self, stacked: list[Tensor]) -> Component:
        return Component(to_numpy(stacked[0], self._dtype))


class Varying(Column):
    """Shapes differ. A tensor and its shape go through the queue as variants, without a copy."""

    fixed_bytes = None

    def __init__(self, spec: Any) -> None:
        self._dtype = spec.dtype
        self._carrier = carrier(spec.dtype)
        self._rank = spec.shape.rank
        shape = (tf.variant, []) if self._rank is None else (tf.int64, [self._rank])
        self.queued = [(tf.variant, []), shape]

    def encode(self, tensor: Tensor) -> list[Tensor]:
        shape = tf.shape(tensor, tf.int64)
        values = self._carrier.to(tensor)
        flat = _wrap(values if self._rank == 1 else tf.reshape(values, [-1]))
        return [flat, _wrap(shape) if self._rank is None else shape]

    def size(self, tensor: Tensor) -> Tensor:
        return tensor_bytes(tensor)

    def decode(self, stacked: list[Tensor]) -> Component:
        variants, shapes = stacked
        if self._rank is None:
            shapes = _unwrap(shapes, tf.int64)[tf.newaxis]  # see Opaque: one element a block
        values = to_numpy(_unwrap(variants, self._carrier.dtype), self._dtype)
        shapes = shapes.numpy()
        if (shapes == shapes[0]).all():
            return Component(reshaped(values, shapes.shape[:1] + tuple(shapes[0])))
        return Component(values, shapes)


class Opaque(Column):
    """A variant that means something to TensorFlow only: serialized, a string."""

    fixed_bytes = None

    def __init__(self, spec: Any) -> None:
        self.queued = [(tf.string, [])]

    def encode(self, tensor: Tensor) -> list[Tensor]:
        return [tf.io.serialize_tensor(tensor)]

    def size(self, tensor: Tensor) -> Tensor:
        return tf.constant(1 << 12, tf.int64)

    def decode(self, stacked: list[Tensor]) -> Component:
        return Component(to_numpy(stacked[0], tf.string))


def tensor_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's values, computed in the graph; of several strings, with their
    lengths."""
    if tensor.dtype == tf.string:
        lengths = tf.cast(tf.strings.length(tensor), tf.int64)
        return lengths if tensor.shape.rank == 0 else tf.reduce_sum(lengths + 8)
    return tf.size(tensor, tf.int64) * tensor.dtype.size


def to_numpy(tensor: Tensor, dtype: Any) -> Any:
    """An eager tensor's values as a block keeps them; numbers are not copied."""
    if dtype != tf.string:
        array = np.asarray(tensor)  # tensor.numpy() would copy
        native = numpy_dtype(array.dtype.name if dtype.is_quantized else dtype.name)
        return array if array.dtype == native else array.astype(native)
    lengths = tf.strings.length(tensor).numpy().astype(np.int64)
    joined = tf.strings.reduce_join(tf.reshape(tensor, [-1])).numpy()
    return Strings(lengths, np.frombuffer(joined, np.uint8))


def reshaped(values: Any, shape: tuple[int, ...]) -> Any:
    """Values of a block in another shape."""
    if isinstance(values, Strings):
        return Strings(values.lengths.reshape(shape), values.data)
    return values.reshape(shape)


def _wrap(flat: Tensor) -> Tensor:
    return tf.raw_ops.RaggedTensorToVariant(
        rt_nested_splits=[], rt_dense_values=flat, batched_input=False
    )


def _unwrap(variants: Tensor, dtype: Any) -> Tensor:
    """The values of wrapped tensors, joined; a single one's without a copy."""
    single = variants.shape[0] == 1
    return tf.raw_ops.RaggedTensorFromVariant(
        encoded_ragged=variants[0] if single else variants,
        input_ragged_rank=0,
        output_ragged_rank=0 if single else 1,
        Tvalues=dtype,
        Tsplits=tf.int64,
    ).output_dense_values

"""Moves one component out of TensorFlow: into a queue by the element, out of it in bulk.

`encode` is traced into the function that C++ runs for every element. A FIFOQueue stacks what it
returns. `decode` turns these stacks into a blocks.Component.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from ...blocks import Component, Strings, numpy_dtype
from .element_specs import carrier

Tensor = Any


class ColumnCodec(Protocol):
    """One component of the elements."""

    queued: list[tuple[Any, list[int]]]
    """(dtype, shape) of what `encode` returns."""
    fixed_bytes: int | None = None
    """The size of every element's component, or None if they differ."""

    def encode(self, tensor: Tensor) -> tuple[list[Tensor], Tensor]:
        """The tensors for the queue, and the component's size in bytes, an int64 scalar."""

    def decode(self, stacked: list[Tensor]) -> Component: ...


def column(spec: Any) -> ColumnCodec:
    """The column for a component of this TensorSpec."""
    if spec.dtype == tf.variant:
        return Opaque(spec)
    if spec.dtype == tf.string and spec.shape.rank != 0:
        return Text(spec)
    return Fixed(spec) if spec.shape.is_fully_defined() else Varying(spec)


class Fixed(ColumnCodec):
    """Every element has the same shape: the queue stacks them."""

    def __init__(self, spec: Any) -> None:
        self._dtype = spec.dtype
        self._carrier = carrier(spec.dtype)
        self.queued = [(self._carrier.dtype, spec.shape.as_list())]
        elements = spec.shape.num_elements()
        self.fixed_bytes = None if spec.dtype == tf.string else elements * self._carrier.dtype.size

    def encode(self, tensor: Tensor) -> tuple[list[Tensor], Tensor]:
        size = tensor_bytes(tensor) if self.fixed_bytes is None else self.fixed_bytes
        return [self._carrier.to(tensor)], tf.convert_to_tensor(size, tf.int64)

    def decode(self, stacked: list[Tensor]) -> Component:
        return Component(to_numpy(stacked[0], self._dtype))


class Varying(ColumnCodec):
    """Shapes differ. Tensor and shape go through the queue as variants, which avoids a copy."""

    def __init__(self, spec: Any) -> None:
        self._dtype = spec.dtype
        self._carrier = carrier(spec.dtype)
        self._rank = spec.shape.rank
        shape = (tf.variant, []) if self._rank is None else (tf.int64, [self._rank])
        self.queued = [(tf.variant, []), shape]

    def encode(self, tensor: Tensor) -> tuple[list[Tensor], Tensor]:
        shape = tf.shape(tensor, tf.int64)
        values = self._carrier.to(tensor)
        flat = _wrap(values if self._rank == 1 else tf.reshape(values, [-1]))
        return [flat, _wrap(shape) if self._rank is None else shape], tensor_bytes(tensor)

    def decode(self, stacked: list[Tensor]) -> Component:
        variants, shapes = stacked
        if self._rank is None:
            assert variants.shape[0] == 1, "an element without a rank travels alone"
            shapes = _unwrapped(shapes, tf.int64, 0)[tf.newaxis]
        shapes = shapes.numpy()
        total = int(shapes.prod(axis=1).sum())
        values = to_numpy(_unwrapped(variants, self._carrier.dtype, total), self._dtype)
        if (shapes == shapes[0]).all():
            return Component(reshaped(values, shapes.shape[:1] + tuple(shapes[0])))
        return Component(values, shapes)


class Text(ColumnCodec):
    """Tensors of strings: joined to one string, and their lengths. The queue would copy each."""

    def __init__(self, spec: Any) -> None:
        self._lengths = column(tf.TensorSpec(spec.shape, tf.int64))
        self.queued = [(tf.string, []), *self._lengths.queued]

    def encode(self, tensor: Tensor) -> tuple[list[Tensor], Tensor]:
        joined = _joined(tensor)
        lengths, size = self._lengths.encode(tf.cast(tf.strings.length(tensor), tf.int64))
        return [joined, *lengths], size + tensor_bytes(joined)

    def decode(self, stacked: list[Tensor]) -> Component:
        joined, *rest = stacked
        own = self._lengths.decode(rest)
        assert not isinstance(own.values, Strings)
        return Component(Strings(own.values, _data(joined)), own.shapes)


class Opaque(ColumnCodec):
    """A variant that only TensorFlow understands: serialized to a string."""

    def __init__(self, spec: Any) -> None:
        self.queued = [(tf.string, [])]

    def encode(self, tensor: Tensor) -> tuple[list[Tensor], Tensor]:
        return [tf.io.serialize_tensor(tensor)], tf.constant(1 << 12, tf.int64)

    def decode(self, stacked: list[Tensor]) -> Component:
        return Component(to_numpy(stacked[0], tf.string))


def tensor_bytes(tensor: Tensor) -> Tensor:
    """The size of a tensor's values, computed in the graph; a string tensor must be a scalar."""
    if tensor.dtype == tf.string:
        return tf.cast(tf.strings.length(tensor), tf.int64)
    return tf.size(tensor, tf.int64) * tensor.dtype.size


def to_numpy(tensor: Tensor, dtype: Any) -> Any:
    """An eager tensor's values in a block's format; numbers are not copied."""
    if dtype != tf.string:
        array = np.asarray(tensor)  # tensor.numpy() would copy
        native = numpy_dtype(array.dtype.name if dtype.is_quantized else dtype.name)
        return array if array.dtype == native else array.astype(native)
    return Strings(tf.strings.length(tensor).numpy().astype(np.int64), _data(tensor))


def _joined(strings: Tensor) -> Tensor:
    return tf.strings.reduce_join(tf.reshape(strings, [-1]))


def _data(strings: Tensor) -> Any:
    """The bytes of eager strings, concatenated."""
    return np.frombuffer(_joined(strings).numpy(), np.uint8)


def reshaped(values: Any, shape: tuple[int, ...]) -> Any:
    """Values of a block in another shape."""
    if isinstance(values, Strings):
        return Strings(values.lengths.reshape(shape), values.data)
    return values.reshape(shape)


def _wrap(flat: Tensor) -> Tensor:
    return tf.raw_ops.RaggedTensorToVariant(
        rt_nested_splits=[], rt_dense_values=flat, batched_input=False
    )


def _unwrapped(variants: Tensor, dtype: Any, total: int) -> Tensor:
    """The values of wrapped tensors, joined, `total` of them; a single one's without a copy.

    TensorFlow's op for this, RaggedTensorFromVariant, copies each value by itself, 3 ns each, even
    bytes. The gradient of wrapping computes the same, and copies a tensor at a time.
    """
    return tf.raw_ops.RaggedTensorToVariantGradient(
        encoded_ragged_grad=variants,
        row_splits=tf.constant(0, tf.int64),  # used only for variants without a tensor
        dense_values_shape=[total if variants.shape[0] > 1 else 0],  # a single one has its own
        Tvalues=dtype,
    )

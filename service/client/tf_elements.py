"""Blocks as a tf.data.Dataset, and datasets as what is registered of them.

A Python generator yields blocks, and C++ takes them apart, so that Python touches a block and
never an element. NumPy arrays that begin at a multiple of 64 bytes are adopted, not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops import compression_ops
from tensorflow.python.data.ops import dataset_ops, map_op

from ..blocks import Array, Block, Component, Strings
from ..element_specs import carrier, component_specs, restore

LARGE_BYTES = 32 << 10

Tensor = Any


class BlockIterator(Protocol):
    """Blocks, until StopIteration. `close` may come at any time, from the iterating thread."""

    def __iter__(self) -> Iterator[Block]: ...
    def __next__(self) -> Block: ...
    def close(self) -> None: ...


def dataset_of_blocks(
    open_blocks: Callable[[], BlockIterator], element_spec: Any, *, compressed: bool = False
) -> Any:
    """A `tf.data.Dataset` of the elements in blocks, with exactly this element_spec.

    `open_blocks` is called for each iteration over the dataset, and what it returned is closed
    when that iteration ends or is dropped. With `compressed` the blocks have one component,
    tf.data service's compressed elements, serialized. Raises UnsupportedElement.
    """
    specs = [tf.TensorSpec([], tf.variant)] if compressed else component_specs(element_spec)
    columns = [_column(spec) for spec in specs]
    counts = tf.TensorSpec([], tf.int64)
    signature = (counts, *[part for column in columns for part in column.signature])

    def arrays() -> Iterator[tuple[Any, ...]]:
        with closing(open_blocks()) as blocks:
            for block in blocks:
                pairs = zip(columns, block.components, strict=True)
                yield (block.count, *[part for c, own in pairs for part in c.arrays(own)])

    def elements(count: Tensor, *parts: Tensor) -> Any:
        grouped = _grouped(columns, parts)
        rows = [c.rows(own) for c, own in zip(columns, grouped, strict=True)]

        def element(row: Tensor) -> Any:
            tensors = [c.element(own, row) for c, own in zip(columns, rows, strict=True)]
            if compressed:
                return compression_ops.uncompress(tensors[0], element_spec)
            return restore(element_spec, tensors)

        return _map(tf.data.Dataset.range(count), element)

    def stacked(_: Tensor, *parts: Tensor) -> Any:
        values = [own[0] for own in _grouped(columns, parts)]
        return tf.data.Dataset.from_tensor_slices(restore(batched, values))

    blocks = tf.data.Dataset.from_generator(arrays, output_signature=signature)
    plain = not compressed and all(isinstance(c, _Numbers) and c.adopts for c in columns)
    if plain and columns and all(isinstance(s, tf.TensorSpec) for s in tf.nest.flatten(element_spec)):
        batched = tf.nest.map_structure(_batched, element_spec)
        if sum(s.shape.num_elements() * s.dtype.size for s in specs) >= LARGE_BYTES:
            # One element a block: no slicing, no copy.
            return blocks.flat_map(elements)
        built = blocks.flat_map(stacked)
    else:
        built = blocks.flat_map(elements)
    return dataset_ops._VariantDataset(built._variant_tensor, element_spec)

"""Blocks: how elements travel, and how they look in NumPy.

An element is a list of *components*, dense tensors: its nested structure flattened, with
composite tensors (ragged, sparse) expanded into the dense tensors that they consist of
(structure.py keeps the nesting). A block holds `count` elements, component by component, so
that Python handles arrays and never single elements:

- *stacked*: every element has the same shape; one array [count, *shape];
- *varying*: shapes differ; the flattened values of all elements one after another, and an
  int64 array [count, rank] of shapes.

A block of one element is always stacked. Numeric types are NumPy's, or ml_dtypes' (bfloat16,
float8_…). Strings are kept as lengths and one run of bytes until somebody wants objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Strings:
    """An array of byte strings: their lengths (int64, any shape) and their bytes, joined."""

    lengths: Array
    data: Array  # uint8 [lengths.sum()]

    def to_numpy(self) -> Array:
        """An object array of `bytes`, of the shape of `lengths`."""
        joined = self.data.tobytes()
        stops = np.cumsum(self.lengths.ravel()).tolist()
        out = np.empty(len(stops), object)
        start = 0
        for i, stop in enumerate(stops):
            out[i] = joined[start:stop]
            start = stop
        return out.reshape(self.lengths.shape)


@dataclass(frozen=True, slots=True)
class Component:
    """One component of all of a block's elements."""

    values: Array | Strings
    shapes: Array | None = None  # int64 [count, rank] if varying

    def elements(self) -> Iterator[Array]:
        """Each element's tensor in turn, as a view."""
        values = self.values.to_numpy() if isinstance(self.values, Strings) else self.values
        if self.shapes is None:
            yield from values if values.ndim > 1 else (values[i, ...] for i in range(len(values)))
            return
        start = 0
        for shape in self.shapes.tolist():
            size = int(np.prod(shape, dtype=np.int64))
            yield values[start : start + size].reshape(shape)
            start += size


@dataclass(frozen=True, slots=True)
class Block:
    """`count` elements of one task."""

    count: int
    components: tuple[Component, ...]
    lease_id: int = 0

    @property
    def payload_bytes(self) -> int:
        """The bytes of its buffers, without padding."""
        return sum(array.nbytes for c in self.components for array in buffers(c))


def buffers(component: Component) -> list[Array]:
    """The arrays that travel for a component, in the order of transfer.proto."""
    values = component.values
    arrays = [values.lengths, values.data] if isinstance(values, Strings) else [values]
    return arrays if component.shapes is None else [*arrays, component.shapes]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of a component's `dtype` field. Raises TypeError for an unknown name."""
    extension = getattr(ml_dtypes, name, None)
    return np.dtype(name if extension is None else extension)

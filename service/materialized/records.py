"""Encodes an element as a record: a tf.train.Example with a serialized tensor for each component.

The bytes equal TensorFlow's, but the code does not import it, which would take five seconds.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...storage.errors import Corrupt
from ..block_limits import TYPES
from ..blocks import Array, Block, numpy_dtype
from ..proto.example_pb2 import Example
from ..proto.graph_pb2 import TensorProto
from .layout import ComponentSpec


def names_of(structure: str) -> list[str]:
    """A unique name for each component of the elements: its path, else its number."""
    names = list(_names(json.loads(structure), ""))
    # Keys may contain dots, or equal the Parquet column name of another component's shapes.
    if len({*names, *map(shapes_of, names)}) < 2 * len(names):
        return [f"{number}" for number in range(len(names))]
    return names


def shapes_of(name: str) -> str:
    """The name of the Parquet column with this component's shapes."""
    return f"{name}:shape"


def _names(node: dict[str, Any], path: str) -> Iterator[str]:
    def below(name: object) -> str:
        return f"{path}.{name}" if path else f"{name}"

    match node:
        case {"tensor": _} | {"opaque": _}:
            yield path or "element"
        case {"ragged": _, "ragged_rank": rank}:
            yield below("values")
            yield from (below(f"row_splits.{number}") for number in range(rank))
        case {"sparse": _}:
            yield from map(below, ("indices", "values", "dense_shape"))
        case {"dict": items}:
            for key, inner in items:
                yield from _names(inner, below(key))
        case {"tuple": items}:
            for number, inner in enumerate(items):
                yield from _names(inner, below(number))
        case {"fields": fields}:
            for key, inner in fields:
                yield from _names(inner, below(key))


def elements_of(block: Block) -> Iterator[tuple[Any, ...]]:
    """The components of each element: arrays, NumPy scalars, and `bytes`."""
    columns = [component.elements() for component in block.components]
    if not columns:
        return itertools.repeat((), block.count)
    return zip(*columns, strict=True)


class Records:
    """Encodes elements of these components as records, and decodes them."""

    def __init__(self, components: Sequence[ComponentSpec]) -> None:
        self._components = components
        self._types = [TYPES[component.dtype] for component in components]

    def encode(self, element: tuple[Any, ...]) -> bytes:
        example = Example()
        features = example.features.feature
        for component, kind, tensor in zip(self._components, self._types, element, strict=True):
            features[component.name].bytes_list.value.append(_serialized(kind, tensor))
        data: bytes = example.SerializeToString(deterministic=True)
        return data

    def decode(self, record: bytes) -> list[Any]:
        """The components of an element; strings are `bytes`, or object arrays of them. Raises
        Corrupt."""
        try:
            features = Example.FromString(record).features.feature
            return [
                _parsed(component, features[component.name].bytes_list.value[0])
                for component in self._components
            ]
        except (ValueError, IndexError) as error:
            raise Corrupt(
                f"a record is no element of this dataset ({error!r}): run the same `forebay "
                "materialize` with --verify, which writes damaged shards again; or the pipeline "
                "that computed them, into another directory"
            ) from error


def _serialized(kind: int, tensor: Array | bytes) -> bytes:
    proto = TensorProto(dtype=kind)
    proto.tensor_shape.SetInParent()
    for size in np.shape(tensor):
        proto.tensor_shape.dim.add(size=size)
    if kind == TYPES["string"]:
        strings = [tensor] if isinstance(tensor, bytes) else tensor.ravel().tolist()
        proto.string_val.extend(strings)
    else:
        proto.tensor_content = tensor.tobytes()  # type: ignore[union-attr]
    data: bytes = proto.SerializeToString()
    return data


def _parsed(component: ComponentSpec, data: bytes) -> Any:
    proto = TensorProto.FromString(data)
    shape = [dim.size for dim in proto.tensor_shape.dim]
    if component.dtype == "string":
        if not shape:
            return proto.string_val[0]
        array = np.empty(len(proto.string_val), object)
        array[:] = proto.string_val
        return array.reshape(shape)
    return np.frombuffer(proto.tensor_content, numpy_dtype(component.dtype)).reshape(shape)

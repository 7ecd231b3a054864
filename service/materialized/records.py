"""Encodes an element as a record: a tf.train.Example with a serialized tensor for each component.

The bytes equal TensorFlow's, but the code does not import it, which would take five seconds.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from ..block_limits import TYPES
from ..blocks import Block
from ..pipelines.tf_data.constants import serialized
from ..proto.example_pb2 import Example
from .layout import ComponentSpec


def names_of(structure: str) -> list[str]:
    """A unique name for each component of the elements: its path, else its number."""
    names = list(_names(json.loads(structure), ""))
    if len({*names}) < len(names):  # keys may contain dots
        return [f"{number}" for number in range(len(names))]
    return names


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
        case {"dict": items} | {"fields": items}:
            for key, inner in items:
                yield from _names(inner, below(key))
        case {"tuple": items}:
            for number, inner in enumerate(items):
                yield from _names(inner, below(number))


def elements_of(block: Block) -> Iterator[tuple[Any, ...]]:
    """The components of each element: arrays, NumPy scalars, and `bytes`."""
    columns = [component.elements() for component in block.components]
    if not columns:
        return itertools.repeat((), block.count)
    return zip(*columns, strict=True)


class Records:
    """Encodes elements of these components as records."""

    def __init__(self, components: Sequence[ComponentSpec]) -> None:
        self._components = [(component.name, TYPES[component.dtype]) for component in components]

    def encode(self, element: tuple[Any, ...]) -> bytes:
        example = Example()
        features = example.features.feature
        for (name, kind), tensor in zip(self._components, element, strict=True):
            features[name].bytes_list.value.append(serialized(kind, tensor))
        data: bytes = example.SerializeToString(deterministic=True)
        return data

"""Checks the shapes in a dataset's structure (service/structure.py), which global arrays need."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..blocks import Block, Component, Strings, numpy_dtype
from ..errors import InvalidArgument
from ..structure import leaves

Array = npt.NDArray[Any]


def require_shapes(structure: str) -> None:
    """Raises InvalidArgument unless batches have the same shape in all processes."""
    for path, node in leaves(structure):
        shape = node["shape"]
        if "tensor" not in node or shape is None or None in shape:
            raise InvalidArgument(
                f"element{path} was registered with shape {shape}, and processes would make arrays "
                "of different shapes of it: pad it to one before it is registered, or with map="
            )


def rows_of(structure: str) -> int:
    """The rows of elements that are batches. Raises InvalidArgument if that is unknown."""
    found = {
        path: (node["shape"] or [None])[0] if "tensor" in node else None
        for path, node in leaves(structure)
    }
    (first, *others) = set(found.values()) or {None}
    if first is None or others:
        raise InvalidArgument(
            f"the elements' first dimensions are {found}: without batch_size they have to be "
            "batches of one known size (batch(…, drop_remainder=True)); give a batch_size otherwise"
        )
    return int(first)


def zeros_of(structure: str, count: int) -> Block:
    """A block of `count` zero elements; unknown dimensions are 0. Raises InvalidArgument."""
    components: list[Component] = []
    for _, node in leaves(structure):
        if "tensor" not in node:
            raise InvalidArgument(
                "a process that is to pad whole batches has to know how one looks, and of ragged "
                'and sparse tensors it does not: give remainder="drop"'
            )
        shape = (count, *(size or 0 for size in node["shape"] or ()))
        values: Array | Strings
        if node["tensor"] == "string":
            values = Strings(np.zeros(shape, np.int64), np.zeros(0, np.uint8))
        else:
            values = np.zeros(shape, numpy_dtype(node["tensor"]))
        components.append(Component(values))
    return Block(count, tuple(components))

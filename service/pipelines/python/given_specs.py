"""A structure (structure.py) from an element_spec in NumPy's words, without TensorFlow.

A leaf is a dtype, for a scalar, or a pair of dtype and shape, in which None is any size:
`{"image": ("uint8", (None, None, 3)), "label": "int64"}`. Anything with a `dtype` and a `shape` is
one as well: an array, `jax.ShapeDtypeStruct`, `tf.TensorSpec`. Dicts, tuples and named tuples nest
leaves, and None is None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...block_limits import TYPES
from ...errors import InvalidArgument
from .inferred import Node, nested

_TEXT: tuple[Any, ...] = (str, bytes, object, "str", "bytes", "object", "string")


def structure_of_spec(spec: Any) -> str:
    """Raises InvalidArgument, naming the place."""
    return json.dumps(_node([spec], "element_spec: element"), separators=(",", ":"))


def _node(specs: Sequence[Any], path: str) -> Node:
    """Of a single one."""
    (spec,) = specs
    if spec is None or type(spec).__name__ == "NoneTensorSpec":
        return {"none": True}
    is_pair = type(spec) is tuple and len(spec) == 2 and _is_shape(spec[1])
    if is_pair and (name := _dtype(spec[0])) is not None:
        return {"tensor": name, "shape": [*spec[1]]}
    if isinstance(spec, Mapping | tuple):
        return nested(specs, path, _node)
    if (name := _dtype(spec)) is not None:
        return {"tensor": name, "shape": []}
    name, shape = _dtype(getattr(spec, "dtype", None)), getattr(spec, "shape", None)
    if hasattr(spec, "ragged_rank") or "Sparse" in type(spec).__name__:
        name = None
    try:
        sizes = None if shape is None else [*shape]
    except (TypeError, ValueError):  # of an unknown rank, or no shape
        sizes = None
    if name is None or sizes is None or not _is_shape(sizes):
        raise InvalidArgument(
            f"{path} is {spec!r:.100}: give a dtype, or a dtype and a shape of a "
            'known rank, such as ("uint8", (None, None, 3)), in dicts and tuples'
        )
    return {"tensor": name, "shape": sizes}


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(
        size is None or (isinstance(size, int) and not isinstance(size, bool) and size >= 0)
        for size in value
    )


def _dtype(value: Any) -> str | None:
    """The name of a dtype; None if it is none that can be registered."""
    if any(value is text or value == text for text in _TEXT if isinstance(value, type | str)):
        return "string"
    if isinstance(value, str) and value in TYPES:
        return value
    if isinstance(value, np.dtype):
        return "string" if value.kind in "SUO" else value.name if value.name in TYPES else None
    if isinstance(value, type | str):
        try:
            return _dtype(np.dtype(value))
        except TypeError:
            return None
    if hasattr(value, "shape"):  # a spec, whose name is the user's
        return None
    name = getattr(value, "name", None)  # of TensorFlow's
    return name if isinstance(name, str) and name in TYPES else None

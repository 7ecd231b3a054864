"""Structures (structure.py) of a Python function's elements, without TensorFlow: inferred from the
first elements, or of an element_spec in NumPy's words.

A leaf of a spec is a dtype, for a scalar, or a pair of dtype and shape, in which None is any size:
`{"image": ("uint8", (None, None, 3)), "label": "int64"}`. Anything with a `dtype` and a `shape` is
one as well: an array, `jax.ShapeDtypeStruct`, `tf.TensorSpec`. Dicts, tuples and named tuples nest
leaves, and None is None.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...block_limits import DTYPES, TYPES
from ...blocks import Array, numpy_dtype
from ...errors import InvalidArgument
from ...proto import graph_pb2
from ..files.formats import Node, is_utf8, written
from .columns import LISTS, MASKED, ONE_TENSOR, Field, Misfit, column_of, is_masked, kinds_of, said


def inferred(elements: Sequence[Any]) -> str:
    """The structure (structure.py) that these elements share; dimensions that differ are unknown.
    Raises InvalidArgument, naming the place."""
    return written(_inferred(elements, "element"))


def _inferred(elements: Sequence[Any], path: str) -> Node:
    first = elements[0]
    if not isinstance(first, Mapping | tuple):
        return _leaf(elements, path)

    def members(element: Any) -> Any:
        return sorted(element, key=str) if isinstance(element, Mapping) else len(element)

    if any(type(e) is not type(first) or members(e) != members(first) for e in elements):
        raise InvalidArgument(
            f"{path} differs among the first elements, {first!r:.80} …: yield the same dicts, "
            "tuples and types, or give element_spec"
        )
    return nested(elements, path, _inferred)


def nested(alike: Sequence[Any], path: str, inner: Callable[[Sequence[Any], str], Node]) -> Node:
    """The structure of dicts or tuples that are `alike`; `inner` is of their members. Raises
    InvalidArgument."""
    first = alike[0]
    if isinstance(first, Mapping):
        if odd := [k for k in first if not (isinstance(k, str) and is_utf8(k))]:
            raise InvalidArgument(
                f"{path} has the key {odd[0]!r}, and only strings of Unicode can be registered"
            )
        keys = sorted(first)
        return {"dict": [[k, inner([e[k] for e in alike], f"{path}[{k!r}]")] for k in keys]}
    columns = [*zip(*alike, strict=True)]
    if names := getattr(first, "_fields", None):
        named = zip(names, columns, strict=True)
        fields = [[name, inner(column, f"{path}.{name}")] for name, column in named]
        return {"named": type(first).__name__, "fields": fields}
    return {"tuple": [inner(column, f"{path}[{i}]") for i, column in enumerate(columns)]}


def _leaf(leaves: Sequence[Any], path: str) -> Node:
    if all(leaf is None for leaf in leaves):
        return {"none": True}
    arrays = [_array(leaf, path) for leaf in leaves]
    dtypes = {"string" if _is_text(array) else array.dtype.name for array in arrays}
    ranks = {array.ndim for array in arrays}
    if len(dtypes) > 1 or len(ranks) > 1:
        raise InvalidArgument(
            f"{path} is of different types or ranks among the first elements: {sorted(dtypes)}, "
            f"{sorted(ranks)} dimensions; yield the same, or give element_spec"
        )
    (dtype,) = dtypes
    if dtype not in TYPES or dtype not in {*DTYPES, "string"}:
        raise InvalidArgument(
            f"{path} is {leaves[0]!r:.80} ({type(leaves[0]).__qualname__}), which is no array: "
            "yield arrays, numbers, strings or bytes, in dicts and tuples"
        )
    sizes = [set(size) for size in zip(*(array.shape for array in arrays), strict=True)]
    shape = [size.pop() if len(size) == 1 else None for size in sizes]
    field = Field(path, None if dtype == "string" else numpy_dtype(dtype), (*shape,))
    try:
        column_of(field, leaves)  # raises as each read would
    except Misfit as misfit:
        raise _no_tensor(path, leaves[misfit.row]) from None
    return {"tensor": dtype, "shape": shape}


def _array(leaf: Any, path: str) -> Array:
    """Raises InvalidArgument for a list that is no tensor, and where NumPy would round integers or
    reveal masked items."""
    if is_masked(leaf):
        raise InvalidArgument(f"{path} is {leaf!r:.80} ({type(leaf).__qualname__}){MASKED}")
    try:
        array = np.asarray(leaf)
    except ValueError:  # "inhomogeneous shape"
        if not isinstance(leaf, LISTS):
            raise
        raise _no_tensor(path, leaf) from None
    if array.size and array.dtype.kind == "f" and kinds_of(leaf) <= {bool, int}:
        raise InvalidArgument(
            f"{path} is {leaf!r:.80}, integers that no dtype of NumPy's holds together: give "
            "np.array(…, np.uint64), if that does, or element_spec"
        )
    return array


def _no_tensor(path: str, leaf: Any) -> InvalidArgument:
    items = ", ".join([*map(said, itertools.islice(leaf, 5)), *["…"] * (len(leaf) > 5)])
    return InvalidArgument(f"{path} is a list of {items}{ONE_TENSOR}")


def _is_text(array: Any) -> bool:
    if array.dtype.kind in "SU":
        return True
    flat = array.ravel().tolist() if array.dtype == object else []
    return bool(flat) and all(isinstance(text, str | bytes) for text in flat)


_TEXT: tuple[Any, ...] = (str, bytes, object, "str", "bytes", "object", "string")


def structure_of_spec(spec: Any) -> str:
    """Raises InvalidArgument, naming the place."""
    return written(_of_spec([spec], "element_spec: element"))


def _of_spec(specs: Sequence[Any], path: str) -> Node:
    """Of a single one."""
    (spec,) = specs
    if spec is None or type(spec).__name__ == "NoneTensorSpec":
        return {"none": True}
    is_pair = type(spec) is tuple and len(spec) == 2 and _is_shape(spec[1])
    if is_pair and (name := _dtype(spec[0])) is not None:
        return {"tensor": name, "shape": [*spec[1]]}
    if isinstance(spec, Mapping | tuple):
        return nested(specs, path, _of_spec)
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


def element_spec_of(structure: str) -> bytes:
    """The element_spec as TensorFlow's metadata stores it; equal structures give equal bytes."""
    return _spec(json.loads(structure)).SerializeToString(deterministic=True)


RAGGED = 3
"""TensorFlow's number of the class."""


def _sizes(shape: Sequence[int | None]) -> graph_pb2.TensorShape:
    return graph_pb2.TensorShape(
        dim=[graph_pb2.Dim(size=-1 if size is None else size) for size in shape]
    )


def _spec(node: Node) -> graph_pb2.StructuredValue:
    made = graph_pb2.StructuredValue()
    match node:
        case {"tensor": dtype, "shape": shape}:
            made.tensor_spec_value.dtype = TYPES[dtype]
            made.tensor_spec_value.shape.CopyFrom(_sizes(shape))
        case {"ragged": dtype, "shape": shape, "ragged_rank": rank}:
            spec = made.type_spec_value
            spec.type_spec_class, spec.type_spec_class_name = RAGGED, "RaggedTensorSpec"
            spec.num_flat_components = 1 + rank
            sizes, of, ranks, splits = (spec.type_state.tuple_value.values.add() for _ in range(4))
            sizes.tensor_shape_value.CopyFrom(_sizes(shape))
            of.tensor_dtype_value, ranks.int64_value = TYPES[dtype], rank
            splits.tensor_dtype_value = TYPES["int64"]
        case {"dict": items}:
            made.dict_value.SetInParent()
            for key, item in items:
                made.dict_value.fields[key].CopyFrom(_spec(item))
        case {"tuple": items}:
            made.tuple_value.SetInParent()
            made.tuple_value.values.extend(map(_spec, items))
        case {"named": name, "fields": fields}:
            made.named_tuple_value.name = name
            for key, item in fields:
                made.named_tuple_value.values.add(key=key).value.CopyFrom(_spec(item))
        case _:
            made.none_value.SetInParent()
    return made

"""The nesting of an element, as JSON: so that NumPy readers need no TensorFlow.

An element travels as a flat list of dense tensors (blocks.py). `encode` writes down what they
were: dicts, tuples, named tuples, None, tensors, ragged and sparse tensors. `assemble` puts
arrays together again. A node of the JSON is one of

    {"tensor": dtype, "shape": [2, null] or null}
    {"ragged": dtype, "shape": …, "ragged_rank": n}     flat values, then n row splits
    {"sparse": dtype, "shape": …}                       indices, values, dense shape
    {"none": true}                                      no component
    {"dict": [[key, node], …]}                          sorted by key, as TensorFlow flattens
    {"tuple": [node, …]}
    {"named": type name, "fields": [[name, node], …]}   named tuples, attrs and extension types
"""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy.typing as npt

from .errors import InvalidArgument

Array = npt.NDArray[Any]
Assemble = Callable[[list[Array]], Any]


class UnsupportedElement(InvalidArgument):
    """The dataset's elements contain something that no block can hold."""


class Ragged(NamedTuple):
    """A ragged tensor: `values[row_splits[i]:row_splits[i + 1]]` is row i.

    With several ragged dimensions `values` is itself a Ragged.
    """

    values: Array | Ragged
    row_splits: Array


class Sparse(NamedTuple):
    """A sparse tensor: `values[i]` stands at `indices[i]`; shapes [n, rank], [n], [rank]."""

    indices: Array
    values: Array
    dense_shape: Array


def encode(element_spec: Any) -> str:
    """A tf.data `element_spec` as JSON. Raises UnsupportedElement, naming the component."""
    return json.dumps(_encode(element_spec, "element"), separators=(",", ":"))


def assemble(structure: str) -> Assemble:
    """A function from an element's components, in order, to the element.

    Named tuples come back as named tuples of the same name and fields, ragged and sparse
    tensors as `Ragged` and `Sparse`.
    """
    build = _assembler(json.loads(structure))

    def element(components: list[Array]) -> Any:
        rest = iter(components)
        built = build(rest)
        if next(rest, None) is not None:
            raise ValueError(
                f"{len(components)} components are more than the structure {structure} has"
            )
        return built

    return element


def _encode(spec: Any, path: str) -> dict[str, Any]:
    import tensorflow as tf
    from tensorflow.python.framework.extension_type import ExtensionTypeSpec

    match spec:
        case None | tf.NoneTensorSpec():
            return {"none": True}
        case tf.TensorSpec() if spec.dtype not in (tf.variant, tf.resource):
            return {"tensor": spec.dtype.name, "shape": _shape(spec)}
        case tf.RaggedTensorSpec():
            rank = {"ragged_rank": spec.ragged_rank}
            return {"ragged": spec.dtype.name, "shape": _shape(spec), **rank}
        case tf.SparseTensorSpec():
            return {"sparse": spec.dtype.name, "shape": _shape(spec)}
        case Mapping():
            keys = sorted(spec)
            return {"dict": [[key, _encode(spec[key], f"{path}[{key!r}]")] for key in keys]}
        case tuple() if fields := getattr(spec, "_fields", None):
            return _named(type(spec).__name__, dict(zip(fields, spec, strict=True)), path)
        case tuple() | list():
            return {"tuple": [_encode(item, f"{path}[{i}]") for i, item in enumerate(spec)]}
    if hasattr(spec, "__attrs_attrs__"):
        fields = {field.name: getattr(spec, field.name) for field in spec.__attrs_attrs__}
        return _named(type(spec).__name__, fields, path)
    if isinstance(spec, ExtensionTypeSpec):
        return _named(spec.value_type.__name__, spec._component_specs, path)
    raise UnsupportedElement(
        f"{path} is a {spec!r}, which cannot be sent to another process; "
        "map the dataset to tensors first, for example with flat_map"
    )


def _named(name: str, fields: Mapping[str, Any], path: str) -> dict[str, Any]:
    nodes = [[key, _encode(value, f"{path}.{key}")] for key, value in fields.items()]
    return {"named": name, "fields": nodes}


def _shape(spec: Any) -> list[int | None] | None:
    return None if spec.shape.rank is None else spec.shape.as_list()


def _assembler(node: dict[str, Any]) -> Callable[[Iterator[Array]], Any]:
    match node:
        case {"tensor": _}:
            return next
        case {"ragged": _, "ragged_rank": rank}:
            return lambda rest: _ragged(next(rest), [next(rest) for _ in range(rank)])
        case {"sparse": _}:
            return lambda rest: Sparse(next(rest), next(rest), next(rest))
        case {"none": _}:
            return lambda rest: None
        case {"dict": items}:
            parts = [(key, _assembler(item)) for key, item in items]
            return lambda rest: {key: part(rest) for key, part in parts}
        case {"tuple": items}:
            members = [_assembler(item) for item in items]
            return lambda rest: tuple([member(rest) for member in members])
        case {"named": name, "fields": fields}:
            kind = namedtuple(name, [key for key, _ in fields])  # type: ignore[misc]
            members = [_assembler(item) for _, item in fields]
            return lambda rest: kind(*[member(rest) for member in members])
    raise ValueError(f"unknown structure node {node!r}: it was written by a newer Forebay")


def _ragged(values: Array | Ragged, splits: list[Array]) -> Array | Ragged:
    for row_splits in reversed(splits):  # outermost first
        values = Ragged(values, row_splits)
    return values

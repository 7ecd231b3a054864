"""Encodes the nesting of elements as JSON, so that NumPy readers need no TensorFlow.

An element travels as a flat list of dense tensors (blocks.py). `encode` describes its nesting:
dicts, tuples, named tuples, extension types, None, tensors, ragged and sparse tensors.
`assemble` rebuilds elements from arrays. A node of the JSON is one of

    {"tensor": dtype, "shape": [2, null] or null}
    {"ragged": dtype, "shape": …, "ragged_rank": n}     flat values, then n row splits
    {"sparse": dtype, "shape": …}                       indices, values, dense shape
    {"none": true}                                      no component
    {"dict": [[key, node], …]}                          sorted by key, as TensorFlow flattens
    {"tuple": [node, …]}
    {"named": type name, "fields": [[name, node], …]}   named tuples, attrs and extension types
    {"opaque": type name, "shape": null}                a variant that only TensorFlow can read
    {"constant": value}                                 a field of an extension type; no component
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy.typing as npt

from .errors import InvalidArgument

Array = npt.NDArray[Any]
Assemble = Callable[[Sequence[Iterable[Array]], int], Iterator[Any]]
_Build = Callable[[Iterator[Iterable[Array]], int], Iterator[Any]]


class UnsupportedElement(InvalidArgument):
    """The dataset's elements contain a type that blocks cannot hold."""


class Ragged(NamedTuple):
    """A ragged tensor: `values[row_splits[i]:row_splits[i + 1]]` is row i.

    With several ragged dimensions `values` is itself a Ragged.
    """

    values: Array | Ragged
    row_splits: Array


class Sparse(NamedTuple):
    """A sparse tensor: `values[i]` is at `indices[i]`; shapes [n, rank], [n], [rank]."""

    indices: Array
    values: Array
    dense_shape: Array


def encode(element_spec: Any) -> str:
    """A tf.data `element_spec` as JSON. Raises UnsupportedElement, naming the component."""
    return json.dumps(_encode(element_spec, "element"), separators=(",", ":"))


def assemble(structure: str) -> Assemble:
    """A function from a block's columns to its elements.

    It takes, for each component, an iterable over the elements, and the number of elements. It
    returns named tuples and extension types as named tuples of the same name and fields, ragged
    and sparse tensors as `Ragged` and `Sparse`, shapes as tuples, and dtypes as names. Raises
    ValueError for another number of columns.
    """
    build = _assembler(json.loads(structure))

    def elements(columns: Sequence[Iterable[Array]], count: int) -> Iterator[Any]:
        rest = iter(columns)
        try:
            built = build(rest, count)
        except StopIteration:
            raise ValueError(
                f"{len(columns)} components are fewer than the structure {structure} has"
            ) from None
        if next(rest, None) is not None:
            raise ValueError(
                f"{len(columns)} components are more than the structure {structure} has"
            )
        return built

    return elements


def leaves(structure: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The nodes of all kinds of tensors, with their paths, such as `['a'][0].b`."""
    return leaves_of(json.loads(structure))


def leaves_of(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """As `leaves`, of a decoded structure: its own nodes."""
    for _, step, member in members_of(node):
        yield from leaves_of(member, path + step)
    match node:
        case {"tensor": _} | {"ragged": _} | {"sparse": _} | {"opaque": _}:
            yield path, node


def members_of(node: dict[str, Any]) -> list[tuple[Any, str, dict[str, Any]]]:
    """The nodes right within a node, with the key and the path of each there."""
    match node:
        case {"dict": items}:
            return [(key, f"[{key!r}]", member) for key, member in items]
        case {"tuple": items}:
            return [(i, f"[{i}]", member) for i, member in enumerate(items)]
        case {"named": _, "fields": fields}:
            return [(key, f".{key}", member) for key, member in fields]
    return []


def describe(structure: str) -> str:
    """A short text for people: `{image: uint8[224, 224, 3], label: int64[]}`; ? is any length."""
    try:
        return _described(json.loads(structure))
    except (ArithmeticError, LookupError, RecursionError, StopIteration, TypeError, ValueError):
        return "unknown, as what was registered describes no elements"


def _described(node: dict[str, Any]) -> str:
    match node:
        case {"dict": items}:
            return "{" + ", ".join(f"{key}: {_described(inner)}" for key, inner in items) + "}"
        case {"tuple": items}:
            return "(" + ", ".join(map(_described, items)) + ")"
        case {"named": name, "fields": fields}:
            return f"{name}({', '.join(f'{key}={_described(inner)}' for key, inner in fields)})"
        case {"opaque": name}:
            return f"{name}"
        case {"constant": value}:
            return repr(value)
        case {"shape": shape, **kind}:
            name = next(f"{node[k]}" if k == "tensor" else f"{k} {node[k]}"
                        for k in ("tensor", "ragged", "sparse") if k in kind)  # fmt: skip
            sizes = ["…"] if shape is None else ["?" if n is None else str(n) for n in shape]
            return f"{name}[{', '.join(sizes)}]"
    return "None"


def _encode(spec: Any, path: str, *, constants: bool = False) -> dict[str, Any]:
    """`constants`: allow constants, as within an extension type."""
    import tensorflow as tf
    from tensorflow.python.framework.extension_type import ExtensionTypeSpec
    from tensorflow.python.framework.none_tensor import NoneTensorSpec

    inner = partial(_encode, constants=constants)
    match spec:
        case None | NoneTensorSpec():
            return {"none": True}
        case tf.TensorSpec() if spec.dtype not in (tf.variant, tf.resource):
            return {"tensor": spec.dtype.name, "shape": _shape(spec)}
        case tf.RaggedTensorSpec():
            rank = {"ragged_rank": spec.ragged_rank}
            return {"ragged": spec.dtype.name, "shape": _shape(spec), **rank}
        case tf.SparseTensorSpec():
            return {"sparse": spec.dtype.name, "shape": _shape(spec)}
        case _ if isinstance(spec, opaque_specs()):
            return {"opaque": type(spec).__name__.removesuffix("Spec"), "shape": None}
        case Mapping():
            if odd := [key for key in spec if not isinstance(key, str)]:
                raise UnsupportedElement(
                    f"{path} has the key {odd[0]!r}, and only strings can be registered: "
                    "map the dataset to a dict with such keys"
                )
            return {"dict": [[k, inner(spec[k], f"{path}[{k!r}]")] for k in sorted(spec)]}
        case tuple() if fields := getattr(spec, "_fields", None):
            return _named(type(spec).__name__, dict(zip(fields, spec, strict=True)), path, inner)
        case tuple() | list():
            return {"tuple": [inner(item, f"{path}[{i}]") for i, item in enumerate(spec)]}
        case bool() | int() | float() | str() if constants:
            return {"constant": spec}
        case tf.DType() if constants:
            return {"constant": spec.name}
        case tf.TensorShape() if constants:
            dimensions = None if spec.rank is None else spec.as_list()
            return inner(dimensions, path)
    if hasattr(spec, "__attrs_attrs__"):
        fields = {field.name: getattr(spec, field.name) for field in spec.__attrs_attrs__}
        return _named(type(spec).__name__, fields, path, inner)
    if isinstance(spec, ExtensionTypeSpec) and not spec._tf_extension_type_is_packed:
        fields = _fields(spec, path)
        return _named(spec.value_type.__name__, fields, path, partial(_encode, constants=True))
    raise UnsupportedElement(
        f"{path} is a {spec!r}, which cannot be sent to another process; "
        "map the dataset to tensors first, for example with flat_map"
    )


def opaque_specs() -> Any:
    """The specs whose values tf.data keeps as one variant that TensorFlow can serialize."""
    import tensorflow as tf

    return tf.TensorArraySpec, tf.OptionalSpec


def _fields(spec: Any, path: str) -> dict[str, Any]:
    from tensorflow.python.framework import type_spec_registry

    name = spec.value_type.__name__
    fields = dict(spec._serialize())
    assigned = [key for key in vars(spec) if key in fields]
    if assigned != list(fields):
        raise UnsupportedElement(
            f"{path} is a {name}, whose constructor sets its fields in the order {assigned}, and "
            f"TensorFlow would mix them up: set them as they are declared, {list(fields)}"
        )
    try:
        type_spec_registry.get_name(type(spec))
    except ValueError:
        raise UnsupportedElement(
            f"{path} is a {name}, which TensorFlow finds by its name only: give the class an "
            f'attribute such as __name__ = "my_project.{name}"'
        ) from None
    return fields


def _named(
    name: str, fields: Mapping[str, Any], path: str, inner: Callable[[Any, str], Any]
) -> dict[str, Any]:
    nodes = [[key, inner(value, f"{path}.{key}")] for key, value in fields.items()]
    return {"named": name, "fields": nodes}


def _shape(spec: Any) -> list[int | None] | None:
    return None if spec.shape.rank is None else spec.shape.as_list()


def _assembler(node: dict[str, Any]) -> _Build:
    """A function that takes the node's columns; it runs no Python code for each plain tensor."""
    match node:
        case {"tensor": _}:
            return lambda columns, count: iter(next(columns))
        case {"ragged": _, "ragged_rank": rank}:
            return lambda columns, count: map(_ragged, *[next(columns) for _ in range(1 + rank)])
        case {"opaque": name}:
            raise UnsupportedElement(
                f"the elements hold a {name}, which only TensorFlow reads: use from_dataset_id, or "
                "map the dataset to tensors before it is registered"
            )
        case {"sparse": _}:
            return lambda columns, count: map(Sparse, *[next(columns) for _ in range(3)])
        case {"none": _}:
            return lambda columns, count: itertools.repeat(None, count)
        case {"constant": value}:
            return lambda columns, count: itertools.repeat(value, count)
        case {"dict": items}:
            keys = tuple(key for key, _ in items)
            return _joined(
                [item for _, item in items], lambda row: dict(zip(keys, row, strict=True))
            )
        case {"tuple": items}:
            return _joined(items, None)
        case {"named": name, "fields": fields}:
            kind = _named_tuple(name, tuple(key for key, _ in fields))
            return _joined([item for _, item in fields], kind._make)
    raise ValueError(f"unknown structure node {node!r}: it was written by a newer Forebay")


def _joined(items: list[dict[str, Any]], make: Callable[[tuple[Any, ...]], Any] | None) -> _Build:
    """Zip the members' elements into tuples, and apply `make` if it is given."""
    members = [_assembler(item) for item in items]

    def build(columns: Iterator[Iterable[Array]], count: int) -> Iterator[Any]:
        parts = [member(columns, count) for member in members]
        rows = zip(*parts, strict=True) if parts else itertools.repeat((), count)
        return rows if make is None else map(make, rows)

    return build


@functools.cache
def _named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    """A named tuple type that can be pickled, although no module has it."""
    base: Any = namedtuple(name, fields, rename=True)  # type: ignore[misc]

    def reduce(self: Any) -> Any:
        return _remade, (name, fields, tuple(self))

    return type(name, (base,), {"__slots__": (), "__reduce__": reduce})


def _remade(name: str, fields: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    return _named_tuple(name, fields)._make(values)


def _ragged(values: Array | Ragged, *splits: Array) -> Array | Ragged:
    for row_splits in reversed(splits):  # outermost first
        values = Ragged(values, row_splits)
    return values

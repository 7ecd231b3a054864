"""An element in TensorFlow: its element_spec, its components, and the dtypes they travel as.

The components of an element are those of `tf.nest.flatten(…, expand_composites=True)`: a
ragged tensor is flat values and row splits, a sparse one indices, values and dense shape.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import tensorflow as tf
from tensorflow.core.protobuf import struct_pb2
from tensorflow.python.data.util import nest
from tensorflow.python.framework.extension_type import ExtensionTypeSpec
from tensorflow.python.framework.none_tensor import NoneTensorSpec
from tensorflow.python.saved_model import nested_structure_coder

from ....journal.proto import events_pb2 as ev
from ... import structure
from ...errors import InvalidArgument
from ...proto.tf_service_pb2 import DataServiceMetadata

P = ParamSpec("P")
R = TypeVar("R")
Tensor = Any  # TensorFlow has no types
Spec = Any


def component_specs(element_spec: Spec) -> list[Spec]:
    """The TensorSpec of each component. Raises UnsupportedElement."""
    structure.encode(element_spec)
    return [spec for leaf in nest.flatten(element_spec) for spec in _expand(leaf, leaf)]


def flatten(element_spec: Spec, element: Any) -> list[Tensor]:
    """An element's components."""
    leaves = nest.flatten_up_to(element_spec, element)
    pairs = zip(nest.flatten(element_spec), leaves, strict=True)
    return [tensor for spec, leaf in pairs for tensor in _expand(spec, leaf)]


def restore(element_spec: Spec, components: Sequence[Tensor]) -> Any:
    """The element of these components: the inverse of `flatten`."""
    rest = iter(components)
    leaves: list[Any] = []
    for spec in nest.flatten(element_spec):
        own = [next(rest) for _ in _expand(spec, spec)]
        if _is_none(spec):
            leaves.append(None)
        elif isinstance(spec, structure.opaque_specs()):
            leaves.append(spec._from_tensor_list(own))
        elif isinstance(spec, tf.TensorSpec):
            leaves.append(tf.ensure_shape(own[0], spec.shape))
        else:
            leaves.append(tf.nest.pack_sequence_as(spec, own, expand_composites=True))
    return nest.pack_sequence_as(element_spec, leaves)


def has_extension_types(element_spec: Spec) -> bool:
    """Whether an element contains a type whose class only the user's programs know."""
    return any(isinstance(spec, ExtensionTypeSpec) for spec in nest.flatten(element_spec))


def without_extension_types(element_spec: Spec) -> Spec:
    """The spec with a tuple of components in place of each extension type.

    The class of a batchable extension type decides how a dataset stores it. Workers need not know
    the class if datasets are registered with this spec.
    """
    leaves = [
        tuple(_expand(spec, spec)) if isinstance(spec, ExtensionTypeSpec) else spec
        for spec in nest.flatten(element_spec)
    ]
    return nest.pack_sequence_as(element_spec, leaves)


def _expand(spec: Spec, leaf: Any) -> list[Any]:
    if _is_none(spec):
        return []
    if isinstance(spec, tf.TensorSpec):
        return [leaf]
    if isinstance(spec, structure.opaque_specs()):
        return list(spec._flat_tensor_specs if leaf is spec else spec._to_tensor_list(leaf))
    return list(tf.nest.flatten(leaf, expand_composites=True))


def _is_none(spec: Spec) -> bool:
    return spec is None or isinstance(spec, NoneTensorSpec)


def check_element_spec(given: Spec, registered: Spec) -> None:
    """Raises InvalidArgument if elements of `registered` do not fit `given`.

    Nesting and dtypes must be equal. Shapes need only be compatible: an unknown dimension in either
    fits any.
    """
    try:
        nest.assert_same_structure(registered, given)
    except (TypeError, ValueError):
        fits = False
    else:
        fits = all(map(_fits, nest.flatten(registered), nest.flatten(given)))
    if not fits:
        raise InvalidArgument(
            f"element_spec={given} does not fit the dataset, which was registered with the "
            f"element_spec {registered}: leave it out, or map the elements to what you need"
        )


def _fits(registered: Spec, given: Spec) -> bool:
    if _is_none(registered) or _is_none(given):
        return _is_none(registered) and _is_none(given)
    return isinstance(given, type(registered)) and registered.is_compatible_with(given)


def plain(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that TensorFlow traces without AutoGraph."""
    marked: Callable[P, R] = tf.autograph.experimental.do_not_convert(function)
    return marked


class Carrier(NamedTuple):
    """How to carry a dtype that TensorFlow's queues and bitcasts do not support."""

    dtype: Any
    to: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


def carrier(dtype: Any) -> Carrier:
    """The carrier of `dtype`: one that every kernel supports and that holds all its values."""
    if dtype in _BITS:
        other = _BITS[dtype]
        return Carrier(other, lambda x: tf.bitcast(x, other), lambda x: tf.bitcast(x, dtype))
    if dtype.name in ("int4", "uint4") or dtype.name.startswith("float8"):
        other = tf.float16 if dtype.is_floating else tf.int8
        return Carrier(other, lambda x: tf.cast(x, other), lambda x: tf.cast(x, dtype))
    return Carrier(dtype, lambda x: x, lambda x: x)


def options_for(specs: Sequence[Spec]) -> Any:
    """The tf.data options of a dataset that has these components in functions."""
    options = tf.data.Options()
    if any(spec.dtype.name.startswith("float8") for spec in specs):
        # TensorFlow 2.21's optimizer fails on float8 ("Converting f8E5M2 to DataType").
        options.experimental_optimization.apply_default_optimizations = False
    return options


_BITS = {
    tf.qint8: tf.int8,
    tf.quint8: tf.uint8,
    tf.qint16: tf.int16,
    tf.quint16: tf.uint16,
    tf.qint32: tf.int32,
}


class Metadata(NamedTuple):
    """What a registration tells about a dataset besides its graph."""

    element_spec: Spec  # None if registered without one
    compressed: bool  # the graph ends in tf.data service's compression
    raw: bool  # blocks hold what the graph yields, not the element_spec's components
    cardinality: int  # tf.data's: may be tf.data.INFINITE_CARDINALITY or UNKNOWN_CARDINALITY


def decode_metadata(definition: ev.DatasetDefinition) -> Metadata:
    """A dataset's metadata.

    A dataset that a stock client registered compressed, or without a spec, is `raw`: such clients
    need what the graph yields.
    """
    proto = DataServiceMetadata.FromString(definition.metadata)
    spec = decode_element_spec(proto.element_spec) if proto.element_spec else None
    compressed = proto.compression in (
        DataServiceMetadata.COMPRESSION_SNAPPY,
        DataServiceMetadata.COMPRESSION_FORCED_SNAPPY,
    )
    raw = not definition.structure and (compressed or spec is None)
    cardinality = proto.cardinality if definition.metadata else tf.data.UNKNOWN_CARDINALITY
    return Metadata(spec, compressed, raw, cardinality)


def encode_element_spec(element_spec: Spec) -> bytes:
    """An element_spec as TensorFlow's metadata stores it. Raises UnsupportedElement."""
    with warnings.catch_warnings():  # it warns that NoneType must be registered; it is
        warnings.simplefilter("ignore", UserWarning)
        try:
            encoded = nested_structure_coder.encode_structure(element_spec)
        except nested_structure_coder.NotEncodableError as error:
            raise structure.UnsupportedElement(
                f"TensorFlow cannot write down this element_spec ({error}): map the dataset to "
                f"dicts, tuples or named tuples of tensors; it is {element_spec}"
            ) from None
    return bytes(encoded.SerializeToString(deterministic=True))  # else dicts have a random order


def decode_element_spec(data: bytes) -> Spec:
    """The spec; None in it becomes NoneTensorSpec, as in a dataset."""
    spec = nested_structure_coder.decode_proto(struct_pb2.StructuredValue.FromString(data))
    leaves = [NoneTensorSpec() if leaf is None else leaf for leaf in nest.flatten(spec)]
    return nest.pack_sequence_as(spec, leaves)

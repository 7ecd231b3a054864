"""Single elements for stock tf.data service clients, which ask for one at a time."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf
from tensorflow.core.framework import tensor_pb2
from tensorflow.python.data.experimental.ops import compression_ops
from tensorflow.python.data.util import structure

from ....journal.proto import events_pb2 as ev
from ...blocks import Array, Block
from ...proto import tf_service_pb2 as pb
from .element_specs import Metadata, component_specs, decode_metadata, restore

MakeResponse = Callable[[Block], pb.GetElementResponse]

_COMPRESSED = "tensorflow.data.CompressedElement"


def response_maker(definition: ev.DatasetDefinition) -> MakeResponse:
    """A function that converts a block of one element to a response."""
    metadata = decode_metadata(definition)

    def make(block: Block) -> pb.GetElementResponse:
        components = tuple(next(component.elements()) for component in block.components)
        if metadata.raw:
            return _as_the_graph_yields(components)
        return _as_the_graph_would_yield(components, metadata)

    return make


def _as_the_graph_yields(components: tuple[Array, ...]) -> pb.GetElementResponse:
    """A response with the graph's own tensors, its variants serialized."""
    if len(components) == 1 and (compressed := _compressed(components[0])):
        return pb.GetElementResponse(compressed=compressed)
    return _uncompressed([tf.make_tensor_proto(array).SerializeToString() for array in components])


def _as_the_graph_would_yield(
    components: tuple[Array, ...], metadata: Metadata
) -> pb.GetElementResponse:
    """A response with composites put together, and with compression, as the graph yields it."""
    pairs = zip(component_specs(metadata.element_spec), components, strict=True)
    parts = [
        tf.io.parse_tensor(array, tf.variant) if spec.dtype == tf.variant else tf.constant(array)
        for spec, array in pairs
    ]
    element = restore(metadata.element_spec, parts)
    if metadata.compressed:
        variant = tf.io.serialize_tensor(compression_ops.compress(element))
        return pb.GetElementResponse(compressed=_compressed(variant.numpy()))
    tensors = structure.to_tensor_list(metadata.element_spec, element)
    return _uncompressed([tf.io.serialize_tensor(tensor).numpy() for tensor in tensors])


def _uncompressed(tensors: list[bytes]) -> pb.GetElementResponse:
    return pb.GetElementResponse(uncompressed=pb.UncompressedElement(components=tensors))


def _compressed(serialized: Array | bytes) -> bytes | None:
    """The CompressedElement in a serialized variant scalar, or None."""
    data = serialized if isinstance(serialized, bytes) else serialized.tolist()
    if not isinstance(data, bytes) or _COMPRESSED.encode() not in data[:200]:
        return None
    content = tensor_pb2.TensorProto.FromString(data).tensor_content
    start = 1 + next(i for i, byte in enumerate(content) if byte < 128)  # behind a varint
    variant = tensor_pb2.VariantTensorDataProto.FromString(content[start:])
    return bytes(variant.metadata) if variant.type_name == _COMPRESSED else None

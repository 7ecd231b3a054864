"""Single elements for tf.data service's own clients, which ask for one at a time."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf
from tensorflow.core.framework import tensor_pb2

from ..blocks import Block, Strings
from ..proto import tf_service_pb2 as pb

_COMPRESSED = "tensorflow.data.CompressedElement"


def responses(block: Block) -> Iterator[pb.GetElementResponse]:
    """The answers to GetElement that a block of the graph's own components makes."""
    for components in zip(*(c.elements() for c in block.components), strict=True):
        if len(components) == 1 and (compressed := _compressed(block, components[0])):
            yield pb.GetElementResponse(compressed=compressed)
            continue
        tensors = [tf.make_tensor_proto(array).SerializeToString() for array in components]
        yield pb.GetElementResponse(uncompressed=pb.UncompressedElement(components=tensors))


def _compressed(block: Block, element: object) -> bytes | None:
    """The CompressedElement in a serialized variant, if the element is one."""
    if not isinstance(block.components[0].values, Strings):
        return None
    data = element.item() if hasattr(element, "item") else element
    if not isinstance(data, bytes) or _COMPRESSED.encode() not in data[:200]:
        return None
    variant = tensor_pb2.TensorProto.FromString(data).variant_val[0]
    return bytes(variant.metadata) if variant.type_name == _COMPRESSED else None

"""Tensors as TensorFlow's messages: those of a graph, which is not run, and those of files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...proto import graph_pb2 as pb

INT32, STRING, INT64, BOOL, VARIANT = 3, 7, 9, 10, 21  # DataType


class TensorFacts(NamedTuple):
    """A tensor's shape, and its value if it is an integer scalar."""

    shape: tuple[int, ...]
    value: int | None


def constant(node: pb.NodeDef) -> TensorFacts | None:
    """Facts about a node's tensor; None if it isn't constant."""
    if node.op == "Pack" and node.attr["axis"].i == 0:
        return TensorFacts((node.attr["N"].i,), None)  # nobody needs the other dimensions
    if node.op != "Const":
        return None
    tensor = node.attr["value"].tensor
    shape = tuple(dim.size for dim in tensor.tensor_shape.dim)
    if shape or tensor.dtype not in (INT32, INT64, BOOL):
        return TensorFacts(shape, None)
    if tensor.tensor_content:
        return TensorFacts((), int.from_bytes(tensor.tensor_content, "little", signed=True))
    values: Sequence[int] = tensor.int64_val if tensor.dtype == INT64 else tensor.int_val
    if tensor.dtype == BOOL:
        values = tensor.bool_val
    return TensorFacts((), int(values[0]) if values else 0)


def strings(node: pb.NodeDef) -> list[bytes] | None:
    """The strings of a constant scalar or vector; None if the node has none, or in another form."""
    if node.op != "Const":
        return None
    tensor = node.attr["value"].tensor
    sizes = [dim.size for dim in tensor.tensor_shape.dim] or [1]
    if tensor.dtype != STRING or sizes != [len(tensor.string_val)]:
        return None
    return list(tensor.string_val)


def text(node: pb.NodeDef) -> str | None:
    """The scalar string that a node yields; None if it isn't constant, or isn't text."""
    found = strings(node) or []
    try:
        return found[0].decode() if len(found) == 1 else None
    except UnicodeDecodeError:
        return None


def element_types(dataset: pb.NodeDef) -> tuple[pb.AttrValue, pb.AttrValue]:
    """The dtypes and shapes of a dataset's components."""
    types, shapes = pb.AttrValue(), pb.AttrValue()
    attrs = {"output_types": types, "Toutput_types": types, "output_shapes": shapes}
    for name in attrs.keys() & dataset.attr.keys():
        attrs[name].MergeFrom(dataset.attr[name])
    if not types.list.type:  # files of records or lines
        types.list.type.append(STRING)
        shapes.list.shape.add()
    return types, shapes


def serialized(kind: int, tensor: Any) -> bytes:
    """An array or bytes, of this DataType, as tf.io.serialize_tensor writes it."""
    proto = pb.TensorProto(dtype=kind)
    proto.tensor_shape.SetInParent()
    for size in np.shape(tensor):
        proto.tensor_shape.dim.add(size=size)
    if kind == STRING:
        strings = [tensor] if isinstance(tensor, bytes) else tensor.ravel().tolist()
        proto.string_val.extend(strings)
    else:
        proto.tensor_content = tensor.tobytes()
    data: bytes = proto.SerializeToString()
    return data

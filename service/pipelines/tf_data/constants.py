"""What a graph says of its tensors by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...proto import graph_pb2 as pb

_INT32, _STRING, _INT64, _BOOL = 3, 7, 9, 10  # DataType


class TensorFacts(NamedTuple):
    """What is asked about a tensor: its shape, and its value if it is an integer scalar."""

    shape: tuple[int, ...]
    value: int | None


def constant(node: pb.NodeDef) -> TensorFacts | None:
    """Of the tensor that a node yields, if it is constant."""
    if node.op == "Pack" and node.attr["axis"].i == 0:
        return TensorFacts((node.attr["N"].i,), None)  # the other dimensions matter to nobody
    if node.op != "Const":
        return None
    tensor = node.attr["value"].tensor
    shape = tuple(dim.size for dim in tensor.tensor_shape.dim)
    if shape or tensor.dtype not in (_INT32, _INT64, _BOOL):
        return TensorFacts(shape, None)
    if tensor.tensor_content:
        return TensorFacts((), int.from_bytes(tensor.tensor_content, "little", signed=True))
    values: Sequence[int] = tensor.int64_val if tensor.dtype == _INT64 else tensor.int_val
    if tensor.dtype == _BOOL:
        values = tensor.bool_val
    return TensorFacts((), int(values[0]) if values else 0)


def text(node: pb.NodeDef) -> str | None:
    """The scalar string that a node yields, if it is constant, and text."""
    tensor = node.attr["value"].tensor
    if node.op != "Const" or tensor.dtype != _STRING or len(tensor.string_val) != 1:
        return None
    try:
        return tensor.string_val[0].decode()
    except UnicodeDecodeError:
        return None

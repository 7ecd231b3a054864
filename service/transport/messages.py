"""What the two sides tell each other about tasks, and how blocks become frames and blocks again.

Nothing that a peer sends is believed: `decode_block` checks every size against every other one
before NumPy sees it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..blocks import Array, Block, Component, Strings, buffers
from ..errors import ProtocolError
from ..proto import transfer_pb2 as pb
from . import frames

VERSION = 1
BLOCK_OVERHEAD_BYTES = 512  # what a block of no bytes costs of the credit
MAX_RANK = 32
MAX_COMPONENTS = 2000
MAX_TEXT = 100_000  # characters of an error

# Which dtypes travel. Not all that NumPy knows: an "object" would be a pointer of the peer's.
_DTYPES: dict[str, np.dtype[Any]] = {np.dtype(c).name: np.dtype(c) for c in "?bhilBHILefdFD"} | {
    name: np.dtype(kind)
    for name, kind in vars(ml_dtypes).items()
    if isinstance(kind, type) and issubclass(kind, np.generic)
}
_INT64 = np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class EndOfTask:
    """The task has ended; its last block has come before."""


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """The task's pipeline raised."""

    code: str  # canonical status name, such as INVALID_ARGUMENT
    message: str


@dataclass(frozen=True, slots=True)
class TaskUnknown:
    """The worker does not have the task, or has it no longer."""


End = EndOfTask | TaskFailed | TaskUnknown


def cost(block: Block) -> int:
    """What the block costs of a connection's credit, in bytes."""
    return block.payload_bytes + BLOCK_OVERHEAD_BYTES


def check_block(block: Block) -> None:
    """Raises TypeError or ValueError for a block that cannot travel."""
    if len(block.components) > MAX_COMPONENTS:
        raise ValueError(f"a block of {len(block.components)} components, above {MAX_COMPONENTS}")
    for array in (array for c in block.components for array in buffers(c)):
        if array.dtype.name not in _DTYPES:
            raise TypeError(f"a block of {array.dtype} cannot travel: cast it, or make it Strings")
        if array.ndim > MAX_RANK:
            raise ValueError(f"a block of rank {array.ndim} cannot travel, above {MAX_RANK}")


def encode_end(task_id: int, end: End) -> bytes:
    """The header that tells a consumer of the end."""
    match end:
        case EndOfTask():
            message = pb.ToConsumer(end_of_task=pb.EndOfTask(task_id=task_id))
        case TaskFailed(code, text):
            failed = pb.TaskFailed(task_id=task_id, code=code, message=text[:MAX_TEXT])
            message = pb.ToConsumer(task_failed=failed)
        case TaskUnknown():
            message = pb.ToConsumer(task_unknown=pb.TaskUnknown(task_id=task_id))
    return message.SerializeToString()


def encode_refusal(reason: str) -> bytes:
    return pb.ToConsumer(refused=pb.Refused(reason=reason[:MAX_TEXT])).SerializeToString()


def encode_block(task_id: int, number: int, block: Block) -> list[frames.Buffer]:
    """The frame of a block that passes `check_block`."""
    header = pb.Block(task_id=task_id, number=number, count=block.count, lease_id=block.lease_id)
    payload: list[memoryview] = []
    for component in block.components:
        values = component.values
        array = values.lengths if isinstance(values, Strings) else values
        arrays = [frames.as_bytes(a) for a in buffers(component)]
        header.components.add(
            dtype="string" if isinstance(values, Strings) else array.dtype.name,
            shape=array.shape,
            rank=0 if component.shapes is None else component.shapes.shape[1],
            varying=component.shapes is not None,
            buffer_bytes=[len(a) for a in arrays],
        )
        payload += arrays
    return frames.encode(pb.ToConsumer(block=header).SerializeToString(), payload)


def decode_block(header: pb.Block, payload: frames.Bytes, peer: str) -> Block:
    """The block of a frame; its arrays are views of `payload`. Raises ProtocolError."""
    sizes = [size for c in header.components for size in c.buffer_bytes]
    expected = sum(size + frames.padding(size) for size in sizes)
    try:
        _check(header.count >= 0, f"{header.count} elements")
        _check(expected == len(payload), f"buffers of {expected} bytes, and {len(payload)} came")
        components = []
        start = 0
        for component in header.components:
            arrays = []
            for size in component.buffer_bytes:
                arrays.append(payload[start : start + size])
                start += size + frames.padding(size)
            components.append(_decode_component(component, header.count, arrays))
    except ValueError as error:
        raise ProtocolError(
            f"{peer} sent block {header.number} of task {header.task_id}, which is broken: {error}"
        ) from None
    return Block(header.count, tuple(components), header.lease_id)


def _decode_component(header: pb.Component, count: int, arrays: list[frames.Bytes]) -> Component:
    strings = header.dtype == "string"
    _check(
        len(arrays) == 1 + strings + header.varying,
        f"{len(arrays)} buffers for a component of dtype {header.dtype}",
    )
    shape = tuple(header.shape)
    stacked = not header.varying
    _check(
        0 < len(shape) <= MAX_RANK and min(shape) >= 0 and (len(shape) == 1 or stacked),
        f"the shape {shape}",
    )
    _check(not stacked or shape[0] == count, f"the shape {shape} for {count} stacked elements")
    dtype = _INT64 if strings else _DTYPES.get(header.dtype)
    if dtype is None:
        raise ValueError(f"the dtype {header.dtype!r} is not known here")
    array = _view(arrays[0], dtype, shape)
    values = Strings(_checked_lengths(array, arrays[1].size), arrays[1]) if strings else array
    if stacked:
        return Component(values)
    _check(0 <= header.rank <= MAX_RANK, f"the rank {header.rank}")
    shapes = _view(arrays[-1], _INT64, (count, header.rank))
    # In float64, because a product of absurd sizes must not wrap around to a right one.
    total = np.prod(shapes, axis=1, dtype=np.float64).sum()
    _check(
        bool((shapes >= 0).all()) and total == shape[0],
        f"shapes of {total:g} values, and {shape[0]} came",
    )
    return Component(values, shapes)


def _view(data: frames.Bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    size = math.prod(shape) * dtype.itemsize
    _check(data.size == size, f"{data.size} bytes for {dtype} of the shape {shape}")
    return data.view(dtype).reshape(shape)


def _checked_lengths(lengths: Array, size: int) -> Array:
    fits = lengths.size == 0 or (int(lengths.min()) >= 0 and int(lengths.max()) <= size)
    _check(fits and int(lengths.sum()) == size, f"strings whose lengths do not sum up to {size}")
    return lengths


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)

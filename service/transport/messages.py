"""What the two sides tell each other about tasks, and how blocks become frames and blocks again.

Nothing that a peer sends is believed: `decode_block` checks every size against every other one
before NumPy sees it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from google.protobuf.message import DecodeError

from ..blocks import Array, Block, Component, Strings, buffers
from ..errors import ProtocolError
from ..proto import transfer_pb2 as pb
from . import codecs, frames
from .shared import SHARED_BYTES, Lender

VERSION = 1
BLOCK_OVERHEAD_BYTES = 512  # what a block of no bytes costs of the credit
MAX_RANK = 32
MAX_SPANNED_BYTES = 1 << 60  # what an array would have without its dimensions of 0
MAX_COMPONENTS = 2000
MAX_TEXT = 100_000  # characters of an error

# Which dtypes travel. Not all that NumPy knows: an "object" would be a pointer of the peer's.
_DTYPES: dict[str, np.dtype[Any]] = {np.dtype(c).name: np.dtype(c) for c in "?bhilBHILefdFD"} | {
    name: np.dtype(kind)
    for name, kind in vars(ml_dtypes).items()
    if isinstance(kind, type) and issubclass(kind, np.generic)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
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

Pack = Callable[[list[memoryview], int], tuple[str, bytes] | None]
"""Takes a payload's buffers and its size; returns a codec and what that made of it, or None."""


def parse(frame: frames.Frame, peer: str) -> pb.ToConsumer:
    """What a worker says. Raises ProtocolError."""
    try:
        return pb.ToConsumer.FromString(frame.header)
    except DecodeError as error:
        raise ProtocolError(f"{peer} sent a header that cannot be parsed: {error}") from None


def cost(block: Block) -> int:
    """What the block costs of a connection's credit, in bytes."""
    return block.payload_bytes + BLOCK_OVERHEAD_BYTES


def check_block(block: Block) -> None:
    """Raises TypeError or ValueError for a block that cannot travel."""
    if len(block.components) > MAX_COMPONENTS:
        raise ValueError(f"a block of {len(block.components)} components, above {MAX_COMPONENTS}")
    arrays = [array for c in block.components for array in buffers(c)]
    size = sum(array.nbytes + frames.padding(array.nbytes) for array in arrays)
    if size > frames.MAX_PAYLOAD_BYTES:
        raise ValueError(
            f"a block of {size} bytes cannot travel, above {frames.MAX_PAYLOAD_BYTES}: make "
            "smaller elements"
        )
    for array in arrays:
        if _native(array.dtype) not in _NAMES:
            raise TypeError(f"a block of {array.dtype} cannot travel: cast it, or make it Strings")
        if array.ndim > MAX_RANK:
            raise ValueError(f"a block of rank {array.ndim} cannot travel, above {MAX_RANK}")


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.isnative else dtype.newbyteorder("=")


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


def encode_refusal(reason: str, broken: bool = False) -> bytes:
    refused = pb.Refused(reason=reason[:MAX_TEXT], broken=broken)
    return pb.ToConsumer(refused=refused).SerializeToString()


def encode_block(
    task_id: int,
    number: int,
    block: Block,
    lender: Lender | None = None,
    pack: Pack | None = None,
) -> tuple[list[frames.Buffer], int | None]:
    """The frame of a block that passes `check_block`.

    With a `lender`, large payloads go into shared memory; if that is new to the consumer, a
    descriptor is to be sent along, and closed. With `pack`, payloads may be compressed.
    """
    header = pb.Block(task_id=task_id, number=number, count=block.count)
    payload: list[memoryview] = []
    for component in block.components:
        values = component.values
        array = values.lengths if isinstance(values, Strings) else values
        arrays = [frames.as_bytes(a) for a in buffers(component)]
        header.components.add(
            dtype="string" if isinstance(values, Strings) else _NAMES[_native(array.dtype)],
            shape=array.shape,
            rank=0 if component.shapes is None else component.shapes.shape[1],
            varying=component.shapes is not None,
            buffer_bytes=[len(a) for a in arrays],
        )
        payload += arrays
    lent = None
    size = sum(len(b) + frames.padding(len(b)) for b in payload)
    if lender is not None and size >= SHARED_BYTES:
        lent = lender.lend(size, payload)
    if lent is not None:
        payload = []
        header.slab.number, header.slab.fresh = lent.slab, lent.descriptor is not None
    elif pack is not None and (packed := pack(payload, size)) is not None:
        header.packed.codec, data = packed
        header.packed.bytes = len(data)
        payload = [memoryview(data)]
    frame = frames.encode(pb.ToConsumer(block=header).SerializeToString(), payload)
    return frame, None if lent is None else lent.descriptor


def payload_bytes(header: pb.Block) -> int:
    """How long the payload of a block is."""
    sizes = (size for component in header.components for size in component.buffer_bytes)
    return sum(size + frames.padding(size) for size in sizes)


def decode_block(header: pb.Block, payload: frames.Bytes, peer: str) -> Block:
    """The block of a frame; its arrays are views of `payload`. Raises ProtocolError."""
    components = []
    start = 0
    try:
        if header.count < 0:
            raise _Broken(f"{header.count} elements")
        for component in header.components:
            arrays = []
            for size in component.buffer_bytes:
                if start + size > len(payload):
                    raise _Broken(f"a payload of {len(payload)} bytes is too short")
                arrays.append(payload[start : start + size])
                start += size + frames.padding(size)
            components.append(_decode_component(component, header.count, arrays))
        if start != len(payload):
            raise _Broken(f"buffers of {start} bytes, but a payload of {len(payload)}")
    except _Broken as what:
        raise ProtocolError(
            f"{peer} sent block {header.number} of task {header.task_id}, which is broken: {what}"
        ) from None
    return Block(header.count, tuple(components))


def unpack_payload(
    header: pb.Block, payload: frames.Bytes, target: frames.Bytes, peer: str
) -> None:
    """Decompress the payload of a block into `target`, which is as long as `payload_bytes` says.

    Raises ProtocolError.
    """
    if header.packed.bytes > payload.size:
        raise ProtocolError(
            f"{peer} sent {payload.size} bytes of block {header.number} of task {header.task_id} "
            f"and says that they are {header.packed.bytes}"
        )
    try:
        codecs.unpack(header.packed.codec, payload[: header.packed.bytes].data, target)
    except codecs.Unpackable as what:
        raise ProtocolError(
            f"{peer} sent block {header.number} of task {header.task_id}, which is broken: {what}"
        ) from None


class _Broken(Exception):
    """What is wrong with a block."""


def _decode_component(header: pb.Component, count: int, arrays: list[frames.Bytes]) -> Component:
    strings = header.dtype == "string"
    varying = header.varying
    shape = tuple(header.shape)
    if len(arrays) != 1 + strings + varying:
        raise _Broken(f"{len(arrays)} buffers for a component of dtype {header.dtype}")
    if not 0 < len(shape) <= (1 if varying else MAX_RANK) or min(shape) < 0:
        raise _Broken(f"the shape {shape}")
    if not varying and shape[0] != count:
        raise _Broken(f"the shape {shape} for {count} stacked elements")
    dtype = _INT64 if strings else _DTYPES.get(header.dtype)
    if dtype is None:
        raise _Broken(f"the dtype {header.dtype!r} is not known here")
    array = _view(arrays[0], dtype, shape)
    values = _strings(array, arrays[1]) if strings else array
    if not varying:
        return Component(values)
    if not 0 <= header.rank <= MAX_RANK or (header.rank == 0 and count != shape[0]):
        raise _Broken(f"the rank {header.rank} for {count} elements of {shape[0]} values")
    shapes = _view(arrays[-1], _INT64, (count, header.rank))
    # In float64, because a product of absurd sizes must not wrap around to a right one.
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.prod(shapes, axis=1, dtype=np.float64).sum()
    if (shapes < 0).any() or total != shape[0]:
        raise _Broken(f"shapes of {total:g} values, but {shape[0]} of them")
    return Component(values, shapes)


def _view(data: frames.Bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    # NumPy refuses arrays of no values, too, if their other dimensions are too many.
    spanned = math.prod(filter(None, shape)) * dtype.itemsize
    if data.size != math.prod(shape) * dtype.itemsize or spanned > MAX_SPANNED_BYTES:
        raise _Broken(f"{data.size} bytes for {dtype} of the shape {shape}")
    return data.view(dtype).reshape(shape)


def _strings(lengths: Array, data: frames.Bytes) -> Strings:
    # No length above the whole, so that their sum cannot wrap around either.
    fit = not lengths.size or (lengths.min() >= 0 and lengths.max() <= data.size)
    if not fit or lengths.sum() != data.size:
        raise _Broken(f"lengths of strings that do not sum up to their {data.size} bytes")
    return Strings(lengths, data)

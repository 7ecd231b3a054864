"""Messages of the data protocol about tasks, and the encoding of blocks as frames and back.

No peer is trusted: `decode_block` checks every size against every other one before NumPy sees it.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from ..block_limits import DTYPES, MAX_RANK, dtype_name, padding
from ..blocks import Array, Block, Component, Picked, Strings, as_bytes, buffers
from ..checksums import Checksum
from ..delivery import End, EndOfSlice, EndOfTask, EndPending, Superseded, TaskFailed, TaskUnknown
from ..errors import ProtocolError
from ..proto import transfer_pb2 as pb
from ..shared import SHARED_BYTES, Borrower, Lender, MapMemory
from . import codecs, frames

VERSION = 4
Key = tuple[int, int]
"""Identifies a consumer's subscription: the task, and a number (0 for the only one)."""

MAX_SPANNED_BYTES = 1 << 60  # of an array, with its dimensions of 0 left out
MAX_TEXT = 100_000  # characters of an error

_INT64 = np.dtype(np.int64)


Pack = Callable[[list[memoryview], int], tuple[str, bytes] | None]
"""Takes a payload's buffers and size; returns a codec and the compressed payload, or None."""


def parse(frame: frames.Frame, peer: str) -> pb.ToConsumer:
    """Parse a worker's message. Raises ProtocolError."""
    try:
        return pb.ToConsumer.FromString(frame.header)
    except DecodeError as error:
        raise ProtocolError(f"{peer} sent a header that cannot be parsed: {error}") from None


_ENDS: dict[str, type[End | EndPending]] = {
    "end_of_task": EndOfTask,
    "end_pending": EndPending,
    "task_failed": TaskFailed,
    "task_unknown": TaskUnknown,
    "end_of_slice": EndOfSlice,
    "superseded": Superseded,
}
"""By field of `ToConsumer`, whose message has the fields of the class, too."""
_FIELDS = {kind: field for field, kind in _ENDS.items()}


def encode_end(task_id: int, end: End | EndPending, subscription: int = 0) -> bytes:
    """The header of a subscription's end, or of EndPending."""
    if isinstance(end, TaskFailed):
        end = TaskFailed(end.code, end.message[:MAX_TEXT])
    message = pb.ToConsumer()
    header = getattr(message, _FIELDS[type(end)])
    header.SetInParent()
    header.task_id, header.subscription = task_id, subscription
    for name in end.__dataclass_fields__:
        setattr(header, name, getattr(end, name))
    return message.SerializeToString()


def decode_end(message: pb.ToConsumer) -> tuple[Key, End | EndPending] | None:
    """The subscription and its end, or EndPending; None for other messages."""
    field = message.WhichOneof("message") or ""
    if (kind := _ENDS.get(field)) is None:
        return None
    header = getattr(message, field)
    end = kind(*(getattr(header, name) for name in kind.__dataclass_fields__))
    return (header.task_id, header.subscription), end


def encode_refusal(reason: str, broken: bool = False, unfit: bool = False) -> bytes:
    refused = pb.Refused(reason=reason[:MAX_TEXT], broken=broken, unfit=unfit)
    return pb.ToConsumer(refused=refused).SerializeToString()


FAREWELL = pb.ToConsumer(farewell=pb.Farewell()).SerializeToString()
"""The header of the answer to a goodbye."""

PONG = pb.ToConsumer(pong=pb.Pong()).SerializeToString()
"""The header of the answer to a ping."""


def encode_block(
    task_id: int,
    number: int,
    block: Block,
    lender: Lender | None = None,
    pack: Pack | None = None,
    subscription: int = 0,
    checksum: bool = False,
) -> tuple[list[frames.Buffer], int | None]:
    """The frame of a block that passes `block_limits.check_block`, and a descriptor or None.

    With a `lender`, large payloads are copied into shared memory, or passed on if they are there.
    If the memory is new to the consumer, the caller sends the descriptor along and closes it. With
    `pack`, payloads may be compressed. With `checksum` the consumer compares what comes.
    """
    message = pb.ToConsumer()
    header = message.block
    header.task_id, header.number, header.count = task_id, number, block.count
    header.index, header.skipped, header.subscription = block.index, block.skipped, subscription
    if block.bundle is not None:
        header.bundle = block.bundle
    if checksum:
        header.checksum = _checksum(block)
    payload: list[memoryview | Picked] = []
    for component in block.components:
        # What was only chosen is copied once, to where it is sent from.
        if lender and isinstance(component, Picked) and (rows := component.rows) is not None:
            shape, sizes = (block.count, *rows.shape[1:]), [component.nbytes]
            header.components.add(dtype=dtype_name(rows.dtype), shape=shape, buffer_bytes=sizes)
            payload.append(component)
            continue
        values = component.values
        array = values.lengths if isinstance(values, Strings) else values
        arrays = [as_bytes(a) for a in buffers(component)]
        header.components.add(
            dtype="string" if isinstance(values, Strings) else dtype_name(array.dtype),
            shape=array.shape,
            rank=0 if component.shapes is None else component.shapes.shape[1],
            varying=component.shapes is not None,
            buffer_bytes=[len(a) for a in arrays],
        )
        payload += arrays
    lent = None
    size = sum(part.nbytes + padding(part.nbytes) for part in payload)
    if lender is not None and size >= SHARED_BYTES:
        lent = lender.pass_on(block.loan) if block.loan is not None else None
        lent = lent or lender.lend(size, payload)
    sent: list[memoryview] = []
    if lent is not None:
        header.slab.number, header.slab.fresh = lent.slab, lent.descriptor is not None
        header.slab.keep_mapped = lent.keep_mapped
    else:
        sent = [as_bytes(a) for component in block.components for a in buffers(component)]
        if pack is not None and (packed := pack(sent, size)) is not None:
            header.packed.codec, data = packed
            header.packed.bytes = len(data)
            sent = [memoryview(data)]
    frame = frames.encode(message.SerializeToString(), sent)
    return frame, None if lent is None else lent.descriptor


def payload_bytes(header: pb.Block) -> int:
    """The size of a block's payload."""
    sizes = (size for component in header.components for size in component.buffer_bytes)
    return sum(size + padding(size) for size in sizes)


def decode_block(header: pb.Block, payload: frames.Bytes, peer: str) -> Block:
    """The block of a frame; its arrays are views of `payload`. Raises ProtocolError."""
    components = []
    start = 0
    bundle = header.bundle if header.HasField("bundle") else None
    with _broken(header, peer):
        if header.count < 0:
            raise codecs.Broken(f"{header.count} elements")
        for component in header.components:
            arrays = []
            for size in component.buffer_bytes:
                if start + size > len(payload):
                    raise codecs.Broken(f"a payload of {len(payload)} bytes is too short")
                arrays.append(payload[start : start + size])
                start += size + padding(size)
            components.append(_decode_component(component, header.count, arrays))
        if start != len(payload):
            raise codecs.Broken(f"buffers of {start} bytes, but a payload of {len(payload)}")
        block = Block(header.count, tuple(components), bundle, header.index, header.skipped)
        if header.HasField("checksum") and (found := _checksum(block)) != header.checksum:
            raise codecs.Broken(
                f"its elements have the checksum {found:08x}, and had {header.checksum:08x} when "
                "they were sent: the network or a host's memory changes bytes"
            )
    return block


@contextlib.contextmanager
def _broken(header: pb.Block, peer: str) -> Iterator[None]:
    """Says of which block `codecs.Broken` tells: raises ProtocolError."""
    try:
        yield
    except codecs.Broken as what:
        raise ProtocolError(
            f"{peer} sent block {header.number} of task {header.task_id}, which is broken: {what}"
        ) from None


def _checksum(block: Block) -> int:
    checksum = Checksum()
    checksum.add(block)
    return checksum.value


def _unpack(header: pb.Block, payload: frames.Bytes, target: frames.Bytes, peer: str) -> None:
    """Decompress the payload of a block into `target`, which it fills. Raises ProtocolError."""
    with _broken(header, peer):
        if header.packed.bytes > payload.size:
            said = f"says that they are {header.packed.bytes}"
            raise codecs.Broken(f"it has {payload.size} bytes, and {said}")
        codecs.unpack(header.packed.codec, payload[: header.packed.bytes].data, target)


def _decode_component(header: pb.Component, count: int, arrays: list[frames.Bytes]) -> Component:
    strings = header.dtype == "string"
    varying = header.varying
    shape = tuple(header.shape)
    if len(arrays) != 1 + strings + varying:
        raise codecs.Broken(f"{len(arrays)} buffers for a component of dtype {header.dtype}")
    if not 0 < len(shape) <= (1 if varying else MAX_RANK) or min(shape) < 0:
        raise codecs.Broken(f"the shape {shape}")
    if not varying and shape[0] != count:
        raise codecs.Broken(f"the shape {shape} for {count} stacked elements")
    dtype = _INT64 if strings else DTYPES.get(header.dtype)
    if dtype is None:
        raise codecs.Broken(f"the dtype {header.dtype!r} is not known here")
    array = _view(arrays[0], dtype, shape)
    values = _strings(array, arrays[1]) if strings else array
    if not varying:
        return Component(values)
    if not 0 <= header.rank <= MAX_RANK or (header.rank == 0 and count != shape[0]):
        raise codecs.Broken(f"the rank {header.rank} for {count} elements of {shape[0]} values")
    shapes = _view(arrays[-1], _INT64, (count, header.rank))
    # In float64, because a product of absurd sizes must not wrap around to the right one.
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.prod(shapes, axis=1, dtype=np.float64).sum()
    if (shapes < 0).any() or total != shape[0]:
        raise codecs.Broken(f"shapes of {total:g} values, but {shape[0]} of them")
    # NumPy refuses even arrays of no values if their other dimensions are too large.
    spanned = np.prod(np.where(shapes == 0, 1, shapes), axis=1, dtype=np.float64)
    if len(spanned) and spanned.max() * dtype.itemsize > MAX_SPANNED_BYTES:
        raise codecs.Broken(f"shapes with dimensions of up to {shapes.max()}")
    return Component(values, shapes)


def _view(data: frames.Bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    # NumPy refuses even arrays of no values if their other dimensions are too large.
    spanned = math.prod(filter(None, shape)) * dtype.itemsize
    if data.size != math.prod(shape) * dtype.itemsize or spanned > MAX_SPANNED_BYTES:
        raise codecs.Broken(f"{data.size} bytes for {dtype} of the shape {shape}")
    return data.view(dtype).reshape(shape)


def _strings(lengths: Array, data: frames.Bytes) -> Strings:
    # No length exceeds the whole, so their sum cannot wrap around either.
    fit = not lengths.size or (lengths.min() >= 0 and lengths.max() <= data.size)
    if not fit or lengths.sum() != data.size:
        raise codecs.Broken(f"lengths of strings that do not sum up to their {data.size} bytes")
    return Strings(lengths, data)


class Payloads:
    """The payloads of blocks from one worker, over one connection after another: each comes in the
    frame behind its block's header, perhaps compressed, or in shared memory. Not thread-safe."""

    def __init__(self, max_bytes: int, map_memory: MapMemory | None = None) -> None:
        """`map_memory` is as for Borrower."""
        self.may_share = True  # whether to share memory on the next connection
        self._max_bytes = max_bytes
        self._map_memory = map_memory
        self._borrower: Borrower | None = None  # of the memory that the worker shares

    def connect(self, peer: str, *, shares: bool) -> None:
        """A connection begins."""
        self._borrower = Borrower(peer, map_memory=self._map_memory) if shares else None

    def disconnect(self) -> None:
        self._borrower = None

    def released(self) -> tuple[list[int], list[int]]:
        """Slabs that are free again, and abandoned slabs, since the last call."""
        return ([], []) if self._borrower is None else self._borrower.released()

    def read(
        self, header: pb.Block, frame: frames.Frame, reader: frames.FrameReader
    ) -> frames.Bytes:
        """The payload of the block with this header. Raises ProtocolError, OSError."""
        if not (header.HasField("packed") or header.HasField("slab")):
            return frame.payload
        size = payload_bytes(header)
        if size > self._max_bytes:
            raise ProtocolError(
                f"{reader.peer} has a block of {size} bytes, compressed or in shared memory; at "
                f"most {self._max_bytes} are allowed here"
            )
        if header.HasField("packed"):
            target = reader.memory(size)
            _unpack(header, frame.payload, target, reader.peer)
            return target
        if self._borrower is None or len(frame.payload):
            raise ProtocolError(
                f"{reader.peer} lends memory over a connection that cannot, or sends "
                f"{len(frame.payload)} bytes beside it"
            )
        slab = header.slab
        if slab.fresh:
            self.may_share = False  # if this fails: we may be out of descriptors
            descriptor = reader.descriptor()
            try:
                self._borrower.learn(slab.number, descriptor, keep_mapped=slab.keep_mapped)
            finally:
                os.close(descriptor)
            self.may_share = True
        return self._borrower.borrow(slab.number, size)

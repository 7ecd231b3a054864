"""The payloads of blocks, as a consumer gets them from one worker.

A payload comes in the frame behind its block's header, perhaps compressed, or in shared memory. If
a connection ends in the middle of a payload, the next one carries only the rest (cut_blocks.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import partial

from ..errors import ProtocolError
from ..proto import transfer_pb2 as pb
from ..shared import Borrower, MapMemory
from . import frames
from .cut_blocks import CutBlock, cut_block
from .messages import parse, payload_bytes, unpack_payload


class Payloads:
    """The payloads from one worker, over one connection after another. Not thread-safe."""

    def __init__(self, max_bytes: int, map_memory: MapMemory | None = None) -> None:
        """`map_memory` is as for Borrower."""
        self.may_share = True  # whether to share memory on the next connection
        self._max_bytes = max_bytes
        self._map_memory = map_memory
        self._borrower: Borrower | None = None  # of the memory that the worker shares
        self._cut: CutBlock | None = None  # in which the last connection ended

    def connect(
        self, reader: frames.FrameReader, reads: Iterable[pb.ToWorker], *, shares: bool
    ) -> Iterator[pb.ToWorker]:
        """Begin a connection; yields its first messages, `reads`. The one that reads on in the cut
        block reports how much of that has come. The block is dropped if none does."""
        self._borrower = Borrower(reader.peer, map_memory=self._map_memory) if shares else None
        cut, self._cut = self._cut, None
        for message in reads:
            if cut is not None and cut.is_next(message.read):
                message.read.cut.CopyFrom(cut.report())
                self._cut = cut
                reader.place = partial(_place, cut, reader.peer)
            yield message

    def disconnect(self) -> None:
        self._borrower = None

    def keep_cut(self, reader: frames.FrameReader | None) -> bool:
        """Keep the part of the block in which the connection ended; whether that is progress."""
        if reader is None or reader.cut is None or not reader.cut.filled:
            return False
        before, now = self._cut, cut_block(reader.cut, self._cut, reader.peer)
        self._cut = now
        if now is None or before is None or now[:2] != before[:2]:
            return now is not None
        return now.filled > before.filled

    def released(self) -> tuple[list[int], list[int]]:
        """Slabs that are free again, and abandoned slabs, since the last call."""
        return ([], []) if self._borrower is None else self._borrower.released()

    def read(
        self, header: pb.Block, frame: frames.Frame, reader: frames.FrameReader
    ) -> frames.Bytes:
        """The payload of the block with this header. Raises ProtocolError, OSError."""
        payload = self._whole(header, frame, reader)
        if header.HasField("packed"):
            return self._unpacked(header, payload, reader)
        return self._borrowed(header, payload, reader) if header.HasField("slab") else payload

    def _whole(
        self, header: pb.Block, frame: frames.Frame, reader: frames.FrameReader
    ) -> frames.Bytes:
        """The frame's payload, completed by the part that came on the last connection."""
        cut = self._cut
        if cut is None or not cut.is_of(header):
            if header.resumes_at:
                raise ProtocolError(f"{reader.peer} sent the rest of a block that was not cut")
            return frame.payload
        self._cut = reader.place = None
        return cut.payload if header.resumes_at else frame.payload

    def _borrowed(
        self, header: pb.Block, payload: frames.Bytes, reader: frames.FrameReader
    ) -> frames.Bytes:
        if self._borrower is None:
            raise ProtocolError(f"{reader.peer} lends memory over a connection that cannot")
        size = payload_bytes(header)
        if size > self._max_bytes or len(payload):
            raise ProtocolError(
                f"{reader.peer} lends {size} bytes, at most {self._max_bytes} are "
                f"allowed here, and sends {len(payload)}"
            )
        if header.slab.fresh:
            self.may_share = False  # if this fails: we may be out of descriptors
            descriptor = reader.descriptor()
            try:
                again = header.slab.keep_mapped
                self._borrower.learn(header.slab.number, descriptor, keep_mapped=again)
            finally:
                os.close(descriptor)
            self.may_share = True
        return self._borrower.borrow(header.slab.number, size)

    def _unpacked(
        self, header: pb.Block, packed: frames.Bytes, reader: frames.FrameReader
    ) -> frames.Bytes:
        size = payload_bytes(header)
        if size > self._max_bytes:
            raise ProtocolError(
                f"{reader.peer} sent a block of {size} bytes, compressed; at most "
                f"{self._max_bytes} are allowed here"
            )
        payload = reader.memory(size)
        unpack_payload(header, packed, payload, reader.peer)
        return payload


def _place(cut: CutBlock, peer: str, header: bytes, size: int) -> frames.Bytes | None:
    """The memory for the payload of a frame with that header; None for any."""
    block = parse(frames.Frame(header, frames.NO_PAYLOAD), peer).block
    return cut.rest(block, size, peer) if block.resumes_at else None

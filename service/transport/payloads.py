"""The payloads of blocks, as a consumer gets them from one worker.

A payload comes in the frame behind its block's header, perhaps compressed, or in shared memory.
"""

from __future__ import annotations

import os

from ..errors import ProtocolError
from ..proto import transfer_pb2 as pb
from ..shared import Borrower, MapMemory
from . import frames
from .messages import payload_bytes, unpack_payload


class Payloads:
    """The payloads from one worker, over one connection after another. Not thread-safe."""

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
        if header.HasField("packed"):
            return self._unpacked(header, frame.payload, reader)
        if header.HasField("slab"):
            return self._borrowed(header, frame.payload, reader)
        return frame.payload

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

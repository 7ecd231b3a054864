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
        if not (header.HasField("packed") or header.HasField("slab")):
            return frame.payload
        size = payload_bytes(header)
        if size > self._max_bytes:
            raise ProtocolError(
                f"{reader.peer} has a block of {size} bytes, compressed or in shared memory; at "
                f"most {self._max_bytes} are allowed here"
            )
        if header.HasField("packed"):
            payload = reader.memory(size)
            unpack_payload(header, frame.payload, payload, reader.peer)
            return payload
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

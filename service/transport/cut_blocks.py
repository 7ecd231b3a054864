"""Cut blocks: if a connection ends in the middle of a payload, only the rest is sent again.

Otherwise a block would never arrive if each connection breaks before the whole block has passed: an
example is an element of some megabytes through a proxy that resets each connection after one. The
consumer reports how many bytes of the payload it has, and their checksum. The worker encodes the
retained block again, the same way, and sends the rest if it begins with these bytes.

Block numbers, acknowledgements and credit are unaffected: they count only complete blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import google_crc32c

from ..blocks import Encodings
from ..errors import ProtocolError
from ..proto import transfer_pb2 as pb
from . import codecs, frames
from .messages import Key, Pack, parse

_PIECE_BYTES = 1 << 20  # of a payload: other threads of the process may run in between


class CutBlock(NamedTuple):
    """The part of a block that a consumer has."""

    key: Key
    number: int
    codec: str  # "" if the payload is not compressed
    payload: frames.Bytes  # of the full size
    filled: int
    checksum: int  # of these bytes

    def is_next(self, read: pb.Read) -> bool:
        """Whether it is the next block of this subscription."""
        return self.key == (read.task_id, read.subscription) and self.number == read.received + 1

    def report(self) -> pb.CutBlock:
        """The report to the worker."""
        return pb.CutBlock(bytes=self.filled, checksum=self.checksum, codec=self.codec)

    def is_of(self, block: pb.Block) -> bool:
        """Whether the header belongs to this block."""
        return self.key == (block.task_id, block.subscription) and self.number == block.number

    def rest(self, block: pb.Block, size: int, peer: str) -> frames.Bytes:
        """The memory for the rest of the payload, of `size` bytes.

        Raises ProtocolError if the header does not belong to the rest of this block.
        """
        whole = block.resumes_at + size
        expected = self.codec, self.filled, self.payload.size
        announced = block.packed.codec, block.resumes_at, whole
        if not self.is_of(block) or announced != expected:
            raise ProtocolError(
                f"{peer} sent bytes {block.resumes_at} to {whole} of block {block.number} of task "
                f"{block.task_id}; missing are bytes {self.filled} to {self.payload.size} of block "
                f"{self.number} of task {self.key[0]}"
            )
        return self.payload[self.filled :]


def cut_block(frame: frames.CutFrame, before: CutBlock | None, peer: str) -> CutBlock | None:
    """The part of the block in whose frame a connection ended; None if its beginning is unknown.

    `before` is the part of a block that the consumer had when that connection began.
    """
    block = parse(frames.Frame(frame.header, frame.payload), peer).block
    if block.resumes_at:
        if before is None:
            return None
        checksum = _checksum([frame.payload[: frame.filled].data], before.checksum)
        return before._replace(filled=before.filled + frame.filled, checksum=checksum)
    key, codec = (block.task_id, block.subscription), block.packed.codec
    checksum = _checksum([frame.payload[: frame.filled].data])
    return CutBlock(key, block.number, codec, frame.payload, frame.filled, checksum)


def pack_as_before(cut: pb.CutBlock, encodings: Encodings | None) -> Pack | None:
    """Compresses a payload as when its first bytes were sent; None if it was not compressed."""
    codec = cut.codec
    if codec not in codecs.CODECS:
        return None

    def pack(buffers: list[memoryview], size: int) -> tuple[str, bytes] | None:
        def encode() -> bytes | None:
            return codecs.pack(codec, codecs.join(buffers))

        packed = encode() if encodings is None else encodings.get(codec, encode)
        return None if packed is None else (codec, packed)

    return pack


def rest_of(
    cut: pb.CutBlock, codec: str, payload: list[memoryview]
) -> tuple[int, list[memoryview]]:
    """How many bytes of a payload the consumer has, and the parts that follow them.

    Returns 0 and the whole payload if the consumer's bytes are not its beginning.
    """
    size = sum(len(part) for part in payload)
    if codec != cut.codec or not 0 < cut.bytes < size:
        return 0, payload
    head, rest, left = [], [], cut.bytes
    for part in payload:
        head.append(part[:left])
        rest.append(part[left:])
        left -= len(head[-1])
    if _checksum(head) != cut.checksum:
        return 0, payload
    return cut.bytes, [part for part in rest if len(part)]


def _checksum(parts: Iterable[memoryview], checksum: int = 0) -> int:
    for part in parts:
        for start in range(0, len(part), _PIECE_BYTES):
            piece = bytes(part[start : start + _PIECE_BYTES])
            checksum = google_crc32c.extend(checksum, piece)
    return checksum

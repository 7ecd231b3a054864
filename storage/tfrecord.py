"""TFRecord framing, and the detection of a frame that a crash has torn.

A frame is the data's length (u64), the masked CRC-32C of those 8 bytes (u32), the data, and the
data's masked CRC-32C (u32), all little-endian: the format that `tf.data.TFRecordDataset` and
Beam's `ReadFromTFRecord` read (https://www.tensorflow.org/tutorials/load_data/tfrecord).

One append writes a frame, and the next one begins only when that is on disk. So only the last
frame of a file can be *torn*. A crash leaves its beginning (the file's size grew only in part),
or zeros where a disk sector was never written (the size grew, but not all data was written).
`is_torn` looks for those signs; everything else is corruption. In doubt it says corruption, which
an operator looks at: it must never drop an acknowledged frame that has rotted.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

from google_crc32c import value as crc32c

HEADER_BYTES = 12
FRAME_BYTES = 16  # header and footer: what framing adds to the data

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_SECTOR_BYTES = 512  # the least that a disk writes at once
_CHUNK_BYTES = 1 << 20


class BrokenFrame(Exception):
    """The frame at `offset` is not whole. `tail` is the rest of the file from there."""

    def __init__(self, offset: int, tail: bytes) -> None:
        super().__init__(f"no whole frame at byte {offset}")
        self.offset = offset
        self.tail = tail


def masked_crc(data: bytes) -> int:
    """The CRC-32C of `data`, rotated and shifted, so that a CRC over CRCs stays a good check."""
    crc: int = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame(data: bytes) -> bytes:
    """Frame `data`."""
    length = len(data).to_bytes(8, "little")
    return b"".join(
        (length, _FOOTER.pack(masked_crc(length)), data, _FOOTER.pack(masked_crc(data)))
    )


def unframe(data: bytes) -> bytes | None:
    """The inverse of `frame`; None unless `data` is exactly one whole frame."""
    length = data_length(data)
    if length is None or len(data) != length + FRAME_BYTES:
        return None
    return _payload(data, length)


def data_length(data: bytes, at: int = 0) -> int | None:
    """Of the frame at `at`, by its header; None without a whole header."""
    if len(data) - at < HEADER_BYTES:
        return None
    length, crc = _HEADER.unpack_from(data, at)
    return length if masked_crc(data[at : at + 8]) == crc else None


def read_frames(fd: int, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield each frame of the file from `offset` on, as (its offset, its data).

    Ends at the end of the file. Raises BrokenFrame at the first frame that is not whole.
    """
    buffer, at = b"", 0  # buffer[0] is the file's byte `offset`
    needed = FRAME_BYTES
    judged = -1  # the offset of a frame that looked broken, and was read again to the file's end
    while True:
        while len(buffer) - at >= needed:
            length, crc = _HEADER.unpack_from(buffer, at)
            if masked_crc(buffer[at : at + 8]) != crc:
                break
            stop = at + HEADER_BYTES + length
            if stop + 4 > len(buffer):
                needed = length + FRAME_BYTES
                break
            data = buffer[at + HEADER_BYTES : stop]
            if masked_crc(data) != _FOOTER.unpack_from(buffer, stop)[0]:
                break
            yield offset + at, data
            at = stop + 4
            needed = FRAME_BYTES
        offset, buffer, at = offset + at, buffer[at:], 0
        if len(buffer) < needed:
            # Never ask for more than the file has: `needed` comes from a header.
            left = os.fstat(fd).st_size - offset - len(buffer)
            more = os.pread(fd, min(max(needed, _CHUNK_BYTES), max(left, 0)), offset + len(buffer))
            if more:
                buffer += more
                continue
            if not buffer:
                return
        # A writer may have replaced what was read first: read once more, to the file's end.
        if judged == offset:
            raise BrokenFrame(offset, buffer)
        judged = offset
        buffer, needed = _read_to_end(fd, offset), FRAME_BYTES


def is_torn(tail: bytes, offset: int) -> bool:
    """Whether a crash during the write of one frame at `offset` explains `tail`.

    `tail` is everything from `offset` to the end of the file, and does not begin with a whole
    frame.
    """
    if len(tail.rstrip(b"\0")) < HEADER_BYTES:
        return True  # not even a header was written
    length = data_length(tail)
    if length is None:
        # The header's own sector is missing. The frame's end is unknown; but had another one
        # followed, this one would have been on disk.
        header_sectors = tail[: HEADER_BYTES + -(offset + HEADER_BYTES) % _SECTOR_BYTES]
        return _lacks_a_sector(header_sectors, offset) and not _holds_a_frame(tail)
    end = length + FRAME_BYTES
    if end > len(tail):
        return True
    if tail[end:].strip(b"\0"):
        return False  # something was written after it
    return _lacks_a_sector(tail[:end], offset) or _lacks_footer(tail[:end], offset)


def _payload(data: bytes, length: int, at: int = 0) -> bytes | None:
    """The data of the frame at `at`; None if the frame is not whole."""
    stop = at + HEADER_BYTES + length
    if stop + 4 > len(data):
        return None
    payload = data[at + HEADER_BYTES : stop]
    return payload if masked_crc(payload) == _FOOTER.unpack_from(data, stop)[0] else None


def _lacks_a_sector(data: bytes, offset: int) -> bool:
    """Whether a sector's part of `data` (the file's bytes from `offset`) was never written.

    Ignores parts of less than 4 bytes: a length may end in zeros.
    """
    for start in range(-(offset % _SECTOR_BYTES), len(data), _SECTOR_BYTES):
        part = data[max(start, 0) : start + _SECTOR_BYTES]
        if len(part) >= 4 and not any(part):
            return True
    return False


def _lacks_footer(frame: bytes, offset: int) -> bool:
    """Whether the data's CRC was not written, or only up to where a sector ends."""
    written = frame[-4:].rstrip(b"\0")
    if not written:
        return True
    expected = _FOOTER.pack(masked_crc(frame[HEADER_BYTES:-4]))
    end = offset + len(frame) - 4 + len(written)
    return expected.startswith(written) and end % _SECTOR_BYTES == 0


def _holds_a_frame(data: bytes) -> bool:
    """Whether a whole frame of less than 4 GiB begins anywhere in `data`."""
    high_half = data.find(b"\0\0\0\0", 4)  # of a length
    while high_half >= 0:
        at = high_half - 4
        length = data_length(data, at)
        if length is not None and _payload(data, length, at) is not None:
            return True
        high_half = data.find(b"\0\0\0\0", high_half + 1)
    return False


def _read_to_end(fd: int, offset: int) -> bytes:
    parts = []
    while part := os.pread(fd, 1 << 26, offset):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)

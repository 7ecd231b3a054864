"""TFRecord framing, and what a crash can do to the last frame of a file.

A frame is the data's length (u64), the masked CRC-32C of those 8 bytes (u32), the data, and the
data's masked CRC-32C (u32), all little-endian: the format that `tf.data.TFRecordDataset` and
Beam's `ReadFromTFRecord` read (https://www.tensorflow.org/tutorials/load_data/tfrecord).

A frame is written by one append, and the next one begins only when it is on disk. So only the
last frame of a file can be *torn*. A crash leaves of it a beginning (the file's size was not
moved all the way), or zeros where a disk sector was never written (the size was moved, not all
of the data). Those are the signs that `is_torn` goes by; everything else is corruption. It
errs on the side of corruption, which an operator looks at, because to drop a torn frame is
right, and to drop one that was acknowledged and has rotted is not.
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
_SECTOR_BYTES = 512  # disks write no less at once
_CHUNK_BYTES = 1 << 20


class BrokenFrame(Exception):
    """The frame at `offset` is not whole. `tail` is what the file holds from there on."""

    def __init__(self, offset: int, tail: bytes) -> None:
        super().__init__(f"no whole frame at byte {offset}")
        self.offset = offset
        self.tail = tail


def masked_crc(data: bytes) -> int:
    """The CRC-32C of `data`, rotated and shifted, so that a CRC over CRCs stays a good one."""
    crc: int = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame(data: bytes) -> bytes:
    """`data` as one frame."""
    length = len(data).to_bytes(8, "little")
    return b"".join(
        (length, _FOOTER.pack(masked_crc(length)), data, _FOOTER.pack(masked_crc(data)))
    )


def unframe(data: bytes) -> bytes | None:
    """The inverse of `frame`; None if `data` is anything but one whole frame."""
    length = _header(data)
    if length is None or len(data) != length + FRAME_BYTES:
        return None
    return _payload(data, length)


def read_frames(fd: int, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield each frame of the file from `offset` on: where it begins, and its data.

    Ends at the end of the file. Raises BrokenFrame at the first frame that is not whole.
    """
    buffer, at = b"", 0  # buffer[0] is the file's byte `offset`
    needed = FRAME_BYTES
    judged = -1  # a frame that looked broken, and was read again with all that is behind it
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
            # Never ask for more than there is: `needed` is what a header says.
            left = os.fstat(fd).st_size - offset - len(buffer)
            more = os.pread(fd, min(max(needed, _CHUNK_BYTES), max(left, 0)), offset + len(buffer))
            if more:
                buffer += more
                continue
            if not buffer:
                return
        # A writer at work may have replaced what was read at first: look once more, at all.
        if judged == offset:
            raise BrokenFrame(offset, buffer)
        judged = offset
        buffer, needed = _read_to_end(fd, offset), FRAME_BYTES


def is_torn(tail: bytes, offset: int) -> bool:
    """Whether a crash while one frame was written at `offset` explains `tail`.

    `tail` is everything from `offset` to the end of the file, and does not begin with a whole
    frame.
    """
    if len(tail.rstrip(b"\0")) < HEADER_BYTES:
        return True  # not even a header was written
    length = _header(tail)
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


def _header(data: bytes, at: int = 0) -> int | None:
    """The data's length, if there is a whole header."""
    if len(data) - at < HEADER_BYTES:
        return None
    length, crc = _HEADER.unpack_from(data, at)
    return length if masked_crc(data[at : at + 8]) == crc else None


def _payload(data: bytes, length: int, at: int = 0) -> bytes | None:
    """The data of the frame at `at`, if it is whole."""
    stop = at + HEADER_BYTES + length
    if stop + 4 > len(data):
        return None
    payload = data[at + HEADER_BYTES : stop]
    return payload if masked_crc(payload) == _FOOTER.unpack_from(data, stop)[0] else None


def _lacks_a_sector(data: bytes, offset: int) -> bool:
    """Whether a sector's part of `data` (the file's bytes from `offset`) was never written.

    A part of less than 4 bytes proves nothing: a length may end in zeros.
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
        length = _header(data, at)
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

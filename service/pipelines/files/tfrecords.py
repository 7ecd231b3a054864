"""TFRecord files: a record is bytes. Each has a header and a footer, with checksums, which are
checked. Where records begin is in an index (record_index.py).
"""

from __future__ import annotations

import os
import struct
from array import array

from google_crc32c import value as crc32c

from ...blocks import Block
from . import record_index
from .formats import TEXT, Damaged, Facts, Format, Ints, NumberedFile, Options, pieces, texts

_HEADER = struct.Struct("<QI")  # the data's length, and the masked CRC of these 8 bytes
_FRAME_BYTES = 16  # header, and the masked CRC of the data behind it
_WINDOW_BYTES = 64 << 10
_MAX_KNOWN = 1 << 12


def _inspect(path: str, options: Options) -> Facts:
    return Facts(len(record_index.made(path, options, _walk)) - 1, TEXT)


def _walk(descriptor: int, size: int) -> array[int]:
    """Reads headers only, where records are large."""
    offsets, at = array("Q", [0]), 0
    lengths: dict[bytes, int] = {}  # by correct headers
    window, begin = b"", 0
    while at < size:
        header = window[at - begin : at - begin + 12]
        if len(header) < 12:
            window, begin = os.pread(descriptor, _WINDOW_BYTES, at), at
            header = window[:12]
        if (length := lengths.get(header)) is None:
            if len(lengths) >= _MAX_KNOWN:
                lengths.clear()
            if (found := _length(header)) is None:
                raise Damaged(
                    f"record {len(offsets) - 1}, at byte {at}, has no whole header: the file is "
                    "cut, damaged, compressed, or no TFRecord file. Write it again uncompressed, "
                    "or leave it out"
                )
            length = lengths[header] = found
        at += _FRAME_BYTES + length
        if at > size:
            raise Damaged(
                f"record {len(offsets) - 1}, at byte {offsets[-1]}, is cut: it has {length} bytes, "
                f"and the file ends {at - size} bytes before its end. Write it again, or truncate "
                f"it to {offsets[-1]} bytes"
            )
        offsets.append(at)
    return offsets


def _length(header: bytes) -> int | None:
    """None if it is no header."""
    if len(header) < _HEADER.size:
        return None
    length, masked = _HEADER.unpack(header)
    return int(length) if _masked_crc(header[:8]) == masked else None


def _masked_crc(data: bytes) -> int:
    crc: int = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class TFRecordFile(NumberedFile):
    def __init__(self, path: str, options: Options) -> None:
        self._offsets = record_index.opened(path, options)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        size, records = int(self._offsets[-1]), len(self._offsets) - 1
        super().__init__(size / max(1, records))

    def take(self, records: Ints) -> Block:
        found = []
        for frame in pieces(self._descriptor, self._offsets, records):
            data = frame[12:-4]
            if _length(frame[:12]) != len(data):
                raise Damaged("its header is damaged")
            if _masked_crc(data) != int.from_bytes(frame[-4:], "little"):
                raise Damaged("its checksum is another one than its data's")
            found.append(data)
        return Block(len(found), (texts(found),))

    def close(self) -> None:
        os.close(self._descriptor)


FORMAT = Format(
    suffixes=(".tfrecord", ".tfrecords"),
    is_it=lambda begin: _length(begin[:12]) is not None,
    inspect=_inspect,
    open=TFRecordFile,
)

"""TFRecord files as Beam reads them, for a fifth of the time.

Beam asks the file for each record's header, and for its data, claims its offset, and computes two
checksums in Python. Here the file is read by the mebibyte, and a header that was found to be right
is known. What does not come, or is not whole and right, Beam reads, once more from the file's
beginning: it knows which records are before the damage, and what to say.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import Any

from apache_beam.io.range_trackers import OffsetRangeTracker
from google_crc32c import value as crc32c

from . import internals

_HEADER = struct.Struct("<QI")  # the data's length, and the masked CRC of these 8 bytes
_FOOTER = struct.Struct("<I")  # the masked CRC of the data
_CHUNK_BYTES = 1 << 20
_MAX_KNOWN = 1 << 12


def records(source: internals.TFRecordSource, path: str) -> Iterator[Any]:
    """All of a file. Raises what Beam's own reading does, behind the same records."""
    decode = internals.tfrecord_decoder(source)
    count = 0
    try:
        for record in _intact(source, path):
            yield decode(record)
            count += 1
        return
    except _Damaged:
        pass
    whole = OffsetRangeTracker(0, OffsetRangeTracker.OFFSET_INFINITY)
    yield from itertools.islice(source.read_records(path, whole), count, None)


class _Damaged(Exception):
    """There is something behind what came."""


def _intact(source: internals.TFRecordSource, path: str) -> Iterator[bytes]:
    """Raises _Damaged."""
    lengths: dict[bytes, int] = {}  # by headers that are right
    with source.open_file(path) as file:
        buffer, at = b"", 0
        while True:
            header = buffer[at : at + 12]
            length = lengths.get(header)
            if length is None:
                if len(lengths) >= _MAX_KNOWN:
                    lengths.clear()
                if (length := _length(header)) is not None:
                    lengths[header] = length
            stop = at + 12 + (length or 0)
            record = buffer[at + 12 : stop]
            if length is not None and stop + 4 <= len(buffer):
                crc = crc32c(record)
                masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
                if (masked,) != _FOOTER.unpack_from(buffer, stop):
                    raise _Damaged
                at = stop + 4
                yield record
                continue
            if length is None and len(header) == 12:
                raise _Damaged
            try:
                more = file.read(max(_CHUNK_BYTES, stop + 4 - len(buffer)))
            except Exception as error:
                raise _Damaged from error
            if more:
                buffer, at = buffer[at:] + more, 0
            elif header:
                raise _Damaged
            else:
                return


def _length(header: bytes) -> int | None:
    if len(header) < 12:
        return None
    length, expected = _HEADER.unpack(header)
    crc = crc32c(header[:8])
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return int(length) if masked == expected else None

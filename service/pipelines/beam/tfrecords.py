"""Reads TFRecord files like Beam, in a fifth of the time.

For each record, Beam asks the file for the header and for the data, claims the offset, and computes
two checksums in Python. This module reads the file by the mebibyte, and remembers headers that were
correct. If a record is missing, cut or damaged, Beam reads the file again from its beginning: Beam
knows which records come before the damage, and what to report.
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
    """All records of a file. Raises what Beam raises, after the same records."""
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
    """The file has damage behind the records that came."""


def _intact(source: internals.TFRecordSource, path: str) -> Iterator[bytes]:
    """Raises _Damaged."""
    lengths: dict[bytes, int] = {}  # by correct headers
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

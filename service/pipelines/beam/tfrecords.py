"""Reads TFRecord files like Beam, in a fifth of the time.

For each record, Beam asks the file for the header and for the data, claims the offset, and computes
two checksums in Python. This module reads the file by the mebibyte, and remembers headers that were
correct. If a record is missing, cut or damaged, Beam reads the file again from its beginning: Beam
knows which records come before the damage, and what to report.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from apache_beam.io.range_trackers import OffsetRangeTracker

from ....storage.tfrecord import HEADER_BYTES, data_length, masked_crc
from . import internals

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
            header = buffer[at : at + HEADER_BYTES]
            length = lengths.get(header)
            if length is None:
                if len(lengths) >= _MAX_KNOWN:
                    lengths.clear()
                if (length := data_length(header)) is not None:
                    lengths[header] = length
            stop = at + HEADER_BYTES + (length or 0)
            record = buffer[at + HEADER_BYTES : stop]
            if length is not None and stop + 4 <= len(buffer):
                if masked_crc(record) != int.from_bytes(buffer[stop : stop + 4], "little"):
                    raise _Damaged
                at = stop + 4
                yield record
                continue
            if length is None and len(header) == HEADER_BYTES:
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

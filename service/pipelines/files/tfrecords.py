"""TFRecord files, also compressed as TensorFlow does: a record is bytes. Each has a header and a
footer, with checksums, which are checked (storage/tfrecord.py). Where records begin is in an index
(record_index.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from ....storage.tfrecord import FRAME_BYTES, HEADER_BYTES, data_length, masked_crc
from ...blocks import Block
from . import record_index
from .byte_sources import ByteSource
from .formats import Damaged, Format, Ints, Options, texts
from .streams import Walk

_WINDOW_BYTES = 64 << 10
_MAX_KNOWN = 1 << 12


class Frames(Walk):
    def is_plain(self, begin: bytes) -> bool:
        return data_length(begin) is not None

    def boundaries(self, source: ByteSource) -> Iterator[int]:
        """Reads headers only, where records are large."""
        at, record = 0, 0
        lengths: dict[bytes, int] = {}  # by correct headers
        window, begin = b"", 0
        yield 0
        while source.reaches(at + 1):
            header = window[at - begin : at - begin + HEADER_BYTES]
            if len(header) < HEADER_BYTES:
                window, begin = bytes(source.read(at, _WINDOW_BYTES)), at
                header = window[:HEADER_BYTES]
            if (length := lengths.get(header)) is None:
                if len(lengths) >= _MAX_KNOWN:
                    lengths.clear()
                if (found := data_length(header)) is None:
                    raise Damaged(
                        f"record {record}, at byte {at}, has no whole header: the file is cut, "
                        "damaged, or no TFRecord file. Write it again, or leave it out"
                    )
                length = lengths[header] = found
            end = at + FRAME_BYTES + length
            if not source.reaches(end):
                raise Damaged(
                    f"record {record}, at byte {at}, is cut: it has {length} bytes, and the file "
                    f"ends {end - source.size} bytes before its end. Write it again, or truncate "
                    f"it to {at} bytes"
                )
            at, record = end, record + 1
            yield at


class TFRecordFile(record_index.FileOfRecords):
    def __init__(self, source: ByteSource, options: Options) -> None:
        super().__init__(source, options, Frames())

    def take(self, records: Ints) -> Block:
        found = []
        for piece in self.pieces(records):
            frame = bytes(piece)
            data = frame[HEADER_BYTES:-4]
            if data_length(frame) != len(data):
                raise Damaged(
                    "no record begins where its index says, so its header is damaged, or the file "
                    "was changed: register it again, which makes the index anew"
                )
            if masked_crc(data) != int.from_bytes(frame[-4:], "little"):
                raise Damaged("its checksum is another one than its data's")
            found.append(data)
        return Block(len(found), (texts(found),))


FORMAT = Format(
    suffixes=(".tfrecord", ".tfrecords"),
    matches=lambda begin: data_length(begin) is not None,
    inspect=lambda source, options: record_index.inspected(source, options, Frames()),
    open=TFRecordFile,
    options=("index_dir", "count"),
)

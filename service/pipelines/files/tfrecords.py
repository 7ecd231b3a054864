"""TFRecord files: a record is bytes. Each has a header and a footer, with checksums, which are
checked (storage/tfrecord.py). Where records begin is in an index (record_index.py).
"""

from __future__ import annotations

from array import array

from ....storage.tfrecord import FRAME_BYTES, HEADER_BYTES, data_length, masked_crc
from ...blocks import Block
from . import record_index
from .byte_sources import ByteSource
from .formats import TEXT, Damaged, Facts, Format, Ints, NumberedFile, Options, texts

_WINDOW_BYTES = 64 << 10
_MAX_KNOWN = 1 << 12


def _inspect(source: ByteSource, options: Options) -> Facts:
    records, _ = record_index.made(source, options, _walk)
    return Facts(records, TEXT)


def _walk(source: ByteSource) -> tuple[array[int], bytes]:
    """Reads headers only, where records are large."""
    offsets, at, size = array("Q", [0]), 0, source.size
    lengths: dict[bytes, int] = {}  # by correct headers
    window, begin = b"", 0
    while at < size:
        header = window[at - begin : at - begin + HEADER_BYTES]
        if len(header) < HEADER_BYTES:
            window, begin = bytes(source.read(at, _WINDOW_BYTES)), at
            header = window[:HEADER_BYTES]
        if (length := lengths.get(header)) is None:
            if len(lengths) >= _MAX_KNOWN:
                lengths.clear()
            if (found := data_length(header)) is None:
                raise Damaged(
                    f"record {len(offsets) - 1}, at byte {at}, has no whole header: the file is "
                    "cut, damaged, compressed, or no TFRecord file. Write it again uncompressed, "
                    "or leave it out"
                )
            length = lengths[header] = found
        at += FRAME_BYTES + length
        if at > size:
            raise Damaged(
                f"record {len(offsets) - 1}, at byte {offsets[-1]}, is cut: it has {length} bytes, "
                f"and the file ends {at - size} bytes before its end. Write it again, or truncate "
                f"it to {offsets[-1]} bytes"
            )
        offsets.append(at)
    return offsets, b""


class TFRecordFile(NumberedFile):
    def __init__(self, source: ByteSource, options: Options) -> None:
        self._file = record_index.IndexedFile(source, options)
        super().__init__(self._file.record_bytes)

    def take(self, records: Ints) -> Block:
        found = []
        for piece in self._file.pieces(records):
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

    def plan(self, first: int, stop: int) -> None:
        self._file.plan(first, stop)

    def close(self) -> None:
        self._file.close()


FORMAT = Format(
    suffixes=(".tfrecord", ".tfrecords"),
    is_it=lambda begin: data_length(begin) is not None,
    inspect=_inspect,
    open=TFRecordFile,
    takes=("index_dir",),
)

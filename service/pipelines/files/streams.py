"""Files that are read from their begin: what is compressed, or whose records were not counted.

An UnpackedFile gives what a file decompresses to, as other sources give bytes. It goes forward in
bounded memory, and keeps some bytes to go back to; for earlier ones it begins again. So formats
find records in it as in a plain file.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from typing import Any

import zstandard
from zlib_ng import zlib_ng

from ....storage.errors import Corrupt
from .byte_sources import ByteSource
from .formats import FIRST_BYTES, LATER_BYTES, Damaged, Options

UNCOUNTED = 1 << 40
"""Records of a file that nobody has counted: more than it has."""

SAMPLE_RECORDS = 1000
"""Of a file whose records are not counted, so many say what records are."""

_MOST_RECORDS = 1 << 14  # of a block
_PART_BYTES, _PLANNED_BYTES = 1 << 20, 4 << 20  # read at a time; without reading ahead
_FED_BYTES = 4 << 10
"""Decompressed at a time: bytes that are made to harm become 30,000 times as many in zstd."""

_BACK_BYTES = 1 << 20  # kept at least

_ADVICE = "Write it again, or leave it out"
_of_zlib = functools.partial(zlib_ng.decompressobj, 47)  # and of gzip


def compression(begin: bytes) -> str:
    """How a file is compressed that begins so; "zlib" may be something else."""
    if begin.startswith(b"\x1f\x8b\x08"):
        return "gzip"
    is_skippable = begin[1:4] == b"\x2a\x4d\x18" and begin[0] >> 4 == 5  # a frame of zstd
    if begin.startswith(b"\x28\xb5\x2f\xfd") or is_skippable:
        return "zstd"
    return "zlib" if begin[:1] == b"x" and int.from_bytes(begin[:2], "big") % 31 == 0 else ""


class Walk(ABC):
    """Finds the records of a file in a format."""

    says: bool | None = False
    """Whether the format says something of the records; None: it may."""

    def is_plain(self, begin: bytes) -> bool:
        """Whether a file that begins so is not compressed."""
        return begin.startswith(b"x")  # zlib is for TFRecord only

    @abstractmethod
    def boundaries(self, source: ByteSource) -> Iterator[int]:
        """Where each record begins, and the last one ends. Raises Damaged, InvalidArgument."""

    def said(self) -> bytes:
        """What the format says of the records that were found last."""
        return b""

    def __call__(self, source: ByteSource) -> tuple[array[int], bytes]:
        return array("Q", self.boundaries(source)), self.said()


class UnpackedFile(ByteSource):
    """What a file decompresses to, or the file itself. Damaged bytes are Damaged, once all before
    them has been read."""

    def __init__(self, source: ByteSource, kind: str) -> None:
        super().__init__(source.entry)
        self._source, self.kind = source, kind  # "" if it is not compressed
        self.size = sys.maxsize  # until the end is reached
        self.kept_from = sys.maxsize  # bytes from there on are kept
        self._restart()

    def _restart(self) -> None:
        self._begin, self._data = 0, bytearray()
        self._fault: Damaged | None = None  # behind these
        self._chunks = self._decompressed()

    def _decompressed(self) -> Iterator[bytes | memoryview]:
        """Of all members of a gzip file, and all frames of a zstd file."""
        kind, size = self.kind, self._source.size
        new = zstandard.ZstdDecompressor().decompressobj if kind == "zstd" else _of_zlib
        decoder, members = None, 0
        for at in range(0, size, _PART_BYTES):
            if at == _PLANNED_BYTES:  # more than a look
                self._source.plan([(at, size)])
            part = memoryview(self._source.read(at, _PART_BYTES))
            if not kind:
                yield part
                continue
            for begin in range(0, len(part), _FED_BYTES):
                data: Any = part[begin : begin + _FED_BYTES]
                while len(data):
                    if decoder is None:
                        if members and kind == "gzip" and not (data := bytes(data).lstrip(b"\0")):
                            break  # zeros between members, and behind them, are padding
                        decoder, members = new(), members + 1
                    try:
                        piece = decoder.decompress(data)
                    except (zlib_ng.error, zstandard.ZstdError) as error:  # type: ignore[misc]
                        where = f"damaged before byte {at + begin + _FED_BYTES} ({error})"
                        self._fault = Damaged(f"its {kind} data are {where}. {_ADVICE}")
                        return
                    data = decoder.unused_data
                    if decoder.eof:
                        decoder = None
                    yield piece
        if decoder is not None:
            self._fault = Damaged(f"its {kind} data are cut at byte {size}. {_ADVICE}")

    def _fill(self, stop: int, keep: int) -> None:
        """Up to `stop`, or the end; bytes before `keep` may go."""
        keep = min(keep, self.kept_from) - _BACK_BYTES
        while (end := self._begin + len(self._data)) < min(stop, self.size) and not self._fault:
            try:
                piece = next(self._chunks, None)
            except BaseException:
                self._restart()  # or the stream would seem to end here
                raise
            if piece is None:
                self.size = self.size if self._fault else end
                return
            self._data += piece
            if (gone := min(keep - self._begin, len(self._data))) > _BACK_BYTES:
                del self._data[:gone]
                self._begin += gone

    def read(self, start: int, size: int) -> bytes:
        if start < self._begin:
            self._restart()
        self._fill(start + size, start)
        at = start - self._begin
        if self._fault and at >= len(self._data):
            raise self._fault
        with memoryview(self._data) as data:
            return bytes(data[at : at + size])

    def reaches(self, end: int) -> bool:
        self._fill(end, end)
        if self._fault and end > self._begin + len(self._data):
            raise self._fault
        return end <= self.size

    def close(self) -> None:
        self._source.close()
        super().close()


def unpacked(source: ByteSource, options: Options, walk: Walk) -> ByteSource:
    """The source, or a stream of it if it is compressed or not counted. Raises OSError."""
    kind = source.entry.packed
    if kind is None:
        begin = bytes(source.read(0, 512))
        kind = "" if walk.is_plain(begin) else compression(begin)
    return UnpackedFile(source, kind) if kind or options.get("count") is False else source


class StreamedFile:
    """An open stream, whose records are found as they come, as an index has them."""

    record_bytes = 1.0

    def __init__(self, source: UnpackedFile, walk: Walk) -> None:
        self._source, self._walk = source, walk
        self._restart()

    def _restart(self) -> None:
        self._first, self._offsets = 0, list[int]()
        """A record, and where it and those behind it begin."""
        self._rest = self._walk.boundaries(self._source)
        self._fault: Damaged | None = None  # behind these
        self._source.kept_from = 0

    def _advance(self) -> bool:
        """Whether there is one more boundary. Raises Corrupt, InvalidArgument, OSError."""
        try:
            if self._fault:
                raise self._fault
            found = next(self._rest, None)
        except Damaged as error:
            self._fault, record = error, self._first + max(0, len(self._offsets) - 1)
            path = self._source.path
            raise Corrupt(f"{path} cannot be read from record {record} on: {error}") from error
        except BaseException:
            self._restart()  # or the file would seem to end here
            raise
        if found is not None:
            self._offsets.append(found)
        return found is not None

    def _seek(self, record: int) -> None:
        """`record` is the first one whose begin is known, if there is one."""
        if record < self._first:
            self._restart()
        while not self._offsets or self._first < record:
            if len(self._offsets) < 2 and not self._advance():
                return  # it has no such record
            gone = min(record - self._first, len(self._offsets) - 1)
            del self._offsets[:gone]
            self._first += gone
            self._source.kept_from = self._offsets[0]

    def offsets(self, first: int, stop: int) -> list[int]:
        """Raises Damaged behind the last record."""
        if not self._first <= first < self._first + len(self._offsets):
            self._seek(first)
        while len(self._offsets) < stop - self._first:
            if not self._advance():
                raise Damaged(f"the file has {self._first + len(self._offsets) - 1} records")
        return self._offsets[first - self._first : stop - self._first]

    def steps(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """As of formats.py, but not beyond the last record."""
        size = FIRST_BYTES
        while first < stop:
            self._seek(first)
            most = min(stop - first, _MOST_RECORDS)
            wanted = self._offsets[0] + size
            with contextlib.suppress(Corrupt):  # until all before has been read
                while len(self._offsets) <= most and self._offsets[-1] < wanted and self._advance():
                    pass
            there = min(most, len(self._offsets) - 1)
            end = first + min(there, bisect.bisect_left(self._offsets, wanted))
            if self._first != first or (end == first and not (self._fault and self._advance())):
                return
            yield first, end
            first, size = end, min(2 * size, LATER_BYTES)

    def said(self) -> bytes:
        return self._walk.said()

    def close(self) -> None:
        """As of an index, which leaves the source open."""

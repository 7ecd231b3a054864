"""Where the records of a file begin, for formats that do not say: a file beside it.

It is written when the file is registered, and again if the file has another time than the index,
or the index is damaged. Workers read it under the same path. Of an object that is read as a whole,
it is in memory only, and is made when the object is opened. Its checksum is compared when it is
opened; later, offsets are read when they are needed. Nothing is mapped: a process dies of SIGBUS
where it maps a file that somebody else truncates. Little-endian:

    magic (8 bytes), fingerprint of the file (8), its size (u64), number of records n (u64),
    CRC-32C of what follows (u32), number of bytes that a format says of its records (u32),
    n + 1 offsets (u64): of each record, and behind the last one; these bytes
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import struct
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from google_crc32c import Checksum
from google_crc32c import value as crc32c

from ...errors import FailedPrecondition, InvalidArgument
from . import stores
from .byte_cache import published
from .byte_sources import Buffer, ByteSource, opened_now
from .formats import TEXT, Damaged, Facts, Node, Options, RandomAccessFile, read_at, steps
from .manifest import FileEntry
from .streams import SAMPLE_RECORDS, UNCOUNTED, StreamedFile, UnpackedFile, Walk, unpacked

SUFFIX = ".forebay-index"
_HEAD = struct.Struct("<8s8sQQII")
_MAGIC = b"FBINDEX2"
_CHUNK = 1 << 20  # bytes whose checksum is computed at a time


Walked = Callable[[ByteSource], tuple["array[int]", bytes]]
"""The offsets of a file, and what its format says of the records. Raises Damaged."""


def path_of(path: str, options: Options) -> str:
    """Of the index of the file at `path`. Either may be a URL."""
    directory, tokens = options.get("index_dir"), options.get("tokens", {})
    path += options.get("index", "")  # of a format whose records are others
    if "eod" in tokens:  # other ends are another index
        path += f".{tokens.get('dtype', '')}-{tokens['eod']}"
    if directory is None:
        return path + SUFFIX
    below = path.replace("://", "/") if stores.is_url(path) else os.path.abspath(path).lstrip("/")
    return os.path.join(directory, below + SUFFIX)


class RecordIndex:
    """An index that is open: the offsets of a file's records, and behind the last one."""

    def __init__(self, source: ByteSource, head: tuple[bytes, int]) -> None:
        """Raises Damaged if it is of another file than `head` says, or damaged. The source is the
        index's from then on."""
        self._source, size = source, source.size
        self.head = bytes(read_at(source, 0, _HEAD.size))
        magic, *of, self.records, checksum, more = _HEAD.unpack(self.head)
        if magic != _MAGIC or (*of,) != head or size != _HEAD.size + 8 * (self.records + 1) + more:
            raise Damaged("it is of another file")
        found = Checksum()
        for at in range(_HEAD.size, size, _CHUNK):
            found.update(read_at(source, at, min(_CHUNK, size - at)))
        self._said = size - more, more
        self.record_bytes = head[1] / max(1, self.records)
        if int.from_bytes(found.digest(), "big") != checksum:
            raise Damaged("its checksum is another one")

    def offsets(self, first: int, stop: int) -> list[int]:
        """Raises FailedPrecondition."""
        try:
            data = read_at(self._source, _HEAD.size + 8 * first, 8 * (stop - first))
        except Damaged as error:
            raise FailedPrecondition(
                f"the index {self._source.path} was cut after it was opened: register the files "
                "again, which writes it"
            ) from error
        found: list[int] = np.frombuffer(data, "<u8").tolist()
        return found

    def steps(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        return steps(first, stop, self.record_bytes)

    def said(self) -> bytes:
        """What the format says of the records. Raises Damaged."""
        return bytes(read_at(self._source, *self._said))

    def close(self) -> None:
        self._source.close()


def indexed(source: ByteSource, options: Options, walk: Walked) -> RecordIndex:
    """The index of an open file. Raises Damaged, with what to do, and OSError."""
    head, index = _head(source.entry), path_of(source.path, options)
    if source.is_whole:
        return RecordIndex(Buffer(source.entry, _content(head, *walk(source))), head)
    if (found := _index(index, head, options)) is None:
        raise Damaged(
            f"its index {index} is not there, damaged, or of another file: register the "
            "files again, which writes it, where workers see it under the same path"
        )
    return found


def opened(source: ByteSource, options: Options, walk: Walk) -> RecordIndex | StreamedFile:
    """Of a source that is `unpacked`. Raises Damaged, OSError."""
    if isinstance(source, UnpackedFile):
        return StreamedFile(source, walk)
    return indexed(source, options, walk)


class FileOfRecords(RandomAccessFile):
    """A file whose records are found by an index, or as a stream has them."""

    def __init__(self, source: ByteSource, options: Options, walk: Walk) -> None:
        source = unpacked(source, options, walk)
        self._file = opened(source, options, walk)
        super().__init__(source, self._file.record_bytes)

    def offsets(self, first: int, stop: int) -> list[int]:
        return self._file.offsets(first, stop)

    def steps(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        return self._file.steps(first, stop)

    def plan(self, first: int, stop: int) -> None:
        if isinstance(self._file, RecordIndex):  # a stream plans itself
            super().plan(first, stop)

    def close(self) -> None:
        self._file.close()
        super().close()


def facts(source: ByteSource, records: int, structure: Node, **more: Any) -> Facts:
    """Of a source that is `unpacked`; a stream is one split."""
    if isinstance(source, UnpackedFile):
        more |= {"cuts": (0, records), "packed": source.kind}
    return Facts(records, structure, **more)


def inspected(source: ByteSource, options: Options, walk: Walk) -> Facts:
    """A format's `inspect`, of records that are bytes."""
    source = unpacked(source, options, walk)
    records, _ = counted(source, options, walk)
    return facts(source, records, TEXT)


def counted(source: ByteSource, options: Options, walk: Walk) -> tuple[int, bytes]:
    """As `made`, of a source that is `unpacked`: a stream has no index."""
    if options.get("count") is False:
        some = sum(1 for _ in itertools.islice(walk.boundaries(source), SAMPLE_RECORDS + 1))
        return UNCOUNTED if some > 1 else 0, walk.said()
    if isinstance(source, UnpackedFile):
        return sum(1 for _ in walk.boundaries(source)) - 1, walk.said()
    return made(source, options, walk, says=walk.says)


def made(
    source: ByteSource, options: Options, walk: Walked, *, says: bool | None = False
) -> tuple[int, bytes]:
    """How many records there are, and what the format `says` (None: it may), by the index that is
    there or by one that `walk` makes, which is stored, but for what is read as a whole. Raises
    what `walk` raises, OSError, and InvalidArgument if no index can be written."""
    if source.is_whole:
        offsets, said = walk(source)
        return len(offsets) - 1, said
    index, head = path_of(source.path, options), _head(source.entry)
    changed_ns = source.changed_ns
    there = b""
    if found := _index(index, head, options):
        with contextlib.closing(found):
            there = found.said()
        of_it = changed_ns is None or os.stat(index).st_mtime_ns == changed_ns
        if says in (None, bool(there)) and of_it:
            return found.records, there
    source.plan([(0, source.size)])
    offsets, said = walk(source)
    content = _content(head, offsets, said)
    if found and changed_ns is not None and found.head == content[: _HEAD.size]:
        with contextlib.suppress(OSError):  # of a copy; it may be another user's
            os.utime(index, ns=(changed_ns, changed_ns))
        return found.records, said
    try:
        if stores.is_url(index):
            stores.put(index, content, options.get("storage", {}))
        else:
            _write(index, content, changed_ns)
    except OSError as error:
        raise InvalidArgument(
            f"the index {index} cannot be written ({error.strerror}): give index_dir, a directory "
            "or a URL that workers see under the same path"
        ) from error
    return len(offsets) - 1, said


def _content(head: tuple[bytes, int], offsets: array[int], said: bytes) -> bytes:
    data = offsets.tobytes() + said
    return _HEAD.pack(_MAGIC, *head, len(offsets) - 1, crc32c(data), len(said)) + data


def _write(index: str, content: bytes, changed_ns: int | None) -> None:
    """Raises OSError."""
    new = f"{index.removesuffix(SUFFIX)}.{secrets.token_hex(8)}{SUFFIX}"
    os.makedirs(os.path.dirname(index), exist_ok=True)
    with published(new, index) as file:
        file.write(content)
        file.flush()
        if changed_ns is not None:
            # An index is used again for a file of this time only, which may be an older one:
            os.utime(file.fileno(), ns=(changed_ns, changed_ns))
        os.fsync(file.fileno())


def _head(entry: FileEntry) -> tuple[bytes, int]:
    """A file's fingerprint in 8 bytes, and its size."""
    said = entry.fingerprint.encode()
    return said if len(said) == 8 else f"{crc32c(said):08x}".encode(), entry.size


def _index(index: str, head: tuple[bytes, int], options: Options) -> RecordIndex | None:
    """None if it is not there, damaged, or another file's. Raises OSError."""
    try:
        source = opened_now(index, options.get("storage", {}))
    except FileNotFoundError:
        return None
    try:
        if stores.is_url(index):
            source = Buffer(source.entry, bytes(source.read(0, source.size)))
        return RecordIndex(source, head)
    except BaseException as error:
        source.close()
        if isinstance(error, Damaged):
            return None
        raise

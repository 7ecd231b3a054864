"""Where the records of a file begin, for formats that do not say: a file beside it.

It is written when the file is registered, and again if the file has another time than the index,
or the index is damaged. Workers read it under the same path. Its checksum is compared when it is
opened; later, offsets are read when they are needed. Nothing is mapped: a process dies of SIGBUS
where it maps a file that somebody else truncates. Little-endian:

    magic (8 bytes), fingerprint of the file (8), its size (u64), number of records n (u64),
    CRC-32C of what follows (u32), number of bytes that a format says of its records (u32),
    n + 1 offsets (u64): of each record, and behind the last one; these bytes
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from array import array
from collections.abc import Callable, Iterator

import numpy as np
from google_crc32c import Checksum

from ...errors import FailedPrecondition, InvalidArgument
from .formats import Damaged, Ints, Options, pieces, read_at
from .manifest import fingerprint, regular

SUFFIX = ".forebay-index"
_HEAD = struct.Struct("<8s8sQQII")
_MAGIC = b"FBINDEX2"
_CHUNK = 1 << 20  # bytes whose checksum is computed at a time

Walk = Callable[[int, int], tuple["array[int]", bytes]]
"""The offsets of an open file of this size, and what its format says of the records. Raises
Damaged."""


def path_of(path: str, options: Options) -> str:
    """Of the index of the file at `path`."""
    directory = options.get("index_dir")
    if directory is None:
        return path + SUFFIX
    return os.path.join(directory, os.path.abspath(path).lstrip("/") + SUFFIX)


class RecordIndex:
    """An index that is open: the offsets of a file's records, and behind the last one."""

    def __init__(self, path: str, descriptor: int, head: tuple[bytes, int]) -> None:
        """Raises Damaged if it is of another file than `head` says, or damaged. The descriptor is
        the index's from then on."""
        self._path, self._descriptor = path, descriptor
        size = os.fstat(descriptor).st_size
        magic, *of, self.records, checksum, more = _HEAD.unpack(read_at(descriptor, 0, _HEAD.size))
        if magic != _MAGIC or (*of,) != head or size != _HEAD.size + 8 * (self.records + 1) + more:
            raise Damaged("it is of another file")
        found = Checksum()
        for at in range(_HEAD.size, size, _CHUNK):
            found.update(read_at(descriptor, at, min(_CHUNK, size - at)))
        self.checksum = int.from_bytes(found.digest(), "big")
        self._said = size - more, more
        if self.checksum != checksum:
            raise Damaged("its checksum is another one")

    def offsets(self, first: int, stop: int) -> list[int]:
        """Raises FailedPrecondition."""
        try:
            data = read_at(self._descriptor, _HEAD.size + 8 * first, 8 * (stop - first))
        except Damaged as error:
            raise FailedPrecondition(
                f"the index {self._path} was cut after it was opened: register the files again, "
                "which writes it"
            ) from error
        found: list[int] = np.frombuffer(data, "<u8").tolist()
        return found

    def said(self) -> bytes:
        """What the format says of the records. Raises Damaged."""
        return read_at(self._descriptor, *self._said)

    def close(self) -> None:
        os.close(self._descriptor)


class IndexedFile:
    """An open file with its index."""

    def __init__(self, path: str, options: Options) -> None:
        """Raises Damaged, with what to do, and OSError."""
        with contextlib.ExitStack() as kept:
            self._descriptor = regular(path, os.O_RDONLY)
            kept.callback(os.close, self._descriptor)
            head = _head(self._descriptor)
            index = path_of(path, options)
            found = _index(index, head)
            if found is None:
                raise Damaged(
                    f"its index {index} is not there, damaged, or of another file: register the "
                    "files again, which writes it, where workers see it under the same path"
                )
            self.index = found
            self.record_bytes = head[1] / max(1, found.records)
            kept.pop_all()

    def pieces(self, records: Ints) -> Iterator[bytes]:
        """Raises Damaged, FailedPrecondition."""
        return pieces(self._descriptor, self.index.offsets, records)

    def close(self) -> None:
        self.index.close()
        os.close(self._descriptor)


def made(path: str, options: Options, walk: Walk, *, says: bool = False) -> tuple[int, bytes]:
    """How many records there are, and what the format `says`, by the index that is there or by one
    that `walk` makes. Raises what `walk` raises, OSError, and InvalidArgument if no index can be
    written."""
    index = path_of(path, options)
    with open(path, "rb", opener=regular) as file, contextlib.ExitStack() as opened:
        head = _head(file.fileno())
        changed_ns = os.fstat(file.fileno()).st_mtime_ns
        if found := _index(index, head):
            opened.callback(found.close)
            there = found.said()
            if bool(there) == says and os.stat(index).st_mtime_ns == changed_ns:
                return found.records, there
        offsets, said = walk(file.fileno(), head[1])
    checksum = _checksum(offsets, said)
    if found and (found.checksum, there) == (checksum, said):  # as of a copy
        with contextlib.suppress(OSError):  # it may be another user's
            os.utime(index, ns=(changed_ns, changed_ns))
        return found.records, said
    new = f"{index.removesuffix(SUFFIX)}.{secrets.token_hex(8)}{SUFFIX}"
    try:
        os.makedirs(os.path.dirname(index), exist_ok=True)
        with open(new, "xb") as file:
            file.write(_HEAD.pack(_MAGIC, *head, len(offsets) - 1, checksum, len(said)))
            offsets.tofile(file)
            file.write(said)
            file.flush()
            # An index is used again for a file of this time only, which may be an older one:
            os.utime(file.fileno(), ns=(changed_ns, changed_ns))
            os.fsync(file.fileno())
        os.replace(new, index)
    except OSError as error:
        raise InvalidArgument(
            f"the index {index} cannot be written ({error.strerror}): give index_dir, a directory "
            "that workers see under the same path"
        ) from error
    finally:
        with contextlib.suppress(OSError):  # it has the index's name, unless there was an error
            os.unlink(new)
    return len(offsets) - 1, said


def _head(descriptor: int) -> tuple[bytes, int]:
    size = os.fstat(descriptor).st_size
    return fingerprint(descriptor, size).encode(), size


def _index(index: str, head: tuple[bytes, int]) -> RecordIndex | None:
    """None if it is not there, damaged, or another file's. Raises OSError."""
    try:
        descriptor = regular(index, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return RecordIndex(index, descriptor, head)
    except Damaged:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise


def _checksum(offsets: array[int], said: bytes) -> int:
    found = Checksum()
    for begin in range(0, len(offsets), _CHUNK):
        found.update(offsets[begin : begin + _CHUNK].tobytes())
    found.update(said)
    return int.from_bytes(found.digest(), "big")

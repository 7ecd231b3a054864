"""Where the records of a file begin, for formats that do not say: a file beside it.

It is written when the file is registered, and again if the file has another time than the index,
or the index is damaged. Workers read it under the same path. Its checksum is compared when it is
opened; then only the parts that are used of it are in memory. Little-endian:

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
from collections.abc import Callable

import numpy as np
from google_crc32c import Checksum

from ...blocks import Array
from ...errors import InvalidArgument
from .formats import Damaged, Options
from .manifest import fingerprint, regular

SUFFIX = ".forebay-index"
_HEAD = struct.Struct("<8s8sQQII")
_MAGIC = b"FBINDEX2"
_CHUNK = 1 << 17  # offsets whose checksum is computed at a time

Walk = Callable[[int, int], tuple["array[int]", bytes]]
"""The offsets of an open file of this size, and what its format says of the records. Raises
Damaged."""


def path_of(path: str, options: Options) -> str:
    """Of the index of the file at `path`."""
    directory = options.get("index_dir")
    if directory is None:
        return path + SUFFIX
    return os.path.join(directory, os.path.abspath(path).lstrip("/") + SUFFIX)


def opened(path: str, options: Options) -> tuple[Array, bytes]:
    """The offsets, as a view of the index, and what the format says. Raises Damaged, with what to
    do, and OSError."""
    index = path_of(path, options)
    with open(path, "rb") as file:
        found = _offsets(index, _head(file.fileno()))
    if found is None:
        raise Damaged(
            f"its index {index} is not there, damaged, or of another file: register the files "
            "again, which writes it, where workers see it under the same path"
        )
    return found


def made(path: str, options: Options, walk: Walk, *, says: bool = False) -> tuple[Array, bytes]:
    """The offsets, of the index that is there or of one that `walk` makes, and what the format
    `says`. Raises what `walk` raises, OSError, and InvalidArgument if no index can be written."""
    index = path_of(path, options)
    with open(path, "rb") as file:
        head = _head(file.fileno())
        changed_ns = os.fstat(file.fileno()).st_mtime_ns
        found = _offsets(index, head)
        if found and bool(found[1]) == says and os.stat(index).st_mtime_ns == changed_ns:
            return found
        offsets, said = walk(file.fileno(), head[1])
    values = np.frombuffer(offsets, np.uint64)
    if found and np.array_equal(found[0], values) and found[1] == said:  # as of a copy
        with contextlib.suppress(OSError):  # it may be another user's
            os.utime(index, ns=(changed_ns, changed_ns))
        return values, said
    new = f"{index.removesuffix(SUFFIX)}.{secrets.token_hex(8)}{SUFFIX}"
    try:
        os.makedirs(os.path.dirname(index), exist_ok=True)
        with open(new, "xb") as file:
            checksum = _checksum(values, said)
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
    return values, said


def _head(descriptor: int) -> tuple[bytes, int]:
    size = os.fstat(descriptor).st_size
    return fingerprint(descriptor, size).encode(), size


def _offsets(index: str, head: tuple[bytes, int]) -> tuple[Array, bytes] | None:
    """Also what the format says. None if it is not there, damaged, or another file's."""
    try:
        with open(index, "rb", opener=regular) as file:
            begin, size = file.read(_HEAD.size), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None
    if len(begin) < _HEAD.size:
        return None
    magic, *of, records, checksum, more = _HEAD.unpack(begin)
    behind = _HEAD.size + 8 * (records + 1)
    if magic != _MAGIC or (*of,) != head or size != behind + more:
        return None
    offsets = np.memmap(index, "<u8", "r", _HEAD.size, (records + 1,))
    said = np.memmap(index, "u1", "r", behind, (more,)).tobytes() if more else b""
    return (offsets, said) if _checksum(offsets, said) == checksum else None


def _checksum(offsets: Array, said: bytes) -> int:
    found = Checksum()
    for begin in range(0, len(offsets), _CHUNK):
        found.update(offsets[begin : begin + _CHUNK].tobytes())
    found.update(said)
    return int.from_bytes(found.digest(), "big")

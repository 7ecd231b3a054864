"""Where the records of a file begin, for formats that do not say: a file beside it.

It is written when the file is registered, and again if the file has another time than the index,
or the index is damaged. Workers read it under the same path. Its checksum is compared when it is
opened; then only the parts that are used of it are in memory. Little-endian:

    magic (8 bytes), fingerprint of the file (8), its size (u64), number of records n (u64),
    CRC-32C of the offsets (u32), 4 zeros,
    n + 1 offsets (u64): of each record, and behind the last one
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
from .manifest import fingerprint

SUFFIX = ".forebay-index"
_HEAD = struct.Struct("<8s8sQQI4x")
_MAGIC = b"FBINDEX2"
_CHUNK = 1 << 17  # offsets whose checksum is computed at a time

Walk = Callable[[int, int], "array[int]"]
"""The offsets of an open file of this size. Raises Damaged."""


def path_of(path: str, options: Options) -> str:
    """Of the index of the file at `path`."""
    directory = options.get("index_dir")
    if directory is None:
        return path + SUFFIX
    return os.path.join(directory, os.path.abspath(path).lstrip("/") + SUFFIX)


def opened(path: str, options: Options) -> Array:
    """The offsets, as a view of the index. Raises Damaged, with what to do, and OSError."""
    index = path_of(path, options)
    with open(path, "rb") as file:
        found = _offsets(index, _head(file.fileno()))
    if found is None:
        raise Damaged(
            f"its index {index} is not there, damaged, or of another file: register the files "
            "again, which writes it, where workers see it under the same path"
        )
    return found


def made(path: str, options: Options, walk: Walk) -> Array:
    """The offsets, of the index that is there or of one that `walk` makes. Raises what it raises,
    OSError, and InvalidArgument if no index can be written."""
    index = path_of(path, options)
    with open(path, "rb") as file:
        head = _head(file.fileno())
        changed_ns = os.fstat(file.fileno()).st_mtime_ns
        found = _offsets(index, head)
        if found is not None and os.stat(index).st_mtime_ns == changed_ns:
            return found
        offsets = walk(file.fileno(), head[1])
    values = np.frombuffer(offsets, np.uint64)
    new = f"{index.removesuffix(SUFFIX)}.{secrets.token_hex(8)}{SUFFIX}"
    try:
        os.makedirs(os.path.dirname(index), exist_ok=True)
        with open(new, "xb") as file:
            file.write(_HEAD.pack(_MAGIC, *head, len(offsets) - 1, _checksum(values)))
            offsets.tofile(file)
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
    return values


def _head(descriptor: int) -> tuple[bytes, int]:
    size = os.fstat(descriptor).st_size
    return fingerprint(descriptor, size).encode(), size


def _offsets(index: str, head: tuple[bytes, int]) -> Array | None:
    """None if it is not there, damaged, or another file's."""
    try:
        with open(index, "rb") as file:
            begin, size = file.read(_HEAD.size), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None
    if len(begin) < _HEAD.size:
        return None
    magic, *of, records, checksum = _HEAD.unpack(begin)
    if magic != _MAGIC or (*of,) != head or size != _HEAD.size + 8 * (records + 1):
        return None
    offsets = np.memmap(index, "<u8", "r", _HEAD.size, (records + 1,))
    return offsets if _checksum(offsets) == checksum else None


def _checksum(offsets: Array) -> int:
    found = Checksum()
    for begin in range(0, len(offsets), _CHUNK):
        found.update(offsets[begin : begin + _CHUNK].tobytes())
    return int.from_bytes(found.digest(), "big")

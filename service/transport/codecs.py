"""Codecs: compress payloads with zstd and LZ4. Both libraries release the interpreter lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import lz4.block
import numpy as np
import zstandard

from ..block_limits import padding
from . import frames

_MAX_LZ4_BYTES = 0x7E000000  # of input; LZ4's own limit
_MAX_WINDOW_BYTES = 128 << 20  # of memory that a zstd frame may demand of its reader


class Broken(Exception):
    """A received block contradicts its header; the message says how."""


def pack(codec: str, payload: bytes | memoryview) -> bytes | None:
    """Compress the payload; None if that does not make it smaller."""
    packed = CODECS[codec][0](payload)
    return packed if packed is not None and len(packed) < len(payload) else None


def join(buffers: Sequence[memoryview]) -> bytes | memoryview:
    """Join the buffers, each padded as in a frame; a single one without padding is not copied."""
    if len(buffers) == 1 and not padding(len(buffers[0])):
        return buffers[0]
    return b"".join(part for b in buffers for part in (b, bytes(padding(len(b)))))


def unpack(codec: str, packed: memoryview, target: frames.Bytes) -> None:
    """Decompress into `target`, which it must fill exactly. Raises Broken."""
    if codec not in CODECS:
        raise Broken(f"it is compressed with {codec!r}, which nobody asked for")
    try:
        size = CODECS[codec][1](packed, target)
    except (zstandard.ZstdError, lz4.block.LZ4BlockError) as error:
        raise Broken(f"it does not decompress to {target.size} bytes: {error}") from error
    if size != target.size:
        raise Broken(f"it decompresses to {size} bytes instead of {target.size}")


def _pack_lz4(payload: bytes | memoryview) -> bytes | None:
    if len(payload) > _MAX_LZ4_BYTES:
        return None
    return cast(bytes, lz4.block.compress(payload, store_size=False))


def _unpack_lz4(packed: memoryview, target: frames.Bytes) -> int:
    if target.size > _MAX_LZ4_BYTES:
        raise Broken(f"it is said to hold {target.size} bytes, which LZ4 cannot")
    raw = lz4.block.decompress(packed, uncompressed_size=target.size)
    target[: len(raw)] = np.frombuffer(raw, np.uint8)  # the library cannot fill a buffer
    return len(raw)


def _pack_zstd(payload: bytes | memoryview) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(payload)


def _unpack_zstd(packed: memoryview, target: frames.Bytes) -> int:
    reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).stream_reader(packed)
    # In one call, so that zstd decompresses directly into the target.
    return reader.readinto(target.data) + len(reader.read(1))


_Pack = Callable[[bytes | memoryview], bytes | None]
_Unpack = Callable[[memoryview, frames.Bytes], int]
CODECS: dict[str, tuple[_Pack, _Unpack]] = {
    "lz4": (_pack_lz4, _unpack_lz4),
    "zstd": (_pack_zstd, _unpack_zstd),
}
"""By their names on the wire, the fastest first."""

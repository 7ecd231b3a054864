"""Block limits: which blocks can be sent, and what they cost in credit and buffers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .blocks import Block, buffers

ALIGNMENT = 64
MAX_PAYLOAD_BYTES = 4 << 30
BLOCK_OVERHEAD_BYTES = 512  # the cost of a block without bytes
MAX_RANK = 32
MAX_COMPONENTS = 2000

# The dtypes that can be sent. Not all of NumPy's: an "object" would be a pointer of the peer.
DTYPES: dict[str, np.dtype[Any]] = {np.dtype(c).name: np.dtype(c) for c in "?bhilBHILefdFD"} | {
    name: np.dtype(kind)
    for name, kind in vars(ml_dtypes).items()
    if isinstance(kind, type) and issubclass(kind, np.generic)
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_IN_ORDER = """
float32 float64 int32 uint8 int16 int8 string complex64 int64 bool qint8 quint8 qint32 bfloat16
qint16 quint16 uint16 complex128 float16 resource variant uint32 uint64 float8_e5m2 float8_e4m3fn
float8_e4m3fnuz float8_e4m3b11fnuz float8_e5m2fnuz int4 uint4
"""
TYPES = {name: number for number, name in enumerate(_IN_ORDER.split(), 1)}
"""TensorFlow's DataType numbers, by the dtype's name."""


def padding(size: int) -> int:
    """How many zero bytes follow a buffer of `size` bytes."""
    return -size % ALIGNMENT


def cost(block: Block) -> int:
    """The block's cost in bytes, for a consumer's credit and for a buffer's bound."""
    return block.payload_bytes + BLOCK_OVERHEAD_BYTES


def dtype_name(dtype: np.dtype[Any]) -> str | None:
    """The dtype's name in `DTYPES`; None if it cannot be sent."""
    return _NAMES.get(dtype if dtype.isnative else dtype.newbyteorder("="))


def check_block(block: Block) -> None:
    """Raise TypeError or ValueError for a block that cannot be sent."""
    if len(block.components) > MAX_COMPONENTS:
        raise ValueError(f"a block of {len(block.components)} components, above {MAX_COMPONENTS}")
    arrays = [array for c in block.components for array in buffers(c)]
    size = sum(array.nbytes + padding(array.nbytes) for array in arrays)
    if size > MAX_PAYLOAD_BYTES:
        raise ValueError(
            f"a block of {size} bytes cannot travel, above {MAX_PAYLOAD_BYTES}: make "
            "smaller elements"
        )
    for array in arrays:
        if dtype_name(array.dtype) is None:
            raise TypeError(f"a block of {array.dtype} cannot travel: cast it, or make it Strings")
        if array.ndim > MAX_RANK:
            raise ValueError(f"a block of rank {array.ndim} cannot travel, above {MAX_RANK}")

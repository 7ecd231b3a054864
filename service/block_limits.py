"""Which blocks may travel, and what they cost: known to whoever makes them, buffers them, sends
them or receives them.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .blocks import Block, buffers

ALIGNMENT = 64
MAX_PAYLOAD_BYTES = 4 << 30
BLOCK_OVERHEAD_BYTES = 512  # what a block of no bytes costs of the credit
MAX_RANK = 32
MAX_COMPONENTS = 2000

# Which dtypes travel. Not all that NumPy knows: an "object" would be a pointer of the peer's.
DTYPES: dict[str, np.dtype[Any]] = {np.dtype(c).name: np.dtype(c) for c in "?bhilBHILefdFD"} | {
    name: np.dtype(kind)
    for name, kind in vars(ml_dtypes).items()
    if isinstance(kind, type) and issubclass(kind, np.generic)
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def padding(size: int) -> int:
    """The bytes of zeros that follow a buffer of `size` bytes."""
    return -size % ALIGNMENT


def cost(block: Block) -> int:
    """What the block costs of a consumer's credit, and of a buffer's bound, in bytes."""
    return block.payload_bytes + BLOCK_OVERHEAD_BYTES


def dtype_name(dtype: np.dtype[Any]) -> str | None:
    """Under which name, of `DTYPES`, it travels; None if it does not."""
    return _NAMES.get(dtype if dtype.isnative else dtype.newbyteorder("="))


def check_block(block: Block) -> None:
    """Raises TypeError or ValueError for a block that cannot travel."""
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

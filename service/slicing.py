"""Long work on the event loop, in slices, between which other requests run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

SLICE_S = 0.0003
"""Long work yields to the event loop after about this long."""


async def in_slices(pieces: Iterable[T]) -> list[T]:
    """The pieces, each of which takes little time to make."""
    found = []
    since_s = time.monotonic()
    for piece in pieces:
        found.append(piece)
        if time.monotonic() - since_s > SLICE_S:
            await asyncio.sleep(0)
            since_s = time.monotonic()
    return found

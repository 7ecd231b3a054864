"""Whether this host's clock jumps: events' times, and ages of before, are told by it."""

from __future__ import annotations

import asyncio
import logging
import time

log = logging.getLogger(__name__)

LOOK_S = 1.0
JUMP_S = 2.0
"""By so much within a second no clock is slewed."""


class ClockWatch:
    """Runs on a dispatcher's event loop."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()
        self._jump: tuple[float, float] | None = None  # by how much, and when, monotonic

    async def keep(self) -> None:
        """Look for jumps until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            offset_s = time.time() - time.monotonic()
            by_s, self._offset_s = offset_s - self._offset_s, offset_s
            if abs(by_s) >= JUMP_S:
                self._jump = by_s, time.monotonic()
                log.warning("this host's clock has jumped by %+.1f s", by_s)

    def status(self) -> dict[str, float] | None:
        """For the status: the last jump."""
        if self._jump is None:
            return None
        by_s, at_s = self._jump
        return {"by_s": by_s, "ago_s": time.monotonic() - at_s}

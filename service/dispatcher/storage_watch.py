"""Whether the storage answers: for how long an append or a renewal of the lead has been waiting.

While the storage hangs, nothing is decided, and heartbeats get no answer. So whoever asks is told
of the storage first, and what was measured before is told as old.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import Any

from ...journal.journal import Journal
from ...storage import Storage
from ..errors import Unavailable
from .leadership import Leadership

log = logging.getLogger(__name__)

SILENT_S = 2.0
"""An operation may take so long."""

CHECK_S = 0.2


class StorageWatch:
    """Of one leader's storage. Everything runs on its event loop."""

    def __init__(self, storage: Storage, journal: Journal, leadership: Leadership) -> None:
        self._url = storage.url
        self._journal = journal
        self._leadership = leadership
        self._is_silent = False
        self._was_silent_s = 0.0  # for how long it was silent the last time, or is
        self._answers_from_s: float | None = None  # when that ended, monotonic

    @property
    def silent_s(self) -> float:
        """For how long it has not answered; 0 if it answers."""
        return self._waits_s() if self._is_silent else 0.0

    async def keep(self) -> None:
        """Find, and log, each silence and its end, until cancelled."""
        while True:
            slept_s = time.monotonic()
            await asyncio.sleep(CHECK_S)
            if time.monotonic() - slept_s > SILENT_S:
                continue  # this process stood still: answers lie unread
            waits_s = self._waits_s()
            was_silent, self._is_silent = self._is_silent, waits_s >= SILENT_S
            if self._is_silent:
                self._was_silent_s = waits_s
                if not was_silent:
                    log.warning("%s: nothing is decided until it does", self.why())
            elif was_silent:
                self._answers_from_s = time.monotonic()
                log.info("%s answers again, after %.0f s", self._url, self._was_silent_s)

    def status(self) -> dict[str, Any]:
        """For the status."""
        from_s = self._answers_from_s
        return {
            "url": self._url,
            "silent_s": self.silent_s,
            "error": self._leadership.error,
            "was_silent_s": self._was_silent_s,
            "answers_s": None if from_s is None else time.monotonic() - from_s,
        }

    async def bound(self, proof: Awaitable[None]) -> None:
        """Await what needs the storage; raises Unavailable once that is silent for SILENT_S, and
        says so also if the proof fails first."""
        try:
            async with asyncio.timeout(max(CHECK_S, SILENT_S - self._waits_s())):
                await proof
        except TimeoutError:
            raise Unavailable(self.why()) from None
        except Unavailable as error:
            if not self._is_silent:
                raise
            raise Unavailable(self.why()) from error

    def why(self) -> str:
        """A sentence on its silence."""
        error = self._leadership.error
        because = f" ({error})" if error else ""
        what = f"the journal's storage {self._url} has not answered"
        return f"{what} for {self._waits_s():.0f} s{because}"

    def _waits_s(self) -> float:
        since_s = min(self._journal.append_began_s, self._leadership.asks_from_s)
        return max(0.0, time.monotonic() - since_s)

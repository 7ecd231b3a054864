"""That this dispatcher still leads: kept up by renewing, and known for a while after that.

Decisions need no such knowledge: the storage itself refuses the append of a dispatcher that
was displaced. Answers to questions do. For the length of a lease from when a renewal was
*sent*, nobody can have taken over, because whoever wants to must have seen this writer silent
for as long; a process that was paused finds its lease run out, and asks before it answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from ...storage import Corrupt, Fenced, StorageError, Writer

log = logging.getLogger(__name__)

RENEWALS_A_LEASE = 4


class Leadership:
    """Of the dispatcher whose writer this is. Everything runs on one event loop."""

    def __init__(self, writer: Writer, on_lost: Callable[[StorageError], None]) -> None:
        """`on_lost` is called when another has taken over, or the storage has lost records."""
        self._writer = writer
        self._on_lost = on_lost
        self._known_until = time.monotonic()  # seconds
        self._renewal: asyncio.Task[None] | None = None
        self._complained = False

    @property
    def known(self) -> bool:
        """Whether a renewal's time has not run out."""
        return time.monotonic() <= self._known_until

    async def prove(self) -> None:
        """Return when it is certain that nobody had taken over when this was called.

        At once, within the lease. Raises StorageError.
        """
        if not self.known:
            await self._renew()

    async def keep(self) -> None:
        """Renew, again and again, until cancelled or displaced."""
        interval_s = self._writer.lease_ms / 1000 / RENEWALS_A_LEASE
        while True:
            try:
                await self._renew()
            except (Fenced, Corrupt):
                return
            except StorageError as error:
                if not self._complained:
                    log.warning("the lead cannot be renewed, and is tried again: %s", error)
                self._complained = True
            else:
                if self._complained:
                    log.info("the lead is renewed again")
                self._complained = False
            await asyncio.sleep(interval_s)

    async def close(self) -> None:
        """Wait for a renewal that is under way."""
        if self._renewal is not None:
            await asyncio.wait([self._renewal])

    async def _renew(self) -> None:
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew_once(), name="forebay-renewal")
            self._renewal.add_done_callback(_was_seen)
        await asyncio.shield(self._renewal)

    async def _renew_once(self) -> None:
        begun = time.monotonic()
        try:
            await asyncio.to_thread(self._writer.renew)
        except (Fenced, Corrupt) as error:
            self._on_lost(error)
            raise
        self._known_until = begun + self._writer.lease_ms / 1000


def _was_seen(renewal: asyncio.Task[None]) -> None:
    if not renewal.cancelled():
        renewal.exception()  # whoever waited for it has it; perhaps nobody does any more

"""That this dispatcher still leads: kept up by renewing, and known for a while after that.

Decisions need no such knowledge: the storage itself refuses the append of a dispatcher that
was displaced. Answers to questions do. For the length of a lease from when a renewal was
*sent*, nobody can have taken over, because whoever wants to must have seen this writer silent
for as long; a process that was paused finds its lease run out, and asks before it answers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ...storage import Corrupt, Fenced, StorageError, Writer

log = logging.getLogger(__name__)

RENEWALS_A_LEASE = 4


class Leadership:
    """Of the dispatcher whose writer this is. Everything runs on one event loop."""

    def __init__(self, writer: Writer, on_lost: Callable[[StorageError], None]) -> None:
        """`on_lost` is called when another has taken over, or the storage has lost records."""
        self._writer = writer
        self._on_lost = on_lost
        self._lease_s = writer.lease_ms / 1000
        self._proved_s = -math.inf  # when the last renewal that succeeded was sent, monotonic
        self._led_s = -math.inf  # when the last append that succeeded was sent
        # Of its own: a renewal must not queue behind graphs that are read and written.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forebay-renewal")
        self._renewal: asyncio.Task[None] | None = None
        self._complained = False

    @property
    def known(self) -> bool:
        """Whether a renewal's time has not run out."""
        return time.monotonic() <= self._proved_s + self._lease_s

    def led(self, sent_s: float) -> None:
        """The storage has taken an append that was sent then, as it does from the leader alone."""
        self._led_s = max(self._led_s, sent_s)

    async def prove(self, since_s: float = math.inf) -> None:
        """Return when it is certain that nobody had taken over at `since_s`, or at some time after
        it; if that lies ahead, when this was called.

        At once, within the lease. Raises StorageError.
        """
        since_s = min(since_s, time.monotonic())
        # A renewal that was under way already proves nothing: this process may have been paused
        # between its answer and now.
        while not self.known and max(self._proved_s, self._led_s) < since_s:
            await self._renew()

    async def keep(self) -> None:
        """Renew, again and again, until cancelled or displaced."""
        interval_s = self._lease_s / RENEWALS_A_LEASE
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
        self._thread.shutdown(wait=False)

    async def _renew(self) -> None:
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew_once(), name="forebay-renewal")
            self._renewal.add_done_callback(_was_seen)
        await asyncio.shield(self._renewal)

    async def _renew_once(self) -> None:
        sent_s = time.monotonic()
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._writer.renew)
        except (Fenced, Corrupt) as error:
            self._on_lost(error)
            raise
        self._proved_s = sent_s


def _was_seen(renewal: asyncio.Task[None]) -> None:
    if not renewal.cancelled():
        renewal.exception()  # whoever waited for it has it; perhaps nobody does any more

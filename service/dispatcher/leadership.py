"""The leader's lease: renewed in the background, and checked before answers to queries.

Decisions need no lease: the storage itself refuses the append of a displaced dispatcher. Queries
do. For the writer's `query_ms` from when a renewal was *sent*, no other dispatcher can take over:
it must first see this writer silent for that long. A process that was paused finds that time over,
and renews before it answers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

from ...journal.journal import FLUSH_S
from ...storage import Corrupt, Fenced, StorageError, Writer
from ...storage.thread_pool import ThreadPool

log = logging.getLogger(__name__)

RENEWALS_A_LEASE = 4


class Leadership:
    """The lease of one dispatcher's writer. Everything runs on one event loop."""

    def __init__(
        self, writer: Writer, on_lost: Callable[[StorageError], None], url: str = ""
    ) -> None:
        """`on_lost` is called when another dispatcher leads, or the storage has lost records.
        `url` is the storage's, which need not stand in its errors."""
        self._writer = writer
        self._url = url
        self._on_lost = on_lost
        self._lease_s = writer.lease_ms / 1000
        self._query_s = writer.query_ms / 1000
        self._proved_s = -math.inf  # when the last renewal that succeeded was sent, monotonic
        self.asks_from_s = math.inf  # since when a renewal has been waiting, or failing
        self.error = ""  # of the last one
        self._led_s = -math.inf  # when the last append that succeeded was sent
        # A thread of its own: a renewal must not queue behind reads and writes of graphs.
        self._thread = ThreadPool(1, "forebay-renewal")
        self._renewal: asyncio.Task[None] | None = None
        self._complained = False

    @property
    def known(self) -> bool:
        """Whether the lease has not expired."""
        return time.monotonic() <= self._proved_s + self._lease_s

    def led(self, sent_s: float) -> None:
        """Record an append that was sent at `sent_s`: the storage accepts only the leader's."""
        self._led_s = max(self._led_s, sent_s)

    async def prove(self, since_s: float = math.inf) -> None:
        """Wait for proof that this dispatcher led at `since_s`, at most now, or at a later time.

        Returns at once if a renewal was sent less than `query_ms` ago. Raises StorageError.
        """
        since_s = min(since_s, time.monotonic())
        # A renewal already in flight proves nothing: this process may have been paused between
        # its answer and now.
        while max(self._proved_s, self._led_s) < since_s:
            if time.monotonic() <= self._proved_s + self._query_s:
                return
            await self._renew()

    async def keep(self) -> None:
        """Renew periodically until cancelled or displaced."""
        interval_s = min(self._lease_s / RENEWALS_A_LEASE, self._query_s / 2)
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
        """Wait for the renewal in flight, FLUSH_S at most."""
        if self._renewal is not None:
            await asyncio.wait([self._renewal], timeout=FLUSH_S)
        self._thread.shutdown(wait=False)

    async def _renew(self) -> None:
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew_once(), name="forebay-renewal")
            self._renewal.add_done_callback(_was_seen)
        await asyncio.shield(self._renewal)

    async def _renew_once(self) -> None:
        sent_s = time.monotonic()
        self.asks_from_s = min(self.asks_from_s, sent_s)
        try:
            await self._thread.run(self._writer.renew)
        except (Fenced, Corrupt) as error:
            self._on_lost(error)
            raise
        except StorageError as error:
            self.error = str(error).rpartition(f"{self._url}: ")[2]
            raise
        self._proved_s, self.asks_from_s, self.error = sent_s, math.inf, ""


def _was_seen(renewal: asyncio.Task[None]) -> None:
    if not renewal.cancelled():
        renewal.exception()  # marks it as retrieved; perhaps nobody awaits it

"""Growing sources: the dispatcher searches for their new splits when a task waits for one.

It journals found splits before it leases them, so that a split's number means the same file after a
restart, and in every pass. Threads search the file systems: a hanging one delays only the tasks
that wait for it.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

from ...storage.thread_pool import ThreadPool
from ..core import commands as c
from ..core.base import find_dataset, find_iteration
from ..errors import Unavailable
from ..saved_chunks import Search
from .decider import Decider

WAIT_S = 2.0
"""How long a request waits before the answer that no split has been found yet."""

THREADS = 16
"""So many directories can hang before others wait for them."""

MAX_FOUND = 10_000
"""The most names in one event."""

SourceKey = tuple[int, int]  # an iteration, and the number of one of its sources


class GrowingSources:
    """The growing sources of one dispatcher. All but file I/O runs on its event loop."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self._threads = ThreadPool(THREADS, "forebay-growing-sources")
        self._searches: dict[SourceKey, asyncio.Task[None]] = {}
        self._asked_s: dict[SourceKey, float] = {}  # the last request for each search

    async def close(self) -> None:
        """Cancel all searches; hanging threads are abandoned."""
        searches = list(self._searches.values())
        for search in searches:
            search.cancel()
        await asyncio.gather(*searches, return_exceptions=True)
        self._threads.shutdown(wait=False)

    async def wait(self, iteration_id: int, source: int) -> None:
        """Wait until more splits are found, or the source is complete; for at most WAIT_S.

        Raises FailedPrecondition if no more will come, NotFound, Unavailable.
        """
        key = iteration_id, source
        if (search := self._searches.get(key)) is None:
            search = asyncio.create_task(self._search(*key), name="forebay-growing-sources")
            search.add_done_callback(partial(self._ended, key))
            self._searches[key] = search
        self._asked_s[key] = time.monotonic()
        await asyncio.wait({search}, timeout=WAIT_S)
        if search.cancelled():
            raise Unavailable("the dispatcher is stopping")
        if search.done():
            search.result()

    def _ended(self, key: SourceKey, search: asyncio.Task[None]) -> None:
        del self._searches[key], self._asked_s[key]
        if not search.cancelled():
            search.exception()  # marks it as retrieved; perhaps nobody awaits it

    async def _search(self, iteration_id: int, source: int) -> None:
        """Search until something is found, or no request has come for 2 × WAIT_S."""
        decider, state = self._decider, self._decider.state
        iteration = find_iteration(state, iteration_id)
        dataset = find_dataset(state, state.jobs[iteration.job_id].dataset_id)
        path = dataset.outline.sources[source].saved_chunks.path
        ledger = iteration.ledgers[source]
        search = Search(path)
        while ledger.grows and not decider.stopped.is_set():
            found = await self._threads.run(search.look, ledger.names)
            if found.names or found.complete:
                await self._decide(iteration_id, source, found.names, found.complete)
                return
            if time.monotonic() - self._asked_s[iteration_id, source] > 2 * WAIT_S:
                return
            await decider.wait_until(lambda: False, int(1000 * search.pause_s))

    async def _decide(
        self, iteration_id: int, source: int, names: list[str], complete: bool
    ) -> None:
        for first in range(0, len(names) or 1, MAX_FOUND):
            command = c.FindSplits(
                iteration_id=iteration_id,
                source=source,
                names=tuple(names[first : first + MAX_FOUND]),
                complete=complete and first + MAX_FOUND >= len(names),
            )
            await self._decider.execute(command)

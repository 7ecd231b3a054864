"""Sources that grow: their splits are looked for when somebody waits for one.

What was found is decided before it is given out, so that a split's number means the same file after
a restart, and in every pass. Where to look is asked in threads: a file system that hangs holds up
who waits for it, and nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING

from ..core import commands as c
from ..core.base import find_dataset, find_iteration
from ..errors import Unavailable
from ..saved_chunks import Search
from .file_threads import FileThreads

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

WAIT_S = 2.0
"""How long one who asks is kept waiting before he is told that there is nothing yet."""

THREADS = 16
"""As many directories can hang before others wait for them."""

MAX_FOUND = 10_000
"""Names in one event."""

SourceKey = tuple[int, int]  # an iteration, and the number of one of its sources


class Growth:
    """Of one dispatcher. Everything but looking runs on its event loop."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._threads = FileThreads(THREADS, "forebay-growth")
        self._searches: dict[SourceKey, asyncio.Task[None]] = {}
        self._asked_s: dict[SourceKey, float] = {}  # when somebody did last, of each search

    async def close(self) -> None:
        """Leave what hangs."""
        searches = list(self._searches.values())
        for search in searches:
            search.cancel()
        await asyncio.gather(*searches, return_exceptions=True)

    async def wait(self, iteration_id: int, source: int) -> None:
        """Until the source has further splits, or has all of them; at the longest WAIT_S.

        Raises FailedPrecondition if there will be none, NotFound, Unavailable.
        """
        key = iteration_id, source
        search = self._searches.get(key)
        if search is None:
            search = asyncio.create_task(self._search(*key), name="forebay-growth")
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
            search.exception()  # perhaps nobody waits for it any more

    async def _search(self, iteration_id: int, source: int) -> None:
        """Until something is found, or nobody asks any more."""
        dispatcher, state = self._dispatcher, self._dispatcher.state
        iteration = find_iteration(state, iteration_id)
        dataset = find_dataset(state, state.jobs[iteration.job_id].dataset_id)
        path = dataset.definition.sources[source].saved_chunks.path
        ledger = iteration.ledgers[source]
        search = Search(path)
        while ledger.grows and not dispatcher.stopped.is_set():
            found = await self._threads.run(search.look, ledger.names)
            if found.names or found.complete:
                await self._decide(iteration_id, source, found.names, found.complete)
                return
            if time.monotonic() - self._asked_s[iteration_id, source] > 2 * WAIT_S:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(dispatcher.stopped.wait(), search.pause_s)

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
            await self._dispatcher.execute(command)

"""Daemon threads for file I/O that may hang for ever.

Each piece of work gets its own thread. The interpreter joins a ThreadPoolExecutor's threads at
exit, so a stopped dispatcher would not end before the file system answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any


class FileThreads:
    """Runs work in at most `most` threads at a time; more work waits. For one event loop."""

    def __init__(self, most: int, name: str) -> None:
        self._places = asyncio.Semaphore(most)
        self._name = name

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """Returns or raises what `work` does. Cancelling does not stop it or free its place."""
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()

        def end(say: Callable[[Any], None], what: Any) -> None:
            self._places.release()
            if not outcome.done():
                say(what)

        def run() -> None:
            try:
                ended = partial(end, outcome.set_result, work(*args))
            except BaseException as error:  # noqa: BLE001 - the waiter gets it
                ended = partial(end, outcome.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(ended)

        threading.Thread(target=run, name=self._name, daemon=True).start()
        return await outcome

"""Threads for what a file system may take for ever to do.

They are daemons, one for each piece of work: those of a ThreadPoolExecutor are waited for when the
process ends, and a stopped dispatcher's would not end before the file system answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any


class FileThreads:
    """At most so many at a time; who comes then waits. To be used on one event loop."""

    def __init__(self, most: int, name: str) -> None:
        self._places = asyncio.Semaphore(most)
        self._name = name

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """What `work` returns, or raises. It goes on, and keeps its place, if this is cancelled."""
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
            except BaseException as error:  # noqa: BLE001 - whoever waits is told
                ended = partial(end, outcome.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(ended)

        threading.Thread(target=run, name=self._name, daemon=True).start()
        return await outcome

"""A dispatcher in this process, on a storage that can be away."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from forebay.journal.codec import encode
from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.dispatcher.candidate import Candidate
from forebay.service.dispatcher.dispatcher import Dispatcher
from forebay.service.dispatcher.options import DispatcherOptions
from forebay.storage import MemoryStorage, Storage, StorageError


def elected(term: int, *, after_repair: bool = False) -> bytes:
    leader = ev.LeaderElected(term=term, format=1, journal_id="j", after_repair=after_repair)
    return encode(ev.Event(time_ms=1, leader_elected=leader))


def dataset(name: str) -> bytes:
    return encode(ev.Event(dataset_registered=ev.DatasetRegistered(dataset_id=name)))


class Renewals(MemoryStorage):
    """A storage whose writer counts renewals, and refuses them if told so."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.error: StorageError | None = None
        self.answers = threading.Event()
        self.answers.set()

    def open_writer(self, owner: str, *, lease_ms: int = 0, place: str = "") -> Any:
        writer = super().open_writer(owner, lease_ms=lease_ms, place=place)
        writer.renew = self._renew  # type: ignore[method-assign]
        return writer

    def _renew(self) -> None:
        self.count += 1
        self.answers.wait(60)
        if self.error is not None:
            raise self.error


def run_dispatcher(
    storage: Storage, then: Callable[[Dispatcher], Coroutine[Any, Any, None]], **options: Any
) -> None:
    async def run() -> None:
        candidate = Candidate(storage, DispatcherOptions(**options), "here:1")
        dispatcher = await candidate.take_over()
        try:
            await then(dispatcher)
        finally:
            await dispatcher.close()

    asyncio.run(run())


async def register(dispatcher: Dispatcher, count: int) -> None:
    """The dataset "d", of so many splits."""
    definition = ev.DatasetDefinition(sources=[ev.SplitSource(count=count)])
    await dispatcher.execute(c.RegisterDataset(dataset_id="d", definition=definition))


async def until(true: Callable[[], object]) -> None:
    give_up = time.monotonic() + 60
    while not true():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.01)

"""Sending graphs to workers and readers, with bounded memory.

A graph may have hundreds of megabytes, and many workers request a new task's graph at once. So
Forebay's clients fetch it in pieces, and concurrent requests share one read of the storage.
TensorFlow's clients get it in one message; few of these are in flight at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

from ...journal.datasets import stored
from ..connections.grpc_server import when_answered
from ..core.state import Dataset
from ..pipelines.definitions import graph_without_compression

KEPT_S = 5.0
"""How long a graph stays in memory after its last piece."""

KEPT_BYTES = 64 << 20
"""The limit of the cache; the newest graph may exceed it alone."""

LARGE_BYTES = 4 << 20
AT_A_TIME = 2
ON_ITS_WAY_S = 20.0
"""A large message gives up its turn after this time: its client may hang."""


class Whole(NamedTuple):
    """A whole graph as sent, and its SHA-256."""

    graph: bytes
    digest: bytes


class GraphPieces:
    """The graph cache and send limit of one dispatcher. For its event loop."""

    def __init__(self, read: Callable[[Dataset], Awaitable[bytes]]) -> None:
        """`read` raises NotFound if the dataset is removed meanwhile."""
        self._read = read
        self._reading: dict[tuple[str, bool], asyncio.Task[Whole]] = {}
        self._kept: OrderedDict[tuple[str, bool], Whole] = OrderedDict()
        self._timers: dict[tuple[str, bool], asyncio.TimerHandle] = {}
        self._large = asyncio.Semaphore(AT_A_TIME)

    async def of(self, dataset: Dataset, *, plain: bool) -> Whole:
        """A dataset's graph; `plain` removes the compression of its elements. Raises what `read`
        does, and InvalidGraph."""
        name = (stored(dataset.outline).blob, plain)
        if name not in self._kept:
            if name not in self._reading:
                self._reading[name] = asyncio.create_task(self._load(dataset, plain))
                self._reading[name].add_done_callback(lambda task: self._loaded(name, task))
            whole = await asyncio.shield(self._reading[name])
            self._kept.setdefault(name, whole)
        self._kept.move_to_end(name)
        if name in self._timers:
            self._timers[name].cancel()
        self._timers[name] = asyncio.get_running_loop().call_later(KEPT_S, self._forget, name)
        whole = self._kept[name]
        while len(self._kept) > 1 and sum(len(w.graph) for w in self._kept.values()) > KEPT_BYTES:
            self._forget(next(iter(self._kept)))
        return whole

    def close(self) -> None:
        """Cancel reads and empty the cache."""
        for task in self._reading.values():
            task.cancel()
        for name in list(self._kept):
            self._forget(name)

    def _loaded(self, name: tuple[str, bool], task: asyncio.Task[Whole]) -> None:
        del self._reading[name]
        if not task.cancelled():
            task.exception()  # marks it as retrieved; perhaps nobody awaits it

    async def _load(self, dataset: Dataset, plain: bool) -> Whole:
        graph = await self._read(dataset)
        if plain:
            graph = await asyncio.to_thread(graph_without_compression, graph)
        return Whole(graph, await asyncio.to_thread(lambda: hashlib.sha256(graph).digest()))

    def _forget(self, name: tuple[str, bool]) -> None:
        del self._kept[name]
        self._timers.pop(name).cancel()

    @contextlib.asynccontextmanager
    async def turn(self, graph_bytes: int) -> AsyncIterator[None]:
        """Hold this while building an answer with `graph_bytes` of graphs. At most AT_A_TIME large
        answers are in flight; a large one keeps its turn until it is sent."""
        if graph_bytes <= LARGE_BYTES:
            yield
            return
        await self._large.acquire()
        turn = contextlib.ExitStack()  # which ends once, whoever ends it
        turn.callback(self._large.release)
        late = asyncio.get_running_loop().call_later(ON_ITS_WAY_S, turn.close)
        try:
            yield
        except BaseException:
            turn.close()
            raise

        def answered() -> None:
            late.cancel()
            turn.close()

        when_answered(answered)

"""Graphs: what datasets are, kept as blobs beside the journal.

A graph is stored before the event that names it, and deleted after the one that no longer does. So
a dispatcher that dies in between leaves one that nothing names; the next one removes it, once
whoever was told of events that the journal has lost has had time to say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from typing import TYPE_CHECKING

from ...journal.datasets import stored
from ...journal.proto import events_pb2 as ev
from ...storage import Corrupt, Missing, Storage, StorageError, Writer
from ..core import commands as c
from ..core.base import find_dataset
from ..core.datasets import fingerprint
from ..core.state import Dataset, State
from ..errors import ForebayError, NotFound, Unavailable
from ..pipelines import definitions

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

log = logging.getLogger(__name__)

USED_MS = 60_000
"""How old it may be what is known of a dataset's last use, when it is registered again."""


class Graphs:
    """Of one dispatcher. Everything but reading and writing blobs runs on its event loop."""

    def __init__(self, dispatcher: Dispatcher, storage: Storage, writer: Writer) -> None:
        self._dispatcher = dispatcher
        self._storage = storage
        self._writer = writer
        self._marks = (f"{writer.term}-{number}" for number in itertools.count(1))

    async def register(
        self, dataset_id: str, definition: ev.DatasetDefinition, graph: bytes
    ) -> str:
        """Register a dataset of this graph, unless it is known; return its id.

        Without a `dataset_id`, an equal one is known that was registered without one, too: who
        chooses an id has it for himself. If the graph of the one that is known cannot be read,
        this one takes its place. Raises what RegisterDataset does, InvalidGraph, Unavailable.
        """
        if not dataset_id:
            print_ = await asyncio.to_thread(definitions.fingerprint, definition, graph)
            stored(definition).fingerprint = print_
        while True:
            known = self._known(dataset_id, definition)
            lost = known is not None and await self.is_lost(known)
            if known is None or lost:
                return await self._register_anew(dataset_id, definition, graph, known)
            if self._known(dataset_id, definition) is known:  # and was not removed meanwhile
                return await self._register_known(known, dataset_id, definition)

    def _known(self, dataset_id: str, definition: ev.DatasetDefinition) -> Dataset | None:
        state = self._dispatcher.state
        equal = dataset_id or state.dataset_by_fingerprint.get(fingerprint(definition), "")
        return state.datasets.get(equal)

    async def _register_known(
        self, known: Dataset, dataset_id: str, definition: ev.DatasetDefinition
    ) -> str:
        renews = time.time_ns() // 1_000_000 - known.used_ms > USED_MS
        answer: str = await self._dispatcher.execute(
            c.RegisterDataset(dataset_id=dataset_id, definition=definition, renews=renews)
        )
        return answer

    async def _register_anew(
        self, dataset_id: str, definition: ev.DatasetDefinition, graph: bytes, lost: Dataset | None
    ) -> str:
        """Store the graph first; `lost` is the dataset that has lost its own, if there is one.

        No graph has the name that another one ever had. So a dispatcher that was displaced as it
        was about to delete the graph of a dataset that had been removed can take it from nobody.
        """
        try:
            blob = await asyncio.to_thread(self._writer.write_blob, graph, next(self._marks))
        except StorageError as error:
            raise Unavailable(f"the dataset could not be stored: {error}") from error
        stored(definition).blob = blob
        if lost is not None and self._dispatcher.state.datasets.get(lost.dataset_id) is not lost:
            lost = None  # it was removed, or was restored, meanwhile
        register = c.RegisterDataset(
            dataset_id=dataset_id if lost is None else lost.dataset_id,
            definition=definition,
            restores=lost is not None,
            graph_bytes=len(graph),
        )
        try:
            answer: str = await self._dispatcher.execute(register)
        except ForebayError:
            await self._delete_blob(blob)
            raise
        registered = self._dispatcher.state.datasets.get(answer)
        if registered is None or stored(registered.definition).blob != blob:
            await self._delete_blob(blob)  # somebody has registered an equal one meanwhile
        return answer

    async def renew(self, known: Dataset) -> None:
        """Somebody is given the id of this dataset."""
        await self._register_known(known, known.dataset_id, known.definition)

    async def _delete_blob(self, name: str) -> None:
        """One of this term's, of which no event says anything."""
        if not self._dispatcher.stopped.is_set():  # else who knows what the journal says
            with contextlib.suppress(StorageError):  # then it stays, and nobody knows it
                await asyncio.to_thread(self._writer.delete_blob, name)

    async def delete_unused(self) -> None:
        """Of datasets that were removed. Raises Unavailable; what could not be deleted stays."""
        await self._dispatcher.durable()  # or they might be back after a crash
        for blob in list(self._dispatcher.state.unused_blobs):
            try:
                await asyncio.to_thread(self._writer.delete_blob, blob)
            except StorageError as error:
                log.error("the graph %s, which no dataset has, cannot be deleted: %s", blob, error)
            else:
                await self._dispatcher.execute(c.ForgetBlob(blob=blob))

    async def is_lost(self, known: Dataset) -> bool:
        """Whether the dataset's graph cannot be read. Not, if that is removed meanwhile."""
        try:
            await self._read_blob(stored(known.definition).blob)
        except (Corrupt, Missing) as error:
            if self._dispatcher.state.datasets.get(known.dataset_id) is not known:
                return False
            log.error("dataset %s has lost its graph: %s", known.dataset_id, error)
            return True
        return False

    async def read(self, dataset: Dataset) -> bytes:
        """The dataset's graph. Raises NotFound if that is removed meanwhile, Missing, Corrupt."""
        try:
            return await self._read_blob(stored(dataset.definition).blob)
        except Missing:
            if find_dataset(self._dispatcher.state, dataset.dataset_id) is dataset:
                raise
            raise NotFound(
                f"dataset {dataset.dataset_id} was replaced as it was being read; ask again"
            ) from None

    async def _read_blob(self, name: str) -> bytes:
        return await asyncio.to_thread(self._storage.read_blob, name)

    async def collect(self) -> None:
        """Remove what dispatchers before this one have stored, and no event names.

        Nobody misses it: an event of an earlier term that is not in the journal by now never will
        be. Unless it was lost, and a person brings it back: so not after a repair, which may have
        cut it off; nor once the journal is known to lack events.
        """
        dispatcher, state = self._dispatcher, self._dispatcher.state
        if state.predecessors:
            return
        try:
            named = {*needed_blobs(state).values(), *state.unused_blobs}
            for blob in await asyncio.to_thread(self._storage.blobs):
                if dispatcher.condemns or dispatcher.stopped.is_set():
                    return
                if blob not in named and 0 < _term(blob) < self._writer.term:
                    await asyncio.to_thread(self._writer.delete_blob, blob)
                    log.info("the graph %s, which no dataset has, was deleted", blob)
        except StorageError as error:
            log.warning("graphs that no dataset has stay until the next term: %s", error)


def needed_blobs(state: State) -> dict[str, str]:
    """The names of what its datasets are kept as, by their ids."""
    return {name: stored(known.definition).blob for name, known in state.datasets.items()}


def _term(blob: str) -> int:
    """In which it was stored; 0 if its name, an early version's, does not say."""
    term = blob.partition(".")[2].partition("-")[0]
    return int(term) if term.isdecimal() else 0

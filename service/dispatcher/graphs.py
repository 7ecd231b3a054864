"""Graphs: the datasets' serialized graphs, stored as blobs beside the journal.

The dispatcher stores a graph before it journals the event that names it, and deletes the graph
after the event that drops it. A crash in between leaves an orphaned blob. The next dispatcher
removes it, once peers that know lost events have had time to report them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable

from ...journal.datasets import stored
from ...journal.proto import events_pb2 as ev
from ...storage import Corrupt, Missing, Storage, StorageError, Writer
from ..core import commands as c
from ..core.base import find_dataset
from ..core.datasets import fingerprint
from ..core.state import Dataset, State
from ..errors import ForebayError, NotFound, Unavailable
from ..pipelines import definitions
from .decider import Decider
from .graph_pieces import GraphPieces
from .history import JournalHistory

log = logging.getLogger(__name__)

USED_MS = 60_000
"""A repeated registration journals the dataset's use only if the last one is older than this."""


class Graphs:
    """The graphs of one dispatcher. All but blob I/O runs on its event loop."""

    def __init__(
        self, decider: Decider, history: JournalHistory, storage: Storage, writer: Writer
    ) -> None:
        self._decider = decider
        self._history = history
        self._storage = storage
        self._writer = writer
        self.pieces = GraphPieces(self.read)
        self._marks = (f"{writer.term}-{number}" for number in itertools.count(1))

    async def register(
        self,
        dataset_id: str,
        definition: ev.DatasetDefinition,
        graph: bytes,
        admit: Callable[[], None] | None = None,
    ) -> str:
        """Register a dataset of this graph, unless it is known; return its id.

        `admit` is called before a further dataset is registered, and may raise. Without a
        `dataset_id`, reuses an equal dataset that was also registered without one. If the known
        dataset's graph cannot be read, this graph replaces it. Raises the errors of
        RegisterDataset, InvalidGraph, Unavailable.
        """
        print_ = await asyncio.to_thread(definitions.fingerprint, definition, graph)
        stored(definition).fingerprint, stored(definition).named = print_, bool(dataset_id)
        while True:
            known = self._known(dataset_id, definition)
            lost = known is not None and await self.is_lost(known)
            if known is None or lost:
                return await self._register_anew(dataset_id, definition, graph, known, admit)
            if self._known(dataset_id, definition) is known:  # not removed meanwhile
                return await self._register_known(known, dataset_id, definition)

    def _known(self, dataset_id: str, definition: ev.DatasetDefinition) -> Dataset | None:
        state = self._decider.state
        equal = dataset_id or state.dataset_by_fingerprint.get(fingerprint(definition), "")
        return state.datasets.get(equal)

    async def _register_known(
        self, known: Dataset, dataset_id: str, definition: ev.DatasetDefinition
    ) -> str:
        renews = time.time_ns() // 1_000_000 - known.used_ms > USED_MS
        answer: str = await self._decider.execute(
            c.RegisterDataset(dataset_id=dataset_id, definition=definition, renews=renews)
        )
        return answer

    async def _register_anew(
        self,
        dataset_id: str,
        definition: ev.DatasetDefinition,
        graph: bytes,
        lost: Dataset | None,
        admit: Callable[[], None] | None,
    ) -> str:
        """Store the graph, then register it; `lost` is the dataset whose graph it replaces.

        Blob names are never reused. So a displaced dispatcher that still deletes a removed
        dataset's blob cannot delete another dataset's.
        """
        try:
            blob = await self._decider.storage_threads.run(
                self._writer.write_blob, graph, next(self._marks)
            )
        except StorageError as error:
            raise Unavailable(f"the dataset could not be stored: {error}") from error
        stored(definition).blob = blob
        if lost is not None and self._decider.state.datasets.get(lost.dataset_id) is not lost:
            lost = None  # it was removed or restored meanwhile
        register = c.RegisterDataset(
            dataset_id=dataset_id if lost is None else lost.dataset_id,
            definition=definition,
            restores=lost is not None,
            graph_bytes=len(graph),
        )
        try:
            if admit is not None and self._known(dataset_id, definition) is None:
                admit()  # in one turn of the event loop with the decision
            answer: str = await self._decider.execute(register)
        except ForebayError:
            await self._delete_blob(blob)
            raise
        registered = self._decider.state.datasets.get(answer)
        if registered is None or stored(registered.outline).blob != blob:
            await self._delete_blob(blob)  # an equal one was registered meanwhile
        return answer

    def is_registered(self, dataset_id: str, definition: ev.DatasetDefinition) -> bool:
        """Whether the dataset of this id is the one in the request. Call it after `register`."""
        known = self._decider.state.datasets.get(dataset_id)
        return known is not None and (
            stored(known.outline).fingerprint == stored(definition).fingerprint
        )

    async def difference(
        self, dataset_id: str, definition: ev.DatasetDefinition, graph: bytes
    ) -> str:
        """How the registered dataset of this id differs from the one in the request; "" if it does
        not, or its graph cannot be read."""
        known = self._decider.state.datasets.get(dataset_id)
        if known is None or self.is_registered(dataset_id, definition):
            return ""
        try:
            registered = await self._read_blob(stored(known.outline).blob)
        except StorageError as error:
            log.info("dataset %s cannot be compared with another one: %s", dataset_id, error)
            return ""
        return await asyncio.to_thread(
            definitions.difference, known.definition, registered, definition, graph
        )

    async def renew(self, known: Dataset) -> None:
        """Journal the dataset's use, if the last one is older than USED_MS."""
        await self._register_known(known, known.dataset_id, known.definition)

    async def _delete_blob(self, name: str) -> None:
        """Delete a blob of this term that no event names."""
        if not self._decider.stopped.is_set():  # else its event may be journaled after all
            with contextlib.suppress(StorageError):  # it stays until the next term's `collect`
                await self._decider.storage_threads.run(self._writer.delete_blob, name)

    async def delete_unused(self) -> None:
        """Delete removed datasets' graphs; keeps those that fail. Raises Unavailable."""
        await self._decider.durable()  # else a crash could bring the datasets back
        for blob in list(self._decider.state.unused_blobs):
            try:
                await self._decider.storage_threads.run(self._writer.delete_blob, blob)
            except StorageError as error:
                log.error("the graph %s, which no dataset has, cannot be deleted: %s", blob, error)
            else:
                await self._decider.execute(c.ForgetBlob(blob=blob))

    async def is_lost(self, known: Dataset) -> bool:
        """Whether the graph is missing or corrupt; False if the dataset is removed meanwhile."""
        try:
            await self._read_blob(stored(known.outline).blob)
        except (Corrupt, Missing) as error:
            if self._decider.state.datasets.get(known.dataset_id) is not known:
                return False
            log.error("dataset %s has lost its graph: %s", known.dataset_id, error)
            return True
        return False

    async def read(self, dataset: Dataset) -> bytes:
        """The dataset's graph. Raises NotFound if it is removed meanwhile, Missing, Corrupt."""
        try:
            return await self._read_blob(stored(dataset.outline).blob)
        except Missing:
            if find_dataset(self._decider.state, dataset.dataset_id) is dataset:
                raise
            raise NotFound(
                f"dataset {dataset.dataset_id} was replaced as it was being read; ask again"
            ) from None

    async def _read_blob(self, name: str) -> bytes:
        return await self._decider.storage_threads.run(self._storage.read_blob, name)

    async def collect(self) -> None:
        """Remove the blobs of earlier terms that no event names.

        That is safe: an event of an earlier term that is not journaled by now never will be. Only
        a person may restore a lost event. So this removes nothing after a repair, or once the
        journal is known to lack events.
        """
        decider, state = self._decider, self._decider.state
        if state.predecessors:
            return
        try:
            named = {*needed_blobs(state).values(), *state.unused_blobs}
            for blob in await self._decider.storage_threads.run(self._storage.blobs):
                if self._history.condemns or decider.stopped.is_set():
                    return
                if blob not in named and 0 < _term(blob) < self._writer.term:
                    await self._decider.storage_threads.run(self._writer.delete_blob, blob)
                    log.info("the graph %s, which no dataset has, was deleted", blob)
        except StorageError as error:
            log.warning("graphs that no dataset has stay until the next term: %s", error)


def needed_blobs(state: State) -> dict[str, str]:
    """The blob names of the datasets' graphs, by dataset id."""
    return {name: stored(known.outline).blob for name, known in state.datasets.items()}


def _term(blob: str) -> int:
    """The term in which the blob was stored; 0 if its name has no mark of ours."""
    term = blob.partition(".")[2].partition("-")[0]
    return int(term) if term.isdecimal() else 0

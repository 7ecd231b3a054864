"""Saves: the directories follow the state (core/saves.py).

Each decision is journaled first, then carried out in the directory, and only then answered. So a
new leader may find directories that lag behind the journal, but never one that is ahead. It catches
up before it assigns a stream. A directory that cannot be written fails its own save only.

A save's directory is created under another name before the save is decided, and renamed afterwards.
So a path that cannot be written is refused, and a directory at the path has all that load needs.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
import uuid
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from google.protobuf.message import DecodeError

from ...journal.proto import events_pb2 as ev
from ...journal.splits import ENDLESS, source_size, split_value
from ...storage.thread_pool import ThreadPool
from ..core import commands as c
from ..core.base import find_save
from ..core.machine import EVENTS
from ..core.save_streams import may_assign, streams_of
from ..core.saves import is_absolute, waits_for
from ..core.state import EndedSave, Save, Worker
from ..errors import (
    AlreadyExists,
    FailedPrecondition,
    ForebayError,
    InvalidArgument,
    Unavailable,
    Unimplemented,
)
from ..pipelines import definitions
from ..proto import tf_service_pb2 as tf
from . import save_directory as directory
from .decider import Decider

log = logging.getLogger(__name__)

COMPRESSIONS = ("", "GZIP", "SNAPPY", "ZLIB")
THREADS = 16
"""So many saves can hang before others wait for them."""

READY_S = 1.0
"""How long a heartbeat waits for the file system; a later heartbeat brings unready streams."""

SILENT_S = 15.0
"""A new leader doubts that a stream is being written after this much silence about it."""

DOUBTED_S = 120.0
"""How long a new leader doubts: then all threads of a worker have found it or given up."""

WITHHELD = -math.inf
"""Marks a stream that is withheld from its worker until the worker has dropped it."""

RETRY_S = 5.0
"""The pause before writing a save's end to its directory is retried."""

_CODE_NAMES = {number: name for name, number in tf.Code.items()}


class Saves:
    """The saves of one dispatcher. All but file I/O runs on its event loop.

    File I/O runs in threads, one at a time for a save: a hanging file system delays neither reads
    nor other saves. The I/O continues if its waiters are cancelled.
    """

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self._threads = ThreadPool(THREADS, "forebay-saves")
        self._tasks: dict[Hashable, asyncio.Task[Any]] = {}  # running tasks, by purpose
        self._locks: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()  # by save
        self._owners: dict[tuple[int, int], tuple[str, int]] = {}  # who may write each stream
        self._written: dict[tuple[int, int], list[int]] = {}  # splits written, by source
        self._sealed: set[int] = set()  # saves whose directories say that they are over
        self._changes = 0  # events that may have given a worker another stream
        self._waiting: dict[int, str] = {}  # the missing kind of worker, by save
        self._ended = asyncio.Event()
        self._doubted_until_s = time.monotonic() + DOUBTED_S
        self._heard_s = {  # when a split was last asked for, of streams begun in an earlier term
            (save.save_id, number): time.monotonic()
            for save in decider.state.saves.values()
            for number, stream in enumerate(save.streams)
            if not stream.completed
        }
        decider.subscribe(self._see)

    async def close(self) -> None:
        """Wait briefly for running I/O, then abandon it."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=READY_S)
        left = list(self._tasks.values())
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        self._threads.shutdown(wait=False)

    async def start(
        self,
        path: str,
        graph: bytes,
        sources: Sequence[ev.SplitSource],
        metadata: bytes,
        request: tuple[str, int] | None = None,
    ) -> None:
        """Begin to save the dataset of this graph.

        Raises AlreadyExists, InvalidArgument, FailedPrecondition if the directory cannot be
        written, Unimplemented if no worker can save the dataset, Unavailable.
        """
        if not self._decider.position().lasting:
            raise InvalidArgument(
                "tf.data distributed snapshot requires running tf.data service in the fault "
                "tolerant mode. Give the dispatcher a storage that outlasts it: a directory or a "
                "Redis"
            )
        says = _metadata(metadata)
        begin = partial(self._begin, path, graph, sources, says, request)
        await asyncio.shield(self._once(request or object(), begin))

    async def _begin(
        self,
        path: str,
        graph: bytes,
        sources: Sequence[ev.SplitSource],
        metadata: tf.DistributedSnapshotMetadata,
        request: tuple[str, int] | None,
    ) -> None:
        path, is_gone = await self._threads.run(directory.look_at, path)
        state = self._decider.state
        # Named after the request, so that a retry finds what another dispatcher has prepared.
        unique = uuid.uuid4().hex if request is None else _digest(request)
        command = c.StartSave(
            request=request,
            path=path,
            definition=ev.DatasetDefinition(sources=sources),
            metadata=metadata.SerializeToString(deterministic=True),
            prepared=f"{path}.{unique}.preparing",
            indivisible=await asyncio.to_thread(_indivisible, graph, sources),
            is_gone=is_gone,
        )
        known = state.save_at.get(path)
        if not is_absolute(path) or known in state.saves or (known is not None and not is_gone):
            started = await self._decider.execute(command)  # refused, or answered before
        elif not is_gone:
            raise AlreadyExists(
                f"tf.data snapshot at {path} already exists, or something else does; save to "
                "another path, or delete it"
            )
        else:
            try:
                await self._threads.run(directory.prepare, command.prepared, metadata, graph)
                started = await self._decider.execute(command)
            except OSError as error:
                raise directory.cannot_write(path, error) from error
            finally:
                begun = state.saves.get(state.save_at.get(path, 0))
                unused = begun is None or begun.prepared != command.prepared
                # Once this dispatcher has stopped, another one may be using the directory.
                if unused and not self._decider.stopped.is_set():
                    await self._threads.run(directory.remove, command.prepared)
        save = state.saves.get(started.save_id)
        if save is not None and not await self._follow(save):
            ended = state.ended_saves.get(started.save_id)
            if ended is not None and ended.failed:
                raise FailedPrecondition(ended.message)

    async def write(self, worker_id: int) -> tuple[list[tuple[Save, int]], bool]:
        """Assign the worker another stream if possible, and prepare its streams' directories.

        Returns its ready streams, as (save, stream number), and whether these are all.
        """
        decider, state = self._decider, self._decider.state
        if not state.saves:
            return [], True
        most = decider.options.most_saves_a_worker
        await decider.execute(c.AssignStream(worker_id=worker_id, most=most))
        worker = state.workers.get(worker_id)
        if worker is None:
            return [], True
        tasks = [
            self._once(
                (save.save_id, number, _owner(save, number)), partial(self._follow, save, number)
            )
            for save, number in streams_of(state, worker)
        ]
        if tasks:
            done, _ = await asyncio.wait(tasks, timeout=READY_S)
            for task in done:
                task.result()
        found = list(streams_of(state, worker))
        ready = [
            (save, number)
            for save, number in found
            if self._owners.get((save.save_id, number)) == _owner(save, number)
        ]
        return ready, len(ready) == len(found)

    def watch(self, worker: Worker) -> Callable[[], bool]:
        """A check whether `write` has another stream for it; cheap while nothing has changed."""
        seen = -1

        def may_write_more() -> bool:
            nonlocal seen
            if seen == self._changes:
                return False
            seen = self._changes
            decider = self._decider
            return may_assign(decider.state, worker, decider.options.most_saves_a_worker)

        return may_write_more

    async def report(self, address: str, path: str, progress: tf.SnapshotTaskProgress) -> None:
        """Handle a TensorFlow worker's report about a stream."""
        save_id = self._decider.state.save_at.get(path, 0)
        number = progress.snapshot_task.stream_index
        if progress.completed:
            await self._decider.execute(
                c.CompleteStream(save_id=save_id, stream=number, worker_address=address)
            )
        elif progress.status.code:
            await self._decider.execute(
                c.FailSave(
                    save_id=save_id,
                    code=_CODE_NAMES.get(progress.status.code, str(progress.status.code)),
                    message=progress.status.message,
                    stream=number,
                    worker_address=address,
                )
            )

    def told(
        self, streams: Sequence[tuple[Save, int]], reports: Mapping[str, tf.SnapshotTaskProgress]
    ) -> list[tuple[Save, int]]:
        """The subset of a TensorFlow worker's streams to send in its heartbeat's answer.
        `reports` are its reports of the streams that it has, by their saves' paths.

        A worker's thread silently gives up its stream if it misses the dispatcher for longer than
        `dispatcher_timeout_ms`, even when other threads have reconnected. So if nobody requests
        splits of an earlier term's stream, the answer leaves it out until the worker has dropped
        it. The worker then restarts the stream from its last checkpoint.
        """
        told = []
        for save, number in streams:
            stream, says = (save.save_id, number), reports.get(save.path)
            if says is None or says.snapshot_task.stream_index != number:
                self._heard_s.pop(stream, None)  # it starts the stream, so it knows this leader
            elif not (says.completed or says.status.code):
                heard_s = self._heard_s.get(stream, math.inf)
                if time.monotonic() - heard_s >= SILENT_S:
                    if heard_s != WITHHELD:
                        log.info("stream %d of the save at %s is begun anew by its worker: nobody "
                                 "has asked for a split of it for %g s", number, save.path,
                                 SILENT_S)  # fmt: skip
                        self._heard_s[stream] = WITHHELD
                    continue
            told.append((save, number))
        return told

    def _hear(self, stream: tuple[int, int]) -> None:
        if self._heard_s.pop(stream, None) and time.monotonic() < self._doubted_until_s:
            self._heard_s[stream] = time.monotonic()

    async def split(self, request: tf.GetSnapshotSplitRequest) -> tf.GetSnapshotSplitResponse:
        """The next split of a stream, after its file is written. Raises FailedPrecondition,
        NotFound, InvalidArgument, Unavailable."""
        state, number = self._decider.state, request.stream_index
        save = find_save(state, request.base_path)
        assigned, event = await self._decider.execute(
            c.AssignSplit(
                path=request.base_path,
                stream=number,
                source=request.source_index,
                pass_number=request.repetition_index,
                worker_address=request.worker_address,
            )
        )
        assert isinstance(save, Save)  # else it was refused
        self._hear((save.save_id, number))
        follow = self._once(object(), partial(self._follow, save, number))
        if not await asyncio.shield(follow):
            raise FailedPrecondition(f"the save at {save.path} is over")
        response = tf.GetSnapshotSplitResponse(local_split_index=assigned)
        if event is None:
            response.end_of_splits = True
        else:
            source = save.definition.sources[event.source]
            response.split = directory.split_tensor(split_value(source, event.number))
        return response

    async def follow(self) -> None:
        """Write to the directories of ended saves how they ended, until cancelled."""
        for save in list(self._decider.state.saves.values()):
            self._once(save.save_id, partial(self._follow, save))
        while True:
            self._ended.clear()
            try:
                await self._decider.settled()
            except Unavailable:
                left = True
            else:
                left = await self._seal_all()
            try:
                await asyncio.wait_for(self._ended.wait(), RETRY_S if left else None)
            except TimeoutError:
                continue

    def _see(self, event: ev.Event) -> None:
        if EVENTS[event.WhichOneof("event") or ""].may_free_stream:
            self._changes += 1
            self._log_missing_workers()
        if event.HasField("save_finished") or event.HasField("save_failed"):
            self._ended.set()

    def _log_missing_workers(self) -> None:
        state, before = self._decider.state, self._waiting
        found = {save.save_id: waits_for(state, save) for save in state.saves.values()}
        self._waiting = {save_id: what for save_id, what in found.items() if what}
        for save_id in self._waiting.keys() - before.keys():
            path, what = state.saves[save_id].path, self._waiting[save_id]
            log.warning("the save at %s waits for %s; start one", path, what)

    async def _seal_all(self) -> bool:
        """Seal all ended saves; returns whether some directory could not be written."""
        ended = self._decider.state.ended_saves
        self._sealed &= ended.keys()
        tasks = [
            self._once(("seal", save.save_id), partial(self._seal, save))
            for save in ended.values()
            if save.save_id not in self._sealed
        ]
        if tasks:
            await asyncio.wait(tasks, timeout=READY_S)
        return not self._sealed >= ended.keys()

    async def _seal(self, save: EndedSave) -> None:
        async with self._lock(save):
            try:
                await self._threads.run(directory.seal, save)
            except OSError as error:
                log.error("could not mark the save at %s as ended there: %s", save.path, error)
                return
            except Exception:  # a bug; it must not affect other saves
                log.exception("could not mark the save at %s as ended there", save.path)
            self._sealed.add(save.save_id)
            for key in [key for key in self._owners if key[0] == save.save_id]:
                del self._owners[key], self._written[key]
        if save.failed:
            log.error("the save at %s failed: %s: %s", save.path, save.failed, save.message)
        else:
            log.info("the save at %s is finished", save.path)

    async def _follow(self, save: Save, number: int | None = None) -> bool:
        """Bring the save's directory, and one stream's files, up to date with the state.

        Fails the save on I/O errors. Returns whether the save is still being written.
        """
        state, save_id = self._decider.state, save.save_id
        async with self._lock(save):
            owner: tuple[str, int] = ("", 0)
            files: list[directory.SplitFile] = []
            counts: list[int] = []
            if number is not None and save_id in state.saves:
                stream, owner = save.streams[number], _owner(save, number)
                if save.stock and not stream.completed:
                    written = self._written.get((save_id, number), [0] * len(stream.sources))
                    files = directory.split_files(save, number, written)
                    counts = [source.assigned for source in stream.sources]
            # The directory must never be ahead of the journal.
            await self._decider.settled()
            if save_id not in state.saves:
                return False
            try:
                await self._threads.run(directory.place, save.prepared, save.path)
                if number is not None:
                    key, address = (save_id, number), owner[0]
                    if counts and self._owners.get(key) != owner:
                        own = directory.own
                        await self._threads.run(own, save.path, number, len(counts), address)
                    await self._threads.run(directory.write_splits, files)
                    self._owners[key], self._written[key] = owner, counts
                return True
            except OSError as error:
                reason = str(directory.cannot_write(save.path, error))
                code = directory.code_of(error)
        await self._decider.execute(c.FailSave(save_id=save_id, code=code, message=reason))
        return False

    def _lock(self, save: Save | EndedSave) -> asyncio.Lock:
        return self._locks.setdefault(save.save_id, asyncio.Lock())

    def _once(
        self, key: Hashable, work: Callable[[], Coroutine[Any, Any, Any]]
    ) -> asyncio.Task[Any]:
        """The running task of this key, or a new one; it survives cancelled waiters."""
        if (task := self._tasks.get(key)) is None:
            task = self._tasks[key] = asyncio.create_task(work(), name="forebay-save")
            task.add_done_callback(partial(self._done, key))
        return task

    def _done(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        del self._tasks[key]
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ForebayError):  # a bug, perhaps unawaited
            log.error("the file work of a save failed", exc_info=error)


def _owner(save: Save, number: int) -> tuple[str, int]:
    stream = save.streams[number]
    return stream.address, stream.uid


def _digest(request: tuple[str, int]) -> str:
    return hashlib.sha256(repr(request).encode()).hexdigest()[:32]


def _metadata(data: bytes) -> tf.DistributedSnapshotMetadata:
    try:
        metadata = tf.DistributedSnapshotMetadata.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(f"the save's metadata does not parse: {error}") from error
    if metadata.compression not in COMPRESSIONS:
        raise InvalidArgument(
            f"a save cannot be compressed with {metadata.compression!r}; give one of "
            f"{[*filter(None, COMPRESSIONS)]}, AUTO or None"
        )
    return metadata


def _indivisible(graph: bytes, sources: Sequence[ev.SplitSource]) -> str:
    """Why Forebay's workers cannot write the dataset's ranges of splits; "" if they can."""
    try:
        definitions.require_bundles(graph, sources, as_parts=True)
    except Unimplemented as error:
        return str(error)
    if min(map(source_size, sources), default=ENDLESS) == ENDLESS:
        return "its source has no end"
    if doubts := definitions.nondeterministic(graph):  # else a resumed stream would skip wrongly
        return f"its elements may be others each time: {doubts[0]}"
    return ""

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
from collections import defaultdict
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from ...journal.proto import events_pb2 as ev
from ...journal.splits import split_value
from ...storage.thread_pool import ThreadPool
from ..core import commands as c
from ..core.base import Numbered, find_save
from ..core.save_streams import MAY_FREE_STREAM, may_assign, streams_of
from ..core.saves import is_absolute
from ..core.state import Save, Worker
from ..errors import AlreadyExists, FailedPrecondition, ForebayError, InvalidArgument
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

SILENT_S, DOUBTED_S = 15.0, 120.0
"""A new leader doubts for `DOUBTED_S` that a stream of an earlier term is still written, if nobody
has asked for a split of it for `SILENT_S`."""

WITHHELD = -math.inf
"""When a split was last asked for, of a stream that is left out until its worker has dropped it."""

RETRY_S = 5.0
"""The pause before writing a save's end to its directory is retried."""

Owner = tuple[str, int]
"""The address and uid of a stream's worker."""

_CODE_NAMES = {number: name for name, number in tf.Code.items()}


@dataclass
class _Directory:
    """What this dispatcher has written to a save's directory."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one I/O at a time
    owners: dict[int, Owner] = field(default_factory=dict)  # of streams that may be written
    splits: dict[int, list[int]] = field(default_factory=dict)  # files by stream, then source
    says_end: bool = False


class Saves:
    """The saves of one dispatcher. All but file I/O runs on its event loop.

    File I/O runs in threads, one at a time for a save: a hanging file system delays neither reads
    nor other saves. The I/O continues if its waiters are cancelled.
    """

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self._threads = ThreadPool(THREADS, "forebay-saves")
        self._tasks: dict[Hashable, asyncio.Task[Any]] = {}  # running tasks, by purpose
        self._directories: defaultdict[int, _Directory] = defaultdict(_Directory)  # by save
        self._changes = 0  # events that may have given a worker another stream
        self._ended = asyncio.Event()
        self._began_s = time.monotonic()
        self._heard_s = {  # of streams begun in an earlier term
            (save.save_id, number): self._began_s
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
        request: Numbered = None,
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
        request: Numbered,
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
            indivisible=await asyncio.to_thread(definitions.indivisible, graph, sources),
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
        if save is not None and not await self._update(save.save_id):
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
        if (worker := state.workers.get(worker_id)) is None:
            return [], True
        tasks = [
            self._once(
                (save.save_id, number, _owner(save, number)), partial(self._update, save.save_id)
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
            if self._directories[save.save_id].owners.get(number) == _owner(save, number)
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
        `dispatcher_timeout_ms`. So the answer leaves a silent stream of an earlier term out, until
        the worker has dropped it. The worker then restarts it from its last checkpoint.
        """
        now_s, told = time.monotonic(), []
        if now_s - self._began_s >= DOUBTED_S:  # those that are withheld stay so
            self._heard_s = {k: at for k, at in self._heard_s.items() if at == WITHHELD}
        for save, number in streams:
            stream, report = (save.save_id, number), reports.get(save.path)
            if report is None or report.snapshot_task.stream_index != number:
                self._heard_s.pop(stream, None)  # it starts the stream, so it knows this leader
            if stream not in self._heard_s or now_s - self._heard_s[stream] < SILENT_S:
                told.append((save, number))
            else:
                self._heard_s[stream] = WITHHELD
        return told

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
        if self._heard_s.get((save.save_id, number), WITHHELD) != WITHHELD:
            self._heard_s[save.save_id, number] = time.monotonic()
        update = self._once(object(), partial(self._update, save.save_id))
        if not await asyncio.shield(update):
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
        state = self._decider.state
        for save_id in state.saves:
            self._once(save_id, partial(self._update, save_id))
        while True:
            self._ended.clear()
            for save_id in self._directories.keys() - state.saves.keys() - state.ended_saves.keys():
                del self._directories[save_id]
            if unsaid := self._unsaid_ends():
                tasks = [self._once(("end", i), partial(self._update, i)) for i in unsaid]
                await asyncio.wait(tasks, timeout=READY_S)
            pause_s = RETRY_S if self._unsaid_ends() else None
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), pause_s)

    def _unsaid_ends(self) -> list[int]:
        """The ended saves whose directories do not say so yet."""
        ended = self._decider.state.ended_saves
        return [save_id for save_id in ended if not self._directories[save_id].says_end]

    def _see(self, event: ev.Event) -> None:
        kind = event.WhichOneof("event")
        if kind in MAY_FREE_STREAM:
            self._changes += 1
        if kind in ("save_finished", "save_failed"):
            self._ended.set()

    async def _update(self, save_id: int) -> bool:
        """Bring a save's directory up to date with the state. Fails the save on I/O errors. Returns
        whether it is still being written. Raises Unavailable."""
        state, written = self._decider.state, self._directories[save_id]
        async with written.lock:
            if (save := state.saves.get(save_id)) is None:
                await self._decider.settled()
                await self._write_end(save_id, written)
                return False
            write, then = _catching_up(save, written)
            await self._decider.settled()  # the directory must never be ahead of the journal
            if save_id not in state.saves:
                return False
            try:
                await self._threads.run(write)
                written.owners, written.splits = then
                return True
            except OSError as error:
                reason = str(directory.cannot_write(save.path, error))
                code = directory.code_of(error)
        await self._decider.execute(c.FailSave(save_id=save_id, code=code, message=reason))
        return False

    async def _write_end(self, save_id: int, written: _Directory) -> None:
        if (save := self._decider.state.ended_saves.get(save_id)) is None or written.says_end:
            return
        try:
            await self._threads.run(directory.seal, save)
        except OSError as error:
            log.error("could not mark the save at %s as ended there: %s", save.path, error)
            return
        except Exception:  # a bug would come again each time, and for this save alone
            log.exception("could not mark the save at %s as ended there", save.path)
        written.says_end = True
        if save.failed:
            log.error("the save at %s failed: %s: %s", save.path, save.failed, save.message)
        else:
            log.info("the save at %s is finished", save.path)

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


def _owner(save: Save, number: int) -> Owner:
    stream = save.streams[number]
    return stream.address, stream.uid


def _catching_up(
    save: Save, written: _Directory
) -> tuple[Callable[[], None], tuple[dict[int, Owner], dict[int, list[int]]]]:
    """A function that writes what the directory lacks, and what `owners` and `splits` are then.
    Only TensorFlow's workers need files of their streams."""
    owners = {number: _owner(save, number) for number in range(len(save.streams))}
    new: dict[int, str] = {}
    files: dict[str, int] = {}
    splits: dict[int, list[int]] = {}
    for number, stream in enumerate(save.streams):
        if save.stock and not stream.completed:
            if written.owners.get(number) != owners[number]:
                new[number] = stream.address
            before = written.splits.get(number, [0] * len(stream.sources))
            files |= directory.split_files(save, number, before)
            splits[number] = [source.assigned for source in stream.sources]
    write = partial(directory.update, save.prepared, save.path, new, len(save.sources), files)
    return write, (owners, splits)


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

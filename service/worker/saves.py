"""Save streams: write a bundle of a dataset's elements to files, chunk by chunk.

    write a chunk → fsync → the dispatcher commits it → rename it to where readers look

Only committed chunks belong to the save. A worker that takes over a stream renames its
predecessor's last committed chunk if necessary, and starts the bundle after the committed elements.
So no element is missing or written twice. A worker that was given up and doesn't know it does no
harm: the dispatcher refuses its commits.
"""

from __future__ import annotations

import copy
import errno
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from .. import malloc, pipelines
from ..connections.dispatcher_client import DispatcherClient
from ..errors import FailedPrecondition, ForebayError, Unavailable, cut_error, status_of
from ..pipelines import Chunk, Run, SplitRange
from ..proto import forebay_pb2 as pb
from ..proto import tf_service_pb2 as tf
from ..save_files import (
    DONE,
    chunk_file,
    graph_file,
    stream_directory,
    sync_directory,
    uncommitted_directory,
    write_whole,
)
from .options import WorkerOptions

log = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)

MAX_DOUBLINGS = 5
"""How often the time limit of a chunk doubles: from 10 s to about 5 minutes."""


Key = tuple[int, int, int]
"""Save id, stream number and assignment; a stream assigned again gets a new writer."""


def _key(stream: pb.Stream) -> Key:
    return stream.save_id, stream.stream, stream.assignment


class StreamWriters:
    """The stream writers of a worker. Thread-safe."""

    def __init__(self, uid: int, dispatcher: DispatcherClient, options: WorkerOptions) -> None:
        self._uid = uid
        self._dispatcher = dispatcher
        self._options = options
        self._lock = threading.Lock()
        self._begins = True  # neither draining nor cancelled
        self._writers: dict[Key, StreamWriter] = {}
        self._ending: list[StreamWriter] = []

    def reconcile(self, streams: Iterable[pb.Stream], *, partial: bool = False) -> None:
        """Make the running writers match `streams`; if these are only some, end none. A writer that
        is ended has lost its assignment, so its commits are refused."""
        listed = {_key(stream): stream for stream in streams}
        with self._lock:
            for key in () if partial else self._writers.keys() - listed.keys():
                writer = self._writers.pop(key)
                writer.cancel()
                self._ending.append(writer)
            self._ending = [writer for writer in self._ending if not writer.join(0)]
            for key, stream in listed.items():
                if key not in self._writers and self._begins:
                    # A copy: a message keeps alive the whole response that it is part of.
                    writer = StreamWriter(
                        copy.copy(stream), self._uid, self._dispatcher, self._options
                    )
                    self._writers[key] = writer
                    writer.start()

    def progress(self) -> list[tuple[int, str, bool]]:
        """For each assigned stream: its number, the save's path, and whether it is complete."""
        with self._lock:
            return [(*w.names, w.completed) for w in self._writers.values()]

    def drain(self) -> None:
        """Start no further writers; each writer commits its current chunk and ends."""
        with self._lock:
            self._begins = False
            for writer in self._writers.values():
                writer.draining.set()

    def cancel(self) -> None:
        """End all writers soon, and start no further ones."""
        with self._lock:
            self._begins = False
        self.reconcile([])

    def join(self, give_up_s: float) -> None:
        """After `drain` or `cancel`: wait for the writers until `give_up_s` (monotonic clock)."""
        with self._lock:
            writers = [*self._ending, *self._writers.values()]
        for writer in writers:
            if not writer.join(max(0.0, give_up_s - time.monotonic())):
                log.warning("stream %d of %s is still in an element, and is left", *writer.names)


class StreamWriter:
    """Writes one stream in its own thread."""

    def __init__(
        self, stream: pb.Stream, uid: int, dispatcher: DispatcherClient, options: WorkerOptions
    ) -> None:
        self.key = _key(stream)
        of_stream = dict(zip(("save_id", "stream", "assignment"), self.key, strict=True))
        self._writer: dict[str, Any] = {**of_stream, "worker_uid": uid}  # in requests
        self.names = stream.stream, stream.path
        self.completed = False  # the whole stream is written
        self.stream = stream
        self._uid = uid
        self._dispatcher = dispatcher
        self._options = options
        self._directory = uncommitted_directory(stream.path, stream.stream)
        self._chunks = stream.chunks
        self.cancelled = threading.Event()
        self.draining = threading.Event()  # commit at the next block, and leave the rest to others
        self._bundle: Run | None = None
        self._thread = threading.Thread(
            target=self.run, name=f"forebay-stream-{stream.stream}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        """End soon; committed chunks stay. Idempotent."""
        self.cancelled.set()
        if (bundle := self._bundle) is not None:
            bundle.cancel()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; False on timeout."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def run(self) -> None:
        """Write the stream, and report its end; `start` runs this in the thread."""
        code, message = "", ""
        try:
            self.completed = self.write()
            if not self.completed:
                return
        except (FailedPrecondition, Unavailable) as error:
            # Another worker has the stream, as the heartbeat will say; or this one is cancelled.
            log.info("stream %d of %s is not written on here: %s", *self.names, error)
            return
        except ForebayError as error:
            code, message = status_of(error), getattr(error, "message", str(error))
        except OSError as error:
            code = "RESOURCE_EXHAUSTED" if error.errno in _FULL else "FAILED_PRECONDITION"
            where = error.filename or self.stream.path
            message = f"{error.strerror or error} ({where}); it is written by {self._uid}"
        except BaseException as bug:  # the save's readers must not wait for ever
            self.report_end("INTERNAL", f"the worker failed: {bug!r}")
            raise
        finally:
            self._bundle = None
            malloc.give_back()
        if not self.cancelled.is_set():
            self.report_end(code, message)

    def report_end(self, code: str, message: str) -> None:
        if code:
            log.error("stream %d of %s failed: %s: %s", *self.names, code, message)
        request = pb.EndStreamRequest(**self._writer, code=code, message=cut_error(message))
        try:
            self._dispatcher.call(request, pb.EndStreamResponse, closed=self.cancelled)
        except ForebayError as error:
            log.info("the end of stream %d of %s could not be told: %s", *self.names, error)

    def write(self) -> bool:
        """Write the stream; False if cancelled or drained before its end."""
        stream = self.stream
        os.makedirs(self._directory, exist_ok=True)
        if stream.last_file:
            self._place(stream.last_file, stream.chunks - 1, stream.last_elements)
        with open(graph_file(stream.path), "rb") as file:
            graph = tf.DatasetDef.FromString(file.read()).graph
        opener = pipelines.chunk_opener(graph, stream.compression)
        pipeline = pipelines.open_saved(graph, stream.sources, self._options.data_root)
        try:
            bundle = self._bundle = pipeline.bundle(
                SplitRange(stream.first, stream.count, 0),
                number=stream.stream,
                seed=stream.save_id,
                start=stream.elements,
            )
            if self.cancelled.is_set():  # `cancel` found no bundle
                bundle.cancel()
            chunk: Chunk | None = None
            for block in bundle.blocks():
                if chunk is None:
                    name = f"chunk_{self._chunks}_CHUNK_SHARDS_{uuid.uuid4().hex}"
                    chunk = opener(f"{self._directory}/{name}")
                    doublings = min(self._chunks, MAX_DOUBLINGS)
                    due_s = time.monotonic() + self._options.save_chunk_s * 2**doublings
                chunk.write(block)
                draining = self.draining.is_set()
                full = chunk.bytes >= self._options.save_chunk_bytes
                if draining or full or time.monotonic() >= due_s:
                    self._commit(chunk, name)
                    chunk = None
                if draining:
                    bundle.cancel()
                    return False
            if self.cancelled.is_set():
                return False
            if chunk is not None:
                self._commit(chunk, name)
        finally:
            pipeline.close()
        self._remove_uncommitted()
        write_whole(f"{stream_directory(stream.path, stream.stream)}/{DONE}", b"")
        return True

    def _remove_uncommitted(self) -> None:
        """Remove leftovers of other writers, once nothing remains to commit. Earlier they might be
        chunks of the stream's current worker, if this one was given up without knowing.
        """
        for name in os.listdir(self._directory):
            with suppress(FileNotFoundError):  # another writer removes them, too
                os.unlink(f"{self._directory}/{name}")

    def _commit(self, chunk: Chunk, name: str) -> None:
        chunk.close()
        with open(f"{self._directory}/{name}", "rb") as file:
            os.fsync(file.fileno())
        sync_directory(self._directory)
        if self.cancelled.is_set():
            raise Unavailable("this writer is cancelled")
        request = pb.CommitChunkRequest(
            **self._writer, chunk=self._chunks, elements=chunk.elements, file=name
        )
        self._dispatcher.call(request, pb.CommitChunkResponse, closed=self.cancelled)
        self._place(name, self._chunks, chunk.elements)
        self._chunks += 1

    def _place(self, name: str, number: int, elements: int) -> None:
        """Rename a committed chunk. Idempotent."""
        place = chunk_file(self.stream.path, self.stream.stream, number, elements)
        try:
            os.rename(f"{self._directory}/{name}", place)
        except FileNotFoundError:
            if not os.path.exists(place):
                raise
        sync_directory(os.path.dirname(place))

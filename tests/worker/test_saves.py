"""A stream of a save, killed at each point: nothing is missing, and nothing comes twice.

The files, the pipelines and the core are real; a worker's death is an exception that nobody
catches, and the next one begins with what its predecessor left in the directory and the journal.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from forebay.journal.proto import events_pb2 as ev
from forebay.service import pipelines
from forebay.service.core import commands as c
from forebay.service.core.save_streams import streams_of
from forebay.service.dispatcher import save_directory
from forebay.service.dispatcher.dispatcher_servicer import _stream
from forebay.service.errors import FailedPrecondition, Unavailable
from forebay.service.pipelines import chunk_opener
from forebay.service.pipelines.tf_data.element_specs import encode_element_spec
from forebay.service.pipelines.tf_data.imports import graph_of
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto import tf_service_pb2
from forebay.service.worker import saves
from forebay.service.worker.options import WorkerOptions

from ..core.given import Given

SIZE = 40
OPTIONS = WorkerOptions(dispatcher="h:1", save_chunk_bytes=1)  # a block each


class Killed(BaseException):
    """kill -9."""


graph = functools.cache(graph_of)  # so that what is traced serves all saves of a dataset


class Cluster(Given):
    """A save to a directory, and a dispatcher to call."""

    def __init__(self, path: Path, dataset: Any, compression: str = "SNAPPY") -> None:
        super().__init__()
        self.path = str(path)
        metadata = tf_service_pb2.DistributedSnapshotMetadata(
            element_spec=encode_element_spec(dataset.element_spec), compression=compression
        )
        prepared = f"{path}.preparing"
        save_directory.prepare(prepared, metadata, graph(dataset))
        save_directory.place(prepared, self.path)
        started: ev.SaveStarted = self.when(
            c.StartSave(
                path=self.path,
                definition=ev.DatasetDefinition(sources=[ev.SplitSource(count=SIZE)]),
                metadata=metadata.SerializeToString(),
                prepared=prepared,
            )
        )
        self.save_id = started.save_id
        self.die_at = ""

    def call(self, request: Any, response: Any, **_: Any) -> Any:
        """Calls the dispatcher, as DispatcherClient does."""
        fields: dict[str, Any] = {
            "save_id": request.save_id,
            "stream": request.stream,
            "worker_uid": request.worker_uid,
            "assignment": request.assignment,
        }
        if isinstance(request, pb.CommitChunkRequest):
            self.reach("before a commit", request.chunk)
            self.when(
                c.CommitChunk(
                    **fields, chunk=request.chunk, elements=request.elements, file=request.file
                )
            )
            self.reach("after a commit", request.chunk)
        elif request.code:
            self.when(c.FailSave(**fields, code=request.code, message=request.message))
        else:
            self.reach("before the end")
            self.when(c.CompleteStream(**fields))
        return response()

    def reach(self, point: str, chunk: int = 1) -> None:
        if point == self.die_at and chunk == 1:
            raise Killed

    def before_commit(self, happens: Callable[[pb.CommitChunkRequest], None]) -> None:
        """Have this happen before each commit."""
        real: Callable[..., Any] = self.call

        def call(request: Any, response: Any, **more: Any) -> Any:
            if isinstance(request, pb.CommitChunkRequest):
                happens(request)
            return real(request, response, **more)

        self.call = call  # type: ignore[method-assign]

    def writer(self, uid: int) -> saves.StreamWriter:
        """Of the stream that another worker has now."""
        worker_id = self.worker(uid)
        self.when(c.AssignStream(worker_id=worker_id, most=1))
        ((save, number),) = streams_of(self.state, self.state.workers[worker_id])
        dispatcher: Any = self
        return saves.StreamWriter(_stream(save, number), uid, dispatcher, OPTIONS)

    def lose(self, uid: int) -> None:
        worker_id = self.state.worker_at[f"w:{uid}"]
        self.when(c.LoseWorker(worker_id=worker_id, reason="it was killed"))

    def loaded(self) -> list[Any]:
        """What the save has once it is over."""
        save_directory.seal(self.state.ended_saves[self.save_id])
        return list(tf.data.Dataset.load(self.path).as_numpy_iterator())


@functools.cache
def numbers() -> Any:
    """Shuffled numbers, each with a random value; together they fill several blocks."""
    dataset = tf.data.Dataset.from_tensor_slices(tf.range(SIZE, dtype=tf.int64))
    return dataset.shuffle(SIZE).map(lambda x: (x, tf.random.uniform([])))


POINTS = ["before a commit", "after a commit", "after it is in place", "before the end"]


@pytest.mark.parametrize("point", POINTS)
def test_the_next_writer_of_a_stream_continues_where_the_last_one_was_killed(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = Cluster(tmp_path / "killed", numbers())
    killed.die_at = point
    real = saves.StreamWriter._place

    def place(self: Any, name: str, number: int, elements: int) -> None:
        real(self, name, number, elements)
        killed.reach("after it is in place", number)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(saves.StreamWriter, "_place", place)
        killed.writer(1).write()
        killed.reach(point)
    before = killed.state.saves[killed.save_id].streams[0].elements
    assert before > 0
    killed.lose(1)
    killed.die_at = ""
    successor = killed.writer(2)
    assert successor.stream.elements == before
    successor.run()
    assert successor.completed
    loaded = sorted(killed.loaded())
    assert [number for number, _ in loaded] == list(range(SIZE))
    assert len({drawn for _, drawn in loaded}) == SIZE


def test_a_writer_that_was_given_up_before_it_began_deletes_no_chunk(tmp_path: Path) -> None:
    """The old writer begins after its successor wrote a chunk and before it committed that."""
    cluster = Cluster(tmp_path / "save", numbers())
    paused = [cluster.writer(1)]
    cluster.lose(1)

    def begins(request: pb.CommitChunkRequest) -> None:
        if request.worker_uid == 2 and paused:
            with pytest.raises(FailedPrecondition, match="is not this worker's any more"):
                paused.pop().write()

    cluster.before_commit(begins)
    cluster.writer(2).run()
    assert not paused
    assert sorted(int(x) for x, _ in cluster.loaded()) == list(range(SIZE))
    stream = Path(cluster.path, "streams", "stream_0")
    assert not [path for path in stream.rglob("chunk_*") if "CHUNK" in path.name]


def test_a_stream_that_is_assigned_to_a_writer_again_has_each_element_once(tmp_path: Path) -> None:
    """Worker 1 is paused before its second commit. Worker 2 commits one chunk, and is killed."""
    cluster = Cluster(tmp_path / "save", numbers())
    paused = cluster.writer(1)
    again: list[saves.StreamWriter] = []

    def gives_up_twice(request: pb.CommitChunkRequest) -> None:
        if request.chunk and not again:
            again.append(paused)
            cluster.lose(1)
            cluster.die_at = "after a commit"
            with pytest.raises(Killed):
                cluster.writer(2).write()
            cluster.lose(2)
            cluster.die_at = ""
            again.append(cluster.writer(1))

    cluster.before_commit(gives_up_twice)
    with pytest.raises(FailedPrecondition, match="is not this worker's any more"):
        paused.write()
    paused.report_end("INTERNAL", "its file is gone")
    assert paused.key != again[1].key
    again[1].run()
    assert sorted(int(x) for x, _ in cluster.loaded()) == list(range(SIZE))


def test_a_worker_writes_what_is_listed_until_it_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is assigned to it again is begun anew, behind the chunks of others."""
    wrote: list[tuple[int, int]] = []
    monkeypatch.setattr(
        saves.StreamWriter, "write", lambda self: wrote.append((self.key[1], self._chunks))
    )
    dispatcher: Any = None
    writers = saves.StreamWriters(1, dispatcher, OPTIONS)
    for assignment, chunks in (1, 0), (1, 0), (3, 4):
        writers.reconcile([pb.Stream(save_id=1, assignment=assignment, chunks=chunks)])
    writers.drain()
    writers.reconcile([pb.Stream(save_id=1, stream=number) for number in (0, 1)])
    writers.join(time.monotonic() + 20)
    assert wrote == [(0, 0), (0, 4)]


def test_a_list_of_some_streams_ends_no_writer_and_a_cancelled_one_commits_nothing(
    tmp_path: Path,
) -> None:
    """Else its successor under the same assignment would commit the same chunk once more."""
    cluster = Cluster(tmp_path / "save", numbers())
    written, listed = threading.Event(), threading.Event()

    def waits(_: pb.CommitChunkRequest) -> None:
        written.set()
        assert listed.wait(20)

    cluster.before_commit(waits)
    writer = cluster.writer(1)
    dispatcher: Any = cluster
    writers = saves.StreamWriters(1, dispatcher, OPTIONS)
    writers.reconcile([writer.stream])
    assert written.wait(20)
    writers.reconcile([], partial=True)
    assert len(writers.progress()) == 1
    listed.set()
    writers.join(time.monotonic() + 20)
    assert sorted(int(x) for x, _ in cluster.loaded()) == list(range(SIZE))

    cluster = Cluster(tmp_path / "another", numbers())
    cancelled = cluster.writer(1)
    cancelled.cancel()
    with contextlib.suppress(Unavailable):
        cancelled.write()
    assert cluster.state.saves[cluster.save_id].streams[0].chunks == 0


def test_a_writer_that_drains_commits_what_it_has(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "save", numbers())
    worker_id, whole = cluster.worker(1), WorkerOptions(dispatcher="h:1")
    cluster.when(c.AssignStream(worker_id=worker_id, most=1))
    save = cluster.state.saves[cluster.save_id]
    dispatcher: Any = cluster
    leaving = saves.StreamWriter(_stream(save, 0), 1, dispatcher, whole)
    leaving.draining.set()
    leaving.run()
    assert (save.streams[0].chunks, 0 < save.streams[0].elements < SIZE) == (1, True)
    assert not save.streams[0].completed
    cluster.when(c.LoseWorker(worker_id=worker_id, reason="it said goodbye", left=True))
    cluster.writer(2).run()
    assert sorted(int(x) for x, _ in cluster.loaded()) == list(range(SIZE))


def elements(x: Any) -> Any:
    """Elements with each kind of component."""
    half = tf.cast(x, tf.bfloat16), tf.cast([x, x], tf.float16), x > 3
    strings = {"s": tf.strings.as_string(x), "ends in zero": tf.constant(b"a\0")}
    composites = tf.ragged.range([x % 3 + 1, 2]), tf.sparse.from_dense([0, x])
    return half, strings, composites, tf.zeros([x % 4, 3, 2], tf.uint8)


def flat(element: Any) -> list[Any]:
    tensors = [tensor.numpy() for tensor in tf.nest.flatten(element, expand_composites=True)]
    return [x if isinstance(x, bytes) else (x.shape, x.tolist()) for x in tensors]


def test_load_gets_what_was_saved(tmp_path: Path) -> None:
    dataset = tf.data.Dataset.from_tensor_slices(tf.range(SIZE)).map(elements)
    for compression in ("SNAPPY", "GZIP", ""):
        cluster = Cluster(tmp_path / f"save{compression}", dataset, compression)
        cluster.writer(1).run()
        cluster.loaded()
        loaded = tf.data.Dataset.load(
            cluster.path, reader_func=lambda chunks: chunks.flat_map(lambda chunk: chunk)
        )
        assert loaded.element_spec == dataset.element_spec
        assert list(map(flat, loaded)) == list(map(flat, dataset))


def test_an_error_of_the_pipeline_ends_the_save(tmp_path: Path) -> None:
    dataset = tf.data.Dataset.from_tensor_slices(tf.range(SIZE)).map(
        lambda x: tf.debugging.check_numerics(1 / (x - 5), "it is infinite")
    )
    cluster = Cluster(tmp_path / "save", dataset)
    cluster.writer(1).run()
    assert cluster.state.ended_saves[cluster.save_id].failed == "INVALID_ARGUMENT"
    with pytest.raises(ValueError, match="it is infinite"):
        cluster.loaded()


def test_an_error_of_the_file_system_ends_the_save_but_not_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, gone = (Cluster(tmp_path / name, numbers()) for name in ("full", "gone"))
    os.unlink(f"{gone.path}/dataset_def.proto")
    gone.writer(1).run()
    os.symlink("/dev/full", f"{full.path}/full")

    def opener(graph: bytes, compression: str) -> Any:
        return lambda _: chunk_opener(graph, compression)(f"{full.path}/full")

    monkeypatch.setattr(pipelines, "chunk_opener", opener)
    full.writer(1).run()
    for cluster, code, said in (
        (full, "RESOURCE_EXHAUSTED", "No space left"),
        (gone, "FAILED_PRECONDITION", "dataset_def.proto"),
    ):
        ended = cluster.state.ended_saves[cluster.save_id]
        assert ended.failed == code, ended.message
        assert said in ended.message


def test_a_cancelled_writer_reports_no_error(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "save", numbers())
    writer = cluster.writer(1)
    writer.cancel()
    writer.run()
    assert cluster.save_id in cluster.state.saves
    assert os.listdir(f"{cluster.path}/chunks") == []

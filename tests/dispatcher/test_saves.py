"""A save's directory follows what was decided, wherever the dispatcher dies; what cannot be written
ends that save only.

The worker is played: it asks as TensorFlow's do.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.core.state import EndedSave
from forebay.service.dispatcher import save_directory, saves
from forebay.service.dispatcher.dispatcher import Dispatcher
from forebay.service.dispatcher.dispatcher_servicer import DispatcherServicer
from forebay.service.dispatcher.tf_data_dispatcher_servicer import TfDataDispatcherServicer
from forebay.service.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unimplemented,
)
from forebay.service.proto import forebay_pb2
from forebay.service.proto import graph_pb2 as graph
from forebay.service.proto import tf_service_pb2 as pb
from forebay.storage import MemoryStorage, Storage, open_storage
from forebay.storage.tfrecord import unframe

from ..transfer_servers import SERVERS
from .leading import run_dispatcher, until

SIZE = 5
METADATA = pb.DistributedSnapshotMetadata(element_spec=b"\x00spec", compression="SNAPPY")
SLICES = graph.GraphDef(
    node=[
        graph.NodeDef(name="n", op="Const"),
        graph.NodeDef(name="source", op="TensorSliceDataset", input=["n"]),
        graph.NodeDef(name="result", op="_Retval", input=["source"]),
    ]
)
SLICES.node[0].attr["value"].tensor.tensor_shape.dim.add(size=SIZE)


class Died(BaseException):
    """kill -9, in the midst of a request: nothing handles it."""


class Served:
    """A dispatcher that serves, and what a stock worker asks it."""

    def __init__(self, dispatcher: Dispatcher, path: Path) -> None:
        self.dispatcher = dispatcher
        self.servicer = TfDataDispatcherServicer(dispatcher)
        self.path = str(path)

    async def save(self, path: str | None = None) -> None:
        await self.servicer.snapshot(
            pb.SnapshotRequest(
                dataset=pb.DatasetDef(graph=SLICES.SerializeToString()),
                path=self.path if path is None else path,
                metadata=METADATA.SerializeToString(),
            )
        )

    async def beat(self, number: int = 1, **progress: Any) -> list[int]:
        """The streams that the worker shall write."""
        request = pb.WorkerHeartbeatRequest(worker_address=f"w:{number}", worker_uid=number)
        if progress:
            said = pb.SnapshotTaskProgress(**progress)
            request.snapshot_task_progress[self.path].CopyFrom(said)
        answer = await self.servicer.worker_heartbeat(request)
        assert all(task.base_path == self.path for task in answer.snapshot_tasks)
        return [task.stream_index for task in answer.snapshot_tasks]

    async def split(self, number: int = 1, stream: int = 0, pass_number: int = 0) -> Any:
        """The local index, and the split's tensor."""
        answer = await self.servicer.get_snapshot_split(
            pb.GetSnapshotSplitRequest(
                worker_address=f"w:{number}", base_path=self.path, stream_index=stream,
                repetition_index=pass_number,
            )
        )  # fmt: skip
        return answer.local_split_index, None if answer.end_of_splits else answer.split

    async def complete(self) -> None:
        await self.beat(completed=True)


Steps = Callable[[Served], Coroutine[Any, Any, None]]


def serve(storage: Storage, path: Path, steps: Steps, **options: Any) -> None:
    async def run(dispatcher: Dispatcher) -> None:
        served = Served(dispatcher, path)
        try:
            await steps(served)
        finally:
            await served.servicer.close()

    run_dispatcher(storage, run, **options)


def splits_in(path: Path) -> dict[str, bytes | None]:
    files = sorted((path / "streams").glob("*/splits/*/*/*"))
    return {str(file.relative_to(path / "streams")): unframe(file.read_bytes()) for file in files}


def test_the_directory_is_tensorflows(tmp_path: Path) -> None:
    path = tmp_path / "a" / "save"

    async def steps(served: Served) -> None:
        await served.save(f"{path}/")
        text = (path / "snapshot.metadata").read_text()
        assert text_format.Parse(text, pb.DistributedSnapshotMetadata()) == METADATA
        assert (path / "dataset_spec.pb").read_bytes() == METADATA.element_spec
        stored = pb.DatasetDef.FromString((path / "dataset_def.proto").read_bytes())
        assert graph.GraphDef.FromString(stored.graph) == SLICES
        assert sorted(os.listdir(path)) == [
            *("chunks", "dataset_def.proto", "dataset_spec.pb", "forebay_save"),
            *("snapshot.metadata", "streams"),
        ]
        assert (await served.beat(), await served.beat(2)) == ([0], [1])
        assert (path / "streams/stream_1/owner_worker").read_text() == "w:2"
        got = [await served.split(), await served.split(2, 1), await served.split(2, 1)]
        values = [save_directory.split_tensor(value) for value in range(3)]
        assert got == [(0, values[0]), (0, values[1]), (1, values[2])]
        assert await served.split(pass_number=1) == (1, values[0])
        assert splits_in(path) == {
            "stream_0/splits/source_0/repetition_0/split_0_0": values[0],
            "stream_0/splits/source_0/repetition_1/split_1_3": values[0],
            "stream_1/splits/source_0/repetition_0/split_0_1": values[1],
            "stream_1/splits/source_0/repetition_0/split_1_2": values[2],
        }
        assert await served.split(2, 1) == (2, None)
        streams = await served.servicer.get_snapshot_streams(
            pb.GetSnapshotStreamsRequest(path=served.path)
        )
        assigned = pb.SnapshotStreamInfo.ASSIGNED
        assert [(s.index, s.state) for s in streams.streams] == [(0, assigned), (1, assigned)]
        await served.complete()
        assert not (path / "DONE").exists()
        assert await served.beat() == []
        await served.beat(2, completed=True, snapshot_task=pb.SnapshotTaskDef(stream_index=1))
        await until((path / "DONE").exists)

    serve(open_storage(str(tmp_path / "journal")), path, steps)


DEATHS = ["place", "own", "write_splits", "seal"]


@pytest.mark.parametrize("step", DEATHS)
def test_the_next_dispatcher_writes_the_files_of_journaled_decisions(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first dispatcher died after it journaled the decision and before it wrote the file."""
    path, storage = tmp_path / "save", open_storage(str(tmp_path / "journal"))
    told: list[Any] = []
    dead: list[str] = []

    async def whole(served: Served) -> None:
        if served.path not in served.dispatcher.state.save_at:
            await served.save()
        assert await served.beat() == [0]
        while (got := await served.split())[1] is not None:
            told.append(got)
        await served.complete()
        await until(lambda: (path / "DONE").exists() or bool(dead))

    real = getattr(save_directory, step)

    def dies(*args: Any) -> None:
        if step != "write_splits" or any("split_2" in path for path in args[0]):
            dead.append(step)
            raise Died
        real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(save_directory, step, dies)
        # What says that a save is over is nobody's request.
        with contextlib.nullcontext() if step == "seal" else pytest.raises(Died):
            serve(storage, path, whole)
    assert not (path / "DONE").exists()

    async def rest(served: Served) -> None:
        if served.dispatcher.state.saves:
            await whole(served)
        await until((path / "DONE").exists)

    serve(storage, path, rest)
    assert not list(tmp_path.glob("*.preparing"))
    files = splits_in(path)
    assert list(files.values()) == [save_directory.split_tensor(value) for value in range(SIZE)]
    names = [name.rpartition("/")[2] for name in files]
    assert names == [f"split_{n}_{n}" for n in range(SIZE)]
    # A worker that missed an answer reads the split from its file: it sees that the index jumps.
    assert {index for index, _ in told} >= set(range(SIZE)) - {2}


def test_a_torn_split_file_is_written_again(tmp_path: Path) -> None:
    path, storage = tmp_path / "save", open_storage(str(tmp_path / "journal"))

    async def steps(served: Served) -> None:
        await served.save()
        await served.beat()
        for _ in range(3):
            await served.split()

    async def again(served: Served) -> None:
        assert await served.beat() == [0]
        assert await served.split() == (3, save_directory.split_tensor(3))

    serve(storage, path, steps)
    written = splits_in(path)
    first, second, _ = sorted(path.glob("streams/*/splits/*/*/*"))
    first.write_bytes(b"")
    second.unlink()
    serve(storage, path, again)
    assert {name: data for name, data in splits_in(path).items() if name in written} == written


@pytest.mark.parametrize("step", ["own", "write_splits"])
def test_a_full_disk_ends_the_save_and_nothing_else(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "save"

    async def steps(served: Served) -> None:
        await served.save()
        monkeypatch.setattr(save_directory, step, full)
        assert await served.beat() == ([] if step == "own" else [0])
        if step == "write_splits":
            with pytest.raises(FailedPrecondition, match="is over"):
                await served.split()
        await until((path / "ERROR").exists)
        status = text_format.Parse((path / "ERROR").read_text(), pb.StatusProto())
        assert status.code == pb.RESOURCE_EXHAUSTED
        assert "No space left" in status.message
        assert await served.beat() == []
        assert await served.beat(2) == []

    def full(what: Any, *_: Any) -> None:
        if what:
            raise OSError(errno.ENOSPC, "No space left on device", "the file")

    serve(open_storage(str(tmp_path / "journal")), path, steps)


def test_an_error_of_a_worker_ends_the_save(tmp_path: Path) -> None:
    path = tmp_path / "save"

    async def steps(served: Served) -> None:
        await served.save()
        await served.beat()
        failed = pb.StatusProto(code=pb.INVALID_ARGUMENT, message="it is infinite")
        assert await served.beat(status=failed) == []
        await until((path / "ERROR").exists)
        assert text_format.Parse((path / "ERROR").read_text(), pb.StatusProto()) == failed
        with pytest.raises(AlreadyExists, match="already started or completed"):
            await served.save()
        for file in sorted(path.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        path.rmdir()
        await served.save()
        assert await served.beat() == [0], "deleted, it can be saved there again"

    serve(open_storage(str(tmp_path / "journal")), path, steps)


def test_an_end_is_written_once_and_only_to_the_saves_own_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "save"
    save = EndedSave(1, str(path), f"{path}.p", finished=True)
    save_directory.seal(save)  # the directory is gone
    assert not caplog.records
    save_directory.prepare(f"{path}.other", METADATA, b"")
    os.rename(f"{path}.other", path)
    save_directory.seal(save)
    assert f"what is at {path} now is not the save" in caplog.text
    assert "DONE" not in os.listdir(path)
    save_directory.remove(str(path))
    save_directory.prepare(save.prepared, METADATA, b"")
    os.rename(save.prepared, path)
    save_directory.seal(save)
    save.finished, save.failed = False, "DATA_LOSS"  # says the journal after a repair
    save_directory.seal(save)
    assert {"DONE", "ERROR"} & {*os.listdir(path)} == {"DONE"}


def test_a_save_within_the_directory_of_another_save_is_refused(tmp_path: Path) -> None:
    outer = tmp_path / "save"

    async def steps(served: Served) -> None:
        await served.save()
        save_id = served.dispatcher.state.save_at[served.path]
        for _ in range(2):  # as it is being written, and afterwards
            with pytest.raises(InvalidArgument, match=f"another one was saved to {outer}, and"):
                await served.save(str(outer / "new" / "inner" / "x" / ".."))
            assert not (outer / "new").exists()
            await served.dispatcher.execute(c.FailSave(save_id=save_id, code="X", message=""))
        await served.save(f"{outer}er")

    serve(open_storage(str(tmp_path / "journal")), outer, steps)


def test_a_save_whose_directory_was_replaced_ends(tmp_path: Path) -> None:
    path = tmp_path / "save"

    async def steps(served: Served) -> None:
        await served.save()
        assert await served.beat() == [0]
        save_directory.remove(str(path))
        path.mkdir()
        assert await served.beat() == []
        (save,) = served.dispatcher.state.ended_saves.values()
        assert f"is gone, or another one is there now ({path})" in save.message

    serve(open_storage(str(tmp_path / "journal")), path, steps)
    assert os.listdir(path) == []


class Hanging:
    """One step of the work on files at one save's directory, which hangs within the context."""

    def __init__(self, step: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self._goes_on = threading.Event()
        self._real, self._path = getattr(save_directory, step), path
        monkeypatch.setattr(save_directory, step, self._work)
        monkeypatch.setattr(saves, "READY_S", 0.01)

    def __enter__(self) -> Hanging:
        return self

    def __exit__(self, *_: object) -> None:
        self._goes_on.set()

    def _work(self, *args: Any) -> None:
        if any(self._path in (arg, getattr(arg, "path", None)) for arg in args):
            self.threads.append(threading.current_thread().name)
            assert self._goes_on.wait(60)
        self._real(*args)


def test_a_hanging_directory_blocks_neither_other_streams_nor_the_end_of_other_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = f"{tmp_path}/slow", f"{tmp_path}/fast"

    async def steps(served: Served) -> None:
        for path in (slow, fast):
            await served.save(path)
        request = pb.WorkerHeartbeatRequest(worker_address="w:1", worker_uid=1)

        async def streams_are_of(*paths: str) -> None:
            found: list[str] = []
            while found != [*paths]:
                answer = await served.servicer.worker_heartbeat(request)
                found = [task.base_path for task in answer.snapshot_tasks]
                assert {*found} <= {*paths}

        with Hanging("own", slow, monkeypatch) as hanging:
            await streams_are_of(fast)
            (thread,) = hanging.threads
            assert thread.startswith("forebay-saves")
        await streams_are_of(slow, fast)
        with Hanging("seal", slow, monkeypatch) as hanging:
            for path in (slow, fast):
                save_id = served.dispatcher.state.save_at[path]
                await served.dispatcher.execute(c.FailSave(save_id=save_id, code="X", message=""))
            await until((tmp_path / "fast" / "ERROR").exists)
            assert hanging.threads
            assert not (tmp_path / "slow" / "ERROR").exists()
        await until((tmp_path / "slow" / "ERROR").exists)

    serve(open_storage(str(tmp_path / "journal")), tmp_path, steps)


def ours(path: Path) -> forebay_pb2.StartSaveRequest:
    return forebay_pb2.StartSaveRequest(
        request=ev.Request(caller="a", number=1),
        path=str(path),
        graph=SLICES.SerializeToString(),
        sources=[ev.SplitSource(count=SIZE)],
        metadata=METADATA.SerializeToString(),
    )


def test_a_client_that_cancels_before_a_save_begins_leaves_no_half_made_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "save"
    real = save_directory.prepare
    prepares, goes_on = threading.Event(), threading.Event()

    def prepare(*args: Any) -> None:
        prepares.set()
        assert goes_on.wait(60)
        real(*args)

    monkeypatch.setattr(save_directory, "prepare", prepare)

    async def steps(served: Served) -> None:
        asking = asyncio.create_task(DispatcherServicer(served.dispatcher).start_save(ours(path)))
        await until(prepares.is_set)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        goes_on.set()
        await DispatcherServicer(served.dispatcher).start_save(ours(path))

    serve(open_storage(str(tmp_path / "journal")), path, steps)
    assert sorted(os.listdir(tmp_path)) == ["journal", "save"]


def test_a_retry_uses_the_directory_that_a_killed_dispatcher_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, storage = tmp_path / "save", open_storage(str(tmp_path / "journal"))
    real = save_directory.prepare

    def dies(*args: Any) -> None:
        real(*args)
        raise Died

    async def steps(served: Served) -> None:
        await DispatcherServicer(served.dispatcher).start_save(ours(path))

    with monkeypatch.context() as patched:
        patched.setattr(save_directory, "prepare", dies)
        patched.setattr(save_directory, "remove", lambda _: None)
        with pytest.raises(Died):
            serve(storage, path, steps)
    assert list(tmp_path.glob("*.preparing"))
    serve(storage, path, steps)
    assert sorted(os.listdir(tmp_path)) == ["journal", "save"]


def test_a_waiting_worker_is_told_of_a_stream_that_becomes_free(tmp_path: Path) -> None:
    async def steps(served: Served) -> None:
        servicer = DispatcherServicer(served.dispatcher)
        beat = forebay_pb2.WorkerHeartbeatRequest(transfer_servers=SERVERS, address="w:1", uid=1)
        version = (await servicer.worker_heartbeat(beat)).version
        beat.MergeFrom(forebay_pb2.WorkerHeartbeatRequest(version=version, wait_ms=600_000))
        waiting = asyncio.create_task(servicer.worker_heartbeat(beat))
        await until(lambda: bool(served.dispatcher.waiting))
        await servicer.start_save(ours(tmp_path / "save"))
        assert [stream.stream for stream in (await waiting).streams] == [0]

    serve(open_storage(str(tmp_path / "journal")), tmp_path, steps)


def test_only_stock_workers_save_a_dataset_that_calls_python(tmp_path: Path) -> None:
    path = tmp_path / "save"
    drawn = graph.GraphDef.FromString(SLICES.SerializeToString())
    drawn.node.add(name="python", op="EagerPyFunc")
    request = ours(path)
    request.graph = drawn.SerializeToString()

    async def steps(served: Served) -> None:
        servicer = DispatcherServicer(served.dispatcher)
        beat = forebay_pb2.WorkerHeartbeatRequest(transfer_servers=SERVERS, address="o:1", uid=9)
        await servicer.worker_heartbeat(beat)
        with pytest.raises(
            Unimplemented, match=r"'python' \(EagerPyFunc\) is a function in Python"
        ):
            await servicer.start_save(request)
        assert not path.exists()
        assert await served.beat() == []
        await servicer.start_save(request)
        assert not (await servicer.worker_heartbeat(beat)).streams
        assert await served.beat() == [0]

    serve(open_storage(str(tmp_path / "journal")), path, steps)


def test_a_refused_save_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "other").mkdir()

    async def steps(served: Served) -> None:
        for path, error, says in [
            ("", InvalidArgument, "absolute"),
            ("gs://bucket/save", InvalidArgument, "absolute"),
            ("/a\0", InvalidArgument, "absolute"),
            (f"{tmp_path}/file", AlreadyExists, "already exists"),
            (f"{tmp_path}/other", AlreadyExists, "already exists"),
            (f"{tmp_path}/file/save", FailedPrecondition, "Not a directory"),
            (f"/{'a' * 300}", FailedPrecondition, "name too long"),
        ]:
            with pytest.raises(error, match=says):
                await served.save(path)
        METADATA.compression = "LZMA"
        with pytest.raises(InvalidArgument, match="compressed with 'LZMA'"):
            await served.save()
        METADATA.compression = "SNAPPY"
        assert not served.dispatcher.state.save_at
        with pytest.raises(NotFound, match="does not know of a save"):
            await served.split()
        servicer = DispatcherServicer(served.dispatcher)
        await servicer.worker_heartbeat(
            forebay_pb2.WorkerHeartbeatRequest(transfer_servers=SERVERS, address="o:1", uid=9)
        )
        two = forebay_pb2.StartSaveRequest(
            path=f"{tmp_path}/s",
            graph=SLICES.SerializeToString(),
            sources=[ev.SplitSource(count=SIZE, unleasable="of why")],
            metadata=METADATA.SerializeToString(),
        )
        with pytest.raises(Unimplemented, match="of why"):
            await servicer.start_save(two)

    serve(open_storage(str(tmp_path / "journal")), tmp_path / "save", steps)
    assert sorted(os.listdir(tmp_path)) == ["file", "journal", "other"]


def test_a_retry_by_our_client_begins_no_second_save(tmp_path: Path) -> None:
    async def steps(served: Served) -> None:
        servicer, request = DispatcherServicer(served.dispatcher), ours(Path(served.path))
        await asyncio.gather(servicer.start_save(request), servicer.start_save(request))
        await servicer.start_save(request)
        request.request.number = 2
        with pytest.raises(AlreadyExists):
            await servicer.start_save(request)
        assert list(served.dispatcher.state.save_at) == [served.path]

    serve(open_storage(str(tmp_path / "journal")), tmp_path / "save", steps)
    assert sorted(os.listdir(tmp_path)) == ["journal", "save"]


def test_a_save_needs_a_storage_that_survives_its_dispatcher(tmp_path: Path) -> None:
    async def steps(served: Served) -> None:
        with pytest.raises(InvalidArgument, match="in the fault tolerant mode"):
            await served.save()

    serve(MemoryStorage(), tmp_path / "save", steps)
    assert os.listdir(tmp_path) == []


def test_a_stream_that_its_worker_abandoned_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow's workers abandon a stream silently if the dispatcher is away for long."""
    storage, task = open_storage(str(tmp_path / "journal")), pb.SnapshotTaskDef(stream_index=0)

    async def begin(served: Served) -> None:
        await served.save()
        assert await served.beat() == [0]
        await served.split()

    async def gives_up(served: Served) -> None:
        assert await served.beat(snapshot_task=task) == [0]
        monkeypatch.setattr(saves, "SILENT_S", 0.0)
        assert await served.beat(2, snapshot_task=task) == [1], "whose stream it is not"
        for _ in range(2):  # the first of these answers may be lost
            assert await served.beat(snapshot_task=task) == []
        with monkeypatch.context() as patch:  # what is withheld stays so
            patch.setattr(saves, "DOUBTED_S", 0.0)
            assert await served.beat(snapshot_task=task) == []
        assert await served.beat() == [0], "it has let the stream go"
        for _ in range(2):
            assert await served.beat(snapshot_task=task) == [0]

    async def is_doubted_no_longer(served: Served) -> None:
        for _ in range(2):
            assert await served.beat(snapshot_task=task) == [0]

    serve(storage, tmp_path / "save", begin)
    serve(storage, tmp_path / "save", gives_up)
    monkeypatch.setattr(saves, "DOUBTED_S", 0.0)
    serve(storage, tmp_path / "save", is_doubted_no_longer)

"""Sources that grow: what is found in a save's directory, and told as splits."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service import saved_chunks
from forebay.service.core import commands as c
from forebay.service.dispatcher import growing_sources
from forebay.service.dispatcher.dispatcher import Dispatcher
from forebay.service.dispatcher.dispatcher_servicer import DispatcherServicer
from forebay.service.dispatcher.tf_data_dispatcher_servicer import (
    TfDataDispatcherServicer,
    file_tensor,
)
from forebay.service.errors import FailedPrecondition, Unavailable
from forebay.service.proto import forebay_pb2
from forebay.service.proto import tf_service_pb2 as pb
from forebay.storage import MemoryStorage, Storage

from .leading import run_dispatcher, until

ROOT = Path(__file__).parents[2]


class Loaded:
    """A dispatcher with an iteration over a save at `path`, and who asks it for splits."""

    def __init__(self, dispatcher: Dispatcher, path: str) -> None:
        self.dispatcher = dispatcher
        self.path = path
        self.servicer = TfDataDispatcherServicer(dispatcher)
        self.ours = DispatcherServicer(dispatcher)
        self.iteration_id = max(dispatcher.state.iterations, default=0)
        self.consumer_id = max(dispatcher.state.consumers, default=0)
        self.task_id = max(dispatcher.state.tasks, default=0)

    async def begin(self) -> None:
        execute = self.dispatcher.execute
        source = ev.SplitSource(saved_chunks=ev.SavedChunks(path=self.path))
        definition = ev.DatasetDefinition(sources=[source])
        await execute(c.RegisterDataset(dataset_id="loaded", definition=definition))
        await execute(c.RegisterWorker(address="w:1", uid=1))
        job = c.GetOrCreateJob(dataset_id="loaded", name="job", sharding=ev.DYNAMIC)
        joined = await execute(c.JoinIteration(job_id=await execute(job), epoch=0))
        self.consumer_id, self.iteration_id = joined.consumer_id, joined.iteration_id
        self.task_id = max(self.dispatcher.state.tasks)

    async def split(self, repetition: int = 0) -> bytes | None:
        answer = await self.servicer.get_split(
            pb.GetSplitRequest(iteration_id=self.iteration_id, repetition=repetition)
        )
        return None if answer.end_of_splits else answer.split

    async def splits(self, repetition: int = 0) -> list[bytes]:
        taken = []
        while (split := await self.split(repetition)) is not None:
            taken.append(split)
        return taken

    async def lease(self, want: int = 10, number: int = 0) -> forebay_pb2.LeaseSplitsResponse:
        return await self.ours.lease_splits(
            forebay_pb2.LeaseSplitsRequest(
                request=ev.Request(number=number), task_id=self.task_id, want=want
            )
        )

    async def lose_worker(self) -> None:
        (worker_id,) = self.dispatcher.state.workers
        await self.dispatcher.execute(c.LoseWorker(worker_id=worker_id, reason="silent"))


Steps = Callable[[Loaded], Coroutine[Any, Any, None]]


def serve(path: Path, steps: Steps, storage: Storage | None = None) -> None:
    async def run(dispatcher: Dispatcher) -> None:
        loaded = Loaded(dispatcher, str(path))
        if not dispatcher.state.datasets:
            await loaded.begin()
        await steps(loaded)
        await loaded.servicer.close()

    run_dispatcher(MemoryStorage() if storage is None else storage, run)


@pytest.fixture
def save(tmp_path: Path) -> Path:
    path = tmp_path / "save"
    (path / "chunks").mkdir(parents=True)
    return path


def write(save: Path, *names: str) -> None:
    for name in names:
        (save / "chunks" / name).touch()


def files(save: Path, *names: str) -> list[bytes]:
    return [file_tensor(f"{save}/chunks/{name}") for name in names]


async def ends(waiting: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(waiting, 60)


def test_a_split_is_the_same_chunk_in_every_pass_and_after_a_restart(save: Path) -> None:
    storage = MemoryStorage()
    write(save, "chunk_0_2_5", "chunk_1_1_5", "chunk_10_1_5", "chunk_9_1_-1", "chunk_0_0__1.tmp")
    found = files(save, "chunk_1_1_5", "chunk_9_1_-1", "chunk_10_1_5", "chunk_0_2_5")

    async def first(loaded: Loaded) -> None:
        assert [await loaded.split() for _ in range(3)] == found[:3]

    async def second(loaded: Loaded) -> None:
        write(save, "chunk_0_0_5", "chunk_0_1_5")  # which are numbered behind what was found
        assert await loaded.split() == found[3]
        late = files(save, "chunk_0_0_5", "chunk_0_1_5")
        assert [await loaded.split() for _ in range(2)] == late
        (save / "DONE").touch()
        assert await loaded.splits() == []
        assert await loaded.splits(1) == [*found, *late]

    serve(save, first, storage)
    serve(save, second, storage)


def test_a_worker_waits_for_the_next_chunk_and_for_the_end(
    save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing_sources, "WAIT_S", 0.02)
    looks: list[str] = []

    def look(path: str, known: Any) -> Any:
        looks.append(path)
        return real(path, known)

    real = saved_chunks.look
    monkeypatch.setattr(saved_chunks, "look", look)

    async def looked() -> None:
        seen = len(looks)
        await until(lambda: len(looks) > seen + 1)

    async def steps(loaded: Loaded) -> None:
        stock = asyncio.create_task(loaded.split())
        assert (await loaded.lease()).not_yet
        await looked()
        assert not stock.done()
        write(save, "chunk_0_0_1")
        assert await ends(stock) == files(save, "chunk_0_0_1")[0]
        write(save, "chunk_0_1_1", "chunk_0_2_1")
        while (lease := await loaded.lease()).not_yet:
            pass
        assert (lease.first, lease.count) == (1, 1)
        assert lease.names == ["chunk_0_1_1"]
        assert (await loaded.lease()).names == ["chunk_0_2_1"]
        stock = asyncio.create_task(loaded.split())
        await looked()
        (save / "DONE").touch()
        assert await ends(stock) is None
        assert (await loaded.lease()).end_of_splits

    serve(save, steps)


def test_a_hanging_file_system_blocks_no_other_request(
    save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, hangs = threading.Event(), threading.Event()

    def look(*_: Any) -> Any:
        hangs.set()
        goes_on.wait(60)
        raise FailedPrecondition("it has hung")

    monkeypatch.setattr(saved_chunks, "look", look)

    async def steps(loaded: Loaded) -> None:
        waiting = [asyncio.create_task(loaded.split()) for _ in range(20)]
        await until(hangs.is_set)
        await ends(loaded.dispatcher.execute(c.RegisterWorker(address="w:2", uid=2)))
        goes_on.set()
        for one in waiting:
            with pytest.raises(FailedPrecondition, match="it has hung"):
                await ends(one)

    serve(save, steps)


HANGS = """
import asyncio, pathlib, sys, threading
from tests.dispatcher.leading import until
from tests.dispatcher.test_growing_sources import serve

def is_looking():
    names = [thread.name for thread in threading.enumerate()]
    return any(name.startswith("forebay-growing-sources") for name in names)

async def steps(loaded):
    asyncio.create_task(loaded.split())
    await until(is_looking)

serve(pathlib.Path(sys.argv[1]), steps)
"""


def test_a_dispatcher_stops_while_a_directory_listing_hangs(save: Path) -> None:
    os.mkfifo(save / "ERROR")  # whoever opens it waits for a writer
    subprocess.run([sys.executable, "-c", HANGS, str(save)], cwd=ROOT, check=True, timeout=60)


def test_a_waiting_worker_is_told_to_ask_the_next_dispatcher(save: Path) -> None:
    async def steps(loaded: Loaded) -> None:
        waiting = [asyncio.create_task(ask()) for ask in (loaded.split, loaded.lease)]
        await asyncio.sleep(0)
        await loaded.dispatcher.finish()
        for one in waiting:
            with pytest.raises(Unavailable, match="stopping"):
                await ends(one)

    serve(save, steps)


def test_a_lease_is_answered_again_with_its_names_to_a_worker_that_was_given_up(save: Path) -> None:
    write(save, "chunk_0_0_1", "chunk_0_1_1")

    async def steps(loaded: Loaded) -> None:
        lease = await loaded.lease(number=1)
        assert lease.names == ["chunk_0_0_1"]
        await loaded.lose_worker()
        assert await loaded.lease(number=1) == lease

    serve(save, steps)


def test_a_stock_worker_is_not_kept_waiting_beyond_its_task_nor_told_of_a_chunk_then(
    save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats wait behind this call, which the worker cannot cancel."""
    monkeypatch.setattr(growing_sources, "WAIT_S", 0.02)

    async def steps(loaded: Loaded) -> None:
        execute, state = loaded.dispatcher.execute, loaded.dispatcher.state
        waiting = asyncio.create_task(loaded.split())
        await asyncio.sleep(0)
        await execute(c.LeaveIteration(consumer_id=loaded.consumer_id, reason="it said goodbye"))
        await execute(c.CollectIteration(iteration_id=loaded.iteration_id))
        (job_id,) = state.jobs
        await execute(c.JoinIteration(job_id=job_id, epoch=0))
        assert max(state.tasks) > loaded.task_id
        assert await ends(waiting) is None
        write(save, "chunk_0_0_1")
        assert await loaded.split() == files(save, "chunk_0_0_1")[0]

    serve(save, steps)


def test_a_stock_worker_that_was_given_up_and_may_come_back_goes_on_waiting(
    save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it were told that the source ended, it would complete its task and the iteration."""
    monkeypatch.setattr(growing_sources, "WAIT_S", 0.02)

    async def steps(loaded: Loaded) -> None:
        waits: list[int] = []
        wait = loaded.dispatcher.growing_sources.wait

        async def counted(*arguments: int) -> None:
            await wait(*arguments)
            waits.append(1)

        monkeypatch.setattr(loaded.dispatcher.growing_sources, "wait", counted)
        waiting = asyncio.create_task(loaded.split())
        await asyncio.sleep(0)
        await loaded.lose_worker()
        await until(lambda: len(waits) > 1 or waiting.done())
        write(save, "chunk_0_0_1")
        assert await ends(waiting) == files(save, "chunk_0_0_1")[0]

    serve(save, steps)


def fail(save: Path) -> None:
    (save / "ERROR").write_text('code: RESOURCE_EXHAUSTED\nmessage: "the disk is full"\n')


def fail_unreadably(save: Path) -> None:
    (save / "ERROR").write_bytes(b"\xffno status")


def put_something_else(save: Path) -> None:
    write(save, "chunk_0_0_1", "chunk_0_0_1.bak")


def put_a_file(save: Path) -> None:
    os.rmdir(save / "chunks")
    (save / "chunks").touch()


def remove(save: Path) -> None:
    os.rmdir(save / "chunks")
    os.rmdir(save)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            fail,
            r"save at .*/save failed, and is not complete: RESOURCE_EXHAUSTED: the disk is full",
        ),
        (fail_unreadably, "save at .*/save failed, and is not complete: .*no status"),
        (put_something_else, r"chunks/chunk_0_0_1\.bak is no chunk .* move away"),
        (put_a_file, "save at .*/save cannot be read: Not a directory"),
        (remove, "no distributed save at .*/save, as it is seen here: No such file .* Mount"),
    ],
)
def test_a_save_that_cannot_be_loaded_gives_the_reason(
    damage: Callable[[Path], None], said: str, save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status code is one that no worker takes for a retry or for the end of its task."""
    monkeypatch.setattr(saved_chunks, "MISSING_S", 0.0)
    damage(save)

    async def steps(loaded: Loaded) -> None:
        for ask in (loaded.split, loaded.lease):
            with pytest.raises(FailedPrecondition, match=said):
                await ends(ask())

    serve(save, steps)


def fails_to_list(number: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What a network file system does, of a client that may go on or not; call it to end that."""
    failing = [True]

    def listdir(path: str) -> list[str]:
        if failing and path.endswith("/chunks"):
            raise OSError(number, os.strerror(number), path)
        return real(path)

    real = os.listdir
    monkeypatch.setattr(os, "listdir", listdir)
    return failing.clear


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EMFILE])
def test_a_directory_that_cannot_be_listed_ends_a_reader_only_after_long(
    number: int, save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(save, "chunk_0_0_1")
    (save / "DONE").touch()
    goes_on = fails_to_list(number, monkeypatch)
    search = saved_chunks.Search(str(save))
    assert search.look([])[:2] == ([], False)
    with monkeypatch.context() as later:
        later.setattr(saved_chunks, "MISSING_S", 0.0)
        with pytest.raises(FailedPrecondition, match=os.strerror(number)):
            search.look([])
    goes_on()
    assert search.look([])[:2] == (["chunk_0_0_1"], True)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ENOTDIR])
def test_a_directory_that_will_never_be_listed_is_refused_at_once(
    number: int, save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_to_list(number, monkeypatch)
    with pytest.raises(FailedPrecondition, match=f"cannot be read: {os.strerror(number)}"):
        saved_chunks.look(str(save), [])


def test_chunks_that_were_found_before_a_save_failed_are_read(save: Path) -> None:
    async def steps(loaded: Loaded) -> None:
        write(save, "chunk_0_0_1", "chunk_0_1_1")
        assert await loaded.split() == files(save, "chunk_0_0_1")[0]
        fail(save)
        assert await loaded.split() == files(save, "chunk_0_1_1")[0]
        with pytest.raises(FailedPrecondition, match="the disk is full"):
            await loaded.split()

    serve(save, steps)


def test_many_chunks_are_found_in_several_events(
    save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing_sources, "MAX_FOUND", 2)
    names = [f"chunk_0_{number}_1" for number in range(5)]
    write(save, *names)
    (save / "DONE").touch()

    async def steps(loaded: Loaded) -> None:
        assert await loaded.splits() == files(save, *names)

    serve(save, steps)

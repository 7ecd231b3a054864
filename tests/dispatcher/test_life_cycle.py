"""What is removed, and when; and that nobody loses what he was given by it."""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from forebay.journal.codec import FORMAT, encode
from forebay.journal.proto import events_pb2 as ev
from forebay.journal.verification import verify
from forebay.service.core import commands as c
from forebay.service.dispatcher import (
    decider,
    positions,
    save_directory,
    tf_data_dispatcher_servicer,
)
from forebay.service.dispatcher.dispatcher import Dispatcher
from forebay.service.dispatcher.dispatcher_servicer import DispatcherServicer
from forebay.service.dispatcher.graphs import Graphs
from forebay.service.dispatcher.tf_data_dispatcher_servicer import TfDataDispatcherServicer
from forebay.service.errors import NotFound, Unavailable
from forebay.service.pipelines import definitions
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto import tf_service_pb2 as tf
from forebay.storage import FileStorage, MemoryStorage, Storage, StorageError
from forebay.storage.base import blob_name

from .leading import run_dispatcher, until

GRAPH = b"the bytes of a GraphDef"
OFTEN = {"job_gc_check_interval_ms": 10}
NEVER = {"job_gc_check_interval_ms": 3_600_000}


@pytest.fixture(autouse=True)
def _no_graph_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definitions, "fingerprint", lambda *_: "the same")
    monkeypatch.setattr(tf_data_dispatcher_servicer, "sanitize", lambda graph: GRAPH)
    monkeypatch.setattr(tf_data_dispatcher_servicer, "split_sources", lambda graph, evaluate: [])


@pytest.fixture(params=["memory", "files"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return MemoryStorage() if request.param == "memory" else FileStorage(tmp_path)


async def register(dispatcher: Dispatcher, dataset_id: str = "", count: int = 9) -> str:
    definition = ev.DatasetDefinition(sources=[ev.SplitSource(count=count)])
    return await dispatcher.graphs.register(dataset_id, definition, GRAPH)


async def remove(dispatcher: Dispatcher, dataset_id: str) -> None:
    request = pb.RemoveDatasetRequest(dataset_id=dataset_id)
    await DispatcherServicer(dispatcher).remove_dataset(request)


async def graph_of(dispatcher: Dispatcher, dataset_id: str) -> bytes:
    return await dispatcher.graphs.read(dispatcher.state.datasets[dataset_id])


async def join(dispatcher: Dispatcher, dataset_id: str, name: str = "n") -> ev.ConsumerJoined:
    job = c.GetOrCreateJob(dataset_id=dataset_id, name=name, sharding=ev.OFF)
    join = c.JoinIteration(job_id=await dispatcher.execute(job), epoch=0)
    return await dispatcher.execute(join)


async def leave(dispatcher: Dispatcher, joined: ev.ConsumerJoined) -> None:
    await dispatcher.execute(c.LeaveIteration(consumer_id=joined.consumer_id, reason="r"))


def test_a_removed_dataset_leaves_nothing_in_the_storage(storage: Storage) -> None:
    names = []

    async def scene(dispatcher: Dispatcher) -> None:
        for _ in range(2):
            dataset_id = await register(dispatcher)
            assert await register(dispatcher) == dataset_id
            names.append(dispatcher.state.datasets[dataset_id].definition.tf_data_graph.blob)
            assert storage.holdings().blobs == 1
            assert await graph_of(dispatcher, dataset_id) == GRAPH
            dataset = dispatcher.state.datasets[dataset_id]
            assert dataset.graph_bytes == len(GRAPH)
            await remove(dispatcher, dataset_id)
            assert storage.holdings().blobs == 0
            assert not dispatcher.state.unused_blobs
            with pytest.raises(NotFound, match=f"{dataset_id} not found: it was removed"):
                await dispatcher.graphs.read(dataset)
        assert verify(storage).problems == []

    for _ in range(2):  # who was displaced may delete late what it was about to
        run_dispatcher(storage, scene, **NEVER)
    assert len(set(names)) == 4, "a name was used twice"


@pytest.mark.parametrize("repaired", [False, True])
def test_a_graph_whose_dispatcher_died_before_it_was_registered_is_removed_by_the_next(
    storage: Storage, repaired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some time into its term, and once; none that is registered, or is about to be; nor what a
    repair may have cut off."""

    async def dies(dispatcher: Dispatcher) -> None:
        await register(dispatcher, "stays")
        writer = dispatcher.writer
        writer.write_blob(b"never registered", f"{writer.term}-9")
        writer.write_blob(b"without a mark")

    async def scene(dispatcher: Dispatcher) -> None:
        begins = dispatcher.writer.write_blob(b"is about to be", f"{dispatcher.writer.term}-9")
        await collected.wait()
        kept = {"stays": dispatcher.state.datasets["stays"].definition.tf_data_graph.blob}
        found = set(storage.blobs())
        assert {*kept.values(), begins, blob_name(b"without a mark")} <= found
        assert len(found) == 3 + repaired

    run_dispatcher(storage, dies, **NEVER)
    if repaired:
        writer = storage.open_writer("repair", lease_ms=0)
        cut = ev.LeaderElected(term=writer.term, format=FORMAT, journal_id="cut", after_repair=True)
        writer.append([encode(ev.Event(time_ms=1, leader_elected=cut))])
        writer.close()
    collected, collect = asyncio.Event(), Graphs.collect

    async def once(graphs: Graphs) -> None:
        assert not collected.is_set()
        await collect(graphs)
        collected.set()

    monkeypatch.setattr(Graphs, "collect", once)
    run_dispatcher(storage, scene, **OFTEN)


def test_graphs_of_events_that_were_lost_stay_until_readers_had_time_to_say_so(
    storage: Storage,
) -> None:
    """Who brings the events back has the graphs."""
    blobs = []

    async def loses_what_it_registers(dispatcher: Dispatcher) -> None:
        writer = dispatcher.writer
        blobs.append(writer.write_blob(b"of an event that was lost", f"{writer.term}-9"))

    async def is_told(dispatcher: Dispatcher) -> None:
        for number in range(9):
            await register(dispatcher, f"another {number}")
            assert set(blobs) <= set(storage.blobs())
        known = copy.copy(dispatcher.position())
        known.sequence += 1
        positions.prove(dispatcher.state.position_key, known)  # as if it had been told
        with pytest.raises(Unavailable):
            await dispatcher.history.check("a reader", known)
        await dispatcher.graphs.collect()
        assert set(blobs) <= set(storage.blobs())

    run_dispatcher(storage, loses_what_it_registers, **NEVER)
    run_dispatcher(storage, is_told, **NEVER)


def test_snapshots_are_rarer_while_large_saves_are_written(tmp_path: Path) -> None:
    """What one costs follows the splits that stock workers were given in turn."""
    storage, path = MemoryStorage(), str(tmp_path / "save")
    save_directory.prepare(f"{path}.p", tf.DistributedSnapshotMetadata(), b"")

    async def scene(dispatcher: Dispatcher) -> None:
        started = c.StartSave(
            path=path, prepared=f"{path}.p", metadata=b"",
            definition=ev.DatasetDefinition(sources=[ev.SplitSource(count=1_000)]),
        )  # fmt: skip
        await dispatcher.execute(started)
        for uid in (1, 2):
            worker = c.RegisterWorker(address=f"w:{uid}", uid=uid, stock=True)
            worker_id = await dispatcher.execute(worker)
            await dispatcher.execute(c.AssignStream(worker_id=worker_id, most=1))
        for number in range(300):
            split = c.AssignSplit(
                path=path, stream=number % 2, source=0, pass_number=0,
                worker_address=f"w:{1 + number % 2}",
            )  # fmt: skip
            await dispatcher.execute(split)
            if dispatcher.snapshot_task is not None:
                await dispatcher.snapshot_task
                written.add(max(storage.snapshots()))

    written: set[int] = set()
    run_dispatcher(storage, scene, snapshot_events=10, **NEVER)
    assert 2 <= len(written) <= 8
    distances = [b - a for a, b in itertools.pairwise(sorted(written))]
    assert distances == sorted(distances), "further and further apart"


class Stubborn(MemoryStorage):
    """Deletes no graph until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may = False

    def open_writer(self, owner: str, **how: Any) -> Any:
        writer = super().open_writer(owner, **how)
        delete = writer.delete_blob

        def delete_blob(name: str) -> None:
            if not self.may:
                raise StorageError("the disk is away")
            delete(name)

        writer.delete_blob = delete_blob  # type: ignore[method-assign]
        return writer


def test_a_graph_that_could_not_be_deleted_is_deleted_by_who_leads_later() -> None:
    storage = Stubborn()

    async def fail(dispatcher: Dispatcher) -> None:
        await remove(dispatcher, await register(dispatcher))
        assert dispatcher.state.unused_blobs

    async def go_on(dispatcher: Dispatcher) -> None:
        again = await register(dispatcher)
        storage.may = True
        await until(lambda: not dispatcher.state.unused_blobs)
        assert storage.holdings().blobs == 1
        assert await graph_of(dispatcher, again) == GRAPH

    run_dispatcher(storage, fail, **NEVER)
    assert storage.holdings().blobs == 1
    run_dispatcher(storage, go_on, **OFTEN)


def test_who_registers_a_dataset_while_it_is_removed_is_given_one_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(dispatcher: Dispatcher) -> None:
        is_lost, servicer = dispatcher.graphs.is_lost, TfDataDispatcherServicer(dispatcher)

        async def remove_meanwhile(known: Any) -> bool:
            found = await is_lost(known)
            if known.dataset_id in dispatcher.state.datasets:
                await remove(dispatcher, known.dataset_id)
            return found

        for chosen in ("", "chosen"):
            await register(dispatcher, chosen)
            with monkeypatch.context() as patch:
                patch.setattr(dispatcher.graphs, "is_lost", remove_meanwhile)
                again = await register(dispatcher, chosen)
            assert await graph_of(dispatcher, again) == GRAPH
        request = tf.GetOrRegisterDatasetRequest(dataset_id="chosen")
        with monkeypatch.context() as patch:
            patch.setattr(dispatcher.graphs, "is_lost", remove_meanwhile)
            answer = await servicer.get_or_register_dataset(request)
        assert answer.dataset_id in dispatcher.state.datasets
        assert await graph_of(dispatcher, answer.dataset_id) == GRAPH
        await servicer.close()

    run_dispatcher(MemoryStorage(), scene, **NEVER)


class Slow(MemoryStorage):
    """A storage in which `meanwhile` happens before the next blob is read."""

    loop: asyncio.AbstractEventLoop
    meanwhile: Coroutine[Any, Any, Any] | None = None

    def read_blob(self, name: str) -> bytes:
        coroutine, self.meanwhile = self.meanwhile, None
        if coroutine is not None:
            asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)
        return super().read_blob(name)


def test_a_dataset_that_is_removed_while_its_graph_is_read_is_not_taken_for_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage = Slow()

    async def scene(dispatcher: Dispatcher) -> None:
        storage.loop = asyncio.get_running_loop()
        removed = await register(dispatcher)
        storage.meanwhile = remove(dispatcher, removed)
        again = await register(dispatcher)
        assert list(dispatcher.state.datasets) == [again]
        assert again != removed
        assert await graph_of(dispatcher, again) == GRAPH

    run_dispatcher(storage, scene, **NEVER)
    assert "lost its graph" not in caplog.text


@pytest.mark.parametrize("chosen", ["", "chosen"])
def test_a_dataset_that_is_removed_while_its_graph_is_restored_is_registered_anew(
    chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(dispatcher: Dispatcher) -> None:
        loop, write = asyncio.get_running_loop(), dispatcher.writer.write_blob
        lost = await register(dispatcher, chosen)

        def remove_first(data: bytes, mark: str) -> str:
            patch.undo()
            asyncio.run_coroutine_threadsafe(remove(dispatcher, lost), loop).result(60)
            return write(data, mark)

        blob = dispatcher.state.datasets[lost].definition.tf_data_graph.blob
        dispatcher.writer.delete_blob(blob)
        with monkeypatch.context() as patch:
            patch.setattr(dispatcher.writer, "write_blob", remove_first)
            again = await register(dispatcher, chosen)
        assert list(dispatcher.state.datasets) == [again]
        assert again == chosen or again != lost
        assert await graph_of(dispatcher, again) == GRAPH

    run_dispatcher(MemoryStorage(), scene, **NEVER)


def test_a_stock_worker_is_told_of_its_other_tasks_while_a_dataset_is_removed() -> None:
    storage = Slow()

    async def scene(dispatcher: Dispatcher) -> None:
        storage.loop = asyncio.get_running_loop()
        servicer = TfDataDispatcherServicer(dispatcher)
        for dataset_id in ("removed", "stays"):
            await register(dispatcher, dataset_id)
            await join(dispatcher, dataset_id, dataset_id)
        removal = pb.RemoveDatasetRequest(dataset_id="removed", force=True)
        storage.meanwhile = DispatcherServicer(dispatcher).remove_dataset(removal)
        beat = tf.WorkerHeartbeatRequest(worker_address="w:1", worker_uid=1)
        answer = await servicer.worker_heartbeat(beat)
        assert [task.dataset_id for task in answer.new_tasks] == ["stays"]
        await servicer.close()

    run_dispatcher(storage, scene, **NEVER)


def test_a_graph_that_is_registered_while_one_like_it_is_deleted_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(dispatcher: Dispatcher) -> None:
        delete, reached, go_on = dispatcher.writer.delete_blob, asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def slowly(name: str) -> None:
            loop.call_soon_threadsafe(reached.set)
            assert go_on.wait(60)
            delete(name)

        monkeypatch.setattr(dispatcher.writer, "delete_blob", slowly)
        removal = asyncio.create_task(remove(dispatcher, await register(dispatcher)))
        await reached.wait()
        again = await register(dispatcher)
        go_on.set()
        await removal
        assert await graph_of(dispatcher, again) == GRAPH

    run_dispatcher(MemoryStorage(), scene, **NEVER)


def test_equal_datasets_that_are_registered_at_once_store_one_graph() -> None:
    storage = MemoryStorage()

    async def scene(dispatcher: Dispatcher) -> None:
        ids = await asyncio.gather(*(register(dispatcher) for _ in range(5)))
        assert len(set(ids)) == 1
        assert storage.holdings().blobs == 1
        assert await graph_of(dispatcher, ids[0]) == GRAPH

    run_dispatcher(storage, scene, **NEVER)


def test_a_finished_epoch_shrinks_and_what_is_unfinished_does_not() -> None:
    """And the next dispatcher agrees, as it is in the journal."""
    storage, collected, kept = MemoryStorage(), set[int](), set[int]()

    async def scene(dispatcher: Dispatcher) -> None:
        state, dataset_id = dispatcher.state, await register(dispatcher)
        await dispatcher.execute(c.RegisterWorker(address="w:1", uid=1))
        read, left = await join(dispatcher, dataset_id), await join(dispatcher, dataset_id, "left")
        await leave(dispatcher, left)
        (task_id,) = state.iterations[read.iteration_id].tasks
        await dispatcher.execute(c.CompleteTask(task_id=task_id))
        await dispatcher.garbage_collector.collect_idle_iterations()
        assert read.iteration_id in state.iterations, "somebody may ask for it yet"
        await leave(dispatcher, read)
        await until(lambda: read.iteration_id not in state.iterations)
        assert left.iteration_id in state.iterations
        late = await join(dispatcher, dataset_id)
        assert state.iterations[late.iteration_id].finished
        collected.add(read.iteration_id)
        kept.update((left.iteration_id, late.iteration_id))

    async def again(dispatcher: Dispatcher) -> None:
        assert not collected & dispatcher.state.iterations.keys()
        assert kept == dispatcher.state.iterations.keys()

    run_dispatcher(storage, scene, finished_retention_ms=0, **OFTEN)
    run_dispatcher(storage, again, **NEVER)


class Counting(MemoryStorage):
    """A storage that counts what is appended at once."""

    appends: int = 0

    def open_writer(self, owner: str, **options: Any) -> Any:
        writer = super().open_writer(owner, **options)
        append = writer.append

        def counted(*args: Any) -> Any:
            self.appends += 1
            return append(*args)

        writer.append = counted  # type: ignore[assignment, method-assign]
        return writer


async def finish_epochs(dispatcher: Dispatcher, count: int) -> None:
    dataset_id = await register(dispatcher)
    job = c.GetOrCreateJob(dataset_id=dataset_id, name="n", sharding=ev.OFF)
    job_id = await dispatcher.execute(job)
    await dispatcher.execute(c.RegisterWorker(address="w:1", uid=1))

    async def finish(epoch: int) -> None:
        joined = await dispatcher.execute(c.JoinIteration(job_id=job_id, epoch=epoch))
        for task_id in dispatcher.state.iterations[joined.iteration_id].tasks:
            await dispatcher.execute(c.CompleteTask(task_id=task_id))
        await leave(dispatcher, joined)

    await asyncio.gather(*map(finish, range(count)))


def test_what_is_collected_at_once_shares_a_commit() -> None:
    storage = Counting()

    async def scene(dispatcher: Dispatcher) -> None:
        await finish_epochs(dispatcher, decider.AT_ONCE + 9)
        storage.appends = 0
        collector = dispatcher.garbage_collector
        assert await collector.collect_idle_iterations(), "there are more"
        assert (storage.appends, len(dispatcher.state.iterations)) == (1, 9)
        assert not await collector.collect_idle_iterations()
        assert (storage.appends, len(dispatcher.state.iterations)) == (2, 0)

    run_dispatcher(storage, scene, finished_retention_ms=0, **NEVER)


def test_what_nobody_uses_goes_with_time_and_what_is_read_does_not() -> None:
    storage = MemoryStorage()

    async def begin(dispatcher: Dispatcher) -> None:
        for dataset_id in ("unread", "read", "used again"):
            await register(dispatcher, dataset_id)
        for name in ("reading", "left"):
            joined = await join(dispatcher, "read", name)
        await leave(dispatcher, joined)
        await dispatcher.execute(c.GetOrCreateJob(dataset_id="read", name="", sharding=ev.OFF))

    async def go_on(dispatcher: Dispatcher) -> None:
        await until(lambda: list(dispatcher.state.datasets) == ["read"])
        await until(lambda: [job.name for job in dispatcher.state.jobs.values()] == ["reading"])
        await until(lambda: storage.holdings().blobs == 1)
        (consumer_id,) = dispatcher.state.consumers
        await dispatcher.execute(c.LeaveIteration(consumer_id=consumer_id, reason="r"))
        await until(lambda: not dispatcher.state.datasets)

    async def keep(dispatcher: Dispatcher) -> None:
        await dispatcher.garbage_collector.remove_unused()
        assert len(dispatcher.state.datasets) == 3
        assert len(dispatcher.state.jobs) == 3

    run_dispatcher(storage, begin, **NEVER)
    run_dispatcher(storage, keep, **NEVER)
    run_dispatcher(storage, go_on, unused_retention_hours=0.0001, **OFTEN)


def test_a_dataset_that_is_registered_again_counts_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(dispatcher: Dispatcher) -> None:
        ids = [await register(dispatcher, chosen) for chosen in ("", "chosen")]
        uses: list[Callable[[], Any]] = [
            lambda: register(dispatcher),
            lambda: register(dispatcher, "chosen"),
            lambda: servicer.get_or_register_dataset(
                tf.GetOrRegisterDatasetRequest(dataset_id="chosen")
            ),
        ]
        servicer = TfDataDispatcherServicer(dispatcher)
        for dataset_id, use in zip([*ids, "chosen"], uses, strict=True):
            dispatcher.state.datasets[dataset_id].used_ms = 1
            await use()
            assert dispatcher.state.datasets[dataset_id].used_ms > 1
            sequence = dispatcher.state.sequence
            await use()
            assert dispatcher.state.sequence == sequence, "each start of a trainer is an event"
        await servicer.close()

    run_dispatcher(MemoryStorage(), scene, **NEVER)


def test_an_id_that_another_dataset_gets_yields_that_ones_splits() -> None:
    async def scene(dispatcher: Dispatcher) -> None:
        servicer, first = TfDataDispatcherServicer(dispatcher), []
        for source in (ev.SplitSource(count=5), ev.SplitSource(arithmetic=STEPS)):
            definition = ev.DatasetDefinition(sources=[source])
            dataset_id = await dispatcher.graphs.register("chosen", definition, GRAPH)
            job = c.GetOrCreateJob(dataset_id=dataset_id, name="n", sharding=ev.DYNAMIC)
            joined = await dispatcher.execute(
                c.JoinIteration(job_id=await dispatcher.execute(job), epoch=0)
            )
            request = tf.GetSplitRequest(iteration_id=joined.iteration_id)
            first.append((await servicer.get_split(request)).split)
            await leave(dispatcher, joined)
            await remove(dispatcher, dataset_id)
        assert first[0] != first[1]
        await servicer.close()

    run_dispatcher(MemoryStorage(), scene, **NEVER)


STEPS = ev.Arithmetic(start=7, stop=70, step=7)

"""Python datasets while workers drain, are killed, or run in the trainer's process."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import tensorflow as tf

from forebay import service
from forebay.journal.proto import events_pb2 as ev
from forebay.storage import FileStorage

from ..cluster import WorkerProcess
from ..standbys import status
from ..stock import DispatcherProcess, call
from .test_python_datasets import kind, lives, numbers, register, twenty

__all__ = ["kind"]

OFF, DYNAMIC = service.ShardingPolicy.OFF, service.ShardingPolicy.DYNAMIC


def drain(worker: WorkerProcess, has_handed_back: Callable[[], bool], gate: Path) -> None:
    """It is told to stop while its function waits at the gate, which opens once it has."""
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(worker.stop)
        while not has_handed_back():
            assert not stopped.done()
            time.sleep(0.05)
        gate.touch()
        assert stopped.result() == 0


def test_trainers_share_a_job_while_a_worker_drains(kind: str, tmp_path: Path) -> None:
    """Together they have every element once, also of splits that it handed back; unsharded, all of
    the other worker's, and what this one had begun."""
    journal, gate = tmp_path / "journal", tmp_path / "gate"

    def gated(split: int) -> Iterator[dict[str, Any]]:
        while split >= 5 and not gate.exists():
            time.sleep(0.01)
        yield from twenty(split)

    def read(mode: service.ShardingPolicy, first: queue.Queue[int]) -> list[int]:
        found = []
        with service.read(
            dispatcher.target, dataset_id, processing_mode=mode, job_name=mode.name
        ) as elements:
            for element in elements:
                found.append(int(element["number"]))
                first.put(0)
        return found

    def has_handed_back() -> bool:
        events = (ev.Event.FromString(record.data) for record in FileStorage(journal).read())
        return any(event.HasField("lease_returned") for event in events)

    with DispatcherProcess(journal) as dispatcher, ThreadPoolExecutor(5) as pool:
        one = WorkerProcess(dispatcher.address, processes=1).wait_until_registered()
        dataset_id = register(kind, dispatcher, gated, range(500))
        reading: dict[Any, list[Any]] = {}
        for mode in (DYNAMIC, OFF):
            first: queue.Queue[int] = queue.Queue()
            reading[mode] = [pool.submit(read, mode, first) for _ in range(2)]
            first.get(timeout=60)
        with WorkerProcess(dispatcher.address, processes=1):
            drain(one, has_handed_back, gate)
            found = {
                mode: collections.Counter(itertools.chain(*(each.result() for each in trainers)))
                for mode, trainers in reading.items()
            }
    assert found[DYNAMIC] == dict.fromkeys(range(10_000), 1)
    twice = found[OFF].total() - 10_000
    assert found[OFF] == {number: 1 + (number < twice) for number in range(10_000)}
    assert twice >= 1


def test_killed_workers_and_dispatchers_cost_no_element_twice(kind: str, tmp_path: Path) -> None:
    """Unsharded, nothing of the other worker's; and the functions' processes end with theirs."""
    folder = tmp_path / "processes"
    folder.mkdir()
    here = os.getpid()  # where it is called as well, to see what it yields

    def processes() -> set[int]:
        return {int(path.name) for path in folder.iterdir()} - {here}

    def slow(split: int) -> Iterator[int]:
        (folder / str(os.getpid())).touch()
        while os.getpid() != here and len(processes()) < 4:  # one for each of two reads and workers
            time.sleep(0.01)
        for number in range(10 * split, 10 * (split + 1)):
            time.sleep(0.003)
            yield number

    def read_unsharded() -> list[int]:
        return [*map(int, service.read(dispatcher.target, dataset_id, job_name="unsharded"))]

    with DispatcherProcess(tmp_path / "journal") as dispatcher, ThreadPoolExecutor(2) as pool:
        one = WorkerProcess(dispatcher.address, processes=1).wait_until_registered()
        with WorkerProcess(dispatcher.address, processes=1):
            dataset_id = register(kind, dispatcher, slow, range(60))
            unsharded = [pool.submit(read_unsharded) for _ in range(2)]
            found = []
            for element in service.read(dispatcher.target, dataset_id, processing_mode=DYNAMIC):
                found.append(int(element))
                if len(found) == 100:
                    one.kill()
                if len(found) == 200:
                    dispatcher.kill()
                    dispatcher.restart()
            assert len(found) == len(set(found))
            assert set(found) <= {*range(600)}
            again = service.read(dispatcher.target, dataset_id, processing_mode=DYNAMIC)
            assert sorted(map(int, again)) == [*range(600)]
            both = collections.Counter(itertools.chain(*(each.result() for each in unsharded)))
            assert both.keys() == {*range(600)} and {*both.values()} <= {1, 2}
    assert len(processes()) >= 4
    while any(map(lives, processes())):
        time.sleep(0.01)


def fork_servers() -> set[int]:
    """The processes of this one that others are forked from."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            is_one = b"pipelines.python.fork_server" in (path / "cmdline").read_bytes()
            if is_one and int(parent) == os.getpid():
                found.add(int(path.name))
    return found


def test_servers_in_the_trainers_own_process(tmp_path: Path) -> None:
    """In each mode, with as many processes as there are cores, and one of two workers that drains;
    one that has stopped leaves no process, though the process that it was in goes on."""
    others, cores, gate = fork_servers(), len(os.sched_getaffinity(0)), tmp_path / "gate"
    kinds, modes = ("python", "beam"), (OFF, DYNAMIC)

    def together(split: int, folder: Path) -> Iterator[int]:
        (folder / str(os.getpid())).touch()
        while len(os.listdir(folder)) < 2 * cores:
            time.sleep(0.01)
        yield split

    def gated(split: int) -> Iterator[int]:
        while split >= 5 and not gate.exists():
            time.sleep(0.01)
        yield split

    def read(kind: str, mode: service.ShardingPolicy) -> list[int]:
        found = []
        with service.read(dispatcher.target, ids[kind], processing_mode=mode) as elements:
            for element in elements:
                found.append(int(element))
                if len(found) == 1:
                    begun.put(0)
        return found

    with (
        service.DispatchServer() as dispatcher,
        service.WorkerServer(service.WorkerConfig(dispatcher.address)) as one,
        service.WorkerServer(service.WorkerConfig(dispatcher.address, processes=0)),
        ThreadPoolExecutor(5) as pool,
    ):
        spec, folders = tf.TensorSpec([], tf.int64), {kind: tmp_path / kind for kind in kinds}
        for kind, folder in folders.items():
            folder.mkdir()
            function = functools.partial(together, folder=folder)
            dataset_id = register(kind, dispatcher, function, range(20), element_spec=spec)
            found = collections.Counter(map(int, service.read(dispatcher.target, dataset_id)))
            assert found == dict.fromkeys(range(20), 2)
            assert len(os.listdir(folder)) == 2 * cores
        begun: queue.Queue[int] = queue.Queue()
        ids = {kind: register(kind, dispatcher, gated, range(100)) for kind in kinds}
        reading = {(kind, mode): pool.submit(read, kind, mode) for kind in kinds for mode in modes}
        for _ in reading:
            begun.get(timeout=60)
        assert fork_servers() - others
        stopped = pool.submit(one.stop, drain=True)
        while not any(worker["draining"] for worker in status(dispatcher)["workers"]):
            time.sleep(0.01)
        gate.touch()
        stopped.result()
        for (kind, mode), read_by in reading.items():
            found = collections.Counter(read_by.result())
            assert found.keys() == {*range(100)}, kind
            assert {*found.values()} <= ({1} if mode == DYNAMIC else {1, 2}), kind
    assert fork_servers() <= others
    processes = {int(path.name) for folder in folders.values() for path in folder.iterdir()}
    while any(map(lives, processes)):
        time.sleep(0.01)


def test_who_cannot_run_it_has_no_task(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """TensorFlow's workers, and one that listens to all the world and was not told to."""
    world = {"host": "0.0.0.0", "address": "127.0.0.1:%port%", "insecure": True}
    with DispatcherProcess(tmp_path / "journal") as dispatcher:
        call(dispatcher, "WorkerHeartbeat", {"worker_address": "stock:1", "worker_uid": 7})
        dataset_id = service.register_dataset(dispatcher.target, numbers)
        with pytest.raises(grpc.RpcError, match="is a Python dataset, which has no graph"):
            call(dispatcher, "GetDatasetDef", {"dataset_id": dataset_id})
        with WorkerProcess(dispatcher.address, **world), ThreadPoolExecutor(1) as pool:
            reading = pool.submit(list, service.read(dispatcher.target, dataset_id))
            while "none of the 2 registered workers may run it" not in caplog.text:
                time.sleep(0.01)
            with WorkerProcess(dispatcher.address):
                assert len(reading.result(timeout=60)) == 1000

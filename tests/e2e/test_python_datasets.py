"""Python datasets through the service: real processes, whoever drains or dies meanwhile."""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import itertools
import os
import queue
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import apache_beam as beam
import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.data.experimental import service as stock

from forebay import service
from forebay.journal.proto import events_pb2 as ev
from forebay.service.client.reader import fetch_dataset
from forebay.service.errors import PipelineError
from forebay.storage import FileStorage

from ..cluster import WorkerProcess
from ..standbys import status
from ..stock import DispatcherProcess, call

OFF, DYNAMIC = service.ShardingPolicy.OFF, service.ShardingPolicy.DYNAMIC


@pytest.fixture(scope="module")
def workers(dispatcher: DispatcherProcess) -> Iterator[None]:
    with WorkerProcess(dispatcher.address), WorkerProcess(dispatcher.address, processes=2):
        yield


@pytest.fixture(params=["python", "beam"])
def kind(request: pytest.FixtureRequest) -> str:
    """Of a dataset, that `register` makes of a function of splits."""
    return str(request.param)


def register(
    kind: str,
    dispatcher: DispatcherProcess | service.DispatchServer,
    function: Callable[..., Any],
    splits: range,
    **how: Any,
) -> str:
    if kind == "python":
        return str(service.register_dataset(dispatcher.target, function, splits=splits, **how))
    chain = beam.Pipeline() | beam.Create(splits) | beam.FlatMap(function)
    return str(service.register_dataset(dispatcher.target, chain, **how))


def twenty(split: int) -> Iterator[dict[str, Any]]:
    """20 of them a split."""
    for number in range(20 * split, 20 * (split + 1)):
        yield {"number": number, "text": f"{number}", "array": np.full((2, 3), number, np.int32)}


numbers = service.python_dataset(range(50))(twenty)


@pytest.mark.usefixtures("workers")
def test_every_element_comes_once_or_once_a_worker(
    kind: str, dispatcher: DispatcherProcess
) -> None:
    dataset_id = register(kind, dispatcher, twenty, range(50))
    assert register(kind, dispatcher, twenty, range(50)) == dataset_id
    for mode, times in ((DYNAMIC, 1), (OFF, 2)):
        found = []
        for element in service.read(dispatcher.target, dataset_id, processing_mode=mode):
            number = int(element["number"])
            assert element["text"] == str(number).encode()
            assert element["array"].tolist() == [[number] * 3] * 2
            found.append(number)
        assert collections.Counter(found) == dict.fromkeys(range(1000), times)
    dataset = service.from_dataset_id(DYNAMIC, dispatcher.target, dataset_id)
    assert dataset.element_spec == {
        "number": tf.TensorSpec([], tf.int64),
        "text": tf.TensorSpec([], tf.string),
        "array": tf.TensorSpec([2, 3], tf.int32),
    }
    assert sorted(int(element["number"]) for element in dataset) == [*range(1000)]


def raises(error: BaseException) -> Callable[[], object]:
    def function() -> None:
        raise type(error)(*error.args)

    return function


def fills_memory() -> object:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), hard))
    return bytearray(1 << 30)


FAILURES: dict[str, tuple[Callable[[], object], str]] = {
    "raises": (raises(KeyError("why")), r"KeyError\('why'\)\nTraceback"),
    "dies": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "the process .* killed by SIGSEGV"),
    # It sleeps until it is killed, which is what is tested.
    "hangs": (lambda: time.sleep(3600), r"it has taken longer than 1 s"),
    # Or what came before it finds no memory to be sent.
    "fills its memory": (fills_memory, r"(MemoryError|it could not be sent: OSError)\(.*\)\nTrace"),
}


@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.usefixtures("workers")
def test_a_failing_function_fails_its_trainer_alone(
    how: str, dispatcher: DispatcherProcess
) -> None:
    """The worker is unharmed, and others read on."""
    last, wanted = FAILURES[how]

    def fails(split: str) -> Iterator[int]:
        yield 1
        if split == "c":
            last()

    with service.read(
        dispatcher.target, service.register_dataset(dispatcher.target, numbers)
    ) as others:
        first = next(others)
        timeout_s = 1 if how == "hangs" else None
        dataset_id = service.register_dataset(
            dispatcher.target, fails, splits=[*"abcd"], timeout_s=timeout_s
        )
        named = rf"worker 127.*split 2( \('c'\))?, element [01]: {wanted}"
        with pytest.raises(PipelineError, match=named):
            list(service.read(dispatcher.target, dataset_id, processing_mode=DYNAMIC))
        if how in ("raises", "dies"):
            with pytest.raises(tf.errors.OpError, match="split 2"):
                list(service.from_dataset_id(DYNAMIC, dispatcher.target, dataset_id))
        assert 1 + sum(1 for _ in others) == 2000
    assert int(first["number"]) in range(1000)


@pytest.mark.usefixtures("workers")
def test_the_users_own_modules_travel_with_a_function(
    kind: str, dispatcher: DispatcherProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which no worker has; of packages with a file of their own, and without."""
    for path in ("own_module.py", "own_package/part.py", "own_folder/inner/part.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(OWN)
    (tmp_path / "own_package" / "__init__.py").write_text("from . import part")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("own_module", "own_package.part", "own_folder.inner.part")
    modules = [importlib.import_module(name) for name in names]
    of_a_folder, inner = sys.modules["own_folder"], modules[-1]
    whole, add = sys.modules["own_package"], modules[0].add

    def function(split: int) -> Iterator[list[int]]:
        yield [
            add(split), whole.part.add(split), inner.add(split), of_a_folder.inner.part.add(split),
            inner.Row(split).number,
        ]  # fmt: skip

    try:
        dataset_id = register(kind, dispatcher, function, range(10))
    finally:
        for name in [name for name in sys.modules if name.startswith("own_")]:
            del sys.modules[name]
    found = service.read(dispatcher.target, dataset_id, processing_mode=DYNAMIC)
    assert sorted(x.tolist() for x in found) == [[n + 3] * 4 + [n] for n in range(10)]


OWN = """
LIMIT = 3

class Row:
    def __init__(self, number):
        self.number = number

def add(number):
    return Row(number + LIMIT).number
"""


@pytest.mark.usefixtures("workers")
def test_every_way_of_reading(kind: str, dispatcher: DispatcherProcess) -> None:
    """In rounds, from a cache, compressed, handed back by who leaves, by TensorFlow's client."""
    target = dispatcher.target

    def endless(split: int) -> Iterator[Any]:
        for number in itertools.count():
            time.sleep(0.001)  # or one process fills the cache before the other begins
            yield np.array([number, os.getpid(), random.getrandbits(60)])

    endless_id = register(kind, dispatcher, endless, range(1))
    with contextlib.ExitStack() as stack:
        consumers = [
            stack.enter_context(
                service.read(
                    target, endless_id, job_name=f"{kind} rounds", consumer_index=index,
                    num_consumers=2,
                )
            )
            for index in range(2)
        ]  # fmt: skip
        pool = stack.enter_context(ThreadPoolExecutor(2))
        for _ in range(20):
            one, other = (x.tolist() for x in pool.map(next, consumers))
            assert one[0] % 2 == 0 and other[:2] == [one[0] + 1, one[1]]
    cached: list[dict[tuple[int, int], int]] = []
    for trainer in "ab":
        found: dict[tuple[int, int], int] = {}
        with service.read(
            target, endless_id, job_name=f"{kind} cache",
            cross_trainer_cache=service.CrossTrainerCache(trainer),
        ) as elements:  # fmt: skip
            processes: set[int] = set()
            while len(processes) < 2:
                number, process, drawn = next(elements).tolist()
                found[number, process] = drawn
                processes.add(process)
        cached.append(found)
    a, b = cached
    both = a.keys() & b.keys()
    assert {process for _, process in a} == {process for _, process in b}
    assert both and all(a[key] == b[key] for key in both)

    dataset_id = register(kind, dispatcher, twenty, range(50), compression="ZSTD")
    definition = fetch_dataset(target, dataset_id).definition
    assert definition.compression == ev.ZSTD
    compressed = service.read(
        target, dataset_id, processing_mode=DYNAMIC, data_transfer_protocol="tcp"
    )
    seen = []
    for element in compressed:
        assert element["array"].tolist() == [[element["number"]] * 3] * 2
        seen.append(int(element["number"]))
    assert sorted(seen) == [*range(1000)]

    seen = []
    for most in (10, 30, 1000):
        with service.read(
            target, dataset_id, processing_mode=DYNAMIC, job_name=f"{kind} left"
        ) as elements:
            seen += [int(element["number"]) for element in itertools.islice(elements, most)]
    assert sorted(seen) == [*range(1000)]

    spec = service.from_dataset_id(DYNAMIC, target, dataset_id).element_spec
    for mode, times in (("distributed_epoch", 1), ("parallel_epochs", 2)):
        theirs = stock.from_dataset_id(mode, target, dataset_id, spec)
        seen = []
        for element in theirs.as_numpy_iterator():
            assert element["text"] == b"%d" % element["number"]
            assert element["array"].tolist() == [[element["number"]] * 3] * 2
            seen.append(int(element["number"]))
        assert collections.Counter(seen) == dict.fromkeys(range(1000), times)


@pytest.mark.usefixtures("workers")
def test_skipped_splits_are_counted_over_all_workers_and_journaled(
    dispatcher: DispatcherProcess,
) -> None:
    def fails(split: int) -> Iterator[int]:
        yield split
        if split % 10 == 3:
            raise KeyError("why")
        yield split

    how: dict[str, Any] = {"splits": range(50), "on_error": "skip"}
    for limit in (5, 4):
        dataset_id = service.register_dataset(dispatcher.target, fails, **how, limit=limit)
        reading = service.read(
            dispatcher.target, dataset_id, processing_mode=DYNAMIC, job_name=f"limit {limit}"
        )
        if limit == 5:
            found = collections.Counter(map(int, reading))
            assert found == {split: 1 + (split % 10 != 3) for split in range(50)}
        else:
            with pytest.raises(PipelineError, match=r"no more than 4 splits are skipped in an"):
                list(reading)
    named = [job for job in status(dispatcher)["jobs"] if job["name"]]
    jobs = {job["name"].rpartition("/")[2]: job for job in named}
    for limit in (5, 4):
        (skipped,) = jobs[f"limit {limit}"]["iterations"]
        assert skipped["skipped"] == limit
        assert {skip["split"] % 10 for skip in skipped["skips"]} == {3}
        for skip in skipped["skips"]:
            where = f"split {skip['split']} ({skip['split']}), element 1"
            assert skip["reason"] == f"{where}: KeyError('why')"
            assert skip["worker_address"].startswith("127.0.0.1:")


def lives(process: int) -> bool:
    """Nobody may have asked yet how it ended."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.usefixtures("workers")
def test_with_lengths_an_ordered_read_begins_without_counting(
    dispatcher: DispatcherProcess, tmp_path: Path
) -> None:
    def noted(split: int) -> Iterator[int]:
        (tmp_path / str(split)).touch()
        yield from range(100 * split, 101 * split)

    dataset_id = service.register_dataset(
        dispatcher.target, noted, splits=range(100), lengths=range(100), element_spec="int64"
    )
    order: dict[str, Any] = {"ordered": True, "shuffle": False, "cycle_length": 1}
    behind = sum(range(98)) + 5
    with service.read(dispatcher.target, dataset_id, start_position=behind, **order) as elements:
        found = [int(number) for number in itertools.islice(elements, 98 - 5 + 99)]
    assert found == [*range(9805, 9898), *range(9900, 9999)]
    assert not (tmp_path / "50").exists()


__all__ = ["kind"]


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

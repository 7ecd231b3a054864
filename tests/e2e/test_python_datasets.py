"""Python datasets through the service: real processes, and whoever dies meanwhile."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import pathlib
import queue
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import apache_beam as beam
import grpc
import numpy as np
import pytest
import tensorflow as tf

from forebay import service
from forebay.journal.proto import events_pb2 as ev
from forebay.service.client.waiting import fetch_status
from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.errors import InvalidArgument, PipelineError, Unimplemented
from forebay.storage import FileStorage

from ..cluster import WorkerProcess
from ..stock import DispatcherProcess, call

OFF, DYNAMIC = service.ShardingPolicy.OFF, service.ShardingPolicy.DYNAMIC


@pytest.fixture(scope="module")
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DispatcherProcess]:
    with DispatcherProcess(tmp_path_factory.mktemp("journal")) as running:
        yield running


@pytest.fixture(scope="module")
def workers(dispatcher: DispatcherProcess) -> Iterator[None]:
    with WorkerProcess(dispatcher.address), WorkerProcess(dispatcher.address, processes=2):
        yield


@pytest.fixture(params=["python", "beam"])
def kind(request: pytest.FixtureRequest) -> str:
    """Of a dataset, that `register` makes of a function of splits."""
    return str(request.param)


def register(
    kind: str, dispatcher: DispatcherProcess, function: Callable[..., Any], splits: range
) -> str:
    if kind == "python":
        return str(service.register_dataset(dispatcher.target, function, splits=splits))
    chain = beam.Pipeline() | beam.Create(splits) | beam.FlatMap(function)
    return str(service.register_dataset(dispatcher.target, chain))


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


@pytest.mark.usefixtures("workers")
def test_a_failing_function_fails_its_trainer_alone(dispatcher: DispatcherProcess) -> None:
    def fails(split: str) -> Iterator[int]:
        yield 1
        if split == "c":
            raise KeyError("why")

    def dies(split: str) -> Iterator[int]:
        yield 1
        if split == "c":
            os.kill(os.getpid(), signal.SIGSEGV)

    with service.read(
        dispatcher.target, service.register_dataset(dispatcher.target, numbers)
    ) as others:
        first = next(others)
        for function, wanted in (
            (fails, r"worker 127.*split 2 \('c'\), element 1: KeyError\('why'\)\nTraceback"),
            (dies, "worker 127.*split 2, element 1: .*killed by SIGSEGV"),
        ):
            dataset_id = service.register_dataset(dispatcher.target, function, splits=[*"abcd"])
            with pytest.raises(PipelineError, match=wanted):
                list(service.read(dispatcher.target, dataset_id, processing_mode=DYNAMIC))
            with pytest.raises(tf.errors.OpError, match="split 2"):
                list(service.from_dataset_id(DYNAMIC, dispatcher.target, dataset_id))
        assert 1 + sum(1 for _ in others) == 2000
    assert int(first["number"]) in range(1000)


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
    client = DispatcherClient(dispatcher.target)
    named = [job for job in fetch_status(client, 60)["jobs"] if job["name"]]
    jobs = {job["name"].rpartition("/")[2]: job for job in named}
    client.close()
    for limit in (5, 4):
        (skipped,) = jobs[f"limit {limit}"]["iterations"]
        assert skipped["skipped"] == limit
        assert {skip["split"] % 10 for skip in skipped["skips"]} == {3}
        for skip in skipped["skips"]:
            where = f"split {skip['split']} ({skip['split']}), element 1"
            assert skip["reason"] == f"{where}: KeyError('why')"
            assert skip["worker_address"].startswith("127.0.0.1:")


def by_python(function: Callable[[int], int], dataset: Any) -> Any:
    """Mapped by a function of integers, as Python."""
    return dataset.map(lambda x: tf.ensure_shape(tf.numpy_function(function, [x], tf.int64), []))


def test_a_dataset_that_a_function_builds_may_call_python_and_is_divided(
    tmp_path: pathlib.Path,
) -> None:
    """Among workers, one of which drains, and one is killed; what its Python does to its process
    costs its trainer alone. They import TensorFlow once more each, so all is in one test."""
    journal, gate, waiting = (tmp_path / name for name in ("journal", "gate", "waiting"))
    waiting.mkdir()
    dispatcher = DispatcherProcess(journal)

    def build() -> Any:
        dataset = by_python(lambda x: 2 * x, tf.data.Dataset.range(300))
        dataset = dataset.map(lambda x: tf.py_function(lambda x: x + 1, [x], tf.int64))
        return dataset.map(lambda x: {"x": tf.ensure_shape(x, []), "text": tf.strings.as_string(x)})

    def generate() -> Any:
        return tf.data.Dataset.from_generator(
            lambda: iter(range(300)), output_signature=tf.TensorSpec([], tf.int64)
        )

    def gated() -> Any:
        def waits(x: int) -> int:
            while x >= 60 and not gate.exists():
                (waiting / str(os.getpid())).touch()
                time.sleep(0.01)
            return x

        return by_python(waits, tf.data.Dataset.range(400))

    def zipped() -> Any:
        numbers = tf.data.Dataset.range(9)
        return tf.data.Dataset.zip((numbers, numbers.filter(lambda x: x > 2)))

    def slow() -> Any:
        def waits(x: int) -> int:
            time.sleep(0.002)
            return x

        return by_python(waits, tf.data.Dataset.range(300)).repeat(2)

    def failing(how: Callable[[], object]) -> Callable[[], Any]:
        def fails(x: int) -> int:
            if x == 2:
                how()
            return x

        return lambda: by_python(fails, tf.data.Dataset.range(3))

    def fails() -> None:
        raise KeyError("why")

    def read(built: Callable[[], Any], mode: Any = DYNAMIC, name: str | None = None) -> Any:
        dataset_id = service.register_dataset(dispatcher.target, built)
        return service.read(dispatcher.target, dataset_id, processing_mode=mode, job_name=name)

    def has_handed_back() -> bool:
        events = (ev.Event.FromString(record.data) for record in FileStorage(journal).read())
        return any(event.HasField("lease_returned") for event in events)

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        stack.enter_context(dispatcher)
        one, two = (stack.enter_context(WorkerProcess(dispatcher.address)) for _ in range(2))
        for mode, times in ((DYNAMIC, 1), (OFF, 2)):
            found = list(read(build, mode))
            numbers = collections.Counter(int(e["x"]) for e in found)
            assert numbers == dict.fromkeys(range(1, 600, 2), times)
            assert all(e["text"] == str(int(e["x"])).encode() for e in found)
        with pytest.raises(Unimplemented, match=r"cannot be split among .* zips a dataset that"):
            read(zipped)

        others = read(slow)
        reached = [int(next(others))]
        for how, wanted in (
            (fails, r"worker 127(.|\n)*KeyError: 'why'"),
            (lambda: os._exit(3), r"worker 127.*: element \d: the process .* exit code 3"),
            (lambda: os.kill(os.getpid(), signal.SIGSEGV), "worker 127.*killed by SIGSEGV"),
        ):
            with pytest.raises(PipelineError, match=wanted):
                list(read(failing(how)))
        reached += map(int, others)
        assert collections.Counter(reached) == dict.fromkeys(range(300), 2)

        sharing = [pool.submit(lambda: list(map(int, read(gated, name="shared")))) for _ in "ab"]
        while len([*waiting.iterdir()]) < 2:  # a process of each worker
            time.sleep(0.01)
        stopped = pool.submit(one.stop)
        while not has_handed_back():  # its function waits yet
            assert not stopped.done()
            time.sleep(0.05)
        gate.touch()
        assert stopped.result() == 0
        assert sorted(itertools.chain(*(each.result() for each in sharing))) == [*range(400)]

        stack.enter_context(WorkerProcess(dispatcher.address))
        found = []
        for element in read(slow):
            found.append(int(element))
            if len(found) == 100:
                two.kill()
        assert max(collections.Counter(found).values()) <= 2
        assert sorted(map(int, read(generate))) == [*range(300)]
    with pytest.raises(InvalidArgument, match=r"returned 7, which is no tf\.data.Dataset"):
        service.register_dataset(dispatcher.target, lambda: 7)


def test_trainers_share_a_job_while_a_worker_drains(kind: str, tmp_path: pathlib.Path) -> None:
    """Together they have every element once, also of splits that it handed back."""
    journal, gate = tmp_path / "journal", tmp_path / "gate"

    def gated(split: int) -> Iterator[dict[str, Any]]:
        while split >= 5 and not gate.exists():
            time.sleep(0.01)
        yield from twenty(split)

    def read(first: queue.Queue[int]) -> Iterator[int]:
        with service.read(
            dispatcher.target, dataset_id, processing_mode=DYNAMIC, job_name="shared"
        ) as elements:
            for element in elements:
                yield int(element["number"])
                first.put(0)

    def has_handed_back() -> bool:
        events = (ev.Event.FromString(record.data) for record in FileStorage(journal).read())
        return any(event.HasField("lease_returned") for event in events)

    with DispatcherProcess(journal) as dispatcher, ThreadPoolExecutor(3) as pool:
        one = WorkerProcess(dispatcher.address, processes=1).wait_until_registered()
        dataset_id = register(kind, dispatcher, gated, range(500))
        first: queue.Queue[int] = queue.Queue()
        reading = [pool.submit(lambda: list(read(first))) for _ in range(2)]
        first.get(timeout=60)
        with WorkerProcess(dispatcher.address, processes=1):
            stopped = pool.submit(one.stop)
            while not has_handed_back():  # its function waits yet
                assert not stopped.done()
                time.sleep(0.05)
            gate.touch()
            assert stopped.result() == 0
            assert sorted(itertools.chain(*(each.result() for each in reading))) == [*range(10_000)]


@pytest.mark.parametrize("killed", ["nobody", "the dispatcher", "the worker"])
def test_what_a_draining_worker_keeps_is_its_own_until_it_is_begun(
    killed: str, tmp_path: pathlib.Path
) -> None:
    """Of a large lease, most of which another worker gets; the rest is lost with it, or not."""
    journal, closed, waiting, gate = (
        tmp_path / name for name in ("journal", "closed", "waiting", "gate")
    )

    def gated(split: int) -> Iterator[int]:
        while closed.exists() and split >= int(closed.read_text() or 0) and not gate.exists():
            waiting.touch()
            time.sleep(0.01)
        time.sleep(0.001)
        yield split

    def events() -> list[ev.Event]:
        return [ev.Event.FromString(record.data) for record in FileStorage(journal).read()]

    def kept() -> ev.SplitsLeased | None:
        """What was leased anew of a lease that was returned in part."""
        seen: dict[tuple[int, int], int] = {}  # who leased a range that begins here
        for event in events():
            if event.HasField("splits_leased"):
                leased = event.splits_leased
                if seen.get((leased.task_id, leased.first), 0) > leased.count:
                    return leased
                seen[leased.task_id, leased.first] = leased.count
        return None

    def read() -> list[int]:
        return [*map(int, service.read(dispatcher.target, dataset_id, processing_mode=DYNAMIC))]

    with DispatcherProcess(journal) as dispatcher, ThreadPoolExecutor(1) as pool:
        one = WorkerProcess(dispatcher.address, processes=1).wait_until_registered()
        dataset_id = service.register_dataset(dispatcher.target, gated, splits=range(400))
        reading = pool.submit(read)
        while not waiting.exists():
            leased = [e.splits_leased for e in events() if e.HasField("splits_leased")]
            if not closed.exists() and leased and leased[-1].count >= 32:
                closed.write_text(str(leased[-1].first + 2))
            time.sleep(0.01)
        with WorkerProcess(dispatcher.address, processes=1):
            one._process.terminate()
            if killed == "the dispatcher":
                dispatcher.kill()
                dispatcher.restart()
            while (lease := kept()) is None:
                assert one._process.poll() is None
                time.sleep(0.05)
            if killed == "the worker":
                one.kill()
            gate.touch()
            if killed != "the worker":
                assert one.wait() == 0
            found = reading.result()
    mine = set(range(lease.first, lease.first + lease.count))
    assert len(found) == len(set(found))
    missing = {*range(400)} - set(found)
    lost = {event.lease_lost.lease_id for event in events() if event.HasField("lease_lost")}
    if killed == "the worker":
        assert lease.lease_id in lost
        assert missing and missing <= mine
    else:
        assert not missing
        assert not lost


def test_killed_workers_and_dispatchers_cost_no_element_twice(
    kind: str, tmp_path: pathlib.Path
) -> None:
    """And the functions' processes end with their workers."""
    folder = tmp_path / "processes"
    folder.mkdir()

    def slow(split: int) -> Iterator[int]:
        (folder / str(os.getpid())).touch()
        for number in range(10 * split, 10 * (split + 1)):
            time.sleep(0.005)
            yield number

    with DispatcherProcess(tmp_path / "journal") as dispatcher:
        one = WorkerProcess(dispatcher.address, processes=1).wait_until_registered()
        with WorkerProcess(dispatcher.address, processes=1):
            dataset_id = register(kind, dispatcher, slow, range(60))
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
    # Here it was called as well, to see what it yields.
    processes = {int(path.name) for path in folder.iterdir()} - {os.getpid()}
    assert len(processes) >= 2
    while any(map(lives, processes)):
        time.sleep(0.01)


def lives(process: int) -> bool:
    """Nobody may have asked yet how it ended."""
    try:
        status = pathlib.Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def nurseries() -> set[int]:
    """The processes of this one that others are forked from."""
    found = set()
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            is_one = b"pipelines.python.nursery" in (path / "cmdline").read_bytes()
            if is_one and int(parent) == os.getpid():
                found.add(int(path.name))
    return found


def test_a_worker_that_has_stopped_leaves_no_process(tmp_path: pathlib.Path) -> None:
    """Though the process that it was in goes on."""
    others, splits = nurseries(), range(20)
    with DispatcherProcess(tmp_path / "journal") as dispatcher:
        with service.WorkerServer(service.WorkerConfig(dispatcher.address, processes=2)):
            dataset_id = service.register_dataset(
                dispatcher.target, lambda split: [os.getpid()], splits=splits
            )
            processes = {*map(int, service.read(dispatcher.target, dataset_id))}
            assert nurseries() - others
        assert nurseries() <= others
    assert processes
    while any(map(lives, processes)):
        time.sleep(0.01)


def test_who_cannot_run_it_has_no_task(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TensorFlow's workers, and one that listens to all the world and was not told to."""
    world = {"host": "0.0.0.0", "address": "127.0.0.1:%port%"}
    with DispatcherProcess(tmp_path / "journal") as dispatcher:
        call(dispatcher, "WorkerHeartbeat", {"worker_address": "stock:1", "worker_uid": 7})
        dataset_id = service.register_dataset(dispatcher.target, numbers)
        with pytest.raises(grpc.RpcError, match="is a Python dataset, which has no graph"):
            call(dispatcher, "GetDatasetDef", {"dataset_id": dataset_id})
        with WorkerProcess(dispatcher.address, **world), ThreadPoolExecutor(1) as pool:
            reading = pool.submit(list, service.read(dispatcher.target, dataset_id))
            while "none of the workers that there are, 2, may run it" not in caplog.text:
                time.sleep(0.01)
            with WorkerProcess(dispatcher.address):
                assert len(reading.result(timeout=60)) == 1000

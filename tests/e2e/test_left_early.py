"""Jobs that trainers leave early: their tasks keep no threads, little memory, and lose nothing that
there is room for."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.data.experimental import service as stock

from forebay import service
from forebay.service.delivery.in_flight import FIRST
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.worker import WorkerOptions, losses
from forebay.service.worker.metrics import COUNTS, PARKED, SHED
from forebay.service.worker.tasks import WorkerTask
from forebay.service.worker.worker import Worker

from ..forks import Fork
from ..standbys import wait_until
from ..stock import DispatcherProcess

OFF, DYNAMIC, DATA = (service.ShardingPolicy[name] for name in ("OFF", "DYNAMIC", "DATA"))
ELEMENTS = 500


class Losses:
    """Counts what is lost."""

    def __init__(self) -> None:
        self.shed_elements = 0
        self.unfinished: list[int] = []  # tasks

    def parked(self, task: pb.Task, what: losses.Undelivered) -> None:
        if what.unfinished:
            self.unfinished.append(task.task_id)

    def shed(self, task: pb.Task, elements: int) -> None:
        self.shed_elements += elements


@pytest.fixture
def dispatcher() -> Iterator[DispatcherProcess]:
    with DispatcherProcess("memory:") as running:
        yield running


class Workers:
    """Workers in this process that keep no pipeline that nobody reads."""

    def __init__(self, dispatcher: DispatcherProcess) -> None:
        self.dispatcher = dispatcher
        self.losses = Losses()
        self.all: list[Worker] = []

    def start(self, **options: Any) -> Worker:
        settings = {"kept_pipelines": 0, "expected_s": 0.1, **options}
        running = Worker(WorkerOptions(dispatcher=self.dispatcher.address, **settings))
        running.start()
        self.all.append(running)
        return running

    def runners(self) -> list[WorkerTask]:
        return [runner for worker in self.all for runner in worker.tasks.unfinished()]

    def wait_until_parked(self) -> None:
        wait_until(lambda: all(runner.is_parked for runner in self.runners()))


@pytest.fixture
def workers(dispatcher: DispatcherProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    started = Workers(dispatcher)
    monkeypatch.setattr(losses, "parked", started.losses.parked)
    monkeypatch.setattr(losses, "shed", started.losses.shed)
    yield started
    for worker in started.all:
        worker.stop()


def task_threads() -> list[str]:
    mine = ("forebay-task", "forebay-pipeline", "forebay-lease")
    return [t.name for t in threading.enumerate() if t.name.startswith(mine)]


def take(
    dispatcher: DispatcherProcess,
    dataset_id: str,
    most: int | None = None,
    mode: service.ShardingPolicy = DYNAMIC,
    job_name: str = "training",
) -> list[int]:
    """The numbers that a reader gets before it leaves, or all that there are."""
    with service.read(
        dispatcher.target, dataset_id, processing_mode=mode, job_name=job_name
    ) as elements:
        return [int(element[0]) for element in itertools.islice(elements, most)]


def numbers(source: Any = None) -> Any:
    """Elements of 40 KB."""
    source = tf.data.Dataset.range(ELEMENTS) if source is None else source
    return source.map(lambda x: tf.fill([5_000], x))


def shuffled() -> Any:
    return numbers(tf.data.Dataset.range(ELEMENTS).shuffle(50)).prefetch(4)


def zipped() -> Any:
    both = tf.data.Dataset.range(ELEMENTS), tf.data.Dataset.range(ELEMENTS)
    return numbers(tf.data.Dataset.zip(both).map(lambda x, _: x))


def of_python() -> Any:
    def numbers_from(start: int) -> Iterator[Any]:
        for number in range(start, start + 20):
            yield [number] * 5_000

    return service.python_dataset(splits=range(0, ELEMENTS, 20))(numbers_from)


@pytest.mark.parametrize("dataset", [numbers, shuffled, zipped, of_python])
def test_the_next_reader_gets_buffered_elements_and_unstarted_splits(
    dispatcher: DispatcherProcess, workers: Workers, dataset: Callable[[], Any]
) -> None:
    for _ in range(2):
        workers.start(processes=2)
    dataset_id = service.register_dataset(dispatcher.target, dataset())
    got: list[int] = []
    for _ in range(4):
        got += take(dispatcher, dataset_id, 60)
        workers.wait_until_parked()
        wait_until(lambda: not task_threads())
    assert not workers.losses.unfinished and not workers.losses.shed_elements
    got += take(dispatcher, dataset_id)
    assert sorted(got) == [*range(ELEMENTS)]
    wait_until(lambda: not workers.runners())


def test_a_pipeline_that_ended_by_itself_is_not_begun_again(
    dispatcher: DispatcherProcess, workers: Workers
) -> None:
    """As of `take`: parked behind its last element, it does not begin anew."""
    workers.start()
    dataset_id = service.register_dataset(dispatcher.target, numbers().take(FIRST))
    got: list[int] = []
    for _ in range(3):
        got += take(dispatcher, dataset_id, 3)
        workers.wait_until_parked()
    got += take(dispatcher, dataset_id)
    assert len(got) == len(set(got)) == FIRST


def test_a_pipeline_without_leases_begins_again(
    dispatcher: DispatcherProcess, workers: Workers
) -> None:
    workers.start()
    dataset_id = service.register_dataset(dispatcher.target, numbers())
    for _ in range(2):
        assert take(dispatcher, dataset_id, 60, OFF) == [*range(60)]
        workers.wait_until_parked()
        wait_until(lambda: not task_threads())
    assert take(dispatcher, dataset_id, mode=OFF) == [*range(ELEMENTS)]


def test_a_static_shard_begins_anew_and_its_job_ends(tmp_path: Path) -> None:
    with DispatcherProcess("memory:", workers="127.0.0.1") as dispatcher:
        workers = Workers(dispatcher)
        workers.start()
        try:
            dataset_id = service.register_dataset(dispatcher.target, numbers())
            assert take(dispatcher, dataset_id, 1, DATA)
            workers.wait_until_parked()
            assert take(dispatcher, dataset_id, mode=DATA) == [*range(ELEMENTS)]
            assert not take(dispatcher, dataset_id, mode=DATA), "the epoch is over"
        finally:
            workers.all[0].stop()


def test_the_buffers_of_all_abandoned_jobs_share_a_bound(
    dispatcher: DispatcherProcess, workers: Workers
) -> None:
    """Jobs that were left first lose their buffers; jobs left last keep them."""
    worker = workers.start(memory_budget=8 * (6 << 20))
    dataset_id = service.register_dataset(dispatcher.target, numbers(tf.data.Dataset.range(20_000)))
    for number in range(8):
        assert len(take(dispatcher, dataset_id, 20, job_name=f"job {number}")) == 20
    workers.wait_until_parked()
    wait_until(lambda: worker.idle.budget.held <= 6 << 20)
    assert workers.losses.shed_elements or workers.losses.unfinished
    counted: list[Any] = worker.tasks.counts(COUNTS)
    parked, shed = ([one.value for one in counted if one.family is of] for of in (PARKED, SHED))
    assert parked == 8 * [1]
    assert sum(shed) == workers.losses.shed_elements
    wait_until(lambda: not task_threads())
    rest = take(dispatcher, dataset_id, job_name="job 0")
    assert len(set(rest)) == len(rest) and 19_999 in rest


PROGRAM = """
import sys, time
from tensorflow.data.experimental import service as stock

from forebay import service
elements = service.read(
    *sys.argv[1:], processing_mode="distributed_epoch", job_name="training",
    data_transfer_protocol="tcp",
)
for _ in range(60):
    next(elements)
print("read", flush=True)
time.sleep(600)  # until it is killed, in the midst of reading
"""


def test_the_buffers_for_killed_readers_are_bounded() -> None:
    """Over TCP their connections just end, and they might come again: not once the dispatcher has
    given them up."""
    with DispatcherProcess("memory:", client_timeout_ms=3_000) as dispatcher:
        workers = Workers(dispatcher)
        worker = workers.start()
        try:
            dataset_id = service.register_dataset(dispatcher.target, numbers())
            arguments = ["-c", PROGRAM, dispatcher.target, dataset_id]
            for reader in [Fork(arguments) for _ in range(3)]:
                assert reader.line() == "read"
                reader.kill()
                reader.finish()
            wait_until(lambda: not worker.consumers.read_tasks())
            workers.wait_until_parked()
            wait_until(lambda: not task_threads())
            kept = [runner.output.waiting_elements * 40_000 for runner in workers.runners()]
            assert worker.idle.budget.held == sum(kept)
            rest = take(dispatcher, dataset_id)
            assert len(set(rest)) == len(rest)
            wait_until(lambda: not worker.idle.budget.held)
        finally:
            worker.stop()


def test_tasks_that_stock_clients_left_are_parked_too(
    dispatcher: DispatcherProcess, workers: Workers
) -> None:
    """Stock clients say goodbye to the dispatcher only."""
    workers.start()
    dataset_id = stock.register_dataset(dispatcher.target, numbers(), compression=None)
    got: list[int] = []
    for _ in range(3):
        elements = stock.from_dataset_id(
            "distributed_epoch", dispatcher.target, dataset_id, numbers().element_spec, "training"
        ).take(60)
        got += [int(element[0]) for element in elements.as_numpy_iterator()]
        del elements
        wait_until(lambda: any(runner.is_parked for runner in workers.runners()))
        wait_until(lambda: not task_threads())
    assert len(got) == len(set(got)) == 180

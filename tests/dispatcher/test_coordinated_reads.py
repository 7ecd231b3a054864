"""Coordinated reads: TensorFlow's own consumers and workers, and the protocol by hand."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from ..cluster import WorkerProcess
from ..forks import Fork
from ..stock import GRAPH, DispatcherProcess, ServerProcess, call, stock_consumers, stock_workers

NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DispatcherProcess]:
    with DispatcherProcess(tmp_path_factory.mktemp("journal"), worker_timeout_ms=-1) as running:
        yield running


# -- stock consumers, stock workers --------------------------------------------------------------


def read_until(iterators: list[Any], workers: int) -> list[tuple[int, ...]]:
    """What each consumer got in each step, until so many workers take part."""
    first = tuple(range(len(iterators)))
    steps: list[tuple[int, ...]] = []
    with ThreadPoolExecutor(len(iterators)) as pool:
        while steps.count(first) < workers:
            steps.append(tuple(int(number) for number, _ in pool.map(next, iterators)))
    return steps


def test_a_read_survives_workers_that_join_or_die_and_a_restarted_dispatcher(
    tmp_path: Path,
) -> None:
    with (
        DispatcherProcess(tmp_path, worker_timeout_ms=1000) as dispatcher,
        stock_workers(dispatcher, 1, heartbeat_interval_ms=100),
    ):
        three, alone = (stock_consumers(dispatcher.target, number) for number in (3, 1))
        steps = read_until(three, 1)
        with stock_workers(dispatcher, 2, heartbeat_interval_ms=100) as killed:
            dispatcher.kill_and_restart()
            steps += read_until(three, 2)
            three.clear()
            read_until(alone, 2)
            killed.kill()  # one consumer alone is within no round with another
            left = [int(next(alone[0])[0]) for _ in range(100)]
        alone.clear()
    assert all(numbers == (numbers[0], numbers[0] + 1, numbers[0] + 2) for numbers in steps)
    assert left[-10:] == [*range(left[-10], left[-10] + 10)]


CONSUMER = """
import sys
import tensorflow as tf
from tensorflow.data.experimental import service

target, name, index = sys.argv[1:]
dataset = tf.data.Dataset.range(1 << 60).repeat().apply(
    service.distribute(
        "parallel_epochs", target, job_name=name, consumer_index=int(index), num_consumers=2
    )
)
try:
    for element in dataset:
        print(int(element), flush=True)
except tf.errors.FailedPreconditionError as error:
    print(error.message, flush=True)
"""


def test_a_consumer_that_is_killed_and_comes_back_is_told_so(tmp_path: Path) -> None:
    """TensorFlow's workers and ours tell it so; the read begins anew under another job name."""

    def begin(name: str, index: int) -> ServerProcess:
        started = ServerProcess(Fork(["-c", CONSUMER, dispatcher.target, name, str(index)]))
        stack.callback(started.kill)
        return started

    for kind in (stock_workers, WorkerProcess):
        with (
            DispatcherProcess(tmp_path / kind.__name__) as dispatcher,
            kind(dispatcher.address),
            contextlib.ExitStack() as stack,
        ):
            for name in ("first", "second"):
                both = [begin(name, index) for index in range(2)]
                for step in range(5):
                    assert [one.first_line() for one in both] == [str(2 * step), str(2 * step + 1)]
                both[1].kill()
                again = begin(name, 1)
                assert re.search(
                    r"requested data for round 0, but the current round has already reached \d+.*"
                    "restarted with the same",
                    again.first_line(),
                )
                both[0].kill()


# -- the protocol by hand ------------------------------------------------------------------------


class Read:
    """A coordinated read of two consumers, and a worker of which there is no process."""

    def __init__(self, dispatcher: DispatcherProcess) -> None:
        self.dispatcher = dispatcher
        number = next(NUMBERS)
        dataset_id = self.call(
            "GetOrRegisterDataset", dataset={"graph": GRAPH}, dataset_id=f"by hand {number}"
        ).dataset_id
        self.address = "w1:1"
        self.worker(self.address, 1)
        self.job_id = self.call(
            "GetOrCreateJob", dataset_id=dataset_id, job_name=f"by hand {number}", num_consumers=2
        ).job_id
        self.clients = [self.join(), self.join()]
        (info,) = self.beat(0, 0).task_info
        self.task_id = info.task_id

    def call(self, method: str, **fields: Any) -> Any:
        return call(self.dispatcher, method, fields)

    def worker(self, address: str, uid: int, *current: int) -> Any:
        return self.call(
            "WorkerHeartbeat", worker_address=address, worker_uid=uid, current_tasks=current
        )

    def join(self) -> int:
        return self.call("GetOrCreateIteration", job_id=self.job_id).iteration_client_id

    def beat(self, index: int, current: int, blocked: int | None = None) -> Any:
        fields = {} if blocked is None else {"blocked_round": blocked}
        return self.call(
            "ClientHeartbeat",
            iteration_client_id=self.clients[index],
            current_round=current,
            **fields,
        )

    def remove(self, index: int, number: int) -> bool:
        return self.call(
            "MaybeRemoveTask", task_id=self.task_id, consumer_index=index, round=number
        ).removed


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as running:
        yield running


def test_a_task_is_removed_when_all_consumers_ask_in_the_same_round(
    dispatcher: DispatcherProcess, pool: ThreadPoolExecutor
) -> None:
    read = Read(dispatcher)
    assert list(pool.map(read.remove, (0, 1), (7, 7))) == [True, True]
    assert read.remove(0, 9)  # it has gone
    assert not read.beat(0, 8).task_info


def test_a_task_stays_if_consumers_ask_in_different_rounds(
    dispatcher: DispatcherProcess, pool: ThreadPoolExecutor
) -> None:
    read = Read(dispatcher)
    assert list(pool.map(read.remove, (0, 1), (7, 8))) == [False, False]
    assert list(pool.map(read.remove, (0, 0), (7, 8))) == [False, False]  # nor one alone
    assert read.beat(0, 8).task_info


def test_requests_for_a_removal_that_make_no_sense_are_refused(
    dispatcher: DispatcherProcess,
) -> None:
    read = Read(dispatcher)
    for index in (-1, 2):
        with pytest.raises(grpc.RpcError, match=f"consumer index {index} .* 0 to 1") as error:
            read.remove(index, 7)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_consumers_of_a_worker_that_was_lost_within_a_round_are_told(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    with DispatcherProcess(tmp_path, worker_timeout_ms=2000) as dispatcher:
        read = Read(dispatcher)
        while read.call("GetWorkers").workers:
            pass
        (info,) = read.beat(0, 3).task_info
        assert info.task_id == read.task_id  # for all consumers, though its worker is lost
        assert info.worker_address == read.address
        assert [s.address for s in info.transfer_servers] == [read.address]
        asked = [pool.submit(read.remove, 0, 7), pool.submit(read.remove, 1, 8)]
        for error in [waiting.exception() for waiting in asked]:
            assert isinstance(error, grpc.RpcError)
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "lost within a round" in str(error.details())
        with pytest.raises(grpc.RpcError, match="round 7"):  # whenever the others come
            read.remove(0, 8)

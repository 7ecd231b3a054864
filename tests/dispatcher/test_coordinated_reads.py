"""Coordinated reads of TensorFlow's own consumers."""

from __future__ import annotations

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..cluster import WorkerProcess
from ..forks import Fork
from ..stock import DispatcherProcess, ServerProcess, stock_consumers, stock_workers


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

"""A cluster of real processes that follows the wanted number of workers."""

from __future__ import annotations

import contextlib
import math
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from forebay import service

from ..cluster import WorkerProcess
from ..standbys import status, wait_until
from ..stock import DispatcherProcess

MAKE_S, STEP_S = 0.04, 0.013  # sleeps, so that the machine's processors are not what counts
ELEMENT_BYTES = 1 << 20  # few of them fill the buffers

pytestmark = pytest.mark.long


def slow(split: int) -> Iterator[Any]:
    for _ in range(25):
        time.sleep(MAKE_S)
        yield np.full(ELEMENT_BYTES, split % 256, np.uint8)


class Trainer(threading.Thread):
    """Takes an element each STEP_S, if there is one."""

    def __init__(self, dispatcher: DispatcherProcess, dataset_id: str) -> None:
        super().__init__()
        self._read = service.read(
            dispatcher.target, dataset_id, processing_mode=service.ShardingPolicy.DYNAMIC
        )
        self.step_s = STEP_S

    def run(self) -> None:
        for _ in self._read:
            time.sleep(self.step_s)

    def leave(self) -> None:
        self._read.leave()
        self.join()


def follow(dispatcher: DispatcherProcess, workers: list[WorkerProcess]) -> dict[str, Any]:
    """Start or stop workers, as the dispatcher wants them. Returns the status."""
    told: Any = status(dispatcher)
    wanted = told["wanted_workers"]["workers"]
    while len(workers) < wanted:
        process = WorkerProcess(dispatcher.address, heartbeat_interval_ms=500)
        workers.append(process.wait_until_registered())
    while len(workers) > max(1, wanted):
        workers.pop().stop()
    return dict(told)


def test_the_cluster_grows_as_trainers_wait_and_shrinks_when_they_are_slow(
    tmp_path: pathlib.Path,
) -> None:
    workers: list[WorkerProcess] = []
    with contextlib.ExitStack() as stack:
        dispatcher = stack.enter_context(
            DispatcherProcess(tmp_path / "j", load_window_ms=3000, client_timeout_ms=2000)
        )
        stack.callback(lambda: [worker.kill() for worker in workers])
        dataset_id = service.register_dataset(dispatcher.target, slow, splits=range(100_000))
        trainer = Trainer(dispatcher, dataset_id)
        trainer.start()
        begin = time.time()
        while time.time() < begin + 100:
            if time.time() > begin + 50:
                trainer.step_s = 0.05
            told = follow(dispatcher, workers)
            print(
                round(time.time() - begin, 1),
                len(workers),
                told["wanted_workers"],
                told["loads"],
                told["memory"][:1],
                flush=True,
            )
            time.sleep(1)
        trainer.leave()

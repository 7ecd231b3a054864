"""A cluster of real processes that follows the wanted number of workers."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay import service

from ..cluster import WorkerProcess
from ..standbys import status
from ..stock import DispatcherProcess

WINDOW_MS = 3_000
MAKE_S = 0.04  # a sleep, so that the machine's processors are not what counts
ELEMENT_BYTES = 1 << 20  # few of them fill the buffers

OPTIONS = {"processes": 1, "heartbeat_interval_ms": 500, "drain_timeout_ms": 2_000}

pytestmark = pytest.mark.timeout(300)


def slow(split: int) -> Iterator[Any]:
    for _ in range(25):
        time.sleep(MAKE_S)
        yield np.full(ELEMENT_BYTES, split % 256, np.uint8)


def _kill(workers: list[WorkerProcess]) -> None:
    for worker in workers:
        worker.kill()


class Trainer(threading.Thread):
    """Takes an element each `step_s`, if there is one."""

    def __init__(self, dispatcher: DispatcherProcess, dataset_id: str, step_s: float) -> None:
        super().__init__()
        self._elements = service.read(
            dispatcher.target, dataset_id, processing_mode=service.ShardingPolicy.DYNAMIC
        )
        self.step_s = step_s

    def run(self) -> None:
        for _ in self._elements:
            time.sleep(self.step_s)

    def leave(self) -> None:
        self._elements.leave()
        self.join()


def follow(dispatcher: DispatcherProcess, workers: list[WorkerProcess]) -> dict[str, Any]:
    """Start and stop workers as the dispatcher wants them, until it wants no others for as long as
    it takes to let some go. Returns what it says of the job."""
    since_s = time.monotonic()
    while time.monotonic() - since_s < 10 * WINDOW_MS / 1000:
        told = status(dispatcher)
        wanted, causes = told["wanted_workers"]["workers"], ("enough", "workers idle")
        if len(workers) < wanted:
            process = WorkerProcess(dispatcher.address, **OPTIONS)
            workers.append(process.wait_until_registered())
        elif len(workers) > max(1, wanted):
            workers.pop().stop()
        elif told["wanted_workers"]["cause"] in causes:
            time.sleep(WINDOW_MS / 4000)  # it judges as often
            continue
        since_s = time.monotonic()
        time.sleep(0.1)
    (load,) = told["loads"]
    return dict(load)


def test_who_follows_gets_the_best_rate_with_at_most_one_worker_too_many(tmp_path: Path) -> None:
    workers: list[WorkerProcess] = []
    with contextlib.ExitStack() as stack:
        dispatcher = stack.enter_context(
            DispatcherProcess(tmp_path / "j", load_window_ms=WINDOW_MS, client_timeout_ms=3000)
        )
        stack.callback(_kill, workers)
        dataset_id = service.register_dataset(dispatcher.target, slow, splits=range(100_000))
        trainer = Trainer(dispatcher, dataset_id, 0.0105)
        trainer.start()
        stack.callback(trainer.leave)
        for trainer.step_s, most in ((0.0105, 5), (0.05, 2)):
            load = follow(dispatcher, workers)
            print(trainer.step_s, len(workers), load)
            least = math.ceil(0.95 * load["elements_per_s"] * MAKE_S)
            assert least <= len(workers) <= min(least + 1, most)
            assert load["waits"] <= 0.05

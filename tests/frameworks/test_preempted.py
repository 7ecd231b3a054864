"""Trainers without TensorFlow that are preempted: their loops end with what they were given, and
who stays gets all else while it trains."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tensorflow as tf

from forebay import service

from ..trainers.conftest import target
from .programs import said_by

__all__ = ["target"]

PROGRAM = Path(__file__).with_name("preempted_program.py")
ELEMENTS, BATCH = 200, 3
QUEUED = 4 * BATCH  # what a DataLoader has asked its two workers for

TORCH = {  # the cases, and how many elements a process is given at most, of those that leave
    "elements": 6,
    "batches": 9,
    "loader": 6 + QUEUED,
    "the loader's next epoch": None,
    "ddp": BATCH,
    "keras": 6,
}
JAX = {"batches": 6 + 2 * BATCH, "keras": 6 + 2 * BATCH}  # some are on the devices already


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("framework", "cases"), [("torch", TORCH), ("jax", JAX)])
def test_two_are_preempted_and_one_survives(
    frameworks: Path, target: str, tmp_path: Path, framework: str, cases: dict[str, int | None]
) -> None:
    numbers = tf.data.Dataset.range(ELEMENTS).map(lambda x: tf.fill([50_000], x))
    dataset_id = service.register_dataset(target, numbers)
    folder = tmp_path / framework
    folder.mkdir()

    def train(me: int) -> list[list[int]]:
        return said_by(
            frameworks, PROGRAM.read_text(), framework, me, target, dataset_id, folder,
            timeout_s=250, KERAS_BACKEND=framework, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1",
        )  # fmt: skip

    with ThreadPoolExecutor() as pool:
        said = [*pool.map(train, range(3))]
    for (case, most), used in zip(cases.items(), zip(*said, strict=True), strict=True):
        assert sorted(number for each in used for number in each) == [*range(ELEMENTS)], case
        for left in used[:2]:
            assert most is None or len(left) <= most, case


HANGS = """
import ctypes
import numpy as np
from forebay.service.trainers import loaders

words = np.full(1, loaders.CAUGHT)  # as of a trainer that catches SIGTERM, and is not told
loaders._TrainerPoller(words).catch()
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
print("hangs", flush=True)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)  # for ever, in C, where no handler of Python's runs
"""


def test_a_loaders_worker_that_hangs_ends_by_sigterm(frameworks: Path) -> None:
    """As it would without a handler in its trainer: who ends a DataLoader waits for its workers."""
    with subprocess.Popen([frameworks, "-c", HANGS], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == "hangs\n"
        worker.terminate()
        assert worker.wait(60) == 143

"""Trainers without TensorFlow that are preempted: their loops end with the next batch, and what is
left of a block goes to the others."""

from __future__ import annotations

import pathlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import tensorflow as tf

from forebay import service

from ..trainers.conftest import target
from .programs import said_by

__all__ = ["target"]

ELEMENTS, STAYS = 200, 10_000

PROGRAM = """
import importlib
import json
import os
import pathlib
import signal
import sys
import time

import numpy as np

from forebay import service

name, target, dataset_id, folder, batch_size, leave_after = sys.argv[1:]
folder, batch_size, leave_after = pathlib.Path(folder), int(batch_size), int(leave_after)
made = importlib.import_module(f"forebay.{name}").ServiceDataset(
    target, dataset_id, job_name=folder.name, batch_size=batch_size or None
)
used = []
with service.PreemptionHandler(grace_period_s=100, exit_code=0) as preemption:
    for batch in made:
        used += np.asarray(batch).reshape(-1, 50_000)[:, 0].tolist()
        if len(used) >= leave_after and not preemption.preempted:
            os.kill(os.getpid(), signal.SIGTERM)
            assert preemption._handed_back.wait(60)
            (folder / str(os.getpid())).touch()
        while leave_after > 1000 and len([*folder.iterdir()]) < 2:
            time.sleep(0.1)  # the others have as much as they can
    if not preemption.preempted:
        (folder / str(os.getpid())).touch()  # nothing was left for it
    print(json.dumps(used), flush=True)
"""


@pytest.mark.parametrize(("name", "batch_size"), [("torch", 0), ("torch", 3), ("jax", 3)])
def test_two_are_preempted_and_one_survives(
    frameworks: pathlib.Path, target: str, tmp_path: pathlib.Path, name: str, batch_size: int
) -> None:
    numbers = tf.data.Dataset.range(ELEMENTS).map(lambda x: tf.fill([50_000], x))
    dataset_id = service.register_dataset(target, numbers)
    folder = tmp_path / f"{name}-{batch_size}"
    folder.mkdir()

    def train(leave_after: int) -> list[int]:
        arguments = (name, target, dataset_id, folder, batch_size, leave_after)
        (used,) = said_by(frameworks, PROGRAM, *arguments)
        return list(used)

    with ThreadPoolExecutor() as pool:
        *left, survivor = pool.map(train, [6, 8, STAYS])
    assert sorted([*left[0], *left[1], *survivor]) == [*range(ELEMENTS)]
    ahead = 2 * max(1, batch_size) if name == "jax" else 0  # on its devices already
    assert len(left[0]) <= 6 + ahead and len(left[1]) <= 9 + ahead

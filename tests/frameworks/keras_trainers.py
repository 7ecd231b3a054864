"""What test_checkpoints.py has several trainers of Keras do, on JAX.

python keras_trainers.py TARGET DATASET_ID FOLDER

A training in step by `keras.distribution.DataParallel` is killed again and again, and goes on with
other numbers of processes. Each process of it is a fork of this one, which only imports.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

import forebay.keras
from forebay.jax import ServiceDataset
from forebay.service.processes import free_port

killed_program: Any = import_module("keras_killed")
TARGET, DATASET_ID, FOLDER = sys.argv[1:4]
GLOBAL_BATCH, EPOCHS, EPOCH_STEPS = 24, 2, 20
STEPS = EPOCHS * EPOCH_STEPS


class Seen:
    """A dataset that writes which elements each step has."""

    def __init__(self, seen: Path, dataset: ServiceDataset) -> None:
        self.seen, self.dataset = seen.open("a", buffering=1), dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)

    def __iter__(self) -> Iterator[Any]:
        for pixels, labels in self.dataset:
            step = self.dataset.state_dict()["position"] // GLOBAL_BATCH
            rows = [zlib.crc32(row.tobytes()) for row in np.asarray(pixels)]
            self.seen.write(json.dumps([step, rows]) + "\n")
            yield pixels, labels


def train(folder: Path, process: int, processes: int, port: int, at: int) -> None:
    """Saves behind each fifth step. Is killed behind a step, unless it is 0."""
    os.dup2(2, 1)  # Gloo writes to stdout, and tears the program's own lines
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    model, position = killed_program.model_of()
    saved = folder / f"saved {process}"  # each process saves, as it takes all to read a weight
    backup = keras.callbacks.BackupAndRestore(saved, save_freq=5, double_checkpoint=True)
    kind = "step" if at else None
    says = killed_program.Says(folder / f"said by {processes}", position, kind, at)
    batch_size = GLOBAL_BATCH // processes
    read = ServiceDataset(TARGET, DATASET_ID, ordered=True, seed=1, batch_size=batch_size)
    model.fit(
        forebay.keras.Epochs(Seen(folder / f"seen by {processes}", read), position=position),
        epochs=EPOCHS,
        verbose=0,
        callbacks=[says, backup, position],
    )
    assert len(jax.devices()) == processes, jax.devices()
    if processes > 1:
        jax.distributed.shutdown()  # waits for all


def trains(folder: Path, processes: int, at: int = 0) -> None:
    """A life of the training, from the files of its first process. One is killed at a step, and
    the others with it."""
    for process in range(1, processes):
        shutil.rmtree(folder / f"saved {process}", ignore_errors=True)
        if (folder / "saved 0").exists():
            shutil.copytree(folder / "saved 0", folder / f"saved {process}")
    port, dies = free_port(), random.randrange(processes)
    started = [
        killed_program.started(
            train, folder, process, processes, port, at if process == dies else 0
        )
        for process in range(processes)
    ]
    try:
        if at:
            assert code_of(started.pop(dies)) == -signal.SIGKILL
        while not at and started:
            assert code_of(started.pop()) == 0
    finally:
        for process in started:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def code_of(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def elements(folder: Path, processes: int) -> dict[int, set[int]]:
    """By step."""
    found: dict[int, set[int]] = defaultdict(set)
    for line in (folder / f"seen by {processes}").read_text().splitlines():
        step, rows = json.loads(line)
        found[step].update(rows)
    return found


def main() -> None:
    warnings.filterwarnings("ignore", "Your input ran out of data")
    seed = random.randrange(1 << 32)
    print("seed", seed, flush=True)
    random.seed(seed)
    undisturbed, killed = Path(FOLDER, "undisturbed"), Path(FOLDER, "killed")
    for folder in undisturbed, killed:
        folder.mkdir()
    trains(undisturbed, 2)
    expected, losses = elements(undisturbed, 2), killed_program.what(undisturbed / "said by 2")
    assert {*expected} == {*range(1, STEPS + 1)}, [*expected]
    assert {len(rows) for rows in expected.values()} == {GLOBAL_BATCH}
    assert len(losses) == STEPS + EPOCHS

    trains(killed, 2, random.randint(6, 9))
    print("another worker", flush=True)
    sys.stdin.read()  # until it is there
    trains(killed, 2, second := random.randint(12, 16))
    found = killed_program.what(killed / "said by 2")
    assert found == {step: losses[step] for step in found}
    assert len(found) >= second
    trains(killed, 1, random.randint(EPOCH_STEPS + 4, EPOCH_STEPS + 9))
    trains(killed, 3)
    steps: dict[int, set[int]] = defaultdict(set)
    for processes in 1, 2, 3:
        for step, rows in elements(killed, processes).items():
            assert rows <= expected[step], (processes, step)
            steps[step] |= rows
    assert steps == expected
    print("done")


if __name__ == "__main__":
    main()

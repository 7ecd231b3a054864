"""The position of an ordered read in each framework's own checkpoint: trainings that are killed,
and go on as if they had not been."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

from forebay import service
from forebay.service.processes import ChildProcess

from .. import forks
from ..cluster import WorkerProcess

HERE = Path(__file__).parent
DIGITS = 480  # 15 steps of 32


@pytest.fixture(scope="module")
def digits(target: str) -> str:
    """The id of a dataset of handwritten digits."""
    pixels, labels = load_digits(return_X_y=True)
    pairs = (pixels[:DIGITS] / 16).astype(np.float32), labels[:DIGITS]
    return service.register_dataset(target, tf.data.Dataset.from_tensor_slices(pairs))


def said_by(
    process: forks.Fork | ChildProcess, go_on: Callable[[], None], target: str
) -> list[str]:
    """Its lines. It waits for `go_on` and another worker where it says so."""
    said = []
    with contextlib.ExitStack() as stack:
        stack.callback(process.finish)
        stack.callback(process.kill)
        while line := process.line():
            said.append(line)
            if line == "another worker":
                stack.enter_context(WorkerProcess(target.removeprefix("grpc://")).until_told())
                go_on()
    return said


def _jax(directory: Path) -> dict[str, str]:
    """Environment variables: Keras is on JAX, which compiles once for all processes."""
    return {
        "KERAS_BACKEND": "jax",
        "JAX_COMPILATION_CACHE_DIR": str(directory / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
@pytest.mark.timeout(240)
def test_keras_has_the_losses_of_a_training_that_was_not_killed(
    backend: str, target: str, digits: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With BackupAndRestore, killed four times, also in the midst of a save; and with
    ModelCheckpoint, from an older checkpoint on two workers and not one."""
    program = [str(HERE / "keras_killed.py"), target, digits, str(tmp_path)]
    process: forks.Fork | ChildProcess
    if backend == "tensorflow":
        process = forks.Fork(program)
        go_on = process.close_input
    else:
        python = [str(request.getfixturevalue("frameworks")), *program]
        environment = {**_jax(tmp_path), "KERAS_BACKEND": backend}
        process = ChildProcess(python, None, piped=True, environment=environment)
        assert process.stdin is not None
        go_on = process.stdin.close
    said = said_by(process, go_on, target)
    assert said[-1:] == [f"done on {backend}"], said


@pytest.mark.timeout(240)
def test_keras_goes_on_with_other_numbers_of_trainers(
    frameworks: Path, target: str, digits: str, tmp_path: Path
) -> None:
    """Two in step, killed twice, with another worker; then one, which is killed, and three. Two
    have the losses of two that were not killed, and each step its elements."""
    program = [str(frameworks), str(HERE / "keras_trainers.py"), target, digits, str(tmp_path)]
    process = ChildProcess(program, None, piped=True, environment=_jax(tmp_path))
    assert process.stdin is not None
    said = said_by(process, process.stdin.close, target)
    assert said[-1:] == ["done"], said


@pytest.mark.timeout(240)
def test_torch_sees_in_each_step_what_it_would_have_seen(
    frameworks: Path, target: str, tmp_path: Path
) -> None:
    """Killed and preempted, also behind a StatefulDataLoader. `examples/digits_torchrun.py` has
    several ranks, whose number changes."""
    pixels, labels = load_digits(return_X_y=True)
    elements = {
        "pixels": (pixels[:DIGITS] / 16).astype(np.float32),
        "label": labels[:DIGITS],
        "number": np.arange(DIGITS),
    }
    dataset_id = service.register_dataset(target, tf.data.Dataset.from_tensor_slices(elements))
    ended = subprocess.run(
        [frameworks, HERE / "torch_killed.py", target, dataset_id, tmp_path],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.stdout.endswith("done\n"), ended.stdout + ended.stderr

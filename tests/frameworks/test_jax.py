"""`forebay.jax`: batches of a process, and global arrays over a mesh, held against NumPy."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from forebay import service

PROGRAM = Path(__file__).with_name("jax_program.py")
SAYS = "said: "
TIMEOUT_S = 100


@contextlib.contextmanager
def started(
    python: Path,
    name: str,
    target: str,
    *arguments: Any,
    processes: int = 1,
    program: Path = PROGRAM,
) -> Iterator[list[subprocess.Popen[str]]]:
    """The program, alone or as the processes of one training."""
    places: list[list[str]] = [[]]
    if processes > 1:
        with socket.create_server(("127.0.0.1", 0)) as free:
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        places = [[coordinator, str(process)] for process in range(processes)]
    with contextlib.ExitStack() as stack:
        programs = []
        for place in places:
            command = [str(python), str(program), name, target, json.dumps(arguments), *place]
            one = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            stack.enter_context(one)
            stack.callback(one.kill)
            programs.append(one)
        yield programs


def next_said(program: subprocess.Popen[str]) -> Any:
    assert program.stdout is not None
    line = next(line for line in program.stdout if line.startswith(SAYS))
    return json.loads(line.removeprefix(SAYS))


def all_said(program: subprocess.Popen[str]) -> list[Any]:
    """Up to its end; none of what was read before."""
    lines = program.communicate(timeout=TIMEOUT_S)[0].splitlines()
    return [json.loads(line.removeprefix(SAYS)) for line in lines if line.startswith(SAYS)]


def said(*how: Any, **options: Any) -> list[Any]:
    """What each process says last, once it has ended in order."""
    with started(*how, **options) as programs:
        found = [all_said(program) for program in programs]
        assert not any(program.returncode for program in programs), found
        return [each[-1] for each in found]


def register(target: str, dataset: Any) -> str:
    return service.register_dataset(target, dataset)


def numbers(count: int) -> Any:
    def element(i: tf.Tensor) -> dict[str, Any]:
        return {"x": tf.fill([16], tf.cast(i, tf.float32)), "y": (i, tf.cast(i % 256, tf.uint8))}

    return tf.data.Dataset.range(count).map(element)


@pytest.mark.parametrize("name", ["batches", "lent"])
def test_batches_of_a_process(frameworks: Path, target: str, name: str) -> None:
    said(frameworks, name, target, register(target, numbers(100)))


def test_who_does_not_train(frameworks: Path, target: str) -> None:
    """A parameter server reads nothing, an evaluator everything: none of it is the training's."""
    (found,) = said(frameworks, "do_not_train", target, register(target, numbers(32)))
    assert found == {"evaluator": [32, 32], "worker": 32}


def test_global_arrays_over_the_devices_of_a_process(frameworks: Path, target: str) -> None:
    whole = tf.data.Dataset.range(100).batch(20, drop_remainder=True)
    ids = register(target, numbers(100)), register(target, whole)
    said(frameworks, "global_arrays", target, *ids)


def test_what_jax_has_no_arrays_for(frameworks: Path, target: str) -> None:
    def element(i: tf.Tensor) -> dict[str, Any]:
        return {
            "name": tf.strings.as_string(i),
            "wide": i * (1 << 40),
            "half": tf.cast(i, tf.bfloat16),
            "precise": tf.cast(i, tf.float64),
            "maybe": None,
        }

    def checked(i: tf.Tensor) -> tf.Tensor:
        return tf.debugging.check_numerics(1 / tf.cast(10 - i, tf.float32), "not finite")

    mixed = tf.data.Dataset.range(8).map(element)
    sequences = tf.data.Dataset.range(8).map(lambda i: {"tokens": tf.fill([i], i)})
    ids = [register(target, dataset) for dataset in (
        mixed, sequences, tf.data.Dataset.range(20).map(checked)
    )]  # fmt: skip
    said(frameworks, "odd", target, *ids)


ROWS, FEW = 8, 5


def test_two_processes_take_the_same_steps(frameworks: Path, target: str) -> None:
    ids = register(target, numbers(1000)), register(target, numbers(FEW))
    both = said(frameworks, "in_step", target, *ids, ROWS, processes=2)
    for name, count in (("numbers", 1000), ("few", FEW)):
        for remainder in ("drop", "pad"):
            for epochs in zip(*(each[f"{name} {remainder}"] for each in both), strict=True):
                check_epoch(epochs, count, remainder)
    own = [number for each in both for number in each["own"]]
    assert sorted(own) == [*range(1000)]


def check_epoch(by_process: Sequence[dict[str, Any]], count: int, remainder: str) -> None:
    first, second = by_process
    assert first["sums"] == second["sums"]
    steps = [a + b for a, b in zip(first["mine"], second["mine"], strict=True)]
    assert first["sums"] == [sum(step) for step in steps]
    elements = sorted(number for step in steps for number in step)
    if remainder == "pad":
        assert elements == [*range(count)]
        return
    assert len({*elements}) == len(elements) == ROWS * len(steps)
    # What one process may have received when the other has come to the end: 16 elements on their
    # way, a batch that is being made, and two that are on the devices.
    assert count - len(elements) <= 16 + 4 * ROWS


def test_who_is_out_of_step_holds_up_nobody(frameworks: Path, target: str) -> None:
    numbers_id = register(target, numbers(200))
    found = said(frameworks, "out_of_step", target, numbers_id, processes=2)
    assert [each["taken"] for each in found] == [2, 2]
    # Those that stopped together have handed back all but what was being made for their devices:
    # two batches each of four rows, and one that was not whole.
    with service.read(
        target, numbers_id, processing_mode="distributed_epoch", job_name="told"
    ) as rest:
        read = [int(element["y"][0]) for element in rest]
    read += [number for each in found for number in each["told"]]
    assert len({*read}) == len(read) >= 200 - 2 * (2 * 4 + 3)


def test_a_killed_process_and_the_restart_of_all(frameworks: Path, target: str) -> None:
    numbers_id = register(target, numbers(200))
    program = frameworks, "until_killed", target, numbers_id
    with started(*program, 0.05, processes=2) as programs:
        taken = [number for _ in range(3) for each in programs for number in next_said(each)]
        programs[1].kill()
        programs[0].kill()  # it would wait for the other one
        taken += [number for each in programs for batch in all_said(each) for number in batch]
    with started(*program, 0, processes=2) as programs:
        *first, ended = all_said(programs[0])
        *second, also_ended = all_said(programs[1])
    assert (ended, also_ended) == ("ended", "ended")
    left = [number for batch in first + second for number in batch]
    assert len({*taken, *left}) == len(taken) + len(left)
    assert len(left) > 100

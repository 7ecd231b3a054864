"""Trainers that are preempted: what they have not used goes to the others, and is used once."""

from __future__ import annotations

import os
import pathlib
import random
import signal
from collections.abc import Iterator, Sequence

import pytest
import tensorflow as tf

from forebay import service

from ..cluster import WorkerProcess
from ..forks import Fork
from ..standbys import wait_until
from ..stock import DispatcherProcess

ELEMENTS = 400
PROGRAM = pathlib.Path(__file__).with_name("preempted.py")


class Trainer:
    """A process of preempted.py."""

    def __init__(
        self,
        kind: str,
        target: str,
        dataset_id: str,
        path: pathlib.Path,
        step_s: float = 0.01,
        grace_s: float = 60,
    ) -> None:
        self.path = path
        arguments = [PROGRAM, kind, target, dataset_id, path, step_s, grace_s]
        self.process = Fork([*map(str, arguments)])
        assert self.process.line() == "begins"

    def lines(self) -> list[str]:
        return self.path.read_text().split() if self.path.exists() else []

    def elements(self) -> list[int]:
        return [int(line) for line in self.lines() if line.isdigit()]

    def end(self) -> int:
        return self.process.finish(60)


@pytest.fixture
def dispatcher() -> Iterator[DispatcherProcess]:
    with DispatcherProcess("memory:") as running:
        yield running


def numbers(target: str, elements: int = ELEMENTS) -> str:
    """Elements of 400 KB: a block has some, and the credit of a trainer many of them."""
    dataset = tf.data.Dataset.range(elements).map(lambda x: tf.fill([50_000], x))
    return service.register_dataset(target, dataset)


def late(target: str, dataset_id: str) -> list[int]:
    """What somebody gets who comes when all others have gone."""
    arguments = {"processing_mode": "distributed_epoch", "job_name": "training"}
    with service.read(target, dataset_id, **arguments) as rest:
        return [int(number) for number in rest]


def require_once(trainers: Sequence[Trainer], rest: Sequence[int] = (), of: int = ELEMENTS) -> None:
    used = [number for trainer in trainers for number in trainer.elements()]
    assert sorted([*used, *rest]) == [*range(of)]


@pytest.mark.parametrize("kind", ["read", "loop", "keras"])
def test_two_are_preempted_and_one_survives(
    kind: str, dispatcher: DispatcherProcess, tmp_path: pathlib.Path
) -> None:
    dice = random.Random(kind)
    with WorkerProcess(dispatcher.address), WorkerProcess(dispatcher.address):
        dataset_id = numbers(dispatcher.target)
        trainers = [
            Trainer(kind, dispatcher.target, dataset_id, tmp_path / f"{i}") for i in range(3)
        ]
        wait_until(lambda: all(trainer.elements() for trainer in trainers))
        for trainer in trainers[:2]:
            some = dice.randrange(10)
            wait_until(lambda trainer=trainer, some=some: len(trainer.elements()) > some)
            trainer.process.send_signal(signal.SIGTERM)
            trainer.process.send_signal(signal.SIGTERM)  # as some platforms do
        assert [trainer.end() for trainer in trainers] == [143, 143, 0]
        for trainer in trainers[:2]:
            assert trainer.lines()[-1] == "saved" and trainer.lines().count("saved") == 1
        require_once(trainers, late(dispatcher.target, dataset_id))

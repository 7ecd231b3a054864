"""Trainers that are preempted: what they have not used goes to the others, and is used once."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from forebay import service

from ..cluster import WorkerProcess
from ..forks import Fork
from ..standbys import status, wait_until
from ..stock import DispatcherProcess

ELEMENTS = 400
BLOCK = 20  # of them, at most
PROGRAM = Path(__file__).with_name("preempted.py")


class Trainer:
    """A process of preempted.py."""

    def __init__(
        self,
        kind: str,
        target: str,
        dataset_id: str,
        path: Path,
        step_s: float = 0.01,
        grace_s: float = 60,
        begin_later: bool = False,
    ) -> None:
        """`begin_later`: once there is a file of its path's name, with the suffix .begin."""
        self.path = path
        arguments = [PROGRAM, kind, target, dataset_id, path, step_s, grace_s, int(begin_later)]
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
    mode = "distributed_epoch"
    with service.read(target, dataset_id, processing_mode=mode, job_name="training") as rest:
        return [int(elements[0]) for elements in rest]


def require_once(trainers: Sequence[Trainer]) -> None:
    used = [number for trainer in trainers for number in trainer.elements()]
    assert sorted(used) == [*range(ELEMENTS)]


def three(kind: str, dispatcher: DispatcherProcess, dataset_id: str, folder: Path) -> list[Trainer]:
    """All of them train: none has used everything before another has begun."""
    hold = folder / "hold"
    hold.touch()
    trainers = [Trainer(kind, dispatcher.target, dataset_id, folder / f"{i}") for i in range(3)]
    wait_until(lambda: all(trainer.elements() for trainer in trainers))
    hold.unlink()
    return trainers


@pytest.mark.parametrize("kind", ["read", "loop", "keras"])
def test_two_are_preempted_and_one_survives(
    kind: str, dispatcher: DispatcherProcess, tmp_path: Path
) -> None:
    dice = random.Random(kind)
    with WorkerProcess(dispatcher.address), WorkerProcess(dispatcher.address):
        dataset_id = numbers(dispatcher.target)
        trainers = three(kind, dispatcher, dataset_id, tmp_path)
        for trainer in trainers[:2]:
            some = dice.randrange(10)
            wait_until(lambda trainer=trainer, some=some: len(trainer.elements()) > some)
            trainer.process.send_signal(signal.SIGTERM)
            trainer.process.send_signal(signal.SIGTERM)  # as some platforms do
        assert [trainer.end() for trainer in trainers] == [143, 143, 0]
        for trainer in trainers[:2]:
            assert trainer.lines()[-1] == "saved" and trainer.lines().count("saved") == 1
        require_once(trainers)
        assert not late(dispatcher.target, dataset_id), "the survivor has taken over everything"


@pytest.mark.long
def test_who_reads_in_order_goes_on_behind_its_last_step(
    dispatcher: DispatcherProcess, tmp_path: Path
) -> None:
    """Nothing is handed back: what was not used is read again, from the checkpoint on."""
    dice = random.Random(5)
    with WorkerProcess(dispatcher.address), WorkerProcess(dispatcher.address):
        dataset_id = numbers(dispatcher.target)
        expected: list[int] = []
        for position in 0, ELEMENTS:
            order: Any = {"seed": 3, "bundle_splits": 20, "start_position": position}
            with service.read(dispatcher.target, dataset_id, ordered=True, **order) as epoch:
                expected += [int(elements[0]) for elements in epoch]
        path = tmp_path / "0"
        for more in *(dice.randrange(10, 300) for _ in range(3)), None:
            trainer = Trainer("in order", dispatcher.target, dataset_id, path, 0)
            if more is not None:
                enough = len(trainer.elements()) + more
                wait_until(lambda t=trainer, n=enough: len(t.elements()) > n)
                trainer.process.send_signal(signal.SIGTERM)
            assert trainer.end() == (0 if more is None else 143)
            assert trainer.elements() == expected[: len(trainer.elements())]
        assert trainer.elements() == expected
        assert trainer.lines().count("saved") == 3


def test_who_waits_for_data_saves_and_exits(dispatcher: DispatcherProcess, tmp_path: Path) -> None:
    """No worker is there; then no dispatcher either, to begin with."""
    dataset_id = numbers(dispatcher.target)
    kinds = ("read", "loop", "repeated loop")
    trainers = [Trainer(k, dispatcher.target, dataset_id, tmp_path / k) for k in kinds]
    wait_until(lambda: len(consumers(dispatcher)) == len(kinds))
    for trainer in trainers:
        trainer.process.send_signal(signal.SIGTERM)
    assert [(t.end(), t.lines()) for t in trainers] == [(143, ["saved"])] * len(kinds)
    later = [
        Trainer(k, dispatcher.target, dataset_id, tmp_path / f"later-{k}", begin_later=True)
        for k in kinds
    ]
    wait_until(lambda: all(trainer.lines() == ["opened"] for trainer in later))
    dispatcher.kill()
    for trainer in later:
        trainer.path.with_suffix(".begin").touch()
    wait_until(lambda: all("waits" in trainer.lines() for trainer in later))
    for trainer in later:
        trainer.process.send_signal(signal.SIGTERM)
    assert [(t.end(), t.lines()[-1]) for t in later] == [(143, "saved")] * len(kinds)


def consumers(dispatcher: DispatcherProcess) -> list[int]:
    jobs: Any = status(dispatcher)["jobs"]
    return [i for job in jobs for of in job["iterations"] for i in range(int(of["consumers"]))]


def test_who_does_not_come_back_from_a_step_exits_and_keeps_only_what_it_had(
    dispatcher: DispatcherProcess, tmp_path: Path
) -> None:
    with WorkerProcess(dispatcher.address):
        dataset_id = numbers(dispatcher.target, 60)
        stuck = Trainer("read", dispatcher.target, dataset_id, tmp_path / "0", 1000, 1.5)
        wait_until(stuck.path.with_suffix(".step").exists)
        wait_until(lambda: begun(dispatcher) >= 8)  # as far as a worker is ahead
        stuck.process.send_signal(signal.SIGTERM)
        rest = late(dispatcher.target, dataset_id)  # waits for what that one has
        assert stuck.end() == 143 and not stuck.lines()
        rest += late(dispatcher.target, dataset_id)
        # A run's first block has one element, which is in the step, or is the first of another.
        assert len(rest) == len(set(rest)) and len(rest) >= 60 - BLOCK


def begun(dispatcher: DispatcherProcess) -> int:
    jobs: Any = status(dispatcher)["jobs"]
    return sum(s["leased"] + s["begun"] for of in jobs[0]["iterations"] for s in of["sources"])

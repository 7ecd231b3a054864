"""The audit of rounds, caches and static shards can fail: it finds each broken promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from forebay.chaos.history import read_history
from forebay.chaos.members import Life
from forebay.chaos.modes import EACH, STEPS
from forebay.chaos.modes_audit import check_modes, check_saved
from forebay.chaos.records import Got, Joined, Left, ReadToEnd, Record
from forebay.chaos.saves import ELEMENTS as SAVED
from forebay.chaos.saves import Saved
from forebay.journal.proto import events_pb2 as ev

JOB, ITERATION, WORKERS, TASKS = 1, 2, (10, 11), (20, 21)
ELEMENTS = 6


class Run:
    """A crowd that got all that it was promised, from two workers; what happened can be changed."""

    def __init__(self) -> None:
        self.events = [
            ev.Event(leader_elected=ev.LeaderElected(
                term=1, places=[ev.Place(configured=f"w:{n}") for n in (1, 2)])),
            ev.Event(job_created=ev.JobCreated(job_id=JOB, name="crowd0.1 static")),
            ev.Event(iteration_created=ev.IterationCreated(
                iteration_id=ITERATION, job_id=JOB, epoch=1)),
            *(ev.Event(worker_registered=ev.WorkerRegistered(worker_id=w)) for w in WORKERS),
            *(self.begin(shard) for shard in (0, 1)),
        ]  # fmt: skip
        self.lives = {"worker0.1": Life("worker0.1", "worker", 0, 0.0)}
        # Each worker's rounds in turn; what a trainer got of each task; whose shard has what.
        self.rounds = [[[EACH * (n // 2) + c for n in range(STEPS)]] for c in range(EACH)]
        self.cached = [{task: list(range(STEPS // 2)) for task in TASKS} for _ in range(EACH)]
        self.static = [{20: [0, 2], 21: [1]}, {20: [4], 21: [3, 5]}]

    @staticmethod
    def begin(shard: int, task_id: int = 0, worker: int = 0) -> ev.Event:
        return ev.Event(task_created=ev.TaskCreated(
            task_id=task_id or TASKS[shard], iteration_id=ITERATION,
            worker_id=worker or WORKERS[shard], shard=shard,
        ))  # fmt: skip

    def broken(self) -> list[str]:
        history = read_history((n, 1, event) for n, event in enumerate(self.events, 1))
        modes: dict[str, list[list[Record]]] = {
            "rounds": [
                [
                    record
                    for number, ids in enumerate(attempts)
                    for record in _visit({0: ids}, number == len(attempts) - 1, at_s=100 * number)
                ]
                for attempts in self.rounds
            ],
            "cached": [_visit(of_task) for of_task in self.cached],
            "static": [_visit(of_task) for of_task in self.static],
        }
        verdict = check_modes(history, "crowd0.1", modes, self.lives, elements=ELEMENTS)
        return [*history.broken, *verdict.broken]


def _visit(of_task: dict[int, list[int]], ended: bool = True, at_s: float = 0) -> list[Record]:
    got = [Got(1, at_s + 1, task, ids) for task, ids in of_task.items()]
    last = ReadToEnd(1, at_s + 2) if ended else Left(1, at_s + 2, [], for_good=True)
    return [Joined(1, 3, at_s), *got, last]


@pytest.fixture
def run() -> Run:
    return Run()


def test_all_is_well(run: Run) -> None:
    assert run.broken() == []


def _set(where: Callable[[Run], Any], key: Any, value: Any) -> Callable[[Run], None]:
    return lambda run: where(run).__setitem__(key, value)


@pytest.mark.parametrize(
    ("lie", "what"),
    [
        (_set(lambda r: r.rounds[1][0], 5, 4), "rounds: step 5 of attempt 0 has the elements"),
        (lambda r: [one[0].reverse() for one in r.rounds], "has round 49, and not the one before"),
        (
            lambda r: [one[0].__setitem__(slice(None), one[0][10:]) for one in r.rounds],
            "has round 5, and not the one before",
        ),
        (lambda r: r.rounds[0][0].pop(), "consumer 0 did not get 100 elements"),
        (
            lambda r: [one.insert(0, one[0][:6]) for one in r.rounds],
            "attempt 0 ended early, and nobody was hit",
        ),
        (lambda r: r.cached[0][20].insert(3, 2), "trainer 0 got elements of task 20 twice"),
        (lambda r: r.cached[1][21].remove(7), "trainer 1 did not get element 7 of task 21"),
        (lambda r: r.static[0][20].append(4), "1 elements (4) delivered twice by one task"),
        (lambda r: r.static[0][20].append(3), "1 elements (3) delivered by a task that has not"),
        (lambda r: r.static[1][21].remove(5), "1 elements (5) lost"),
        (lambda r: r.events.append(r.begin(1, 22, 10)), "shard 1, which task 21 has, is begun"),
    ],
)  # fmt: skip
def test_a_broken_promise_is_found(run: Run, lie: Callable[[Run], None], what: str) -> None:
    lie(run)
    assert what in run.broken()[0]


def test_consumers_begin_again_once_a_worker_was_lost(run: Run) -> None:
    for one in run.rounds:
        one.insert(0, one[0][:6])
    run.lives["worker0.1"].killed_s = 1.5
    assert run.broken() == []
    run.lives["worker0.1"].killed_s = 50.0
    assert "nobody was hit" in run.broken()[0]


def test_what_was_on_its_way_from_a_worker_that_was_given_up(run: Run) -> None:
    run.cached[0][20].remove(7)
    lost = ev.WorkerLost(worker_id=10, reason="no sign of life")
    run.events.append(ev.Event(time_ms=1, worker_lost=lost))
    assert run.broken() == []


def test_a_shard_that_is_begun_anew(run: Run) -> None:
    lost = ev.WorkerLost(worker_id=11, reason="its connection broke")
    again = ev.WorkerRegistered(worker_id=12)
    run.events += [
        ev.Event(worker_lost=lost),
        ev.Event(worker_registered=again),
        run.begin(1, 22, 12),
    ]
    run.static[0][22] = [1, 3, 5]
    assert run.broken() == []


@pytest.mark.parametrize(
    ("ids", "damaged", "what"),
    [
        ([*range(SAVED)], [], ""),
        ([*range(1, SAVED)], [], "1 elements (0) lost"),
        ([*range(SAVED), 7], [], "1 elements (7) saved twice"),
        ([*range(SAVED + 1)], [], f"1 elements ({SAVED}) saved that nobody made"),
        ([*range(SAVED)], [3], "1 elements (3) damaged"),
    ],
)
def test_what_is_saved(ids: list[int], damaged: list[int], what: str) -> None:
    broken = check_saved("crowd0.1", Saved(ids, damaged)).broken
    assert broken == ([f"crowd0.1 save: {what}"] if what else [])


def test_a_save_without_an_end() -> None:
    assert check_saved("crowd0.1", None).broken == ["crowd0.1 save: it did not come to its end"]

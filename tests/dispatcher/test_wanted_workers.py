"""How many workers are wanted, under loads of which the best number is known.

The same loads are judged by TensorFlow's estimate. They are a fluid: each worker can make `speed`
elements a second, the source gives all of them at most `source`, and trainers take at most
`demand`.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import NamedTuple

import pytest

from forebay.service.dispatcher.wanted_workers import NOBODY, Judge, Load, Wanted, all_jobs

EVERY_S = 5.0
HOLD_S = 120.0
HELD_UP = "no further one would help"


class Fluid(NamedTuple):
    demand: float
    speed: float = 10.0
    source: float = math.inf
    reads_ahead: bool = False  # its consumers wait while their buffer is not full
    prefetches: bool = False  # its workers seem idle while their buffers are full

    def rate(self, workers: int) -> float:
        return min(workers * self.speed, self.source, self.demand)

    def least(self) -> int:
        """The fewest workers of the best rate, of which 5 % do not matter."""
        best = min(self.demand, self.source)
        return next(n for n in itertools.count(1) if self.rate(n) >= 0.95 * best)

    def load(self, workers: int, luck: random.Random) -> Load:
        """What is measured, up to 3 % wrong."""
        rate = self.rate(workers)
        is_short = rate < self.demand
        waits = 1 - rate / self.demand
        busy = workers if is_short else rate / self.speed * (0.2 if self.prefetches else 1)
        waits = float(is_short) if self.reads_ahead else waits
        rate, busy = (luck.uniform(0.97, 1.03) * each for each in (rate, busy))
        return Load(workers, min(busy, workers), 0.0, waits, rate)


def follow(judge: Judge, fluid: Fluid, workers: int, at_s: float, for_s: float) -> list[int]:
    """The numbers of workers of a cluster that follows the judge, one each EVERY_S."""
    luck = random.Random(7)
    numbers = []
    for step in range(int(for_s / EVERY_S)):
        workers = judge.judge(fluid.load(workers, luck), at_s + step * EVERY_S).workers
        numbers.append(workers)
    return numbers


def tf_optimal_number(fluid: Fluid, workers: int) -> int:
    """TensorFlow's estimate (core/data/service/auto_scaler.cc): the rates that consumers would
    reach without waiting, over the mean rate of a worker's pipeline, as its model sees them: a slow
    read is processing. At most four times as many as there are."""
    throughput = min(fluid.speed, fluid.source / workers)
    return max(1, min(math.ceil(fluid.demand / throughput), 4 * workers))


STEADY = [
    *(
        Fluid(demand, reads_ahead=ahead, prefetches=ahead)
        for demand in (3, 33, 50, 97, 180)
        for ahead in (False, True)
    ),
    *(Fluid(100, 10, source, ahead, ahead) for source in (5, 25, 60) for ahead in (False, True)),
]


@pytest.mark.parametrize("fluid", STEADY, ids=str)
@pytest.mark.parametrize("workers", [1, 40])
def test_who_follows_gets_the_best_rate_with_at_most_one_worker_too_many(
    fluid: Fluid, workers: int
) -> None:
    numbers = follow(Judge(HOLD_S), fluid, workers, 0, 8000)
    settled = numbers[len(numbers) // 2 :]
    right = sum(fluid.least() <= number <= fluid.least() + 1 for number in settled)
    if fluid.source == math.inf:
        assert right >= 0.95 * len(settled), numbers  # each hour it tries fewer
        assert tf_optimal_number(fluid, settled[0]) == math.ceil(fluid.demand / fluid.speed)
    else:  # seldom it tries whether the source is still slow; TensorFlow always wants more
        assert right >= 0.85 * len(settled), numbers
        assert tf_optimal_number(fluid, settled[-1]) > settled[-1]


def test_demand_that_rises_is_met_at_once_and_one_that_falls_is_believed_later() -> None:
    judge, luck = Judge(HOLD_S), random.Random(7)
    high, low = Fluid(200), Fluid(30)
    assert follow(judge, low, 1, 0, 300)[-1] == 3
    rising = follow(judge, high, 3, 300, 300)
    assert rising.index(rising[-1]) <= 3  # it doubles
    assert rising[-1] in (20, 21)
    falling = follow(judge, low, rising[-1], 600, HOLD_S + 60)
    assert set(falling[: int(HOLD_S / EVERY_S) - 1]) == {rising[-1]}
    assert falling[-1] in (3, 4)
    held = judge.judge(Fluid(1).load(4, luck), 600 + HOLD_S + 60)
    assert (held.workers, held.cause) == (falling[-1], "workers idle")
    assert held.reason == (
        "trainers wait 0% of the time, and 0.1 busy workers could make what 4 make: 1 would do, "
        "if this lasts"
    )


def test_a_smaller_number_is_said_once() -> None:
    judge = Judge(HOLD_S)
    assert judge.judge(Load(2, 2, 0, 0.75, 40), 0).reason.endswith("busy: 4 would do")
    held = judge.judge(Load(2, 2, 0, 0.3, 40), 5)
    assert held.workers == 4
    assert held.reason.endswith("all 2 workers are busy: 4 would do")


def test_who_makes_nothing_needs_no_more_workers() -> None:
    judge = Judge(HOLD_S)
    assert judge.judge(Load(2, 2, 0, 1.0, 0), 0).cause == "trainers wait"
    stalled = Judge(HOLD_S).judge(Load(2, 2, 0, 1.0, 0, stalls=True), 0)
    assert (stalled.workers, stalled.cause) == (2, "stalled")


@pytest.mark.parametrize(
    ("load", "wanted", "cause", "reason"),
    [
        (
            Load(4, 3.9, 0, 0.38, 40), 7, "trainers wait",
            "trainers wait 38% of the time, and all 4 workers are busy: 7 would do",
        ),
        (Load(4, 1.9, 0, 0.02, 40), 3, "workers idle", None),
        (Load(4, 3.9, 0, 0.02, 40), 4, "enough", None),
        (Load(4, 0.4, 3.6, 0.9, 2), 1, "source", None),
        (
            Load(4, 1.0, 0, 0.5, 40), 4, "not the workers",
            "trainers wait 50% of the time, but only 1.0 of 4 workers are busy: " + HELD_UP,
        ),
        (Load(4, 4, 0, 1, 40, room=2), 6, "no splits", None),
        (Load(4, 4, 0, 1, 40, room=0), 4, "no splits", None),
        (Load(4, 4, 0, 1, 0), 8, "trainers wait", None),
    ],
)  # fmt: skip
def test_each_cause(load: Load, wanted: int, cause: str, reason: str | None) -> None:
    judged = Judge(HOLD_S).judge(load, 0)
    assert (judged.workers, judged.cause) == (wanted, cause)
    assert reason in (None, judged.reason)


def test_the_neediest_job_counts() -> None:
    few, many = Wanted(2, "enough", "why"), Wanted(5, "trainers wait", "because")
    three, none = Wanted(3, "saves", "…"), Wanted(0, "saves", "…")
    assert all_jobs([("a", few), ("b", many)], three) == (5, "trainers wait", "job b: because")
    assert all_jobs([("a", few)], three) == three
    assert all_jobs([], none) == NOBODY

"""How long a reader waits, also for what never comes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from forebay.benchmarks.silence import TimedReader

LIMIT_S = 0.5


def test_all_comes() -> None:
    found = TimedReader(iter(range(4)), 4).until(30)
    assert found["percent"] == 100
    assert found["per_s"] > 0
    assert found["wait_s"] < 30


def test_a_wait_that_lasts_counts_as_long_as_it_has_lasted() -> None:
    over = threading.Event()

    def elements() -> Iterator[int]:
        yield 1
        over.wait(30)

    found = TimedReader(elements(), 4).until(LIMIT_S)
    over.set()
    assert found["percent"] == 25
    assert 0 < found["wait_s"] <= LIMIT_S
    assert found["per_s"] == 1 / LIMIT_S


def test_nothing_comes_after_an_error() -> None:
    found = TimedReader(map(int, ["no number"]), 4).until(LIMIT_S)
    assert found == {"wait_s": LIMIT_S, "percent": 0, "per_s": 0}

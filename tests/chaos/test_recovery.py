"""The waits after faults are what recovery.py says that they are."""

from __future__ import annotations

import math

import pytest

from forebay.service.chaos.cluster import Done
from forebay.service.chaos.plan import Fault
from forebay.service.chaos.records import Got, Record, Started
from forebay.service.chaos.recovery import (
    deliveries,
    percentile,
    throughput,
    wait_after,
    waits_by_kind,
)

BLOCKS = {
    "trainer0.1": [(1.0, 5), (2.0, 5), (6.0, 5), (6.5, 5), (20.0, 5)],
    "trainer1.1": [(1.5, 2), (2.5, 2)],
}


def lasted_s(done: Done) -> float:
    wait = wait_after(done, BLOCKS)
    assert wait is not None
    return wait.lasted_s


def done(name: str | None, at_s: float) -> Done:
    return Done(Fault(0.0, "trainer", 0, "kill"), at_s, 0, name)


def test_it_counts_from_the_fault() -> None:
    assert lasted_s(done("worker0.1", 2.2)) == pytest.approx(3.8)


def test_the_longest_gap_that_begins_in_the_window() -> None:
    assert lasted_s(done("worker0.1", 1.2)) == pytest.approx(4.0)
    assert lasted_s(done("worker0.1", 4.0)) == pytest.approx(13.5)
    assert lasted_s(done("worker0.1", 3.4)) == pytest.approx(2.6)


def test_not_at_the_trainer_that_was_hit() -> None:
    assert lasted_s(done("trainer0.1", 1.8)) == pytest.approx(0.7)


def test_nobody_was_left_to_wait() -> None:
    assert wait_after(done("worker0.1", 20.0), BLOCKS) is None
    assert wait_after(done("worker0.1", 0.5), BLOCKS) is None


def test_by_kind_without_faults_that_found_nobody() -> None:
    faults = [("a", done("w", 2.2)), ("a", done("w", 2.1)), ("b", done(None, 2.2))]
    waits = waits_by_kind(faults, BLOCKS)
    assert list(waits) == ["a"] and waits["a"].faults == 2
    assert waits["a"].p50_s == pytest.approx(3.8)
    assert waits["a"].p99_s == waits["a"].longest_s == pytest.approx(3.9)


def test_without_a_worker_they_are_counted_apart() -> None:
    faults = [("a", done("w", 1.9)), ("a", done("w", 2.2)), ("a", done("w", 7.0))]
    waits = waits_by_kind(faults, BLOCKS, [(2.1, 2.2), (5.9, 6.1), (30.0, math.inf)])
    assert {kind: w.faults for kind, w in waits.items()} == {"a": 1, "a, no worker left": 2}
    assert waits["a"].longest_s == pytest.approx(13.0)


def test_percentiles() -> None:
    values = list(range(1, 101))
    assert percentile(values, 50) == 50 and percentile(values, 99) == 99
    assert percentile([3.0], 50) == percentile([3.0], 99) == 3.0


def test_throughput() -> None:
    records: list[Record] = [
        Started("trainer0.1", 9.0), Got(1, 10.1, 20, [1, 2]), Got(1, 10.9, 20, [3]),
        Started("trainer0.2", 11.0), Got(1, 12.0, 20, [4]),
    ]  # fmt: skip
    blocks = deliveries([records])
    assert blocks == {"trainer0.1": [(10.1, 2), (10.9, 1)], "trainer0.2": [(12.0, 1)]}
    assert throughput(blocks, 10.0) == [3, 0, 1]
    assert throughput({}, 10.0) == []

"""The waits after faults are what recovery.py says that they are."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from forebay.chaos.faults import DoneFault
from forebay.chaos.plan import Fault
from forebay.chaos.records import Got, Joined, ReadToEnd, Record, Started, Worked
from forebay.chaos.recovery import (
    Delivery,
    deliveries,
    percentile,
    wait_after,
    waits_by_kind,
)


def eager(*got_s: float) -> list[Delivery]:
    """Of a trainer that asks for the next block as soon as it has one."""
    return [Delivery(got_s[max(0, i - 1)], at_s) for i, at_s in enumerate(got_s)]


GOT = {"trainer0.1": eager(1.0, 2.0, 6.0, 6.5, 20.0), "trainer1.1": eager(1.5, 2.5)}


def lasted_s(done: DoneFault) -> float:
    wait = wait_after(done, GOT)
    assert wait is not None
    return wait.lasted_s


def done(name: str | None, at_s: float) -> DoneFault:
    return DoneFault(Fault(0.0, "trainer", 0, "kill"), at_s, 0, name, at_s)


def lasting(kind: str, at_s: float, until_s: float) -> tuple[str, DoneFault]:
    action, role = kind.split()
    role = "dispatcher" if role in ("leader", "standby") else role
    fault = Fault(0.0, role, 0, action, until_s - at_s)
    return kind, DoneFault(fault, at_s, 0, f"{role}0.1", until_s)


def rows(*kinds: tuple[str, DoneFault]) -> dict[str, Any]:
    """Of each row how many waits, and the longest."""
    waits = waits_by_kind(kinds, GOT)
    return {kind: [w.faults, pytest.approx(w.longest_s)] for kind, w in waits.items()}


def test_it_counts_from_the_fault() -> None:
    assert lasted_s(done("worker0.1", 2.2)) == pytest.approx(3.8)


def test_the_longest_gap_that_begins_in_the_window() -> None:
    assert lasted_s(done("worker0.1", 1.2)) == pytest.approx(4.0)
    assert lasted_s(done("worker0.1", 4.0)) == pytest.approx(13.5)
    assert lasted_s(done("worker0.1", 3.4)) == pytest.approx(2.6)


def test_not_at_the_trainer_that_was_hit() -> None:
    assert lasted_s(done("trainer0.1", 1.8)) == pytest.approx(0.7)


def test_nobody_was_left_to_wait() -> None:
    assert wait_after(done("worker0.1", 20.0), GOT) is None
    assert wait_after(done("worker0.1", 0.5), GOT) is None


def test_by_kind_without_faults_that_found_nobody() -> None:
    faults = [("a", done("w", 2.2)), ("a", done("w", 2.1)), ("b", done(None, 2.2))]
    waits = waits_by_kind(faults, GOT)
    assert list(waits) == ["a"] and waits["a"].faults == 2
    assert waits["a"].p50_s == pytest.approx(3.8)
    assert waits["a"].p99_s == waits["a"].longest_s == pytest.approx(3.9)


def test_without_a_worker_they_are_counted_apart() -> None:
    faults = [("a", done("w", 1.9)), ("a", done("w", 2.2)), ("a", done("w", 7.0))]
    waits = waits_by_kind(faults, GOT, [(2.1, 2.2), (5.9, 6.1), (30.0, math.inf)])
    assert {kind: w.faults for kind, w in waits.items()} == {"a": 1, "a, no worker left": 2}
    assert waits["a"].longest_s == pytest.approx(13.0)


def test_a_wait_during_another_fault_that_lasts_is_counted_apart() -> None:
    """The leader is killed 0.4 s before Redis falls silent: it cannot be over before that is."""
    kill = ("kill leader", done("dispatcher0.1", 2.2))
    alone = {"kill leader": [1, 3.8]}
    assert rows(kill) == alone
    silence = lasting("silence redis", 2.6, 5.6)
    assert rows(kill, silence) == {
        "kill leader, during another": [1, 3.8],
        "silence redis": [1, 3.4],
    }
    for kind in (
        "stall leader",
        "pause dispatcher",
        "mute redis",
        "pause worker",
        "silence postgres",
    ):
        assert set(rows(kill, lasting(kind, 2.6, 5.6))) == {"kill leader, during another", kind}


def test_so_is_one_that_began_in_it() -> None:
    """Redis is back at 2.2, and trainers wait still, when the leader is killed."""
    found = rows(("kill leader", done("dispatcher0.1", 2.4)), lasting("silence redis", 2.1, 2.3))
    assert found == {"kill leader, during another": [1, 3.6], "silence redis": [1, 3.9]}


def test_two_that_last_are_each_during_another() -> None:
    found = rows(lasting("stall leader", 2.2, 3.0), lasting("pause redis", 2.5, 4.0))
    assert list(found) == ["pause redis, during another", "stall leader, during another"]


def test_not_during_one_that_stops_nobody_else_or_is_over_or_takes_no_time() -> None:
    kill = ("kill leader", done("dispatcher0.1", 2.2))
    harmless = [
        lasting("silence standby", 2.6, 5.6),
        lasting("pause trainer", 2.6, 5.6),
        lasting("silence redis", 6.1, 6.4),
        lasting("mute leader", 0.5, 1.9),
        lasting("cut redis", 2.6, 2.6),
    ]
    for other in harmless:
        assert rows(kill, other)["kill leader"] == [1, 3.8], other
    found_nobody = "silence redis", msgspec.structs.replace(harmless[2][1], name=None, at_s=2.6)
    assert rows(kill, found_nobody) == {"kill leader": [1, 3.8]}


def test_no_wait_vanishes() -> None:
    kinds = [("kill leader", done("w", at_s)) for at_s in (1.2, 2.2, 4.0, 7.0)]
    kinds += [lasting("silence redis", 2.6, 5.6), lasting("pause worker", 6.6, 9.0)]
    waits = waits_by_kind(kinds, GOT, [(15.0, 16.0)])
    assert sum(w.faults for w in waits.values()) == len(kinds)


def test_who_works_on_a_block_does_not_wait() -> None:
    records: list[Record] = [
        Started("trainer0.1", 0.0), Joined(2, 7, 0.5), Got(2, 1.0, 20, [1]), Worked(4.0),
        Got(2, 4.1, 20, [2]), Worked(5.0), ReadToEnd(2, 5.1), Joined(3, 8, 5.2),
        Got(3, 7.0, 20, [3]), Started("trainer0.2", 8.0), Got(3, 9.0, 20, [4]),
    ]  # fmt: skip
    got = deliveries([records])
    assert got["trainer0.1"] == [(1.0, 1.0), (4.0, 4.1), (5.0, 7.0)]
    assert got["trainer0.2"] == [(9.0, 9.0)]
    wait = wait_after(done("worker0.1", 1.5), got)
    assert wait is not None and wait.lasted_s == pytest.approx(0.1)
    turn = wait_after(done("worker0.1", 2.5), got)
    assert turn is not None and turn.lasted_s == pytest.approx(2.0)


def test_percentiles() -> None:
    values = list(range(1, 101))
    assert percentile(values, 50) == 50 and percentile(values, 99) == 99
    assert percentile([3.0], 50) == percentile([3.0], 99) == 3.0

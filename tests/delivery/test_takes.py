"""Which elements trainers have taken, and how far a pipeline may be ahead of them."""

from __future__ import annotations

import pytest

from forebay.service.delivery.takes import FIRST, MAX_GROWTH, Takes


def put(count: int) -> Takes:
    takes = Takes()
    takes.put = count
    return takes


def test_elements_are_settled_in_any_order() -> None:
    takes = put(100)
    takes.take(20, 10, 0)
    takes.take(40, 20, 0)
    assert takes.are_settled(20, 30)
    assert takes.are_settled(45, 60)
    assert not takes.are_settled(20, 45)
    takes.drop(30, 10)
    assert takes.are_settled(20, 60)
    assert not takes.are_settled(0, 60)
    takes.take(0, 20, 0)
    assert takes.are_settled(0, 60)
    assert takes.untaken == 40
    assert takes.any_dropped(0, 31)
    assert takes.any_dropped(39, 50)
    assert not takes.any_dropped(40, 60)
    assert not takes.any_dropped(0, 30)


def test_a_trainer_that_pauses_lets_nothing_grow() -> None:
    takes = put(100_000)
    for first in range(10, 100_000, 10):  # it has the first ten
        takes.take(first, 10, 0)
    assert takes._settled == [(10, 100_000)] and takes.untaken == 10
    assert takes.are_settled(10, 100_000) and not takes.are_settled(9, 20)


@pytest.mark.parametrize("rate", [50, 500, 100_000])
def test_a_pipeline_may_be_ahead_by_what_trainers_take_in_a_second(rate: int) -> None:
    takes, now_s, taken = put(0), 0.0, 0
    while now_s < 10:
        before, takes.put = takes.bound, taken + takes.bound
        now_s += before / rate
        takes.take(taken, before, now_s)
        taken += before
        assert takes.bound <= MAX_GROWTH * before
    assert takes.bound == pytest.approx(rate, rel=0.1)


def test_a_consumer_that_takes_a_pack_at_once_waits_for_no_round() -> None:
    takes = put(256)
    takes.take(0, 256, 0)
    assert takes.bound == 256 * MAX_GROWTH


def test_the_bound_grows_with_each_piece_of_a_window() -> None:
    takes, taken, now_s = put(1 << 20), 0, 0.0
    while takes.bound < 100_000:
        before, piece, now_s = takes.bound, takes.bound // 4, now_s + 0.001
        takes.take(taken, piece, now_s)
        taken += piece
        assert takes.bound > before


def test_a_pause_costs_half_of_the_bound_and_no_more() -> None:
    takes, taken = put(0), 0
    for now_ms in range(0, 1001, 10):  # 10,000 a second
        takes.take(taken, 100, now_ms / 1000)
        taken += 100
    bound = takes.bound
    assert bound == pytest.approx(10_000, rel=0.1)
    takes.take(taken, 100, 100)
    assert takes.bound == bound // 2
    takes.take(taken + 100, bound // 8, 100 + bound / 80_000)
    assert takes.bound == pytest.approx(bound, rel=0.1), "the pause is forgotten"


def test_trainers_that_become_slow_lower_the_bound_each_second() -> None:
    takes = put(0)
    takes.bound = 10_000
    for second in range(12):
        takes.take(second * 10, 10, second)
    assert takes.bound == FIRST

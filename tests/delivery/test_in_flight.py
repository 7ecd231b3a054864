"""Which elements trainers have taken, and how far a pipeline may be ahead of them."""

from __future__ import annotations

import pytest

from forebay.service.delivery.in_flight import FIRST, MAX_GROWTH, InFlightElements


def put(count: int) -> InFlightElements:
    in_flight = InFlightElements()
    in_flight.put = count
    return in_flight


def test_elements_are_settled_in_any_order() -> None:
    in_flight = put(100)
    in_flight.take(20, 10, 0)
    in_flight.take(40, 20, 0)
    assert in_flight.are_settled(20, 30)
    assert in_flight.are_settled(45, 60)
    assert not in_flight.are_settled(20, 45)
    in_flight.drop(30, 10)
    assert in_flight.are_settled(20, 60)
    assert not in_flight.are_settled(0, 60)
    in_flight.take(0, 20, 0)
    assert in_flight.are_settled(0, 60)
    assert in_flight.untaken == 40
    assert in_flight.any_dropped(0, 31)
    assert in_flight.any_dropped(39, 50)
    assert not in_flight.any_dropped(40, 60)
    assert not in_flight.any_dropped(0, 30)


def test_a_trainer_that_pauses_lets_nothing_grow() -> None:
    in_flight = put(100_000)
    for first in range(10, 100_000, 10):  # it has the first ten
        in_flight.take(first, 10, 0)
    assert in_flight._settled == [(10, 100_000)] and in_flight.untaken == 10
    assert in_flight.are_settled(10, 100_000) and not in_flight.are_settled(9, 20)


@pytest.mark.parametrize("rate", [50, 500, 100_000])
def test_a_pipeline_may_be_ahead_by_what_trainers_take_in_a_second(rate: int) -> None:
    in_flight, now_s, taken = put(0), 0.0, 0
    while now_s < 10:
        before, in_flight.put = in_flight.bound, taken + in_flight.bound
        now_s += before / rate
        in_flight.take(taken, before, now_s)
        taken += before
        assert in_flight.bound <= MAX_GROWTH * before
    assert in_flight.bound == pytest.approx(rate, rel=0.1)


def test_a_consumer_that_takes_a_pack_at_once_waits_for_no_round() -> None:
    in_flight = put(256)
    in_flight.take(0, 256, 0)
    assert in_flight.bound == 256 * MAX_GROWTH


def test_the_bound_grows_with_each_piece_of_a_window() -> None:
    in_flight, taken, now_s = put(1 << 20), 0, 0.0
    while in_flight.bound < 100_000:
        before, piece, now_s = in_flight.bound, in_flight.bound // 4, now_s + 0.001
        in_flight.take(taken, piece, now_s)
        taken += piece
        assert in_flight.bound > before


def test_a_pause_costs_half_of_the_bound_and_no_more() -> None:
    in_flight, taken = put(0), 0
    for now_ms in range(0, 1001, 10):  # 10,000 a second
        in_flight.take(taken, 100, now_ms / 1000)
        taken += 100
    bound = in_flight.bound
    assert bound == pytest.approx(10_000, rel=0.1)
    in_flight.take(taken, 100, 100)
    assert in_flight.bound == bound // 2
    in_flight.take(taken + 100, bound // 8, 100 + bound / 80_000)
    assert in_flight.bound == pytest.approx(bound, rel=0.1), "the pause is forgotten"


def test_trainers_that_become_slow_lower_the_bound_each_second() -> None:
    in_flight = put(0)
    in_flight.bound = 10_000
    for second in range(12):
        in_flight.take(second * 10, 10, second)
    assert in_flight.bound == FIRST

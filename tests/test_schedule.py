"""The laws of a schedule with changes, against a walk along the line."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forebay.journal.datasets import SHARES
from forebay.journal.proto import events_pb2 as ev
from forebay.service.picks import shares
from forebay.service.schedule import EpochSteps, Schedule

from .picked import picked

SOURCES, LENGTH = 3, 400
WEIGHTS = st.lists(st.integers(0, 5), min_size=SOURCES, max_size=SOURCES).filter(any)
PLACES = st.integers(0, LENGTH)
CHANGES = st.lists(
    st.one_of(
        st.tuples(PLACES, WEIGHTS).map(
            lambda each: ev.ScheduleChange(place=each[0], shares=shares(each[1]))
        ),
        st.tuples(PLACES, st.integers(1, 60)).map(
            lambda each: ev.ScheduleChange(place=each[0], skipped=each[1])
        ),
    ),
    max_size=6,
)


def walked(weights: list[int], changes: list[Any]) -> tuple[list[tuple[int, int]], list[int]]:
    """Of each place its source and the how-manieth of it that it is; and the places that are
    left."""
    of_place: list[list[int]] = [[*shares(weights)]] * LENGTH
    begin = [0] * LENGTH
    left_out: set[int] = set()
    for change in changes:
        if change.skipped:
            left_out |= {*range(change.place, change.place + change.skipped)}
        else:
            for place in range(change.place, LENGTH):
                of_place[place], begin[place] = [*change.shares], change.place
    counts, found = [0] * SOURCES, []
    for place in range(LENGTH):
        source = int(picked(of_place[place], place - begin[place], 1)[0])
        found.append((source, counts[source]))
        counts[source] += 1
    return found, [place for place in range(LENGTH) if place not in left_out]


@given(WEIGHTS, CHANGES)
def test_it_is_the_walk(weights: list[int], changes: list[Any]) -> None:
    schedule = Schedule(shares(weights), changes)
    found, there = walked(weights, changes)
    for position, place in enumerate(there):
        assert schedule.place_of(position) == place
        assert schedule.position_of(place) == position
    positions = schedule.positions_of(np.arange(LENGTH)).tolist()
    assert [place for place in range(LENGTH) if positions[place] >= 0] == there
    assert schedule.places_of(np.arange(len(there))).tolist() == there
    for every in (1, 3):
        places = np.arange(5, LENGTH, every)
        assert schedule.sources_of(places).tolist() == [each for each, _ in found[5::every]]
    for source in range(SOURCES):
        mine = [place for place, (each, _) in enumerate(found) if each == source]
        for begin in (0, len(mine) // 3):
            count = len(mine) - begin
            assert schedule.places(source, begin, count).tolist() == mine[begin:]
        for place in range(0, LENGTH, 7):
            before = sum(each < place for each in mine)
            assert schedule.count_before(place, source) == before


@given(WEIGHTS, CHANGES, CHANGES)
def test_up_to_their_first_difference_two_are_the_same(
    weights: list[int], changes: list[Any], others: list[Any]
) -> None:
    one, another = Schedule(shares(weights), changes), Schedule(shares(weights), changes + others)
    place = one.first_difference(another)
    until = LENGTH if place is None else place
    (found, there), (also, others_there) = (
        walked(weights, changes),
        walked(weights, changes + others),
    )
    assert found[:until] == also[:until]
    assert [p for p in there if p < until] == [p for p in others_there if p < until]
    assert place is None or others


@given(WEIGHTS, CHANGES, st.integers(0, 1 << 40))
def test_far_away_places_and_positions_are_inverse(
    weights: list[int], changes: list[Any], position: int
) -> None:
    schedule = Schedule(shares(weights), changes)
    assert schedule.position_of(schedule.place_of(position)) == position


def test_what_is_left_out_between_elements_costs_nothing() -> None:
    schedule = Schedule(shares([1, 3]), [ev.ScheduleChange(place=100, skipped=1 << 50)])
    places = schedule.places_of(np.arange(90, 110))
    apart = [int(schedule.sources_of(places[n : n + 1])[0]) for n in range(20)]
    assert schedule.sources_of(places).tolist() == apart and places[-1] > 1 << 50


def test_a_source_that_has_no_share_any_more_has_no_more_places() -> None:
    schedule = Schedule(shares([1, 1, 0]), [ev.ScheduleChange(place=10, shares=shares([1, 0, 1]))])
    assert len(schedule.places(1, 0, 100)) == 5
    assert len(schedule.places(1, 5, 1)) == 0
    assert schedule.places(2, 0, 1).tolist() == [10] and schedule.count_before(10, 2) == 0


@given(st.data())
def test_steps_of_epochs_are_those_of_who_reads_all(data: st.DataObject) -> None:
    total, size = data.draw(st.integers(1, 12), "total"), data.draw(st.integers(1, 7), "size")
    drop = data.draw(st.booleans(), "drop_remainder")
    stretch = st.tuples(st.integers(0, 5 * total), st.integers(1, 3 * total))
    left_out = data.draw(st.lists(stretch, max_size=4), "left_out")
    gone = {place for first, count in left_out for place in range(first, first + count)}
    begins, ends = [], []
    for first in range(0, 14 * total, total):
        kept = [place for place in range(first, first + total) if place not in gone]
        whole = len(kept) // size * size if drop else len(kept)
        begins += [kept[at] for at in range(0, whole, size)]
        ends += [kept[min(at + size, whole) - 1] for at in range(0, whole, size)]
    changes = [ev.ScheduleChange(place=first, skipped=count) for first, count in left_out]
    steps = EpochSteps(Schedule([SHARES], changes), size, total, drop)
    assert [steps.place_of(step) for step in range(len(begins))] == begins
    assert [steps.behind(step + 1) for step in range(len(ends))] == [end + 1 for end in ends]
    for place in range(begins[-1] + 1 if begins else 0):
        assert steps.step_of(place) == bisect_left(begins, place)

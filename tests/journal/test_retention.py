from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.journal.snapshots import Retention, RetentionPlan, plan_retention

HOUR = 3_600_000


def test_few_snapshots_all_stay() -> None:
    assert plan_retention([], 10**15, Retention(0)) == RetentionPlan([], 1)
    assert plan_retention([(7, 0)], 10**15, Retention(0)) == RetentionPlan([], 1)


def test_the_newest_two_stay_however_old() -> None:
    snapshots = [(10, 0), (20, 1), (30, 2)]
    assert plan_retention(snapshots, 10**15, Retention(1)) == RetentionPlan([10], 21)


def test_the_first_of_each_hour_stays_within_the_retention() -> None:
    snapshots = [(i, i * HOUR // 4) for i in range(1, 17)]  # 0 h 15 … 4 h
    plan = plan_retention(snapshots, 4 * HOUR, Retention(2))
    # 8, of 2:00, is the newest that is two hours old, and the first of its hour. 12 is of 3:00.
    assert plan == RetentionPlan([1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 13, 14], 9)


def test_everything_may_stay() -> None:
    snapshots = [(i, i * HOUR) for i in range(1, 100)]
    assert plan_retention(snapshots, 10**9, Retention(math.inf)) == RetentionPlan([], 1)


@pytest.mark.parametrize("hours", [-1, math.nan])
def test_no_negative_retention(hours: float) -> None:
    with pytest.raises(ValueError, match="give 0 or more"):
        Retention(hours)


TIMES = st.lists(st.integers(0, 100 * HOUR), max_size=40)


@given(TIMES, st.integers(0, 120 * HOUR), st.floats(0, 100))
def test_retention_keeps_a_whole_history_and_two_snapshots(
    times: list[int], now_ms: int, hours: float
) -> None:
    """The clock may have been set back in between."""
    snapshots = [(10 * (i + 1), time_ms) for i, time_ms in enumerate(times)]
    plan = plan_retention(snapshots, now_ms, Retention(hours))
    kept = {sequence: time_ms for sequence, time_ms in snapshots if sequence not in plan.delete}
    assert set(plan.delete) <= {sequence for sequence, _ in snapshots}
    assert {s for s, _ in snapshots[-2:]} <= set(kept)
    # The history is whole from the oldest snapshot on, and there are two to begin with.
    if plan.trim_before > 1:
        assert min(kept) == plan.trim_before - 1
        assert len(kept) >= 2
        expired = [s for s, time_ms in snapshots if time_ms <= now_ms - hours * HOUR]
        assert plan.trim_before - 1 <= expired[-1]
    # What stays, stays when asked again.
    again = plan_retention(sorted(kept.items()), now_ms, Retention(hours))
    assert (again.delete, again.trim_before) == ([], plan.trim_before)

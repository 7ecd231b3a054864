"""The picks of mixtures: laws 1 to 3 of a schedule, and numbers that never change."""

from __future__ import annotations

import hashlib
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.journal.datasets import SHARES
from forebay.service.errors import InvalidArgument
from forebay.service.picks import MOST, Picks, shares

from .picked import picked

WEIGHTS = st.lists(
    st.one_of(st.integers(0, 10), st.floats(0, 1e6), st.sampled_from([1e-9, 1e-5, 1e9])),
    min_size=1,
    max_size=12,
).filter(any)
FAR = st.one_of(st.integers(0, 5000), st.integers(0, 1 << 40))


@given(WEIGHTS)
def test_shares_add_up_and_none_is_lost(weights: list[float]) -> None:
    found = shares(weights)
    assert sum(found) == SHARES
    for weight, share in zip(weights, found, strict=True):
        assert (share > 0) == (weight > 0)
        exact = Fraction(float(weight)) * SHARES / sum(map(Fraction, map(float, weights)))
        assert abs(share - exact) <= len(weights)


@pytest.mark.parametrize(
    "weights", [[0, 0], [-1, 2], [float("nan")], [float("inf"), 1], ["1"], [True], []]
)
def test_weights_that_are_none_are_refused(weights: list[float]) -> None:
    with pytest.raises(InvalidArgument, match="weight"):
        shares(weights)


@given(WEIGHTS, FAR, st.integers(0, 600))
def test_picks_from_anywhere_are_those_of_a_walk(weights: list[float], at: int, n: int) -> None:
    found = shares(weights)
    picks = Picks(found)
    sources = picked(found, at, n)
    for source, share in enumerate(found):
        before, behind = picks.count_before(at, source), picks.count_before(at + n, source)
        mine = np.flatnonzero(sources == source)
        assert len(mine) == behind - before
        if share and len(mine):
            assert (picks.positions(source, before, len(mine)) == at + mine).all()


@given(WEIGHTS, FAR)
def test_each_prefix_has_its_proportions(weights: list[float], at: int) -> None:
    found = shares(weights)
    picks = Picks(found)
    counts = [picks.count_before(at, source) for source in range(len(found))]
    assert sum(counts) == at
    for count, share in zip(counts, found, strict=True):
        assert abs(count - Fraction(at * share, SHARES)) < 2
    if len({*found}) == 1:
        assert all(abs(count - Fraction(at, len(found))) < 1 for count in counts)


@given(st.integers(2, 40), st.integers(0, 3000))
def test_the_worst_trees_keep_the_bound(depth: int, at: int) -> None:
    """Shares like Fibonacci's make the deepest trees."""
    weights = [1, 1]
    while len(weights) < depth:
        weights.append(weights[-1] + weights[-2])
    found = shares(weights)
    picks = Picks(found)
    for source, share in enumerate(found):
        assert abs(picks.count_before(at, source) - Fraction(at * share, SHARES)) < 2


def test_a_tiny_share_is_found_far_away() -> None:
    found = shares([1e9, 1, 1])
    picks = Picks(found)
    positions = picks.positions(1, 0, 5)
    assert [picked(found, int(p), 1).tolist() for p in positions] == [[1]] * 5
    assert (np.diff(positions) > 900_000_000).all()


def test_many_picks_and_none() -> None:
    picks = Picks(shares([1, 0]))
    assert (picks.positions(0, 7, 2 * MOST + 1) == np.arange(7, 2 * MOST + 8)).all()
    with pytest.raises(ValueError, match="weight of 0"):
        picks.positions(1, 0, 1)
    assert picks.count_before(100, 1) == 0


def test_the_rule_never_changes() -> None:
    """Recorded positions depend on it."""
    assert picked(shares([0.7, 0.2, 0.1]), 0, 10).tolist() == [0, 0, 1, 0, 2, 0, 0, 1, 0, 0]
    far = picked(shares(range(1, 9)), 10**9, 5000).astype(np.uint8).tobytes()
    assert hashlib.sha256(far).hexdigest()[:16] == "94127979db86e6a6"

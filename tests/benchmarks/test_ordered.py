"""What the row of ordered reads takes for granted."""

from __future__ import annotations

import numpy as np

from forebay.benchmarks.contents import AT_LEAST_ONCE, AT_MOST_ONCE, ORDERED
from forebay.benchmarks.file_pipelines import PIPELINES
from forebay.benchmarks.ordered import CASES, filtered, lengths_of


def test_the_lengths_that_are_told_are_those_of_the_filter() -> None:
    numbers = np.array(list(filtered(4, 50).as_numpy_iterator()))
    assert lengths_of(4, 50) == np.bincount(numbers // 50, minlength=4).tolist()
    assert len(set(lengths_of(100, 50))) > 1


def test_all_ways_read_the_same_pipeline() -> None:
    for row in CASES:
        in_order, once = PIPELINES[row + ORDERED], PIPELINES[row + AT_MOST_ONCE]
        least = PIPELINES[row + AT_LEAST_ONCE]
        assert (least.claimed, least.ordered, least.mode) == (True, False, "OFF")
        assert (in_order.ordered, in_order.mode) == (True, "OFF")
        assert (once.ordered, once.mode) == (False, "DYNAMIC")
        assert in_order.into == once.into

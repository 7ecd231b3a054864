"""Sorted, disjoint, merged integer ranges: [(start, stop), …] with start < stop.

The ledgers of millions of splits are ranges: their size follows the number of gaps, not of splits.
"""

from __future__ import annotations

from bisect import bisect_left

Ranges = list[tuple[int, int]]


def add(ranges: Ranges, start: int, stop: int) -> None:
    """Insert [start, stop), which no range in `ranges` overlaps; merge adjacent ranges."""
    if start >= stop:
        return
    if ranges and ranges[-1][1] == start:  # the common case: in order
        ranges[-1] = (ranges[-1][0], stop)
        return
    at = bisect_left(ranges, (start, stop))
    if at > 0 and ranges[at - 1][1] == start:
        at -= 1
        start = ranges.pop(at)[0]
    if at < len(ranges) and ranges[at][0] == stop:
        stop = ranges.pop(at)[1]
    ranges.insert(at, (start, stop))


def remove(ranges: Ranges, start: int, stop: int) -> None:
    """Remove [start, stop), which one range in `ranges` must contain."""
    at = bisect_left(ranges, (start + 1,)) - 1
    first, last = ranges[at]
    ranges[at : at + 1] = [r for r in ((first, start), (stop, last)) if r[0] < r[1]]


def holds(ranges: Ranges, number: int) -> bool:
    """Whether a range contains the number."""
    at = bisect_left(ranges, (number + 1,)) - 1
    return at >= 0 and number < ranges[at][1]


def total(ranges: Ranges) -> int:
    """How many integers the ranges hold."""
    return sum(stop - start for start, stop in ranges)

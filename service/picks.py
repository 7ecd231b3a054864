"""Picks: from which of a mixture's sources each position takes its element.

A pick is a pure function of the weights: no table, and no walk from the beginning. The sources are
the leaves of a tree, and each inner node divides its picks among two children by rounding: of its
first m picks, the first child has round(m * share), and the other one has the rest. Counts and
their inverses have closed forms, so a position costs as many steps as its leaf is deep.

**Proportions.** The tree is Huffman's: the two lightest nodes become one, again and again. Rounding
is off by 1/2 at most, and a node passes what it is off by to its children, times their share of it.
A child with children of its own has at most 2/3 of its parent, as each of those was not heavier
than the node that it was joined with. So at every prefix a source's count is off by less than
1/2 * (1 + 1 + 2/3 + 4/9 + …) = 2 from its share, and by less than 1 if the weights are equal.

The rule never changes between releases: recorded positions depend on it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..journal.datasets import SHARES
from .errors import InvalidArgument
from .order import Ints

MOST = 1 << 20
"""How many picks may be asked for at a time: products with shares then fit into 64 bits."""


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """The weights as integers that add up to SHARES; a weight above 0 has at least 1.

    Raises InvalidArgument for weights that are negative, no numbers, or all 0.
    """
    for weight in weights:
        is_number = isinstance(weight, int | float | np.integer | np.floating)
        if not is_number or isinstance(weight, bool) or not 0 <= weight < math.inf:
            raise InvalidArgument(f"a weight is {weight!r}: give a number of at least 0")
    ratios = [float(weight).as_integer_ratio() for weight in weights]
    common = math.lcm(*(below for _, below in ratios))
    exact = [above * (common // below) for above, below in ratios]
    if not (total := sum(exact)):
        raise InvalidArgument(f"the weights {[*weights]} are all 0: give one that is not")
    found = [max(int(weight > 0), weight * SHARES // total) for weight in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: found[i] * total - exact[i] * SHARES)
    left = SHARES - sum(found)
    if left < 0:  # of the tiny ones that were given one: the largest gives it
        found[max(range(len(found)), key=found.__getitem__)] += left
    for i in by_rest[: max(left, 0)]:
        found[i] += 1
    return tuple(found)


class _Division(NamedTuple):
    """How a node's picks go to two children: `first` has `share` of `whole`."""

    first: _Node
    second: _Node
    share: int
    whole: int


_Node = _Division | int  # a leaf is the number of its source


def _tree(found: Sequence[int]) -> _Node:
    ties = itertools.count()
    heap: list[tuple[int, int, _Node]] = [
        (share, next(ties), source) for source, share in enumerate(found) if share
    ]
    while len(heap) > 1:
        (light, _, second), (heavy, _, first) = heapq.heappop(heap), heapq.heappop(heap)
        node = _Division(first, second, heavy, light + heavy)
        heapq.heappush(heap, (light + heavy, next(ties), node))
    return heap[0][2]


@dataclass(frozen=True, slots=True)
class _Step:
    """One node on the way from the root to a leaf: the path's child has floor((m * times + plus) /
    by) of the node's first m picks."""

    times: int
    plus: int
    by: int

    def count(self, m: int) -> int:
        return (m * self.times + self.plus) // self.by

    def inverses(self, first: int, k: Any) -> tuple[int, Any]:
        """The node's pick that is the child's pick first + k: of `first`, and how many more."""
        # The least m with m * times + plus >= (k + 1) * by, less 1.
        base, rest = divmod((first + 1) * self.by - self.plus - 1, self.times)
        return base, (rest + k * self.by) // self.times


def _steps(node: _Division) -> tuple[_Step, _Step]:
    """Of the first and the second child. The first has floor(m * share / whole + 1/2), and the
    second has m less that, which is a floor as well."""
    by, rest = 2 * node.whole, node.whole - node.share
    return _Step(2 * node.share, node.whole, by), _Step(2 * rest, node.whole - 1, by)


class Picks:
    """The picks of sources with these shares, which add up to SHARES."""

    def __init__(self, found: Sequence[int]) -> None:
        self._paths: list[list[_Step] | None] = [None] * len(found)  # from the root
        self._note_paths(_tree(found), [])

    def _note_paths(self, node: _Node, path: list[_Step]) -> None:
        if isinstance(node, int):
            self._paths[node] = path
            return
        first, second = _steps(node)
        self._note_paths(node.first, [*path, first])
        self._note_paths(node.second, [*path, second])

    def has(self, source: int) -> bool:
        """Whether the source has a share."""
        return self._paths[source] is not None

    def count_before(self, position: int, source: int) -> int:
        """How many of the picks before this position are the source's."""
        if (path := self._paths[source]) is None:
            return 0
        for step in path:
            position = step.count(position)
        return position

    def positions(self, source: int, first: int, count: int) -> Ints:
        """The positions of the source's picks first … first + count - 1, int64 (count,). Raises
        ValueError for a source that has no picks, and OverflowError for positions above 2^63."""
        if (path := self._paths[source]) is None:
            raise ValueError(f"source {source} has a weight of 0, and no picks")
        if count > MOST:
            pieces = range(0, count, MOST)
            found = [self.positions(source, first + n, min(MOST, count - n)) for n in pieces]
            return np.concatenate(found)
        numbers: Any = np.arange(count)
        for step in reversed(path):
            if count and int(numbers[-1]) * step.by >= 1 << 62:
                numbers = numbers.astype(object)  # of a tiny share: Python's integers
            first, numbers = step.inverses(first, numbers)
        positions: Ints = (first + numbers).astype(np.int64)
        return positions

"""Takes: which of an output's elements trainers have taken, and how far the pipeline may be ahead.

Elements are numbered in the order in which they were put: their *positions*. An element is settled
once its trainer has taken it, or once it was dropped.

A killed worker loses what it has made and nobody has taken. So it may be ahead of its trainers by
what they take in AHEAD_S, however small elements are. As in TCP's slow start, the bound begins with
FIRST elements and grows by at most MAX_GROWTH with each round. A *round* ends once as many elements
were taken.

Nothing here is thread-safe or reads a clock: AnyOutput does both.
"""

from __future__ import annotations

from .. import ranges

FIRST = 16
MAX_GROWTH = 8  # as leases: each round of a fast trainer waits for the dispatcher
AHEAD_S = 1.0


class Takes:
    """The elements of one output."""

    def __init__(self, now_s: float) -> None:
        self.put = 0
        self.bound = FIRST  # elements that the pipeline may be ahead
        # As ranges, their size follows what consumers have, and not how far they are.
        self._settled: ranges.Ranges = []
        self._drops: ranges.Ranges = []  # of these
        self._round = 0  # elements taken in this round
        self._round_began_s = now_s

    @property
    def untaken(self) -> int:
        return self.put - ranges.total(self._settled)

    @property
    def dropped(self) -> int:
        return ranges.total(self._drops)

    def take(self, first: int, count: int, now_s: float) -> None:
        """A trainer has taken these."""
        ranges.add(self._settled, first, first + count)
        self._round += count
        if self._round >= self.bound:
            rate = self._round / max(now_s - self._round_began_s, 1e-6)
            wanted = max(rate * AHEAD_S, self.bound / 2, FIRST)
            self.bound = int(min(wanted, MAX_GROWTH * self._round))
            self._round, self._round_began_s = 0, now_s

    def drop(self, first: int, count: int) -> None:
        """No trainer will get these."""
        ranges.add(self._settled, first, first + count)
        ranges.add(self._drops, first, first + count)

    def grow(self) -> None:
        """The pipeline needs more splits before it makes a further element."""
        self.bound *= 2

    def are_settled(self, first: int, stop: int) -> bool:
        return first >= stop or any(a <= first and stop <= b for a, b in self._settled)

    def any_dropped(self, first: int, stop: int) -> bool:
        return any(a < stop and first < b for a, b in self._drops)

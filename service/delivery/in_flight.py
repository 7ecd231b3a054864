"""In-flight elements: those of an output that no trainer has taken yet, and their bound.

Elements are numbered in the order in which they were put: their *positions*. An element is settled
once its trainer has taken it, or once it was dropped; until then it is in flight.

A killed worker loses what it has made and nobody has taken. So it may be ahead of its trainers by
what they take in AHEAD_S, however small elements are. As in TCP's slow start, the bound begins with
FIRST elements, and grows by at most MAX_GROWTH of what was taken in a round. A *round* ends once a
fourth of the bound was taken, as consumers report by pieces, or after AHEAD_S. The rate is that of
four rounds, or of one that was slow.

Nothing here is thread-safe or reads a clock: FirstComeOutput does both.
"""

from __future__ import annotations

from collections import deque

from .. import ranges

FIRST = 16
MAX_GROWTH = 8
ROUNDS = 4  # in which a bound is taken
AHEAD_S = 1.0


class InFlightElements:
    def __init__(self) -> None:
        self.put = 0
        self.bound = FIRST  # elements that the pipeline may be ahead
        # As ranges, their size follows what consumers have, and not how far they are.
        self._settled: ranges.Ranges = []
        self._drops: ranges.Ranges = []  # of these
        self._taken = 0
        self._rounds: deque[tuple[float, int]] = deque(maxlen=ROUNDS)  # when, what was taken before

    @property
    def untaken(self) -> int:
        return self.put - ranges.total(self._settled)

    @property
    def dropped(self) -> int:
        return ranges.total(self._drops)

    def take(self, first: int, count: int, now_s: float) -> None:
        ranges.add(self._settled, first, first + count)
        self._taken += count
        if not self._rounds:  # what was taken first tells of no rate
            self.bound = max(FIRST, MAX_GROWTH * count)
            self._rounds.append((now_s, self._taken))
        began_s, before = self._rounds[-1]
        taken, is_slow = self._taken - before, now_s >= began_s + AHEAD_S
        if taken * ROUNDS < self.bound and not is_slow:
            return
        since_s, since = self._rounds[-1 if is_slow else 0]
        rate = (self._taken - since) / max(now_s - since_s, 1e-6)
        wanted = min(rate * AHEAD_S, MAX_GROWTH * taken)
        self.bound = int(max(wanted, self.bound / 2, FIRST))
        if is_slow:
            self._rounds.clear()
        self._rounds.append((now_s, self._taken))

    def drop(self, first: int, count: int) -> None:
        ranges.add(self._settled, first, first + count)
        ranges.add(self._drops, first, first + count)

    def grow(self) -> None:
        """The pipeline needs more splits before it makes a further element."""
        self.bound *= 2

    def are_settled(self, first: int, stop: int) -> bool:
        return first >= stop or any(a <= first and stop <= b for a, b in self._settled)

    def any_dropped(self, first: int, stop: int) -> bool:
        return any(a < stop and first < b for a, b in self._drops)

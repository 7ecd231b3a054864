"""Takes: which of an output's elements trainers have taken, and how far the pipeline may be ahead.

Elements are numbered in the order in which they were put: their *positions*. An element is settled
once its trainer has taken it, or once it was dropped.

A killed worker loses what it has made and nobody has taken. So it may be ahead of its trainers by
what they take in AHEAD_S, however small elements are. As in TCP's slow start, the bound begins with
FIRST elements and at most doubles with each round. A *round* ends once as many elements were taken.

Nothing here is thread-safe or reads a clock: AnyOutput does both.
"""

from __future__ import annotations

FIRST = 16
AHEAD_S = 1.0


class Takes:
    """The elements of one output."""

    def __init__(self, now_s: float) -> None:
        self.put = 0
        self.settled = 0
        self.dropped = 0  # of these
        self.bound = FIRST  # elements that the pipeline may be ahead
        self._floor = 0  # all elements before it are settled
        self._behind: dict[int, int] = {}  # settled parts behind it: first to stop
        self._drops: list[tuple[int, int]] = []
        self._round = 0  # elements taken in this round
        self._round_began_s = now_s

    @property
    def untaken(self) -> int:
        return self.put - self.settled

    def take(self, first: int, count: int, now_s: float) -> None:
        """A trainer has taken these."""
        self._settle(first, count)
        self._round += count
        if self._round >= self.bound:
            rate = self._round / max(now_s - self._round_began_s, 1e-6)
            wanted = max(rate * AHEAD_S, self.bound / 2, FIRST)
            self.bound = int(min(wanted, 2 * self._round))
            self._round, self._round_began_s = 0, now_s

    def drop(self, first: int, count: int) -> None:
        """No trainer will get these."""
        self._settle(first, count)
        self.dropped += count
        self._drops.append((first, first + count))

    def grow(self) -> None:
        """The pipeline needs more splits before it makes a further element."""
        self.bound *= 2

    def are_settled(self, first: int, stop: int) -> bool:
        """Whether all of these are; perhaps False although they are, if others before are not."""
        at = max(first, self._floor)
        while at < stop:
            ends = [end for begin, end in self._behind.items() if begin <= at < end]
            if not ends:
                return False
            at = ends[0]
        return True

    def any_dropped(self, first: int, stop: int) -> bool:
        return any(begin < stop and first < end for begin, end in self._drops)

    def _settle(self, first: int, count: int) -> None:
        self.settled += count
        self._behind[first] = first + count
        while self._floor in self._behind:
            self._floor = self._behind.pop(self._floor)

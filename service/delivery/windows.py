"""Fair shares: how many elements each of several competing subscriptions may hold at a time.

A subscription *holds* the elements that it was given and its trainer has not taken. Its *window*
bounds them to what the trainer uses in AHEAD_S and two round trips, so that no subscription hoards
what another will lack. As in TCP's slow start, a window begins with FIRST elements and at most
doubles each round. A *round* ends once a whole window was given. Then the trainer's rate, while it
has elements, is measured anew.

Each block costs its trainer and the worker about a millisecond of CPU time. So a window is given in
fourths. It grows to MOST_AHEAD_S, as long as a fourth is at most SLACK of all elements that the
subscription was given. Two trainers' shares may differ by that much if the end comes by surprise,
because the pipeline is slower than they are.

Where several subscriptions compete:

- **Turns.** A subscription that is a round ahead of another begins its next round at least
  PATIENCE_S after its last one. So the windows of equally fast trainers grow alike, whichever
  process the operating system runs first. Subscriptions with larger windows are not waited for.
- **Levels.** A subscription that holds something gets no piece that would raise it above an even
  part of all elements buffered and held. Once the end is known, each holds at most half of that,
  and half of what it would use while the others use the rest. So windows shrink towards the end,
  and the remaining elements correct the shares.

A subscription that holds nothing may always get something, so all progress while anything is
buffered. Nothing here is thread-safe or reads a clock: FirstComeOutput does both.
"""

from __future__ import annotations

import math

FIRST = 8
LEAST = 2  # one in use, and one on its way
PIECES = 4  # of a window, or of a level: consumers report what was taken by the piece
PIECE_S = 0.002  # of use: the smallest piece
SLACK = 0.15
AHEAD_S = 0.1
MOST_AHEAD_S = 0.4
PATIENCE_S = 0.04  # below AHEAD_S, so that only windows that grow wait for it
MOST_ROUND_TRIP_S = 0.5  # so that a wrong measurement does little harm


class Windows:
    """The subscriptions that compete for one task's elements."""

    def __init__(self) -> None:
        self._members: set[Window] = set()
        self.held = 0  # by all of them

    def open(self, now_s: float) -> Window:
        first_round = min((member._round for member in self._members), default=0)
        window = Window(self, first_round, now_s)
        self._members.add(window)
        return window

    def _even_part(self, buffered: int) -> float:
        return (buffered + self.held) / len(self._members)

    def _part_in_time(self, window: Window, buffered: int) -> float:
        """How much it would use while the others use the rest."""
        rates = [member.rate for member in self._members if member.rate]
        if not window.rate or not rates:
            return math.inf
        unknown = len(self._members) - len(rates)
        all_rates = sum(rates) * (1 + unknown / len(rates))
        return (buffered + self.held) * window.rate / all_rates


class Window:
    def __init__(self, windows: Windows, first_round: int, now_s: float) -> None:
        self._windows = windows
        self.held = 0
        self.rate = 0.0  # elements that its trainer takes a second, while it has any; 0: unknown
        self.round_trip_s = 0.0
        self.retry_at_s: float | None = None  # when there may be room although nothing changes
        self._size = FIRST
        self._round = first_round
        self._round_began_s = now_s
        self._total = 0  # elements given so far
        self._given = self._taken = 0  # elements in this round
        self._busy_s = 0.0  # in this round, while it held something
        self._busy_since_s: float | None = None  # None while it holds nothing

    def room(self, buffered: int, ended: bool, now_s: float) -> int:
        """How many of the `buffered` elements it may be given now."""
        self.retry_at_s = None
        if not buffered:
            return 0
        if self._given >= self._size and not self._begin_round(now_s):
            return 0
        room, piece = self._size - self.held, self._size / PIECES
        windows = self._windows
        if len(windows._members) > 1:
            least = self.rate * PIECE_S
            piece = min(piece, max(self._total * SLACK, least))
            level = windows._even_part(buffered)
            if ended:
                level = min(level, windows._part_in_time(self, buffered)) / 2
                room = min(room, max(math.ceil(level - self.held), int(not self.held)))
                piece = min(piece, max(level / PIECES, least))
            elif self.held and math.ceil(level - self.held) < max(1, int(piece)):
                return 0
        return max(0, min(room, buffered, max(1, int(piece))))

    def even_room(self, buffered: int) -> int:
        """How many of the `buffered` elements it gets if all are divided evenly, at once."""
        room = math.ceil(self._windows._even_part(buffered)) - self.held
        return min(buffered, max(room, int(not self.held)))

    def give(self, count: int, now_s: float) -> None:
        """Count elements that it was given."""
        if self._busy_since_s is None:
            self._busy_since_s = now_s
        self._given += count
        self._total += count
        self._hold(count)

    def take(self, count: int, now_s: float) -> None:
        """Count elements that its trainer has taken."""
        self._taken += count
        self._hold(-count)
        if self._busy_since_s is not None:
            self._busy_s += now_s - self._busy_since_s
            self._busy_since_s = now_s if self.held else None

    def close(self) -> int:
        """Stop competing. Returns how many elements it held. Idempotent."""
        held = self.held
        self._hold(-held)
        self._windows._members.discard(self)
        return held

    def _hold(self, count: int) -> None:
        self.held += count
        self._windows.held += count

    def _begin_round(self, now_s: float) -> bool:
        """Begin the next round if something was taken and its turn has come; whether it began."""
        if not self._taken:
            return False
        turn_s = self._round_began_s + PATIENCE_S
        if now_s < turn_s and any(
            member._round < self._round and member._size <= self._size
            for member in self._windows._members
        ):
            self.retry_at_s = turn_s
            return False
        round_trips_s = 2 * min(self.round_trip_s, MOST_ROUND_TRIP_S)
        self.rate = self._taken / max(self._busy_s, 1e-9)
        most = self.rate * (MOST_AHEAD_S + round_trips_s)
        least = self.rate * (AHEAD_S + round_trips_s)
        wanted = max(least, min(most, PIECES * SLACK * self._total))
        wanted = min(max(wanted, self._size / 2), self._size * 2)
        self._size = max(LEAST, math.ceil(wanted))
        self._round += 1
        self._round_began_s = now_s
        self._given = self._taken = 0
        self._busy_s = 0.0
        return True

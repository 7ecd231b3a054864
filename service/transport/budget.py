"""How many elements a consumer lets all of its workers together send ahead.

Each worker has a share of the limit, so that one that is slow or stalled holds up no other, and
none gets what another still has: of a limit that is reached, a worker that joins gets its share
as the elements of the others are taken. Only the first element is always allowed, so that a
consumer with more workers than elements allowed has one of each.
"""

from __future__ import annotations

import threading

MAX_ELEMENTS = 1 << 32  # more are as good as no limit


class ElementBudget:
    """The limit. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = min(limit, MAX_ELEMENTS)
        self._lock = threading.Lock()  # of the shares, too
        self._shares = 0
        self._outstanding = 0

    def share(self) -> Share:
        """Another worker's share; the others become smaller."""
        with self._lock:
            self._shares += 1
            return Share(self)

    @property
    def outstanding(self) -> int:
        """Elements that workers may send, or have sent and nobody has taken."""
        return self._outstanding


class Share:
    """One worker's part of an ElementBudget."""

    def __init__(self, budget: ElementBudget) -> None:
        self._budget = budget
        self._lock = budget._lock
        self._granted = 0  # and not received
        self._held = 0  # received and not taken
        self._left = False

    def is_due(self) -> bool:
        """Whether there is so much room again that the worker should be told."""
        with self._lock:
            mine = self._granted + self._held
            return self._room() > (self._quota() // 4 if mine else 0)

    def grant(self) -> int:
        """How many more elements the worker may send from now on."""
        with self._lock:
            room = max(0, self._room())
            self._add(granted=room)
            return room

    def received(self, count: int) -> bool:
        """So many have come; whether the worker was allowed to send any.

        They may be more than were granted, if they were sent before and did not arrive then.
        """
        with self._lock:
            allowed = self._granted > 0 or count == 0
            self._add(granted=-min(count, self._granted), held=count)
            return allowed

    def taken(self, count: int) -> None:
        """So many of those received are not here any more."""
        with self._lock:
            self._add(held=-count)

    def take_back(self) -> None:
        """The connection has ended: what was granted on it will not come."""
        with self._lock:
            self._add(granted=-self._granted)

    def leave(self) -> None:
        """The worker sends no more. Idempotent."""
        with self._lock:
            self._add(granted=-self._granted)
            self._budget._shares -= not self._left
            self._left = True

    def _add(self, granted: int = 0, held: int = 0) -> None:
        self._granted += granted
        self._held += held
        self._budget._outstanding += granted + held

    def _room(self) -> int:
        if self._left:
            return 0
        budget, mine = self._budget, self._granted + self._held
        room = min(self._quota() - mine, budget._limit - budget._outstanding)
        return max(room, int(mine == 0))

    def _quota(self) -> int:
        return max(1, self._budget._limit // max(1, self._budget._shares))

"""Element budget: how many elements all workers of a consumer together may send ahead.

Each worker has a share of the limit, so a slow or stalled worker holds up no other. Together they
never exceed the limit: if it is reached, a worker that joins gets its share as elements of the
others are taken. The only exception is a worker's first element, which is always allowed. So a
consumer with more workers than allowed elements still gets one from each.
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
        """Add a worker's share; the others shrink."""
        with self._lock:
            self._shares += 1
            return Share(self)

    @property
    def outstanding(self) -> int:
        """Elements that workers may send, or have sent and the trainer has not taken."""
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
        """Whether there is enough new room to tell the worker."""
        with self._lock:
            mine = self._granted + self._held
            return self._room() > (self._quota() // 4 if mine else 0)

    def grant(self) -> int:
        """Grant the worker all free room; return how many more elements it may send."""
        with self._lock:
            room = max(0, self._room())
            self._add(granted=room)
            return room

    def received(self, count: int) -> bool:
        """Count elements that have come; return whether the worker was allowed to send any.

        They may exceed the grant if they are sent again after a connection was cut.
        """
        with self._lock:
            allowed = self._granted > 0 or count == 0
            self._add(granted=-min(count, self._granted), held=count)
            return allowed

    def taken(self, count: int) -> None:
        """Count received elements that were taken."""
        with self._lock:
            self._add(held=-count)

    def take_back(self) -> None:
        """Revoke the grant, since its connection has ended."""
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

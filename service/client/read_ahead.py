"""ReadAhead: how many elements an ordered read asks for ahead of its trainer."""

from __future__ import annotations

from .portions import Portions
from .positions import OrderedRead

WINDOW_BYTES = 64 << 20
"""How much is asked for ahead of the trainer."""

MAX_WINDOWS = 4
"""If more than so many windows have come and wait for what is given before them, elements are much
larger than was estimated."""

FIRST_WINDOW = 32
"""How many elements are asked for before it is known how large they are."""

EARLY_BYTES = 8 << 20
"""The window grows fast to so much, and then by a quarter of what was given: workers make what the
window grows by instead of what the trainer is given next."""


class ReadAhead:
    """It grows with what was given: a trainer gets its first elements before workers make those
    that are far ahead."""

    def __init__(self, portions: Portions, ordered: OrderedRead) -> None:
        self.given = 0  # elements, to the trainer
        self._portions = portions
        self._ordered = ordered
        self._at_a_time = 1  # elements to ask for

    def elements(self) -> int:
        """How many of this consumer's elements may be asked for and not given."""
        window = self._portions.fit(WINDOW_BYTES) or FIRST_WINDOW
        early = min(4 * self.given, self._portions.fit(EARLY_BYTES) or 0)
        window = min(window, max(FIRST_WINDOW, early, self.given // 4))
        return max(window, 2 * (self._ordered.batch_size or 1))

    @property
    def is_exceeded(self) -> bool:
        """Whether more than MAX_WINDOWS wait here, and more than two windows are planned."""
        return (
            self._portions.held_bytes > MAX_WINDOWS * WINDOW_BYTES
            and self._portions.elements > 2 * self.elements()
        )

    @property
    def is_young(self) -> bool:
        """Whether too little was given for bundles to be opened ahead: a quarter of a window."""
        return 4 * self.given < (self._portions.fit(WINDOW_BYTES) or 1)

    def grow(self) -> None:
        """Ask for twice as much at a time, up to half a window."""
        self._at_a_time = min(2 * self._at_a_time, self.elements() // 2)

    def positions(self) -> int:
        """How many elements of all consumers to ask for at a time."""
        return max(1, self._at_a_time * self._ordered.num_consumers)

"""What has become of a source's splits: the arithmetic of a pass, and nothing else.

A pass is one opening of a source; a pipeline with `repeat` has several. Each split of the present
pass is in one place:

    waiting ──lease──► leased ──begin──► begun        its elements may have been seen
       ▲                 │ │
       │                 │ └──lose────► lost          its worker is gone; never leased again
    returned ◄─give back─┘               │            … unless that worker comes back: find
                         ▲───────────────┘

Of earlier passes only what was handed back is kept (`left_over`), and leased before all else: who
had it is gone, and nobody else need ask for it. Ranges, not splits, so that the size follows the
number of gaps.

The splits of a source may be found while it is read (it `grows`): all of them have names, and the
same ones in every pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from . import ranges
from .ranges import Ranges


class Offer(NamedTuple):
    """The splits that a request can have next: a range, and how many there are in all."""

    pass_number: int
    first: int
    stop: int
    total: int
    starts: bool = False  # the pass is a new one
    waits: bool = False  # nothing is there yet


class Ledger(msgspec.Struct, forbid_unknown_fields=True):
    """Of one source in one iteration. Ranges are of the present pass."""

    size: int  # splits a pass
    shared_size: int | None = None  # of those, what all sources have that are leased with it
    leased_with: int | None = None  # the source whose leases this one shares
    pass_number: int = 0
    next: int = 0  # splits from here on were never leased
    returned: Ranges = []
    begun: Ranges = []
    lost: Ranges = []
    left_over: dict[int, Ranges] = {}
    grows: bool = False  # further splits may be found
    names: list[str] = []  # of the splits that were found, of every pass

    @property
    def is_zipped(self) -> bool:
        """Whether another source is leased with it, or it with another."""
        return self.shared_size is not None or self.leased_with is not None

    @property
    def size_together(self) -> int:
        """Of what is leased together."""
        return self.size if self.shared_size is None else self.shared_size

    @property
    def leased(self) -> int:
        """How many splits somebody has, who has neither begun them nor handed them back."""
        return self.next - sum(map(ranges.total, (self.returned, self.begun, self.lost)))

    @property
    def owes(self) -> bool:
        """Whether something was handed back that nobody has asked for again."""
        return bool(self.returned or self.left_over)

    def offer(self, size: int, pass_number: int, or_later: bool = False) -> Offer:
        """What a request for that pass can have, of the first `size` splits.

        The first request for a later pass starts it. One for an earlier pass finds it ended, or, if
        `or_later`, takes from the present one.
        """
        left_over = self.left_over
        if not left_over and pass_number > self.pass_number and self.returned:
            left_over = {self.pass_number: self.returned}
        if left_over:
            earliest = min(left_over)
            left = left_over[earliest]
            return Offer(earliest, *left[0], ranges.total(left))
        if pass_number > self.pass_number and size:  # of nothing none need begin
            return Offer(pass_number, 0, size, size, starts=True)
        if pass_number < self.pass_number and not or_later:
            return Offer(self.pass_number, 0, 0, 0)
        total = size - self.next + ranges.total(self.returned)
        first, stop = self.returned[0] if self.returned else (self.next, size)
        return Offer(self.pass_number, first, stop, total, waits=self.grows and not total)

    def grow(self, names: Sequence[str], complete: bool) -> None:
        """Further splits were found, behind those that are known; if `complete`, the last."""
        self.names.extend(names)
        self.size, self.grows = len(self.names), not complete

    def start(self, pass_number: int) -> None:
        """A later pass begins; what is still leased of this one has no place any more."""
        if self.returned:
            self.left_over[self.pass_number] = self.returned
        self.pass_number, self.next = pass_number, 0
        self.returned, self.begun, self.lost = [], [], []

    def lease(self, pass_number: int, first: int, stop: int) -> None:
        """What `offer` said, or the first part of it, is somebody's now."""
        if pass_number != self.pass_number:
            left = self.left_over[pass_number]
            ranges.remove(left, first, stop)
            if not left:
                del self.left_over[pass_number]
        elif first == self.next:
            self.next = stop
        else:
            ranges.remove(self.returned, first, stop)

    def begin(self, pass_number: int, first: int, stop: int) -> None:
        """They entered a pipeline."""
        if pass_number == self.pass_number:
            ranges.add(self.begun, first, stop)

    def give_back(self, pass_number: int, first: int, stop: int) -> None:
        """They were leased, and did not enter a pipeline."""
        if pass_number == self.pass_number:
            ranges.add(self.returned, first, stop)
        else:
            ranges.add(self.left_over.setdefault(pass_number, []), first, stop)

    def lose(self, pass_number: int, first: int, stop: int) -> None:
        """Who had them is gone, and nobody knows which of their elements were seen."""
        if pass_number == self.pass_number:
            ranges.add(self.lost, first, stop)

    def find(self, pass_number: int, first: int, stop: int) -> None:
        """Who had lost them has come back, and still has them."""
        if pass_number == self.pass_number:
            ranges.remove(self.lost, first, stop)

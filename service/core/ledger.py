"""The ledger of a source's splits: which are waiting, leased, begun, returned or lost.

A pass is one opening of a source; a pipeline with `repeat` has several. Each split of the current
pass has one state:

    waiting ──lease──► leased ──begin──► begun        its elements may have been seen
       ▲                 │ │
       │                 │ └──lose────► lost          its worker is gone; never leased again
    returned ◄─give back─┘               │            … unless that worker returns: find
                         ▲───────────────┘

Of earlier passes the ledger keeps only the returned splits (`left_over`). It leases them first:
their worker is gone, and perhaps no request names their pass again. The ledger keeps ranges, so
its size follows the number of gaps.

Splits may be discovered during reading (`grows`). Such splits have names, the same in every pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from .. import ranges
from ..ranges import Ranges


class Offer(NamedTuple):
    """The next range that a request can lease, and the total that could be leased."""

    pass_number: int
    first: int
    stop: int
    total: int
    starts: bool = False  # leasing starts a new pass
    waits: bool = False  # empty now, but more splits may be found


class Ledger(msgspec.Struct, forbid_unknown_fields=True):
    """One source's ledger in one iteration. Ranges are of the current pass."""

    size: int  # splits a pass
    shared_size: int | None = None  # the smallest size of the sources leased together
    leased_with: int | None = None  # the source whose leases this one shares
    pass_number: int = 0
    next: int = 0  # splits from here on were never leased
    returned: Ranges = []
    begun: Ranges = []
    lost: Ranges = []
    left_over: dict[int, Ranges] = {}
    grows: bool = False  # further splits may be found
    names: list[str] = []  # of the found splits, for every pass

    @property
    def is_zipped(self) -> bool:
        """Whether it shares its leases with another source."""
        return self.shared_size is not None or self.leased_with is not None

    @property
    def size_together(self) -> int:
        """Splits a pass, when zipped sources are leased together."""
        return self.size if self.shared_size is None else self.shared_size

    @property
    def leased(self) -> int:
        """How many splits are leased: neither begun nor returned nor lost."""
        return self.next - sum(map(ranges.total, (self.returned, self.begun, self.lost)))

    @property
    def owes(self) -> bool:
        """Whether returned splits wait for a new lease."""
        return bool(self.returned or self.left_over)

    def offer(self, size: int, pass_number: int, or_later: bool = False) -> Offer:
        """The offer for a request for that pass, among the first `size` splits.

        The first request for a later pass starts it. A request for an earlier pass gets an empty
        offer, or, with `or_later`, one of the current pass.
        """
        left_over = self.left_over
        if not left_over and pass_number > self.pass_number and self.returned:
            left_over = {self.pass_number: self.returned}
        if left_over:
            earliest = min(left_over)
            left = left_over[earliest]
            return Offer(earliest, *left[0], ranges.total(left))
        if pass_number > self.pass_number and size:  # an empty source starts no pass
            return Offer(pass_number, 0, size, size, starts=True)
        if pass_number < self.pass_number and not or_later:
            return Offer(self.pass_number, 0, 0, 0)
        total = size - self.next + ranges.total(self.returned)
        first, stop = self.returned[0] if self.returned else (self.next, size)
        return Offer(self.pass_number, first, stop, total, waits=self.grows and not total)

    def grow(self, names: Sequence[str], complete: bool) -> None:
        """Append newly found splits; with `complete`, no more will follow."""
        self.names.extend(names)
        self.size, self.grows = len(self.names), not complete

    def start(self, pass_number: int) -> None:
        """Start a later pass. The ledger forgets the splits still leased from this one."""
        if self.returned:
            self.left_over[self.pass_number] = self.returned
        self.pass_number, self.next = pass_number, 0
        self.returned, self.begun, self.lost = [], [], []

    def lease(self, pass_number: int, first: int, stop: int) -> None:
        """Mark an offered range, or its first part, as leased."""
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
        """The splits were given to a pipeline, or taken by trainers if the pipeline can tell."""
        if pass_number == self.pass_number:
            ranges.add(self.begun, first, stop)

    def give_back(self, pass_number: int, first: int, stop: int) -> None:
        """The leased splits did not enter a pipeline, and may be leased again."""
        if pass_number == self.pass_number:
            ranges.add(self.returned, first, stop)
        else:
            ranges.add(self.left_over.setdefault(pass_number, []), first, stop)

    def lose(self, pass_number: int, first: int, stop: int) -> None:
        """Their worker is gone; which of their elements were seen is unknown."""
        if pass_number == self.pass_number:
            ranges.add(self.lost, first, stop)

    def find(self, pass_number: int, first: int, stop: int) -> None:
        """The worker that was lost with them has returned, and still has them."""
        if pass_number == self.pass_number:
            ranges.remove(self.lost, first, stop)

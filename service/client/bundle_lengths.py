"""The lengths of an ordered read's bundles: asked of workers, learned, and told to the dispatcher.

How far the order is known depends on them (service/order.py). A *query* asks a worker for the
length of a bundle, or for how many elements it has at least.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ..errors import FailedPrecondition
from ..proto import forebay_pb2 as pb
from .positions import SAME_EACH_TIME, OrderedEpoch, OrderedRead
from .slices import Request

MAX_LENGTHS = 10_000
"""Of bundles, in one heartbeat."""

MAX_QUERIES = 1000
"""So many queries may be outstanding that a plan needs, and as many others. A worker bounds the two
together."""


class BundleLengths:
    """What one consumer knows of an epoch's lengths. The reading thread calls all of it but
    `report`, which any thread may call."""

    def __init__(
        self, ordered: OrderedRead, ask: Callable[[Request], None], first: int = 0
    ) -> None:
        """`first`: the number that the read has for the epoch's first bundle."""
        self._ordered = ordered
        self._ask = ask
        self._first = first
        # The places whose queries are outstanding, at most one of each kind: `Request.is_needed`.
        self._needed: set[int] = set()
        self._others: set[int] = set()
        self._waiting: dict[int, tuple[int, int]] = {}  # by place: a query's `until` and `enough`
        self._at_least: dict[int, int] = {}  # by place: elements that it is known to have
        self._unsaid: deque[int] = deque()  # bundles whose lengths the dispatcher was not told of
        self._lock = threading.Lock()  # of `report`

    def begin(self, epoch: OrderedEpoch) -> None:
        """Places are of this epoch from now on. Its queries were withdrawn."""
        self._epoch = epoch
        self._at_least.clear()
        self.forget_queries()

    def forget_queries(self) -> None:
        """All were withdrawn."""
        self._needed.clear()
        self._others.clear()
        self._waiting.clear()

    def query(self, place: int, until: int, enough: int = 0) -> None:
        """Ask for the length of the bundle there, unless it is known or was asked for, and once
        there is room for a query. Elements before `until` are made for that, and those before
        `enough` if there is room."""
        known = self.at_least(place)
        self._query(Request(place, (), is_query=True, until=until, enough=enough, known=known))

    def query_rounds(self, place: int, round_number: int, rounds: int) -> None:
        """Ask for the length of a bundle that this round reads, unless it has enough elements for
        so many rounds. No further round is known without another block of each bundle."""
        block_length = self._epoch.spec.block_length
        planned = self._epoch.order.index_at(place, round_number)
        enough = planned + rounds * block_length
        if self.at_least(place) < enough:
            self.query(place, planned + block_length, enough)

    def query_ahead(self, place: int) -> None:
        """Have a bundle opened that no plan needs yet."""
        self._query(Request(place, (), is_query=True, is_ahead=True))

    def _query(self, query: Request) -> None:
        place, is_needed = query.place, query.is_needed
        if self._epoch.order.knows(place):  # `lengths` may have it of another iteration
            return
        if place in self._needed or (place in self._others and not is_needed):
            return
        if is_needed and len(self._needed) >= MAX_QUERIES:
            self._waiting[place] = query.until, query.enough
        elif is_needed or len(self._others) < MAX_QUERIES:  # else the next plan asks, if need be
            self._waiting.pop(place, None)
            (self._needed if is_needed else self._others).add(place)
            self._ask(query)

    @property
    def outstanding(self) -> int:
        return len(self._needed) + len(self._others)

    def at_least(self, place: int) -> int:
        """So many elements the bundle is known to have."""
        return self._at_least.get(place, 0)

    def answered(self, query: Request) -> None:
        """The query has ended: one that waits is asked."""
        (self._needed if query.is_needed else self._others).discard(query.place)
        while self._waiting and len(self._needed) < MAX_QUERIES:
            place = next(iter(self._waiting))
            until, enough = self._waiting.pop(place)
            if self.at_least(place) < max(1, enough):
                self.query(place, until, enough)

    def learn(self, place: int, length: int, complete: bool) -> None:
        """A worker says that the bundle has at least so many elements, or exactly if `complete`.
        Raises FailedPrecondition if that contradicts what was known."""
        try:
            self._epoch.order.learn(place, length, complete)
        except ValueError as error:
            raise self.mismatch(place, str(error)) from None
        self._at_least[place] = max(self._at_least.get(place, 0), length)
        bundle = self._first + self._epoch.bundles[place]
        if complete and self._ordered.lengths[bundle] < 0:
            self._ordered.lengths[bundle] = length
            self._unsaid.append(bundle)

    def report(self, request: pb.ConsumerHeartbeatRequest) -> None:
        """Add lengths that the dispatcher was not told of to the request, once: the request must be
        repeated until it is answered."""
        unsaid, room = self._unsaid, MAX_LENGTHS - len(request.bundles)
        with self._lock:
            bundles = [unsaid.popleft() for _ in range(min(len(unsaid), room))]
        request.bundles.extend(bundles)
        request.lengths.extend(self._ordered.lengths[bundle] for bundle in bundles)

    def mismatch(
        self, place: int, how: str, epoch: OrderedEpoch | None = None
    ) -> FailedPrecondition:
        """The error for a bundle that has other elements than before, of an `epoch` or this one."""
        epoch = epoch or self._epoch
        return FailedPrecondition(
            f"{how}. It is bundle {epoch.bundles[place]} of epoch {epoch.number}. An "
            f"ordered read needs {SAME_EACH_TIME}: change it, or read it without ordered=True. If "
            "its files have changed, remove the dataset and register it again"
        )

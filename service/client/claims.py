"""The mode of a consumer that reads at least once: it claims bundles, and reads each to its end.

A `Claimer` (claimer.py) claims the bundles and reports how far the trainer has come. Several claims
are read side by side: more while the trainer waits, fewer while it does not, so that a slow trainer
holds few. Their number is limited so that each is read in large slices. Blocks are given as they
come, those of the oldest claim first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from google.protobuf.message import Message

from ..blocks import Block
from ..delivery import End, Slice
from ..errors import FailedPrecondition
from ..order import permuted_many
from ..proto import forebay_pb2 as pb
from ..transport.messages import Key
from .claimer import Claimer
from .heartbeats import News
from .links import Client, Links
from .positions import SAME_EACH_TIME
from .slices import BundlesMode, Request, Slices

PACE_S = 0.25
"""How often the number of claims that are read is adapted."""

FIRST_READ, MOST_READ = 2, 64
"""How many claims are read side by side: at the beginning, and at most."""

MAX_SLICES_PER_S = 200
"""How many slices are asked for in a second, about: each costs both sides a fraction of a
millisecond. Each claim has two, and all claims share a window, so this bounds the claims."""

WINDOW_BYTES = 32 << 20
"""How much is asked for ahead of the trainer, over all claims."""

FIRST_CHUNK = 16
"""How many elements of a bundle are asked for first, and one until it is known how large they are;
then twice as many each time."""


@dataclass(eq=False)
class _Claim:
    place: int
    cursor: int  # elements before this one were given to the trainer
    came: int  # elements before this one have come, here or to an earlier consumer
    asked: int  # elements before this one were asked for
    chunk: int  # so many are asked for next
    first: int  # the first one that this consumer reads
    length: int | None = None  # elements of the bundle, once it is known
    requests: deque[Request] = field(default_factory=deque)  # in order, with what has come

    @property
    def is_done(self) -> bool:
        return self.length is not None and self.cursor >= self.length


class ClaimsMode(BundlesMode):
    """Gives the elements of what this consumer claims."""

    def __init__(self, links: Links, joined: pb.JoinIterationResponse, claimer: Claimer) -> None:
        self._spec, self._epoch = joined.order, joined.epoch
        self._claimer = claimer
        self.slices = Slices(links, self._slice, self._epoch * self._spec.bundles)
        self._bundles = np.arange(self._spec.bundles)
        if self._spec.shuffle:
            self._bundles = permuted_many(
                self._bundles, self._spec.bundles, self._spec.seed, self._epoch
            )
        self._read: dict[int, _Claim] = {}  # by place, the oldest first
        self._given: _Claim | None = None  # whose block the trainer has
        self._finished = False  # the iteration
        self._side_by_side = FIRST_READ
        self._waited = False  # the trainer, since the pace was set
        self._paced_s = 0.0
        self._came_bytes, self._came = 0, 0
        self._paced_came = 0  # elements that had come when the pace was set
        claimer.start(FIRST_READ)

    # -- what it gives -------------------------------------------------------------------------

    def take(self) -> tuple[Block, tuple[Client, int] | None] | None:
        self._pace()
        self._begin()
        for claim in self._read.values():
            while claim.requests and not claim.requests[0].blocks and not claim.requests[0].runs:
                claim.requests.popleft()
            if claim.requests and claim.requests[0].blocks:
                block = claim.requests[0].blocks[0]
                end = claim.cursor + block.count
                if not self._claimer.give(claim.place, claim.cursor, end, end == claim.length):
                    return None
                claim.requests[0].blocks.popleft()
                self._given = claim
                return block, None
        self._waited = True
        return None

    def used(self, block: Block) -> None:
        claim, self._given = self._given, None
        if claim is not None and self._claimer.used():
            claim.cursor += block.count
            self._go_on(claim)

    def _go_on(self, claim: _Claim) -> None:
        """Ask for more of it, or end it if the trainer was given all of it."""
        if not claim.is_done:
            self._ask(claim)
            return
        del self._read[claim.place]
        self.slices.forget(claim.place)
        self._claimer.done(claim.place)
        for active in self._active():
            self._ask(active)

    @property
    def patience_s(self) -> float:
        return min(PACE_S, self.slices.patience_s)

    def has_ended(self) -> bool:
        return self._finished and not self._read

    def awaited(self) -> str:
        if self._read or not self.slices.tasks:
            return self.slices.awaited()
        return "bundles to claim: other consumers have claimed the rest of the epoch"

    def final_reports(self, consumer_id: int, left: int) -> Iterable[tuple[Message, type[Message]]]:
        return [(self._claimer.final_report(left), pb.ClaimBundlesResponse)]

    # -- what is read --------------------------------------------------------------------------

    def _pace(self) -> None:
        """Read more side by side if the trainer had to wait lately, else fewer. But not before all
        that are read have brought something: busy workers would get more work."""
        now = time.monotonic()
        if (passed_s := now - self._paced_s) < PACE_S:
            return
        if self._came:
            more = self._side_by_side - (not self._waited)
            if self._waited and all(claim.came > claim.first for claim in self._active()):
                more = 2 * self._side_by_side
            window, rate = self._in_window(), (self._came - self._paced_came) / passed_s
            most = MAX_SLICES_PER_S * window // (2 * max(1, int(rate)))
            self._side_by_side = max(1, min(more, MOST_READ, window // 2, max(most, FIRST_READ)))
        self._paced_s, self._paced_came, self._waited = now, self._came, False
        for claim in self._active():
            self._ask(claim)

    def _active(self) -> list[_Claim]:
        """The claims that are asked for: the oldest ones."""
        return list(islice(self._read.values(), self._side_by_side))

    def _begin(self) -> None:
        if not self.slices.tasks:
            return
        missing = max(0, self._side_by_side - len(self._read))
        for place, cursor in self._claimer.begin(missing):
            chunk = FIRST_CHUNK if self._came else 1
            self._read[place] = claim = _Claim(place, cursor, cursor, cursor, chunk, cursor)
            self._ask(claim)

    def _ask(self, claim: _Claim) -> None:
        """Ask for the claim's next elements, unless enough are asked for, or older claims are."""
        is_asked = claim.length is not None and claim.asked >= claim.length
        if (
            is_asked
            or claim not in self._active()
            or 2 * (claim.asked - claim.cursor) > claim.chunk
        ):
            return
        share = self._in_window() // min(len(self._read), self._side_by_side)
        chunk = min(claim.chunk, max(1, share // 2))
        request = Request(claim.place, (claim.asked, chunk), claim.asked)
        claim.asked += chunk
        claim.chunk = 2 * chunk
        claim.requests.append(request)
        self.slices.ask(request)

    def _in_window(self) -> int:
        """How many elements WINDOW_BYTES hold, as far as that is known."""
        return WINDOW_BYTES * self._came // max(1, self._came_bytes) if self._came else FIRST_CHUNK

    def _slice(self, request: Request) -> Slice:
        place = self.slices.first_place + request.place
        claim = self._read[request.place]
        first = request.runs[0]
        return Slice(
            bundle=self.slices.first_place + int(self._bundles[request.place]),
            place=place,
            runs=request.runs,
            until=claim.asked,
            keep=min([first, *(r.runs[0] for r in claim.requests if r.runs)]),
            alone=True,
        )

    # -- what workers say ----------------------------------------------------------------------

    def deliver(self, client: Client, key: Key, block: Block) -> None:
        client.taken(block)  # no credit is needed: the requests bound the elements held here
        request = self.slices.delivered(key, block)
        if request is None:
            return
        self._came += block.count
        self._came_bytes += block.payload_bytes
        if (claim := self._read.get(request.place)) is not None:
            claim.came = max(claim.came, block.index + block.count)
            self._ask(claim)

    def end(self, key: Key, end: End) -> None:
        ended = self.slices.ended(key, end)
        if ended is None:
            return
        request, said = ended
        if (claim := self._read.get(request.place)) is None:
            return
        if said.complete and said.length < claim.came:
            raise FailedPrecondition(
                f"bundle {int(self._bundles[claim.place])} of epoch {self._epoch - 1} had at least "
                f"{claim.came} elements, and has {said.length} now: a read at least once needs "
                f"{SAME_EACH_TIME}: change it, or read it without delivery"
            )
        if said.complete:
            claim.length = said.length
            request.runs = ()
        self._go_on(claim)

    def update(self, news: News) -> None:
        self._finished = news.finished
        self.slices.update(news.tasks)
        self._claimer.heard(news.version)

    def ask_again(self) -> None:
        self.slices.ask_again(lambda request: bool(request.runs))

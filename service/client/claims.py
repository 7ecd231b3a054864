"""The mode of a consumer that reads at least once: it claims bundles, and reads each to its end.

A thread claims bundles at the dispatcher, a little ahead of the trainer, and reports how far the
trainer has come with each: the claim's *cursor*. If this consumer dies, others claim what it had,
from these cursors on (service/core/claims.py). If it leaves, its last report is exact.

Several claims are read side by side: more while the trainer waits, fewer while it does not, so that
a slow trainer holds few. Blocks are given as they come, those of the oldest claim first.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from google.protobuf.message import Message

from ..blocks import Block
from ..connections.dispatcher_client import DispatcherClient
from ..delivery import End, Slice
from ..errors import FailedPrecondition, ForebayError, PipelineError
from ..order import permuted_many
from ..proto import forebay_pb2 as pb
from ..transport.messages import Key
from .heartbeats import News
from .links import Client, Links, WorkerLink
from .modes import Mode
from .open_iterations import Taker
from .slices import Request, Slices

REPORT_S = 1.0
"""How often cursors are reported: so much may come again if the trainer is killed."""

AHEAD_S = 0.5
"""Seconds of reading for which bundles are claimed ahead."""

PACE_S = 0.25
"""How often the number of claims that are read is adapted."""

FIRST_READ, MOST_READ = 2, 64
"""How many claims are read side by side: at the beginning, and at most."""

MAX_CLAIMS = 1000

WINDOW_BYTES = 32 << 20
"""How much is asked for ahead of the trainer, over all claims."""

FIRST_CHUNK = 16
"""How many elements of a bundle are asked for first, and one until it is known how large they are;
then twice as many each time."""


@dataclass(eq=False)
class _Claim:
    """A bundle that is this consumer's to read."""

    place: int
    cursor: int  # elements before this one were given to the trainer
    came: int  # elements before this one have come, here or to an earlier consumer
    asked: int  # elements before this one were asked for
    chunk: int  # so many are asked for next
    length: int | None = None  # elements of the bundle, once it is known
    requests: deque[Request] = field(default_factory=deque)  # in order, with what has come

    @property
    def is_done(self) -> bool:
        return self.length is not None and self.cursor >= self.length


class ClaimsMode(Mode):
    """Gives the elements of what this consumer claims."""

    def __init__(
        self,
        links: Links,
        joined: pb.JoinIterationResponse,
        dispatcher: DispatcherClient,
        fail: Callable[[ForebayError], None],
        wake: Callable[[], None],
        closed: threading.Event,
        taker: Taker | None = None,
    ) -> None:
        """The `taker` says how far the trainer is with a block. Other threads call `fail` with an
        error that ends the reading, and `wake` when there is something new. `closed` is set once
        the consumer leaves."""
        self._consumer_id, self._spec, self._epoch = joined.consumer_id, joined.order, joined.epoch
        self._dispatcher, self._fail, self._wake, self._closed = dispatcher, fail, wake, closed
        self._taker = taker
        self._slices = Slices(links, self._slice)
        self._slices.begin_epoch(self._epoch * self._spec.bundles)
        self._bundles = np.arange(self._spec.bundles)
        if self._spec.shuffle:
            self._bundles = permuted_many(
                self._bundles, self._spec.bundles, self._spec.seed, self._epoch
            )
        self._read: dict[int, _Claim] = {}  # by place, the oldest first
        self._given: tuple[_Claim, int] | None = None  # what the trainer has: elements of a claim
        self._blocks = 0  # that were given
        self._finished = False  # the iteration
        self._side_by_side = FIRST_READ
        self._waited = False  # the trainer, since the pace was set
        self._paced_s = 0.0
        self._came_bytes, self._came = 0, 0
        # What follows is shared with the claiming thread, under `_changed`.
        self._changed = threading.Condition()
        self._claimed: dict[int, int] = {}  # place → cursor: claims that are not read yet
        self._cursors: dict[int, int] = {}  # of all claims
        self._done: dict[int, None] = {}  # and not reported
        self._done_count, self._rate_s, self._rate = 0, time.monotonic(), 0.0
        self._refused = False  # there was nothing to claim, when it was asked for last
        self._version = 0  # of the iteration, as far as this consumer has heard
        self._thread = threading.Thread(
            target=self._run, name=f"forebay-claims-{self._consumer_id}", daemon=True
        )
        self._thread.start()

    # -- what it gives -------------------------------------------------------------------------

    def take(self) -> tuple[Block, tuple[Client, int] | None] | None:
        self._pace()
        self._begin()
        for claim in self._read.values():
            while claim.requests and not claim.requests[0].blocks and not claim.requests[0].runs:
                claim.requests.popleft()
            if claim.requests and claim.requests[0].blocks:
                with self._changed:
                    if self._closed.is_set():  # others read the rest
                        return None
                    block = claim.requests[0].blocks.popleft()
                    self._given = claim, block.count
                    self._blocks += 1
                return block, None
        self._waited = True
        return None

    def used(self, block: Block) -> None:
        with self._changed:
            if self._given is None or self._closed.is_set():
                return
            claim, count = self._given
            self._given = None
            claim.cursor += count
            self._cursors[claim.place] = claim.cursor
        self._go_on(claim)

    def _go_on(self, claim: _Claim) -> None:
        """Ask for more of it, or end it if the trainer was given all of it."""
        if not claim.is_done:
            self._ask(claim)
            return
        del self._read[claim.place]
        self._slices.forget(claim.place)
        with self._changed:
            if self._cursors.pop(claim.place, None) is not None:
                self._done[claim.place] = None
                self._done_count += 1
                self._changed.notify_all()

    @property
    def patience_s(self) -> float:
        return min(PACE_S, self._slices.patience_s)

    def has_ended(self) -> bool:
        return self._finished and not self._read

    def awaited(self) -> str:
        if self._read or not self._slices.tasks:
            return self._slices.awaited()
        return "bundles to claim: other consumers have claimed the rest of the epoch"

    # -- what is read --------------------------------------------------------------------------

    def _pace(self) -> None:
        """Read more side by side if the trainer had to wait lately, else fewer."""
        now = time.monotonic()
        if now < self._paced_s + PACE_S:
            return
        if self._came:
            more = 2 * self._side_by_side if self._waited else self._side_by_side - 1
            self._side_by_side = max(1, min(more, MOST_READ, self._in_window() // 2))
        self._paced_s, self._waited = now, False

    def _begin(self) -> None:
        """Begin to read claims."""
        while len(self._read) < self._side_by_side and self._slices.tasks:
            with self._changed:
                if not self._claimed:
                    self._changed.notify_all()
                    return
                place = next(iter(self._claimed))
                cursor = self._claimed.pop(place)
                self._changed.notify_all()
            chunk = FIRST_CHUNK if self._came else 1
            self._read[place] = claim = _Claim(place, cursor, cursor, cursor, chunk)
            self._ask(claim)

    def _ask(self, claim: _Claim) -> None:
        """Ask for the claim's next elements, unless enough are asked for."""
        if claim.length is not None and claim.asked >= claim.length:
            return
        if 2 * (claim.asked - claim.cursor) > claim.chunk:
            return
        chunk = min(claim.chunk, self._most_in_chunk())
        request = Request(claim.place, (claim.asked, chunk), claim.asked)
        claim.asked += chunk
        claim.chunk = 2 * chunk
        claim.requests.append(request)
        self._slices.ask(request)

    def _most_in_chunk(self) -> int:
        """Elements: half of the claim's share of the window."""
        return max(1, self._in_window() // (2 * len(self._read)))

    def _in_window(self) -> int:
        """How many elements WINDOW_BYTES hold, as far as that is known."""
        return WINDOW_BYTES * self._came // max(1, self._came_bytes) if self._came else FIRST_CHUNK

    def _slice(self, request: Request) -> Slice:
        place = self._slices.first_place + request.place
        claim = self._read[request.place]
        first = request.runs[0]
        return Slice(
            bundle=self._slices.first_place + int(self._bundles[request.place]),
            place=place,
            runs=request.runs,
            until=claim.asked,
            keep=min([first, *(r.runs[0] for r in claim.requests if r.runs)]),
            alone=True,
        )

    # -- what workers say ----------------------------------------------------------------------

    def deliver(self, client: Client, key: Key, block: Block) -> None:
        client.taken(block)  # what is asked for bounds what is here
        request = self._slices.delivered(key, block)
        if request is None:
            return
        self._came += block.count
        self._came_bytes += block.payload_bytes
        if (claim := self._read.get(request.place)) is not None:
            claim.came = max(claim.came, block.index + block.count)
            self._ask(claim)

    def end(self, key: Key, end: End) -> None:
        ended = self._slices.ended(key, end)
        if ended is None:
            return
        request, said = ended
        if (claim := self._read.get(request.place)) is None:
            return
        if said.complete and said.length < claim.came:
            raise FailedPrecondition(
                f"bundle {int(self._bundles[claim.place])} of epoch {self._epoch} had at least "
                f"{claim.came} elements, and has {said.length} now: a read at least once needs a "
                "pipeline that gives the same each time (no clocks, no functions in Python that "
                "draw random numbers, no random numbers that decide how many elements come): "
                "change it, or read it without delivery"
            )
        if said.complete:
            claim.length = said.length
            request.runs = ()
        self._go_on(claim)

    def update(self, news: News) -> None:
        self._finished = news.finished
        self._slices.update(news.tasks)
        with self._changed:
            self._version = max(self._version, news.version)
            self._refused = False
            self._changed.notify_all()

    def gone(self, link: WorkerLink) -> None:
        self._slices.gone(link)

    def ask_again(self) -> None:
        self._slices.ask_again(lambda: [r for r in self._slices.outstanding if r.runs])

    # -- the thread that claims ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._claim()
        except ForebayError as error:
            if not self._closed.is_set():
                self._fail(error)
        except BaseException as bug:  # the trainer must not wait for ever
            self._fail(PipelineError("INTERNAL", f"claiming bundles failed: {bug!r}"))
            raise

    def _claim(self) -> None:
        reported: dict[int, int] = {}
        reported_s = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed.is_set() or self._wants(),
                    max(0.0, reported_s + REPORT_S - time.monotonic()),
                )
                if self._closed.is_set():
                    return
                self._look_at_block()
                is_news = self._wants() or self._done or self._cursors != reported
                is_news = is_news or not self._cursors  # a late request may have claimed for us
                request = self._report(self._most())
            reported_s = time.monotonic()
            if not is_news:
                continue
            answer = self._dispatcher.call(request, pb.ClaimBundlesResponse, closed=self._closed)
            reported = dict(zip(request.places, request.cursors, strict=True))
            self._hear(request, answer)

    def _look_at_block(self) -> None:
        """Move the cursor of the block that the trainer has, as far as it was given."""
        if self._given is None or self._taker is None or self._taker.begun != self._blocks:
            return
        (claim, count), left = self._given, self._taker.left()
        if self._taker.begun == self._blocks:
            self._cursors[claim.place] = claim.cursor + count - min(left, count)

    def _hear(self, request: pb.ClaimBundlesRequest, answer: pb.ClaimBundlesResponse) -> None:
        with self._changed:
            for place in request.done:
                self._done.pop(place, None)
            new = {
                place: cursor
                for place, cursor in zip(answer.places, answer.cursors, strict=True)
                if place not in self._cursors and place not in self._done
            }
            self._claimed |= new
            self._cursors |= new
            self._refused = not new and self._version <= answer.version
        if new:
            self._wake()

    def _wants(self) -> bool:
        """Whether it is time to claim more, or to say that all is done."""
        if self._done and not self._cursors:
            return True
        may = self._done or not self._refused
        return bool(may) and len(self._claimed) < max(1, self._ahead() // 2)

    def _most(self) -> int:
        """How many claims this consumer wants to have."""
        return min(len(self._cursors) - len(self._claimed) + self._ahead(), MAX_CLAIMS)

    def _ahead(self) -> int:
        """How many claims it wants to have before it reads them."""
        now = time.monotonic()
        if now >= self._rate_s + PACE_S:
            self._rate = self._done_count / (now - self._rate_s)
            self._done_count, self._rate_s = 0, now
        to_begin = max(0, self._side_by_side - len(self._read))
        return max(1, to_begin + int(self._rate * AHEAD_S))

    def _report(self, most: int) -> pb.ClaimBundlesRequest:
        return pb.ClaimBundlesRequest(
            consumer_id=self._consumer_id,
            most=most,
            places=self._cursors.keys(),
            cursors=self._cursors.values(),
            done=self._done.keys(),
        )

    def final_reports(self, consumer_id: int, left: int) -> Iterable[tuple[Message, type[Message]]]:
        with self._changed:
            self._changed.notify_all()
            if self._given is not None:
                claim, count = self._given
                self._given = None
                claim.cursor += count - left
                self._cursors[claim.place] = claim.cursor
                if claim.is_done:
                    del self._cursors[claim.place]
                    self._done[claim.place] = None
            return [(self._report(0), pb.ClaimBundlesResponse)]

"""The claimer: claims bundles for a consumer that reads at least once, and reports its cursors.

A thread claims bundles at the dispatcher, a little ahead of the trainer, and reports how far the
trainer has come with each: the claim's *cursor*. If this consumer dies, others claim what it had,
from these cursors on (service/core/claims.py). If it leaves, its final report is exact.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from ..connections.dispatcher_client import DispatcherClient
from ..errors import ForebayError, PipelineError
from ..proto import forebay_pb2 as pb
from .open_iterations import Taker

REPORT_S = 1.0
"""How often cursors are reported: so much may come again if the trainer is killed."""

AHEAD_S = 0.5
"""Seconds of reading for which bundles are claimed ahead."""

RATE_S = 0.25
"""How often the rate of reading is measured."""


class _Given(NamedTuple):
    """The block that the trainer has: the elements from `start` to before `end` of a claim."""

    place: int
    start: int
    end: int
    is_last: bool  # the bundle has no elements behind it


class Claimer:
    """The claims of one consumer: those that are read, and those that wait to be read.

    The reading thread calls all methods but `final_report`, which any thread may call.
    """

    def __init__(
        self,
        dispatcher: DispatcherClient,
        consumer_id: int,
        *,
        fail: Callable[[ForebayError], None],
        wake: Callable[[], None],
        closed: threading.Event,
        taker: Taker | None = None,
    ) -> None:
        """The claiming thread calls `fail` with an error that ends the reading, and `wake` when
        there is something to `begin`. The `taker` says how far the trainer is with a block.
        `closed` is set once the consumer leaves; nothing is given or used afterwards.
        """
        self._dispatcher, self._consumer_id = dispatcher, consumer_id
        self._fail, self._wake, self._closed, self._taker = fail, wake, closed, taker
        self._thread = threading.Thread(
            target=self._run, name=f"forebay-claims-{consumer_id}", daemon=True
        )
        self._changed = threading.Condition()  # guards all that follows
        self._unread: dict[int, int] = {}  # place → cursor: claims that are not read yet
        self._cursors: dict[int, int] = {}  # of all claims
        self._done: dict[int, None] = {}  # and not reported
        self._given: _Given | None = None
        self._blocks = 0  # that were given
        self._missing = 0  # so many more claims would be read now, if they were here
        self._done_count, self._rate_s, self._rate = 0, time.monotonic(), 0.0
        self._refused = False  # there was nothing to claim, when it was asked for last
        self._version = 0  # of the iteration, as far as this consumer has heard

    # -- what the mode says --------------------------------------------------------------------

    def start(self, missing: int) -> None:
        """Begin to claim. The mode would read `missing` claims now, if it had them."""
        self._missing = missing
        self._thread.start()

    def begin(self, missing: int) -> list[tuple[int, int]]:
        """Claims to read from now on, as places and cursors: at most `missing`."""
        with self._changed:
            begun = list(self._unread.items())[:missing]
            for place, _ in begun:
                del self._unread[place]
            self._missing = missing - len(begun)
            if begun or self._missing:
                self._changed.notify_all()
            return begun

    def give(self, place: int, start: int, end: int, is_last: bool) -> bool:
        """Note that the trainer gets the elements from `start` to before `end` of a claim; none
        follow if `is_last`. Returns False once the consumer leaves: others read them."""
        with self._changed:
            if self._closed.is_set():
                return False
            self._given = _Given(place, start, end, is_last)
            self._blocks += 1
            return True

    def used(self) -> bool:
        """The trainer was given all of its block. False once the consumer leaves: the final report
        says how much the trainer was given."""
        with self._changed:
            if self._given is None or self._closed.is_set():
                return False
            self._cursors[self._given.place] = self._given.end
            self._given = None
            return True

    def done(self, place: int) -> None:
        with self._changed:
            if self._cursors.pop(place, None) is not None:
                self._done[place] = None
                self._done_count += 1
                self._changed.notify_all()

    def heard(self, version: int) -> None:
        """The iteration has changed: there may be more to claim."""
        with self._changed:
            self._version = max(self._version, version)
            self._refused = False
            self._changed.notify_all()

    def final_report(self, left: int) -> pb.ClaimBundlesRequest:
        """What to tell the dispatcher before the consumer leaves. The trainer was not given the
        last `left` elements of its block. Called once, after `closed` was set."""
        with self._changed:
            self._changed.notify_all()
            if (given := self._given) is not None:
                self._given = None
                if self._taker is not None and self._taker.failed:  # in the step of one of them
                    left = min(left + 1, given.end - given.start)
                self._cursors[given.place] = given.end - left
                if given.is_last and not left:
                    del self._cursors[given.place]
                    self._done[given.place] = None
            return self._report(0)

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
                self._move_cursor()
                is_news = self._wants() or self._done or self._cursors != reported
                is_news = is_news or not self._cursors  # a late request may have claimed for us
                request = self._report(len(self._cursors) - len(self._unread) + self._ahead())
            reported_s = time.monotonic()
            if not is_news:
                continue
            answer = self._dispatcher.call(request, pb.ClaimBundlesResponse, closed=self._closed)
            reported = dict(zip(request.places, request.cursors, strict=True))
            if self._hear(request, answer):
                self._wake()

    def _hear(self, request: pb.ClaimBundlesRequest, answer: pb.ClaimBundlesResponse) -> bool:
        """Whether there are new claims."""
        with self._changed:
            for place in request.done:
                self._done.pop(place, None)
            new = {
                place: cursor
                for place, cursor in zip(answer.places, answer.cursors, strict=True)
                if place not in self._cursors and place not in self._done
            }
            self._unread |= new
            self._cursors |= new
            self._refused = not new and self._version <= answer.version
            return bool(new)

    # What follows is called with `_changed` held.

    def _move_cursor(self) -> None:
        """Move the cursor of the trainer's block up to the element that it works on. If the trainer
        is killed meanwhile, that one comes again."""
        if self._given is None or self._taker is None or self._taker.begun != self._blocks:
            return
        given, left = self._given, self._taker.left()
        if self._taker.begun == self._blocks:
            self._cursors[given.place] = max(given.start, given.end - left - 1)

    def _wants(self) -> bool:
        """Whether it is time to claim more, or to say that all is done."""
        if self._done and not self._cursors:
            return True
        may = self._done or not self._refused
        return bool(may) and len(self._unread) < max(1, self._ahead() // 2)

    def _ahead(self) -> int:
        """How many claims it wants to have before they are read."""
        now = time.monotonic()
        if now >= self._rate_s + RATE_S:
            self._rate = self._done_count / (now - self._rate_s)
            self._done_count, self._rate_s = 0, now
        return max(1, self._missing + int(self._rate * AHEAD_S))

    def _report(self, most: int) -> pb.ClaimBundlesRequest:
        return pb.ClaimBundlesRequest(
            consumer_id=self._consumer_id,
            most=most,
            places=self._cursors.keys(),
            cursors=self._cursors.values(),
            done=self._done.keys(),
        )

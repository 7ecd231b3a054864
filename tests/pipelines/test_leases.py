"""What a task's feed asks the dispatcher for."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.blocks import Block, Component
from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.delivery import ANY
from forebay.service.delivery.first_come import FirstComeOutput
from forebay.service.errors import ProtocolError, Unavailable
from forebay.service.pipelines import SplitRange
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.worker.lease_reports import LeaseReports
from forebay.service.worker.leases import LeaseFeed

KEPT = 1 << 40  # what is kept of a lease is called


class Dispatcher:
    """Leases the splits 0 … 9, as many as are wanted, or `least`."""

    def __init__(self, splits: int = 10, least: int = 0) -> None:
        self._next, self._splits, self._least = 0, splits, least
        self.wanted: list[int] = []
        self.asked = threading.Event()  # without wanting any
        self.returned: list[tuple[int, int]] = []
        self.begun: list[int] = []
        self.numbers: list[int] = []

    def call(self, request: pb.LeaseSplitsRequest, _: Any, **__: Any) -> pb.LeaseSplitsResponse:
        self.returned += ((lease.lease_id, lease.count) for lease in request.returned)
        self.begun += request.begun
        if request.request.number:
            self.numbers.append(request.request.number)
        if not request.want:
            self.asked.set()
            kept = KEPT if request.returned and request.request.number else 0
            over = self._next == self._splits
            return pb.LeaseSplitsResponse(lease_id=kept, end_of_splits=over)
        self.wanted.append(request.want)
        want = max(request.want, self._least)
        first, self._next = self._next, min(self._splits, self._next + want)
        count = self._next - first
        return pb.LeaseSplitsResponse(
            lease_id=self._next, first=first, count=count, end_of_splits=not count
        )


def test_what_may_be_left_early_is_leased_when_it_is_needed() -> None:
    """Leased ahead, an input that its pipeline does not choose again is lost to the others."""
    dispatcher = cast(DispatcherClient, Dispatcher())
    feeds = [
        LeaseFeed(dispatcher, task, [ev.SplitSource(count=10, singly=True)]) for task in (1, 2)
    ]
    leased = [feed.next_range(0, 0, endless=False) for _ in range(5) for feed in feeds]
    assert [(own.first, own.count) for own in leased if own] == [(i, 1) for i in range(10)]
    for feed in feeds:
        feed.close()


def test_a_lease_without_the_names_of_its_splits_is_not_taken_for_an_empty_one() -> None:
    dispatcher = cast(DispatcherClient, Dispatcher())
    saved = ev.SplitSource(saved_chunks=ev.SavedChunks(path="/save"))
    feed = LeaseFeed(dispatcher, 1, [saved])
    with pytest.raises(ProtocolError, match=r"1 splits of source 0 .* 0 names"):
        feed.next_range(0, 0, endless=False)
    feed.close()


def test_leases_do_not_grow_while_processes_are_given_their_first_splits() -> None:
    """That is fast, and says nothing of how long splits take."""
    dispatcher = Dispatcher(1000)
    feed = LeaseFeed(cast(DispatcherClient, dispatcher), 1, [ev.SplitSource(count=1000)], 4)
    for _ in range(4):
        assert feed.next_range(0, 0, endless=False)
    feed.close()  # when the lease ahead was asked for
    assert set(dispatcher.wanted) == {1}


def test_a_draining_worker_hands_back_what_no_process_has_begun() -> None:
    """Of the lease that is being worked on as well."""
    dispatcher = Dispatcher(1000, least=160)
    feed = LeaseFeed(cast(DispatcherClient, dispatcher), 1, [ev.SplitSource(count=1000)], 2)
    given = [feed.next_range(0, 0, endless=False) for _ in range(3)]
    assert given == [SplitRange(first, 10, 0) for first in (0, 10, 20)]
    feed.drain(time.monotonic() + 60)
    assert dispatcher.returned == [(160, 130), (320, 160)]
    assert not dispatcher.begun  # as long as a process may not have come to it
    assert feed.next_range(0, 0, endless=False) is None
    assert dispatcher.begun == [KEPT]
    assert len(dispatcher.returned) == 2
    feed.close()


def test_a_worker_that_was_told_to_drain_when_all_it_was_given_is_begun_keeps_no_lease() -> None:
    dispatcher = Dispatcher(1000, least=160)
    feed = LeaseFeed(cast(DispatcherClient, dispatcher), 1, [ev.SplitSource(count=1000)], 2)
    feed.next_range(0, 0, endless=False)
    feed.pause()  # and what is to be handed back is not yet
    assert feed.next_range(0, 0, endless=False) is None
    feed.drain(time.monotonic() + 60)
    assert dispatcher.returned == [(160, 150), (320, 160)]
    assert not dispatcher.begun  # the dispatcher has them so
    feed.close()


def test_a_drain_does_not_overtake_the_lease_that_is_on_its_way() -> None:
    """Which would be refused then, and its splits lost."""
    asked, answered = threading.Event(), threading.Event()

    class Slow(Dispatcher):
        def call(self, request: pb.LeaseSplitsRequest, _: Any, **how: Any) -> Any:
            if request.want and self.wanted:
                asked.set()
                answered.wait()
            return super().call(request, _, **how)

    dispatcher = Slow(1000, least=160)
    feed = LeaseFeed(cast(DispatcherClient, dispatcher), 1, [ev.SplitSource(count=1000)], 2)
    feed.next_range(0, 0, endless=False)
    asked.wait()
    feed._leases[0].hand_back(0.01)
    assert dispatcher.returned == [(160, 150)]
    assert dispatcher.numbers == [1]
    answered.set()
    feed.pause()
    assert feed.next_range(0, 0, endless=False) is None
    assert dispatcher.returned == [(160, 150), (320, 160)]
    feed.close()


def test_a_drain_tells_what_was_dropped_until_it_is_heard() -> None:
    told: list[int] = []

    class Away(Dispatcher):
        def call(self, request: pb.LeaseSplitsRequest, _: Any, **how: Any) -> Any:
            told.append(request.dropped)
            if len(told) == 1:
                raise Unavailable("away")
            return super().call(request, _, **how)

    output = FirstComeOutput()
    reports = LeaseReports(output)
    feed = LeaseFeed(cast(DispatcherClient, Away()), 1, [ev.SplitSource(count=1)], reports=reports)
    output.put(Block(3, (Component(np.arange(3)),)))
    output.cancel()
    for _ in range(3):
        feed.drain(time.monotonic() + 60)
    assert told == [3, 3]
    feed.close()


@pytest.mark.parametrize("comes", ["a reader", "the end", "a drain", "a stop"])
def test_a_task_that_nobody_reads_leases_nothing(comes: str) -> None:
    dispatcher, output = Dispatcher(1), FirstComeOutput()
    feed = LeaseFeed(
        cast(DispatcherClient, dispatcher), 1, [ev.SplitSource(count=1)],
        when_opened=output.when_opened,
    )  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(feed.next_range, 0, 0, False)
        assert dispatcher.asked.wait(60)
        assert not waiting.done() and not dispatcher.wanted
        if comes == "a reader":
            output.open(ANY)
            assert waiting.result(60) == SplitRange(0, 1, 0)
        elif comes == "the end":
            dispatcher._next = 1  # others have it
            assert waiting.result(60) is None
            assert not dispatcher.wanted
        elif comes == "a drain":
            feed.drain(time.monotonic() + 60)
            assert waiting.result(60) is None
            assert not dispatcher.wanted  # only to hand it back
        else:
            feed.close(wait=False)
            assert isinstance(waiting.exception(60), Unavailable)
    feed.close()


def test_a_task_that_was_opened_before_its_feed_leases_at_once() -> None:
    dispatcher, output = Dispatcher(1), FirstComeOutput()
    output.open(ANY)
    feed = LeaseFeed(
        cast(DispatcherClient, dispatcher), 1, [ev.SplitSource(count=1)],
        when_opened=output.when_opened,
    )  # fmt: skip
    assert feed.next_range(0, 0, endless=False) == SplitRange(0, 1, 0)
    assert not dispatcher.asked.is_set()
    feed.close()


class Silent(Dispatcher):
    """Answers when it is told to."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.called, self.answers = threading.Event(), threading.Event()

    def call(self, *arguments: Any, **options: Any) -> pb.LeaseSplitsResponse:
        self.called.set()
        assert self.answers.wait(60)
        return super().call(*arguments, **options)


def test_a_drain_does_not_wait_for_what_an_unread_task_has_asked() -> None:
    dispatcher = Silent(1)
    feed = LeaseFeed(
        cast(DispatcherClient, dispatcher), 1, [ev.SplitSource(count=1)],
        when_opened=FirstComeOutput().when_opened,
    )  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(feed.next_range, 0, 0, False)
        assert dispatcher.called.wait(60)
        assert feed._leases[0]._lock.acquire(timeout=0.1), "it has to be had to hand back"
        feed._leases[0]._lock.release()
        feed.drain(time.monotonic() + 60)
        dispatcher.answers.set()
        assert waiting.result(60) is None
    assert not dispatcher.wanted
    feed.close()


def test_closing_without_waiting_leaves_a_silent_dispatcher_to_others() -> None:
    """A worker cancels its tasks one after the other."""
    dispatcher = Silent()
    feed = LeaseFeed(cast(DispatcherClient, dispatcher), 1, [ev.SplitSource(count=10)])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(feed.next_range, 0, 0, False)
        assert dispatcher.called.wait(60)
        feed.close(wait=False)
        assert not waiting.done()
        dispatcher.answers.set()
        assert isinstance(waiting.exception(60), Unavailable)
    feed.close()

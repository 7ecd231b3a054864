"""What an ordered read's consumer asks of workers that the test plays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.blocks import Block, Component
from forebay.service.client import bundle_lengths, ordered, portions, read_ahead, source_plan
from forebay.service.client.ordered import OrderedMode
from forebay.service.client.positions import OrderedRead
from forebay.service.client.slices import Request
from forebay.service.delivery import EndOfSlice, Slice
from forebay.service.delivery.read_requests import (
    MAX_INDEX,
    MAX_SLICE_RUNS,
    UNNEEDED,
    encode,
    runs_after,
)
from forebay.service.order import Deal, EpochOrder
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto import transfer_pb2
from forebay.service.transport.server import _MAX_HEADER_BYTES

TASK = 5


class Worker:
    """A client of a worker, and its link."""

    def __init__(self) -> None:
        self.asked: dict[int, Slice] = {}  # and neither ended nor stopped
        self.tasks: dict[int, int] = {}  # of which task
        self.reading: set[int] = set()
        self.client: Any = self

    def read(self, task_id: int, order: Slice, number: int) -> None:
        self.asked[number] = order
        self.tasks[number] = task_id

    def together(self) -> Any:
        return contextlib.nullcontext()

    def stop_task(self, task_id: int, number: int) -> None:
        self.asked.pop(number, None)

    def taken(self, block: Block) -> None:
        pass


def links_to(worker: Worker) -> Any:
    """In the place of a consumer's links."""
    return SimpleNamespace(
        get=lambda uid: worker, all=lambda: [(1, worker)], open=lambda task: worker,
        start=lambda: None, reachable=list,
    )  # fmt: skip


class Reading:
    """A consumer, and two tasks of a worker that has all bundles, of these lengths."""

    def __init__(self, lengths: Sequence[int], **options: Any) -> None:
        """With `are_known=True` the dispatcher says these lengths."""
        self.lengths = lengths
        known = lengths if options.pop("are_known", False) else ()
        self.worker = Worker()
        self.read = OrderedRead(**{"shuffle": False, "bundle_splits": 1} | options)
        order = ev.OrderSpec()
        order.CopyFrom(self.read.spec)
        order.bundles = len(lengths)
        joined = pb.JoinIterationResponse(order=order, lengths=known)
        self.mode = OrderedMode(self.read, links_to(self.worker), joined)
        tasks = [pb.TaskInfo(task_id=TASK + i, worker_uid=1 + i) for i in range(2)]
        news: Any = SimpleNamespace(tasks=tasks)
        self.mode.update(news)
        self.got: list[tuple[int, int]] = []
        self.most_bytes = 0  # that the consumer held

    @property
    def asked(self) -> list[tuple[int, Slice]]:
        return list(self.worker.asked.items())

    @property
    def slices(self) -> list[tuple[int, Slice]]:
        """Of elements."""
        return [(number, order) for number, order in self.asked if order.runs]

    @property
    def queries(self) -> list[tuple[int, Slice]]:
        return [(number, order) for number, order in self.asked if not order.runs]

    def take(self) -> None:
        while (taken := self.mode.take()) is not None:
            values: Any = taken[0].components[0].values
            self.got += [tuple(pair) for pair in values.reshape(-1, 2).tolist()]

    def answer(self, number: int, length: int, complete: bool = False) -> None:
        order = self.worker.asked.pop(number)
        self.mode.end(
            (self.worker.tasks[number], number), EndOfSlice(order.bundle, length, complete)
        )

    def answer_all(self) -> None:
        """All queries, with the whole length."""
        for number, order in self.queries:
            if number in self.worker.asked:
                self.answer(number, self.lengths[order.bundle], complete=True)

    def give(self, number: int, most: int = MAX_INDEX, size: int = 16) -> None:
        """A block of the slice, of up to so many elements of this size, and the slice's end behind
        its last one."""
        if number not in self.worker.asked:
            return  # withdrawn meanwhile
        order = self.worker.asked[number]
        first, count = order.runs[:2]
        count = min(count, most)
        rows = np.array([(order.bundle, first + i) for i in range(count)])
        padding = np.zeros((count, size - rows[0].nbytes), np.uint8)
        block = Block(count, (Component(rows), Component(padding)), order.bundle, first)
        runs = runs_after(order.runs, count)
        self.worker.asked[number] = replace(order, runs=runs)
        client: Any = self.worker
        self.mode.deliver(client, (self.worker.tasks[number], number), block)
        if not runs and number in self.worker.asked:
            self.answer(number, first + count)

    def give_all(self, size_of: Callable[[int], int] = lambda bundle: 16) -> None:
        """A block of each slice, of up to 4000 bytes of elements whose size the bundle says."""
        for number, order in self.slices:
            size = size_of(order.bundle)
            self.give(number, max(1, 4000 // size), size)
            self.most_bytes = max(self.most_bytes, self.held_bytes())

    def go_on(self, size_of: Callable[[int], int] = lambda bundle: 16) -> None:
        """To the end."""
        while not self.mode.has_ended():
            self.take()
            self.answer_all()
            self.take()
            self.give_all(size_of)
        self.take()

    def held_bytes(self) -> int:
        portions = self.mode._portions
        requests = (request for queue in portions._queues.values() for request in queue)
        blocks = [block for request in requests for block in request.blocks]
        return sum(block.payload_bytes for block in (*blocks, *(b for b, _ in portions._ready)))


def in_order(lengths: Sequence[int], **options: Any) -> list[tuple[int, int]]:
    places, indexes = (order := EpochOrder(len(lengths), lengths=lengths, **options)).elements(
        0, order.known_until
    )
    return list(zip(places.tolist(), indexes.tolist(), strict=True))


def test_a_query_that_is_outstanding_is_not_asked_again_once_a_later_one_was_answered() -> None:
    asked: list[Any] = []
    any_read: Any = None
    lengths = bundle_lengths.BundleLengths(any_read, asked.append)
    epoch: Any = SimpleNamespace(order=SimpleNamespace(knows=lambda place: False))
    lengths.begin(epoch)
    lengths.query_ahead(4)
    lengths.query(4, until=2)
    lengths.answered(asked[1])
    lengths.query_ahead(4)
    assert len(asked) == 2
    lengths.query(4, until=2)
    assert len(asked) == 3


def test_a_trainer_that_waits_is_given_what_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "CUT_S", 0.0)
    reading = Reading([9] * 4, cycle_length=4, are_known=True)
    reading.take()
    for number, order in reading.slices:
        if order.bundle != 2:
            reading.give(number)
    reading.take()
    assert reading.got == [(0, 0), (1, 0)]


def test_the_window_grows_with_what_the_trainer_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small elements would fit into a window of millions, which workers would make first; once it
    is large it grows slowly. Workers make no more elements for a query than the next plan needs."""
    for early_bytes, share in ((1 << 40, 8.0), (1 << 10, 0.25)):
        monkeypatch.setattr(read_ahead, "EARLY_BYTES", early_bytes)
        reading = Reading([1 << 20], cycle_length=1)
        while len(reading.got) < 5_000:
            reading.take()
            given = len(reading.got)
            most = 2 * read_ahead.FIRST_WINDOW + 64 + share * given
            for number, query in reading.queries:
                assert query.until <= given + most and query.enough <= given + 2 * most
                reading.answer(number, max(query.until, query.enough))
            reading.take()
            for number, order in reading.slices:
                assert order.stop <= given + most
                reading.give(number)


def test_lengths_go_with_a_heartbeat_that_is_repeated_until_it_is_answered() -> None:
    """An urgent report may fail, and is not repeated: the dispatcher would never hear of them."""
    reading = Reading([5], cycle_length=1)
    reading.take()
    reading.answer_all()
    said = []
    for wait_ms in (0, 5000, 5000):
        request = pb.ConsumerHeartbeatRequest(wait_ms=wait_ms)
        reading.mode.report(request)
        said.append([*request.lengths])
    assert said == [[], [5], []]


def test_a_group_agrees_on_the_first_element_of_a_bundle() -> None:
    """Else each of its consumers has the bundle run for itself, from its own first element. Nothing
    is counted any more once the start is found."""
    for index in range(3):
        group = {"consumer_index": index, "num_consumers": 3, "batch_size": 4}
        reading = Reading([100], cycle_length=1, start_position=24, **group)
        reading.take()
        ((_, count),) = reading.queries
        assert count.known == count.until == count.keep == MAX_INDEX
        reading.answer_all()
        reading.take()
        assert not any(order.known == MAX_INDEX for _, order in reading.asked)
        _, order = reading.slices[0]
        assert (order.runs[0], order.keep) == (24 + 4 * index, 24)


def test_bundles_that_nobody_reads_yet_are_asked_about_behind_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_ahead, "WINDOW_BYTES", 1 << 10)  # it is not young for long
    reading = Reading([100] * 40, cycle_length=2)
    while len(reading.got) <= 100:
        reading.take()
        for number, query in reading.queries:
            if query.bundle < 2:
                reading.answer(number, min(100, query.until + 50))
        reading.give_all()
    ahead = {order.bundle for _, order in reading.asked if order.position == UNNEEDED}
    assert ahead == set(range(2, 2 + source_plan.AHEAD))
    reading.go_on()
    assert reading.got == in_order([100] * 40, cycle_length=2, block_length=1)


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> int:
    """A small window's bytes."""
    monkeypatch.setattr(read_ahead, "WINDOW_BYTES", 256 << 10)
    monkeypatch.setattr(portions, "PORTION_BYTES", 4 << 10)
    monkeypatch.setattr(portions, "RECENT_BYTES", 32 << 10)
    return read_ahead.WINDOW_BYTES


@pytest.mark.parametrize(("cycle_length", "block_length"), [(1, 1), (4, 7), (3, 5000)])
@pytest.mark.parametrize("consumers", [1, 3])
def test_elements_that_become_much_larger(
    window: int, cycle_length: int, block_length: int, consumers: int
) -> None:
    """As many as were small would not fit into memory."""
    lengths = [6000] * 4 + [100] * 20
    interleave = {"cycle_length": cycle_length, "block_length": block_length}
    reading = Reading(
        lengths, **interleave, consumer_index=0, num_consumers=consumers, batch_size=5
    )
    reading.go_on(lambda bundle: 16 if bundle < 4 else 16_000)
    whole = in_order(lengths, **interleave)
    assert reading.got == [at for n, at in enumerate(whole) if n // 5 % consumers == 0]
    assert reading.most_bytes < 6 * window
    assert not reading.worker.asked


def test_a_large_round_is_asked_for_in_parts(window: int) -> None:
    """While lengths are unknown, workers make all of a round, to know the next one."""
    reading = Reading([2000] * 2, cycle_length=2, block_length=1000)
    while not reading.mode.has_ended():
        reading.take()
        for number, query in reading.queries:
            reading.answer(number, min(query.until, 2000), complete=query.until > 2000)
        reading.give_all(lambda bundle: 2000)
        assert reading.mode._portions.elements <= 2 * window // 2000 + 2 * read_ahead.FIRST_WINDOW
    assert reading.most_bytes < 2 * window


def test_many_bundles_at_a_time_are_asked_for_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker refuses a connection of more subscriptions than it takes."""
    lengths = [2] * 20_000
    reading = Reading(lengths, cycle_length=20_000)
    most = answers = 0
    while not reading.mode.has_ended():
        reading.take()
        most = max(most, len(reading.asked))
        for number, query in reading.queries:
            answers += 1
            is_end = query.known >= query.until or query.known == 2
            reading.answer(number, 2 if is_end else query.until, complete=is_end)
        for number, _ in reading.slices:
            reading.give(number)
    reading.take()
    assert reading.got == in_order(lengths, cycle_length=20_000, block_length=1)
    assert most <= 2 * source_plan.MAX_REQUESTS + bundle_lengths.MAX_QUERIES
    assert answers <= 4 * len(lengths), "each answer leads to another query"


def test_the_longest_slice_fits_into_a_message() -> None:
    far = MAX_INDEX - 3 * MAX_SLICE_RUNS
    runs = tuple(n for i in range(MAX_SLICE_RUNS) for n in (far + 2 * i, 1))
    far_ones = dict.fromkeys(("until", "known", "keep", "floor"), MAX_INDEX)
    order = Slice(MAX_INDEX, MAX_INDEX, runs, **far_ones, alone=True)
    assert encode(order, transfer_pb2.Read()).ByteSize() < _MAX_HEADER_BYTES - 1000


def test_who_waits_is_given_whole_batches() -> None:
    """A part of a batch would be copied once more, with the rest of it."""
    found = portions.Portions()
    found.count(Block(1, (Component(np.zeros((1, 1))),)))  # elements are small
    found.plan(np.array([0, 1] * 6), np.arange(12), Deal(0, 4, 1, 0))
    for place in (0, 1):
        found.expect(Request(place, (0, 6)))
    for place, count in ((0, 6), (1, 4)):
        (request,) = found._queues[place]
        request.blocks.append(Block(count, (Component(np.arange(count)[:, np.newaxis]),)))
    assert found.take(MAX_INDEX) is None
    found.cut()
    taken = found.take(MAX_INDEX)
    assert taken is not None and taken[0].count == 8
    found.cut()
    assert found.take(MAX_INDEX) is None

"""What an ordered read's consumer asks of workers that the test plays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.journal.proto import events_pb2 as ev
from forebay.service.blocks import Block, Component
from forebay.service.client import bundle_lengths, ordered, portions, read_ahead
from forebay.service.client.ordered import OrderedMode
from forebay.service.client.positions import OrderedRead
from forebay.service.client.slices import Request
from forebay.service.delivery import EndOfSlice, Slice
from forebay.service.delivery.orders import (
    MAX_INDEX,
    MAX_SLICE_RUNS,
    UNNEEDED,
    encode,
    runs_after,
)
from forebay.service.order import EpochOrder
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


class Reading:
    """A consumer, and the worker that has all bundles, of these lengths."""

    def __init__(self, lengths: Sequence[int], **options: Any) -> None:
        """With `are_known=True` the dispatcher says these lengths."""
        self.lengths = lengths
        known = lengths if options.pop("are_known", False) else ()
        self.worker = Worker()
        parameters = {"shuffle": False, "bundle_splits": 1} | options
        self.read = read = parameters.pop("read", None) or OrderedRead(**parameters)
        order = ev.OrderSpec()
        order.CopyFrom(read.spec)
        order.bundles = len(lengths)
        links: Any = SimpleNamespace(
            get=lambda uid: self.worker, all=lambda: [(1, self.worker)],
            open=lambda task: self.worker, start=lambda: None, reachable=list,
        )  # fmt: skip
        joined = pb.JoinIterationResponse(order=order, lengths=known)
        self.mode = OrderedMode(read, links, joined)
        news: Any = SimpleNamespace(tasks=[pb.TaskInfo(task_id=TASK, worker_uid=1)])
        self.mode.update(news)
        self.got: list[tuple[int, int]] = []
        self.most_bytes = 0  # that the consumer held

    def take(self) -> None:
        while (taken := self.mode.take()) is not None:
            values: Any = taken[0].components[0].values
            self.got += [tuple(pair) for pair in values.reshape(-1, 2).tolist()]

    def queries(self, place: int = 0) -> list[Slice]:
        return [s for s in self.worker.asked.values() if s.bundle == place and not s.runs]

    def answer(self, query: Slice, length: int, complete: bool = False) -> None:
        (number,) = [n for n, each in self.worker.asked.items() if each is query]
        del self.worker.asked[number]
        self.mode.end((TASK, number), EndOfSlice(query.bundle, length, complete))

    def give_blocks(self, sizes: Callable[[int], int]) -> None:
        """Give of each slice that was asked for one block of up to 4000 bytes, or an element.
        `sizes` says by bundle how large elements are."""
        for number, order in [(n, order) for n, order in self.worker.asked.items() if order.runs]:
            if number not in self.worker.asked:
                continue  # withdrawn meanwhile
            first, count = order.runs[:2]
            size = sizes(order.bundle)
            count = min(count, max(1, 4000 // size))
            rows = np.array([(order.bundle, first + i) for i in range(count)])
            padding = np.zeros((count, size - rows[0].nbytes), np.uint8)
            block = Block(count, (Component(rows), Component(padding)), order.bundle, first)
            runs = runs_after(order.runs, count)
            self.worker.asked[number] = replace(order, runs=runs)
            client: Any = self.worker
            self.mode.deliver(client, (TASK, number), block)
            if not runs and number in self.worker.asked:
                self.answer(self.worker.asked[number], first + count)
            self.most_bytes = max(self.most_bytes, self.held_bytes())

    def held_bytes(self) -> int:
        portions = self.mode._portions
        requests = (request for queue in portions._queues.values() for request in queue)
        blocks = [block for request in requests for block in request.blocks]
        return sum(block.payload_bytes for block in (*blocks, *(b for b, _ in portions._ready)))

    def give(self, most: int | None = None) -> None:
        """Give what was asked for of elements, of so many slices at most."""
        slices = [(n, order) for n, order in self.worker.asked.items() if order.runs][:most]
        for number, order in slices:
            client: Any = self.worker
            for first, count in zip(order.runs[::2], order.runs[1::2], strict=True):
                rows = np.array([(order.bundle, first + i) for i in range(count)])
                block = Block(count, (Component(rows),), order.bundle, first)
                self.mode.deliver(client, (TASK, number), block)
            del self.worker.asked[number]
            self.mode.end((TASK, number), EndOfSlice(order.bundle, order.stop, False))

    def go_on(self, most: int = 1000) -> None:
        """To the end, or so many rounds of answers."""
        for _ in range(most):
            if self.mode.has_ended():
                return
            self.take()
            for place, length in enumerate(self.lengths):
                for query in self.queries(place):
                    self.answer(query, length, complete=True)
            self.give()


@pytest.mark.parametrize("others", [0, 1])
def test_all_is_asked_for_and_given_in_order(others: int) -> None:
    """Also by an iteration beside another one of the same dataset, which learns the lengths."""
    lengths = [5, 0, 7] * 20
    reading = Reading(lengths, cycle_length=2)
    reading.go_on(most=2)
    for _ in range(others):
        Reading(lengths, read=reading.read.copy()).go_on()
    reading.go_on()
    assert reading.mode.has_ended() and not reading.worker.asked
    assert sorted(reading.got) == [(b, i) for b, n in enumerate(reading.lengths) for i in range(n)]


def test_a_query_asks_for_what_the_next_plan_needs() -> None:
    """And it is asked only if that is more than is known."""
    reading = Reading([1 << 20], cycle_length=1)
    reading.take()
    (first,) = reading.queries()
    assert (first.known, first.until) == (0, 1)
    reading.answer(first, 20_000)
    reading.take()
    assert not reading.queries(), "few are asked for at first"
    while len(reading.got) < 20_000:
        assert any(s.runs for s in reading.worker.asked.values())
        reading.give()
        reading.take()
    queries = reading.queries()
    assert max(query.until for query in queries) == 20_001, "workers must make no more"
    assert 20_000 < max(query.enough for query in queries) <= 20_000 + 2 * len(reading.got)
    for query in queries:
        reading.answer(query, 20_010)
    reading.take()
    assert {query.known for query in reading.queries()} == {20_010}


def test_first_blocks_that_are_smaller_than_a_round_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of a bundle that was opened ahead, and whose first block comes once it is read."""
    monkeypatch.setattr(read_ahead, "WINDOW_BYTES", 1 << 10)
    reading = Reading([64] * 6, cycle_length=1, block_length=16)
    for _ in range(500):
        reading.take()
        queries = [s for s in reading.worker.asked.values() if not s.runs]
        first = min((query.bundle for query in queries), default=0)
        for query in reading.queries(first):
            length = min(64, query.known + 8)
            reading.answer(query, length, complete=length == 64)
        reading.give()
    assert reading.got == [(bundle, i) for bundle in range(6) for i in range(64)]
    assert reading.mode.has_ended()


def test_slices_are_asked_for_again_before_all_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where their number is bounded."""
    monkeypatch.setattr(ordered, "MAX_REQUESTS", 50)
    reading = Reading([4] * 400, are_known=True, cycle_length=400)
    while len(reading.got) < 1500:
        reading.take()
        slices = [(n, order) for n, order in reading.worker.asked.items() if order.runs]
        assert len(reading.got) < 100 or len(slices) >= 20
        reading.give(most=1)


def test_a_bundle_is_asked_about_twice_at_a_time_at_most() -> None:
    """Also if nobody answers, and slices bring the news: workers had thousands of queries a second
    from each consumer of a group."""
    reading = Reading([1 << 20] * 4, cycle_length=4)
    reading.take()
    for place in range(4):
        (query,) = reading.queries(place)
        reading.answer(query, 4)
    for _ in range(20):
        reading.take()
        assert all(len(reading.queries(place)) <= 2 for place in range(4))
        for number, order in [(n, s) for n, s in reading.worker.asked.items() if s.runs]:
            client: Any = reading.worker
            rows = np.array([(order.bundle, i) for i in range(order.runs[0], order.stop)])
            block = Block(len(rows), (Component(rows),), order.bundle, order.runs[0])
            reading.mode.deliver(client, (TASK, number), block)
            reading.answer(order, order.stop + 3)
    assert len(reading.got) >= 4 * 40


def test_who_has_enough_asks_no_worker_for_lengths() -> None:
    """Each answer would lead to another question, thousands in a second."""
    reading = Reading([1 << 24] * 4, cycle_length=4)
    reading.take()
    for place in range(4):
        (query,) = reading.queries(place)
        reading.answer(query, 1 << 23)
    for _ in range(10):
        reading.give()
        reading.take()
    assert len(reading.got) > 10_000
    assert not any(reading.queries(place) for place in range(4))


def test_lengths_go_with_a_heartbeat_that_is_repeated_until_it_is_answered() -> None:
    """An urgent report may fail, and is not repeated: the dispatcher would never hear of them."""
    reading = Reading([5], cycle_length=1)
    reading.take()
    (query,) = reading.queries()
    reading.answer(query, 5, complete=True)
    said = []
    for wait_ms in (0, 5000, 5000):
        request = pb.ConsumerHeartbeatRequest(wait_ms=wait_ms)
        reading.mode.report(request)
        said.append([*request.lengths])
    assert said == [[], [5], []]


def test_bundles_before_the_start_are_counted_until_it_is_found() -> None:
    reading = Reading([10] * 40, cycle_length=2, start_position=25)
    reading.take()
    assert all(s.known == s.until == s.keep == MAX_INDEX for s in reading.worker.asked.values())
    for place in (0, 1):
        (query,) = reading.queries(place)
        reading.answer(query, 10, complete=True)
    reading.take()
    for place in (2, 3):
        (query,) = reading.queries(place)
        reading.answer(query, 10, complete=True)
    reading.take()
    asked = reading.worker.asked.values()
    assert asked and not any(s.known == MAX_INDEX for s in asked), "nothing is counted any more"
    reading.give()
    reading.take()
    assert reading.got[0] == (3, 2)


def test_a_group_agrees_on_the_first_element_of_a_bundle() -> None:
    """Else each of its consumers has the bundle run for itself, from its own first element."""
    for index in range(3):
        group = {"consumer_index": index, "num_consumers": 3, "batch_size": 4}
        reading = Reading([100], cycle_length=1, start_position=24, **group)
        reading.take()
        (count,) = reading.queries()
        reading.answer(count, 100, complete=True)
        reading.take()
        order = next(s for s in reading.worker.asked.values() if s.runs)
        assert (order.runs[0], order.keep) == (24 + 4 * index, 24)


def test_the_window_grows_with_what_the_trainer_was_given() -> None:
    """Small elements would fit into a window of millions, which workers would make first."""
    reading = Reading([1 << 20], cycle_length=1)
    asked = 0
    for _ in range(8):
        reading.take()
        for query in reading.queries():
            reading.answer(query, 1 << 20, complete=True)
        reading.take()
        most = max(s.stop for s in reading.worker.asked.values() if s.runs)
        assert asked < most <= 2 * read_ahead.FIRST_WINDOW + 8 * len(reading.got)
        asked = most
        reading.give()
    assert asked > 1_000


def test_the_window_grows_slowly_once_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers make what it grows by, while the trainer waits for what comes first."""
    monkeypatch.setattr(read_ahead, "EARLY_BYTES", 1 << 10)  # 64 elements
    reading = Reading([1 << 20], cycle_length=1)
    for _ in range(30):
        reading.take()
        for query in reading.queries():
            reading.answer(query, 1 << 20, complete=True)
        reading.take()
        most = max((s.stop for s in reading.worker.asked.values() if s.runs), default=0)
        given = len(reading.got)
        assert most <= given + max(2 * read_ahead.FIRST_WINDOW, given // 4) + 64
        reading.give()
    assert len(reading.got) > 2_000


def test_bundles_that_nobody_reads_yet_are_asked_about_behind_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_ahead, "WINDOW_BYTES", 1 << 10)  # it is not young for long
    reading = Reading([100] * 40, cycle_length=2)
    for _ in range(100):
        reading.take()
        if len(reading.got) > 100:
            break
        for place in (0, 1):
            for query in reading.queries(place):
                reading.answer(query, min(100, query.until + 50))
        reading.give()
    else:
        pytest.fail("it did not go on")
    ahead = {s.bundle for s in reading.worker.asked.values() if s.position == UNNEEDED}
    assert ahead == set(range(2, 2 + ordered.AHEAD))
    reading.give()  # so that it waits for queries only: none asked ahead makes a worker silent
    held: list[Request] = []
    with monkeypatch.context() as patch:
        patch.setattr(reading.mode._slices, "ask_again", lambda find: held.extend(find()))
        reading.mode.ask_again()
    assert {request.place for request in held} <= {0, 1}
    for query in [*reading.queries(0), *reading.queries(1)]:
        reading.answer(query, 100, complete=True)
    reading.take()
    for place in (2, 3):  # they are read next
        (needed,) = [q for q in reading.queries(place) if q.position < UNNEEDED]
        reading.answer(needed, 60)
    for _ in range(20):
        reading.give()
        reading.take()
    assert len(reading.got) > 200


def test_a_worker_that_refuses_connections_is_asked_nothing_if_there_is_another() -> None:
    reading = Reading([30] * 4, cycle_length=4, are_known=True)
    tasks = [pb.TaskInfo(task_id=TASK + i, worker_uid=1 + i) for i in range(2)]
    news: Any = SimpleNamespace(tasks=tasks)
    reading.mode.update(news)
    worker: Any = reading.worker

    def asked() -> set[int]:
        return {worker.tasks[number] for number in worker.asked}

    reading.take()
    assert asked() == {TASK, TASK + 1}
    reading.mode.refused(2)
    assert asked() == {TASK}
    while not reading.mode.has_ended():
        for number, order in list(worker.asked.items()):
            first, count = order.runs[:2]
            rows = np.array([(order.bundle, first + i) for i in range(count)])
            block = Block(count, (Component(rows),), order.bundle, first)
            reading.mode.deliver(worker, (TASK, number), block)
            reading.answer(worker.asked[number], 30, complete=True)
        reading.take()
    assert asked() == set()
    assert reading.got == [(bundle, index) for index in range(30) for bundle in range(4)]


def test_outstanding_slices_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "MAX_REQUESTS", 50)
    reading = Reading([400] * 20, cycle_length=20)
    most = 0
    while not reading.mode.has_ended():
        reading.take()
        most = max(most, len(reading.worker.asked))
        for place, length in enumerate(reading.lengths):
            for query in reading.queries(place):
                reading.answer(query, length, complete=True)
        reading.give()
    reading.take()
    assert len(reading.got) == 20 * 400 and most <= 50 + 2 * 20


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> int:
    """A small window's bytes."""
    monkeypatch.setattr(read_ahead, "WINDOW_BYTES", 256 << 10)
    monkeypatch.setattr(portions, "PORTION_BYTES", 4 << 10)
    monkeypatch.setattr(portions, "RECENT_BYTES", 32 << 10)
    return read_ahead.WINDOW_BYTES


def in_order(lengths: Sequence[int], **options: Any) -> list[tuple[int, int]]:
    places, indexes = (order := EpochOrder(len(lengths), lengths=lengths, **options)).elements(
        0, order.known_until
    )
    return list(zip(places.tolist(), indexes.tolist(), strict=True))


@pytest.mark.parametrize(
    ("cycle_length", "block_length", "consumers"),
    [(1, 1, 1), (4, 1, 1), (4, 7, 1), (3, 5000, 1), (1, 1, 3), (4, 7, 3), (3, 5000, 3)],
)
def test_elements_that_become_much_larger(
    window: int, cycle_length: int, block_length: int, consumers: int
) -> None:
    """As many as were small would not fit into memory."""
    lengths = [6000] * 4 + [100] * 20
    interleave = {"cycle_length": cycle_length, "block_length": block_length}
    whole = in_order(lengths, **interleave)
    batch_size = 5
    for index in range(consumers):
        group = (
            {"consumer_index": index, "num_consumers": consumers, "batch_size": batch_size}
            if consumers > 1
            else {}
        )
        reading = Reading(lengths, **interleave, **group)
        while not reading.mode.has_ended():
            reading.take()
            for place, length in enumerate(lengths):
                for query in reading.queries(place):
                    reading.answer(query, length, complete=True)
            reading.take()
            reading.give_blocks(lambda bundle: 16 if bundle < 4 else 16_000)
        reading.take()
        mine = [
            pair
            for position, pair in enumerate(whole)
            if position // batch_size % consumers == index
        ]
        assert reading.got == mine
        assert reading.most_bytes < 6 * window
        assert not reading.worker.asked


def test_a_round_that_is_larger_than_the_window_is_asked_for_in_parts(window: int) -> None:
    reading = Reading([10_000] * 4, cycle_length=4, block_length=10_000)
    while not reading.mode.has_ended():
        reading.take()
        for place in range(4):
            for query in reading.queries(place):
                reading.answer(query, 10_000, complete=True)
        reading.give_blocks(lambda bundle: 1000)
        assert reading.mode._portions.elements <= 2 * window // 1000
    assert reading.got == in_order([10_000] * 4, cycle_length=4, block_length=10_000)
    assert reading.most_bytes < 2 * window


def test_a_large_round_is_warned_of_once(
    window: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While lengths are unknown: workers make all of it, to know the next one."""
    monkeypatch.setattr(ordered, "LARGE_ROUND_BYTES", 3 << 20)
    reading = Reading([2000] * 2, cycle_length=2, block_length=1000)
    while not reading.mode.has_ended():
        reading.take()
        for place in range(2):
            for query in reading.queries(place):
                reading.answer(query, min(query.until, 2000), complete=query.until > 2000)
        reading.give_blocks(lambda bundle: 2000)
    (said,) = caplog.messages
    assert "block_length=1000" in said and "2000 elements, about 3 MB" in said


def test_many_bundles_at_a_time_are_asked_for_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker refuses a connection of more subscriptions than it takes."""
    lengths = [2] * 20_000
    reading = Reading(lengths, cycle_length=20_000)
    most = answers = 0
    while not reading.mode.has_ended():
        reading.take()
        asked = [*reading.worker.asked.values()]
        most = max(most, len(asked))
        queries = [query for query in asked if not query.runs]
        answers += len(queries)
        for number, order in [*reading.worker.asked.items()]:
            if not order.runs:
                del reading.worker.asked[number]
                at_least = order.until  # no more is made than must be
                end = EndOfSlice(order.bundle, at_least, False)
                if order.known >= at_least or order.known == 2:
                    end = EndOfSlice(order.bundle, 2, True)
                reading.mode.end((TASK, number), end)
        reading.give()
    reading.take()
    assert reading.got == in_order(lengths, cycle_length=20_000, block_length=1)
    assert most <= 2 * ordered.MAX_REQUESTS + bundle_lengths.MAX_QUERIES
    assert answers <= 4 * len(lengths), "each answer leads to another query"


def test_a_slice_of_single_elements_fits_into_a_message() -> None:
    elements = 30_000
    reading = Reading([2 * elements], cycle_length=1, consumer_index=0, num_consumers=2)
    sizes = []
    while not reading.mode.has_ended():
        reading.take()
        for query in reading.queries():
            reading.answer(query, 2 * elements, complete=True)
        sizes += [encode(s, transfer_pb2.Read()).ByteSize() for s in reading.worker.asked.values()]
        assert all(len(s.runs) <= 2 * MAX_SLICE_RUNS for s in reading.worker.asked.values())
        reading.give()
    reading.take()
    assert reading.got == [(0, i) for i in range(0, 2 * elements, 2)]
    assert max(sizes) < _MAX_HEADER_BYTES - 1000


def test_the_longest_slice_fits_into_a_message() -> None:
    far = MAX_INDEX - 3 * MAX_SLICE_RUNS
    runs = tuple(n for i in range(MAX_SLICE_RUNS) for n in (far + 2 * i, 1))
    far_ones = dict.fromkeys(("until", "known", "keep", "floor"), MAX_INDEX)
    order = Slice(MAX_INDEX, MAX_INDEX, runs, **far_ones, alone=True)
    assert encode(order, transfer_pb2.Read()).ByteSize() < _MAX_HEADER_BYTES - 1000


@given(st.sets(st.integers(0, 60), min_size=1).map(sorted), st.integers(1, 5))
def test_the_runs_of_a_slice_are_bounded(indexes: list[int], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered, "MAX_SLICE_RUNS", most)
        array = np.array(indexes)
        parts = ordered._parts(array, np.arange(len(indexes)))
    assert np.concatenate(parts).tolist() == [*range(len(indexes))]
    runs = [len(ordered._runs(array[part])) // 2 for part in parts]
    assert max(runs) <= most and all(count == most for count in runs[:-1])

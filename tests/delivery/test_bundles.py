"""Bundles, given a run and slices of it: what is made, given, kept, dropped and made again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forebay.service.block_limits import cost
from forebay.service.blocks import Block, Component, Strings
from forebay.service.delivery import (
    ANY,
    BundleRun,
    BundlesOutput,
    End,
    EndOfSlice,
    EndPending,
    MemoryBudget,
    OutputCancelled,
    Slice,
    Subscription,
    TaskFailed,
    TaskUnknown,
    bundles,
    run_queue,
)
from forebay.service.delivery.read_requests import (
    MAX_INDEX,
    MAX_SLICE_RUNS,
    UNNEEDED,
    decode,
    encode,
)
from forebay.service.errors import ProtocolError
from forebay.service.proto import transfer_pb2 as pb

from .contract import TIMEOUT_S, Reader, block

SIZE = cost(block(0, 10))
FAR = MAX_INDEX
COUNT = Slice(1, until=FAR, known=FAR, keep=FAR)
TORN = TaskFailed("DATA_LOSS", "torn")


def begun(output: BundlesOutput, most: int = 100) -> BundleRun:
    run = output.next_run(most, 0)
    assert run is not None
    return run


def idle(output: BundlesOutput, most: int = 100) -> bool:
    return output.next_run(most, 0) is None


def make(run: BundleRun, stop: int, size: int = 10) -> BundleRun:
    """Put elements up to `stop`, in blocks to the next multiple of `size`."""
    while run.stop < stop:
        count = min(stop, run.stop - run.stop % size + size) - run.stop
        run.put(block(run.stop, count, run.number))
    return run


def read(reader: Reader) -> list[int] | End | EndPending | None:
    """What there is for it: elements, or the end."""
    got = len(reader.got)
    while isinstance(item := reader.next(), Block):
        pass
    return reader.got[got:] or item


def made(length: int, *readers: Slice, output: BundlesOutput | None = None) -> BundlesOutput:
    """An output that has run a bundle of `length` elements, for these slices, now closed."""
    output = output or BundlesOutput()
    asking = [Reader(output, request) for request in readers]
    make(begun(output), length).finish()
    for reader in asking:
        reader.close()
    return output


LONG_S = 2 * TIMEOUT_S
"""Who is not woken looks again after this: too late."""

TO_CANCEL: list[BundlesOutput] = []
WAITING: list[Waiting] = []


class Waiting:
    """A producer in a thread of its own that waits in `put`, until the test ends."""

    def __init__(self, pool: ThreadPoolExecutor, run: BundleRun, stop: int) -> None:
        TO_CANCEL.append(run._output)
        WAITING.append(self)
        self.done = pool.submit(make, run, stop)
        while not run.waits:
            assert not self.done.done()
            threading.Event().wait(0.001)


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(4) as threads:
        yield threads
        while TO_CANCEL:
            TO_CANCEL.pop().cancel()
        while WAITING:
            assert isinstance(WAITING.pop().done.exception(TIMEOUT_S), OutputCancelled | None)


# -- slices and runs ---------------------------------------------------------------------------


def test_a_slice_is_given_what_it_asked_for_and_what_the_bundle_is_known_to_have() -> None:
    output = BundlesOutput()
    reader = Reader(output, Slice(1, runs=(3, 2, 8, 4, 25, 1), until=30, keep=3))
    assert read(reader) is None
    run = begun(output)
    assert (run.number, run.start) == (1, 3)
    make(run, 28)
    assert read(reader) == [3, 4, 8, 9, 10, 11, 25]
    assert read(reader) == EndOfSlice(1, 28, False)
    make(run, 30).finish()
    assert reader.next() == EndOfSlice(1, 28, False), "an end stays as it is"
    late = Reader(output, Slice(1, runs=(29, 5), until=30))
    assert read(late) == [29]
    assert read(late) == EndOfSlice(1, 30, True)


def test_of_several_runs_a_slice_joins_the_one_that_has_come_farthest() -> None:
    output = BundlesOutput()
    Reader(output, Slice(1, runs=(10, 10), until=40, keep=10))
    farther = make(begun(output), 40)
    Reader(output, Slice(1, runs=(0, 10), until=10))
    assert begun(output).start == 0
    assert read(Reader(output, Slice(1, runs=(30, 2)))) == [30, 31]
    assert farther.stop == 40 and idle(output)


def test_bundles_run_in_the_order_in_which_elements_are_needed_a_few_at_a_time() -> None:
    output = BundlesOutput()
    for bundle, position in [(1, 7), (2, 50), (3, 9), (4, 6)]:
        Reader(output, Slice(bundle, bundle, (0, 5), until=5, position=position))
    Reader(output, Slice(2, 2, (3, 1), until=5, position=5))  # earlier than the run's first slice
    runs = [begun(output, 2), begun(output, 2)]
    assert [run.number for run in runs] == [2, 4]
    assert idle(output, 2)
    runs[1].finish()
    assert begun(output, 2).number == 1
    runs[0].fail("DATA_LOSS", "torn")
    assert begun(output, 2).number == 3


def needed(output: BundlesOutput, bundle: int) -> None:
    """A reader needs elements of the bundle."""
    Reader(output, Slice(bundle, bundle, (0, 5), until=5, position=50))


def test_bundles_that_nobody_needs_yet_are_opened_one_at_a_time() -> None:
    output = BundlesOutput()
    for bundle in (1, 2, 3):
        Reader(output, Slice(bundle, bundle, position=UNNEEDED))
    for bundle in (4, 5, 6):
        needed(output, bundle)
    runs = [begun(output, 2), begun(output, 2)]
    assert [run.number for run in runs] == [4, 5] and idle(output, 2), "they come first"
    runs[0].finish()
    assert begun(output, 2).number == 6, "needed, too"
    opened = begun(output, 2)
    assert opened.number == 1 and idle(output, 2)
    runs[1].finish()
    needed(output, 7)
    assert begun(output, 2).number == 7, "whatever is opened meanwhile"
    opened.finish()
    assert begun(output, 2).number == 2 and idle(output, 2)


Happens = Callable[[BundlesOutput, ThreadPoolExecutor], Callable[[], object]]


def late_slice(output: BundlesOutput, _: ThreadPoolExecutor) -> Callable[[], object]:
    return lambda: needed(output, 4)


def becomes_needed(output: BundlesOutput, _: ThreadPoolExecutor) -> Callable[[], object]:
    """Another bundle is opened once the one before is needed."""
    for bundle in (1, 4):
        Reader(output, Slice(bundle, bundle, position=UNNEEDED))
    assert begun(output, 2).number == 1
    return lambda: needed(output, 1)


def is_left(output: BundlesOutput, _: ThreadPoolExecutor) -> Callable[[], object]:
    """None is needed any more, so one that nobody needs yet is opened."""
    for bundle in (1, 2):
        needed(output, bundle)
        begun(output, 2)
    left = Reader(output, Slice(3, 3, (0, 5), until=5, position=60))
    Reader(output, Slice(4, 4, position=UNNEEDED))
    return left.close


def waits_for_readers(output: BundlesOutput, pool: ThreadPoolExecutor) -> Callable[[], object]:
    for bundle in (1, 2, 4):
        Reader(output, Slice(bundle, bundle, (0, 10), until=10))
    runs = [begun(output, 2), begun(output, 2)]
    TO_CANCEL.append(output)
    return lambda: pool.submit(make, runs[0], 100_000)


@pytest.mark.parametrize("happens", [late_slice, becomes_needed, is_left, waits_for_readers])
def test_what_wakes_the_thread_that_begins_runs(pool: ThreadPoolExecutor, happens: Happens) -> None:
    output = BundlesOutput(max_bytes=SIZE)
    happen = happens(output, pool)
    asking = pool.submit(output.next_run, 2, LONG_S)
    while not output.queue._changed._waiters:  # type: ignore[attr-defined]
        threading.Event().wait(0.001)
    happen()
    run = asking.result(TIMEOUT_S)
    assert run is not None and run.number == 4


def test_blocks_follow_one_another() -> None:
    output = BundlesOutput()
    Reader(output, Slice(1, runs=(5, 20), keep=5))
    run = begun(output)
    for wrong in (block(0, 5, 1), block(5, 5, 2), block(5, 5)):
        with pytest.raises(ValueError, match="where those from 5 on of bundle 1 come next"):
            run.put(wrong)
    with pytest.raises(TypeError, match="object cannot travel"):
        run.put(Block(1, (Component(np.array([None], object)),), 1, 5))
    with pytest.raises(TypeError, match="put to a run"):
        output.put(block(5, 5, 1))
    assert run.stop == 5 and not output.held_bytes


# -- backpressure ------------------------------------------------------------------------------


def test_what_a_slice_asks_for_is_made_as_it_is_given_if_there_is_no_room(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much it is: its reader may have taken the elements for small ones."""
    monkeypatch.setattr(bundles, "FIRST_AHEAD_BYTES", 20 * SIZE)
    monkeypatch.setattr(bundles, "AHEAD_BYTES", 20 * SIZE)
    few = 20
    output = BundlesOutput(5 * SIZE)
    total = 300 * few
    reader = Reader(output, Slice(1, runs=(0, total), until=total, alone=True))
    making = pool.submit(make, begun(output), total)
    most = 0
    while len(reader.got) < total:
        if reader.next() is None:
            time.sleep(0.001)
        most = max(most, output.held_bytes)
    making.result(TIMEOUT_S)
    assert reader.got == [*range(total)]
    assert most <= (few + 3) * SIZE


def test_what_nobody_lacks_is_made_only_if_there_is_memory(pool: ThreadPoolExecutor) -> None:
    budget = MemoryBudget(12 * SIZE)
    output = BundlesOutput(5 * SIZE, budget=budget)
    for bundle in range(3):
        Reader(output, Slice(bundle, runs=(0, 10), until=10))
    runs = [make(begun(output), 10) for _ in range(3)]
    waiting = [Waiting(pool, run, 1000) for run in runs]
    assert output.held_bytes <= 5 * SIZE
    output.cancel()
    assert all(each.done.exception(TIMEOUT_S) for each in waiting)
    assert budget.held == budget.active == 0


def test_a_slice_that_comes_while_carriers_are_told_is_not_overlooked(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is free then; what has changed is seen before the producer waits."""
    monkeypatch.setattr(bundles, "AHEAD_BYTES", 0)
    monkeypatch.setattr(bundles, "ROOM_S", None)
    output = BundlesOutput()
    Reader(output, Slice(1, runs=(0, 10), until=10))
    run = begun(output)
    make(run, 20)
    late: list[Reader] = []

    def told(*_: Any) -> None:
        if run.waits and not late:
            late.append(Reader(output, Slice(1, runs=(35, 1), until=40)))

    output.on_change = told
    TO_CANCEL.append(output)
    pool.submit(make, run, 40).result(TIMEOUT_S)
    assert read(late[0]) == [35]


# -- forgetting --------------------------------------------------------------------------------


def test_a_reader_that_has_passed_and_gone_lets_blocks_go() -> None:
    output = BundlesOutput()
    for i in range(2):
        Reader(output, Slice(1, keep=20 + i * 10, reader=i, readers=2)).close()
    reader = Reader(output, Slice(1, runs=(0, 40), until=40, keep=20, readers=2))
    make(begun(output), 40).finish()
    assert read(reader) == [*range(40)]
    assert isinstance(read(reader), EndOfSlice)
    assert output.held_bytes == 2 * SIZE


def test_what_all_was_given_goes_also_if_other_readers_never_come_to_the_bundle() -> None:
    """As if a round is as long as a batch of each reader: a bundle belongs to one of them."""
    output = BundlesOutput()
    mine = Reader(output, Slice(1, runs=(0, 15), until=30, reader=2, readers=4))
    run = make(begun(output), 30)
    assert read(mine)[:15] == [*range(15)]  # type: ignore[index]
    assert output.held_bytes == 3 * SIZE, "it may lack them: a connection can break"
    Reader(output, Slice(1, runs=(18, 2), keep=15, reader=2, readers=4))
    assert output.held_bytes == 2 * SIZE and run.has(10), "others lack some of the second block"
    other = Reader(output, Slice(1, runs=(15, 3), keep=15, reader=1, readers=4))
    assert read(other)[:3] == [15, 16, 17]  # type: ignore[index]
    Reader(output, Slice(1, runs=(20, 1), keep=20, reader=2, readers=4))
    assert output.held_bytes == 2 * SIZE, "the other one may lack its own"


def test_what_all_was_given_goes_whichever_of_a_readers_slices_was_given_first() -> None:
    output = BundlesOutput()
    slices = [Reader(output, Slice(1, runs=(at, 5), until=10, readers=4)) for at in (0, 5)]
    make(begun(output), 10)
    for reader, first in zip(reversed(slices), (5, 0), strict=True):
        assert read(reader)[:5] == [*range(first, first + 5)]  # type: ignore[index]
    Reader(output, Slice(1, runs=(10, 1), keep=10, readers=4))
    assert not output.held_bytes


@pytest.mark.parametrize("is_late", [False, True])
def test_what_another_group_is_given_does_not_count_for_this_one(is_late: bool) -> None:
    output = BundlesOutput()
    former = Reader(output, Slice(1, runs=(0, 10), until=10, readers=2))
    make(begun(output), 10)
    if is_late:
        Reader(output, Slice(2, readers=3)).close()
    assert read(former)[:10] == [*range(10)]  # type: ignore[index]
    former.close()
    Reader(output, Slice(1, keep=10, readers=3)).close()
    assert output.held_bytes == SIZE, "two of this group may lack it"


def images(first: int, count: int) -> Block:
    values = np.repeat(np.arange(first, first + count, dtype=np.uint8), bundles.LARGE_BYTES)
    return Block(count, (Component(values.reshape(count, -1)),), 1, first)


def rows(item: Any) -> list[int]:
    given, size = item
    assert size == cost(given)
    return [int(element[0]) for element in given.components[0].elements()]


def test_large_elements_of_a_slice_come_together_or_after_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bundles, "HOLD_S", 1000.0)
    output = BundlesOutput()
    slices = [output.open(Slice(1, runs=(at, 2, at + 8, 2), readers=2)) for at in (0, 4)]
    run = begun(output)
    told: list[list[object]] = []
    output.on_change = lambda _, changed: told.append([*(changed or ())])
    for first in range(0, 10, 5):
        run.put(images(first, 5))
    one, other = slices
    assert isinstance(one, Subscription) and isinstance(other, Subscription)
    assert rows(one.next(True)) == [0, 1, 8, 9]
    assert other.next(True) is None and other.retry_s()
    assert other.next(False) is None and other.sleeps, "without credit no time makes a difference"
    assert other.next(True) is None and other.retry_s()
    run.put(images(10, 1))
    assert told == [[one, other], [one, other], [one]], "what is held is not told of each block"
    monkeypatch.setattr(bundles, "HOLD_S", 0.0)
    assert rows(other.next(True)) == [4, 5]
    assert other.next(True) is None and other.sleeps


@pytest.mark.parametrize("why", ["most", "bytes", "strings"])
def test_elements_that_waiting_cannot_put_together_are_given_at_once(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "HOLD_S", 1000.0)
    if why == "bytes":
        monkeypatch.setattr(bundles, "BLOCK_BYTES", bundles.LARGE_BYTES)
    output = BundlesOutput()
    reader = output.open(Slice(1, runs=(0, 8)))
    assert isinstance(reader, Subscription)
    text = Component(Strings(np.array([40_000]), np.zeros(40_000, np.uint8)))
    begun(output).put(Block(1, (text,), 1, 0) if why == "strings" else images(0, 1))
    assert isinstance(reader.next(True, 1 if why == "most" else None), tuple)


def test_credit_that_comes_and_goes_does_not_hold_elements_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(bundles, "time", SimpleNamespace(monotonic=lambda: now))
    output = BundlesOutput()
    reader = output.open(Slice(1, runs=(0, 8)))
    assert isinstance(reader, Subscription)
    begun(output).put(images(0, 1))
    for _ in range(3):
        assert reader.next(True) is None and reader.next(False) is None
        now += bundles.HOLD_S / 2.5
    assert isinstance(reader.next(True), tuple)


def test_a_slice_of_a_bundle_below_the_floor_is_served_nevertheless() -> None:
    """Its reader begins anew from a position that it saved."""
    output = BundlesOutput()
    Reader(output, Slice(9, 9, floor=9)).close()
    reader = Reader(output, Slice(1, 1, (5, 5), until=10, floor=1))
    Reader(output, Slice(9, 9, floor=9)).close()
    make(begun(output), 10).finish()
    assert read(reader) == [*range(5, 10)]
    read(reader)
    assert 1 not in output._bundles and not output.held_bytes


def test_another_group_counts_anew() -> None:
    output = made(40, Slice(1, 1, (0, 1), until=40, keep=30, floor=1))
    Reader(output, Slice(1, 1, (0, 1), keep=40, floor=2, reader=1, readers=2)).close()
    assert output._bundles[1].keeps == {1: 40} and output._floors == {1: 2}


@pytest.mark.parametrize("readers", [1, 2], ids=["the same group", "another group"])
def test_what_was_made_for_later_goes_when_a_reader_begins_again_before(readers: int) -> None:
    output = made(40, Slice(5, 5, (0, 20), until=40, floor=5))
    asks = Reader(output, Slice(5, 5, (0, 40), until=40, floor=5))
    output = made(40, Slice(6, 6, (0, 20), until=40, floor=5), output=output)
    assert output.held_bytes == 8 * SIZE
    again = Slice(2, 2, (0, 10), until=40, floor=2, readers=readers)
    Reader(output, again)
    assert output.held_bytes == 4 * SIZE, "only what a slice has joined stays"
    assert read(asks) == [*range(40)]
    make(begun(output), 10)
    assert read(Reader(output, again)) == [*range(10)]


@pytest.mark.parametrize("stops", [False, True])
def test_a_reader_far_ahead_waits_for_one_that_reads(
    stops: bool, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the one behind needs is kept, until it has read it or has stopped."""
    now = [1e6]
    monkeypatch.setattr(bundles, "time", SimpleNamespace(monotonic=lambda: now[0]))
    output = BundlesOutput(2 * SIZE)
    Reader(output, Slice(1, 1, keep=40, reader=1, readers=2)).close()  # it has passed
    slow = Reader(output, Slice(1, 1, (0, 10), until=40, readers=2, position=0))
    run = make(begun(output), 40)  # all there is room for
    assert read(slow) == [*range(10)]
    slow.close()
    fast = Reader(output, Slice(2, 2, (0, 40), until=40, reader=1, readers=2, position=40))
    waiting = Waiting(pool, begun(output), 10)
    assert fast.next() is None
    if stops:
        now[0] += bundles.STILL_READS_S
        waiting.done.result(TIMEOUT_S)
        assert run.log.start > 0, "there was no room"
        return
    slow = Reader(output, Slice(1, 1, (10, 30), until=40, keep=10, readers=2, position=10))
    assert read(slow) == [*range(10, 40)], "all that it needs was kept"
    slow.close()
    Reader(output, Slice(1, 1, keep=40, readers=2)).close()
    waiting.done.result(TIMEOUT_S)
    assert read(fast) == [*range(10)]
    assert idle(output), "nothing was made twice"


def test_lengths_of_many_bundles_are_not_all_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The floors of a group that is not complete never rise."""
    monkeypatch.setattr(bundles, "MAX_KNOWN", 20)
    output = BundlesOutput(0)
    output._most_known = 20
    for number in range(200):
        reader = Reader(output, Slice(number, number, (0, 5), floor=number, readers=2))
        make(begun(output), 5).finish()
        read(reader), read(reader)
        Reader(output, Slice(number, number, keep=5, floor=number, readers=2)).close()
        assert len(output._bundles) <= 41


def test_looking_for_what_can_be_dropped_is_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    drop: Callable[..., None] = BundlesOutput._drop_passed

    def look(*arguments: Any) -> None:
        nonlocal looks
        looks += 1
        drop(*arguments)

    monkeypatch.setattr(BundlesOutput, "_drop_passed", look)
    monkeypatch.setattr(bundles, "FIRST_AHEAD_BYTES", 1 << 30)
    monkeypatch.setattr(bundles, "AHEAD_BYTES", 1 << 30)
    output = BundlesOutput(100 * SIZE)
    Reader(output, Slice(1, runs=(0, 10_000), until=10_000))
    make(begun(output), 10_000)
    assert output.held_bytes == 1000 * SIZE and looks < 200


# -- queries and counts ------------------------------------------------------------------------


def test_a_query_waits_a_moment_for_further_news(pool: ThreadPoolExecutor) -> None:
    output = BundlesOutput(SIZE)
    query = Reader(output, Slice(1, until=11, enough=11))
    query.subscription._opened_s += 1e6  # type: ignore[attr-defined]
    run = make(begun(output), 10)
    assert query.next() is None
    told = threading.Event()
    output.on_change = lambda *_: told.set()
    Waiting(pool, run, 1000)
    assert told.wait(TIMEOUT_S)
    assert query.next() == EndOfSlice(1, 20, False), "as many as it asked for were made"


def test_a_run_makes_as_much_ahead_as_it_has_given(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "FIRST_AHEAD_BYTES", SIZE)
    output = BundlesOutput()
    first = Reader(output, Slice(1, runs=(0, 10)))
    second = Reader(output, Slice(1, runs=(10, 20)))
    run = begun(output)
    Waiting(pool, run, 1000)
    assert run.stop == 40, "one block more than was asked for"
    assert read(first) and read(second)
    give_up_s = time.monotonic() + TIMEOUT_S
    while run.stop < 60:
        assert time.monotonic() < give_up_s, "it was not told"
        threading.Event().wait(0.001)


def test_what_a_query_would_like_is_made_only_if_there_is_room(pool: ThreadPoolExecutor) -> None:
    """Else each consumer of a group could fill a worker's memory with what nobody asked for."""
    output = BundlesOutput(3 * SIZE)
    query = Reader(output, Slice(1, enough=1000, readers=64))
    run = begun(output)
    Waiting(pool, run, 1000)
    assert run.stop == 240 and output.held_bytes == 8 * 3 * SIZE
    assert query.next() == EndOfSlice(1, 240, False)


def test_a_bundle_that_is_counted_keeps_nothing_and_waits_for_nobody() -> None:
    output = BundlesOutput(1)
    query, other = Reader(output, COUNT), Reader(output, COUNT)
    make(begun(output), 1000).finish()
    assert query.next() == other.next() == EndOfSlice(1, 1000, True)
    assert not output.held_bytes and not output._bundles[1].runs and idle(output)


def test_what_is_counted_is_kept_in_a_run_of_its_own() -> None:
    """Its reader may come to read it, too."""
    output = BundlesOutput()
    query = Reader(output, COUNT)
    counting = make(begun(output), 40)
    reader = Reader(output, Slice(1, runs=(5, 10), until=20, keep=5))
    run = make(begun(output), 20)
    Reader(output, COUNT).close()
    assert read(reader) == [*range(5, 15)]
    query.close()
    with pytest.raises(OutputCancelled):
        make(counting, 50)
    assert run.log.start == 5, "whoever counts has not passed anything"
    assert read(Reader(output, Slice(1, runs=(15, 5)))) == [*range(15, 20)]
    assert run.stop == 20 and idle(output)


@pytest.mark.parametrize(
    "read_request", [Slice(1, runs=(90, 9), keep=90), Slice(1, known=90, until=90, keep=90)]
)
def test_a_run_that_began_behind_the_end_has_its_bundle_counted(read_request: Slice) -> None:
    output = BundlesOutput()
    reader = Reader(output, read_request)
    run = begun(output)
    assert run.start == 90
    run.finish()
    assert reader.next() is None
    make(begun(output), 40).finish()
    assert reader.next() == EndOfSlice(1, 40, True)
    assert Reader(output, read_request).next() == EndOfSlice(1, 40, True)
    assert idle(output) and not output.held_bytes


# -- errors and ends ---------------------------------------------------------------------------


@pytest.mark.parametrize("length", [5, 39, 41, 60])
def test_a_bundle_of_another_length_fails_its_readers(length: int) -> None:
    output = made(40, Slice(1, runs=(0, 1), until=40))
    other = Reader(output, Slice(1, runs=(0, 100), until=100))
    Reader(output, Slice(1, keep=40)).close()
    read(other)
    again = Reader(output, Slice(1, runs=(2, 30), until=40, keep=40))
    run = begun(output)
    try:
        make(run, length).finish()
    except OutputCancelled:
        assert length > 40
    failed = again.next()
    assert isinstance(failed, TaskFailed) and failed.code == "FAILED_PRECONDITION"
    assert "had 40 elements when it was run first" in failed.message
    assert Reader(output, Slice(1)).next() == Reader(output, COUNT).next() == failed
    assert idle(output) and not output.held_bytes and not output.queue.busy


def test_a_bundle_that_has_fewer_elements_than_were_seen_fails() -> None:
    output = BundlesOutput()
    Reader(output, Slice(1, runs=(0, 20), until=20))
    make(begun(output), 20)
    query = Reader(output, COUNT)
    make(begun(output), 10).finish()
    assert isinstance(failed := query.next(), TaskFailed) and "had 20 elements" in failed.message


def test_a_bundle_that_failed_may_be_tried_again() -> None:
    output = BundlesOutput()
    reader = Reader(output, Slice(1, runs=(0, 10)))
    begun(output).fail("UNAVAILABLE", "a disk is away")
    assert isinstance(reader.next(), TaskFailed)
    again = Reader(output, Slice(1, runs=(0, 10)))
    make(begun(output), 10)
    assert read(again) == [*range(10)]


@pytest.mark.parametrize("failed", [False, True])
def test_the_end_of_a_task_ends_all(pool: ThreadPoolExecutor, failed: bool) -> None:
    output = BundlesOutput(SIZE)
    reader = Reader(output, Slice(1, runs=(0, 10), until=10))
    run = begun(output)
    waiting = Waiting(pool, run, 100)
    asking = pool.submit(output.next_run, 1, LONG_S)
    free: list[bool] = []

    def has_lock() -> bool:
        with output.lock:
            return True

    output.on_change = lambda *_: free.append(pool.submit(has_lock).result(TIMEOUT_S))
    if failed:
        output.fail("DATA_LOSS", "torn")
    else:
        output.cancel()
    assert free, "carriers are told, without the lock"
    for future in (waiting.done, asking):
        future.exception(TIMEOUT_S)
    late: Any
    for late in run.finish, partial(run.fail, "DATA_LOSS", "torn"), partial(output.next_run, 1, 0):
        with pytest.raises(OutputCancelled):
            late()
    with pytest.raises(OutputCancelled):
        run.put(block(run.stop, 1, 1))
    end = TORN if failed else TaskUnknown()
    assert reader.next() == output.open(Slice(1)) == end
    assert not output.held_bytes and output.wait_drained(0)


# -- read requests -----------------------------------------------------------------------------


def test_orders_travel() -> None:
    request = Slice(9, 8, (0, 1, 3, 4), 7, 6, 5, 4, 3, 10, alone=True)
    assert decode(encode(request, pb.Read())) == request
    assert isinstance(BundlesOutput().open(ANY), TaskFailed)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"runs": (3,)}, "1 numbers, where each run has an index and a count"),
        ({"runs": (3, 0)}, "a run of 0 elements from 3 on"),
        ({"runs": (3, 2, 4, 1)}, "a run of 1 elements from 4 on, after 5"),
        ({"runs": (3, 1 << 62)}, "a slice has numbers from 0 to"),
        ({"runs": (0, 1, 1 << 63, 1)}, "a slice has numbers from 0 to"),
        ({"known": 1 << 63}, "a slice has numbers from 0 to"),
        ({"reader": 2, "readers": 2}, "reader 2 of 2"),
        ({"readers": 0}, "reader 0 of 0"),
        ({"readers": 1 << 17}, "at most 65536"),
        ({"runs": range(2_000_000)}, f"1000000 runs; at most {MAX_SLICE_RUNS}"),
    ],
)
def test_a_slice_is_checked(wrong: dict[str, Any], message: str) -> None:
    fields = {"bundle": 1, "readers": 1} | wrong
    with pytest.raises(ProtocolError, match=f"task 5 was asked for: .*{message}"):
        decode(pb.Read(task_id=5, slice=pb.Slice(**fields)))


def test_what_follows_of_a_slice() -> None:
    request = Slice(1, runs=(0, 5, 10, 5))
    assert request.after(block(0, 3, 1)).runs == (3, 2, 10, 5)
    assert request.after(block(0, 5, 1)).runs == (10, 5)
    assert request.after(block(0, 7, 1)).runs == (12, 3)
    assert request.after(block(0, 10, 1)).runs == ()
    for wrong in (block(1, 1, 1), block(0, 1, 2), block(0, 11, 1)):
        with pytest.raises(ValueError, match=r"come next|more than a slice has"):
            request.after(wrong)


# -- a reader that is alone --------------------------------------------------------------------


def test_what_one_that_is_alone_was_given_is_dropped_at_once() -> None:
    output = BundlesOutput()
    reader = Reader(output, Slice(1, runs=(0, 40), until=40, alone=True))
    run = make(begun(output), 25)
    assert read(reader) == [*range(25)]
    assert output.held_bytes == 0 and not run.log
    make(run, 40).finish()
    assert read(reader) == [*range(25, 40)]
    assert read(reader) == EndOfSlice(1, 40, True)
    assert output.held_bytes == 0 and not output._bundles[1].runs


def test_what_another_slice_of_one_that_is_alone_lacks_is_kept() -> None:
    output = BundlesOutput()
    early, late = (Reader(output, Slice(1, runs=(at, 10), until=20, alone=True)) for at in (0, 10))
    run = make(begun(output), 20)
    assert read(late) == [*range(10, 20)]
    assert [kept.start for kept in reversed(run.log)] == [10, 0]
    assert read(early) == [*range(10)]
    assert not run.log


def test_the_next_one_that_is_alone_goes_on_at_its_cursor() -> None:
    """Others made these elements for a consumer that died: they are dropped, and made again."""
    output = BundlesOutput()
    first = Reader(output, Slice(1, runs=(0, 20), until=40, alone=True))
    run = make(begun(output), 40)
    read(first)
    first.close()
    assert [kept.start for kept in reversed(run.log)] == [30, 20]
    again = Reader(output, Slice(1, runs=(5, 35), until=40, keep=5, alone=True))
    assert run.dropped
    other = begun(output)
    assert other.start == 5
    make(other, 40).finish()
    assert read(again) == [*range(5, 40)]


def test_what_one_that_is_alone_has_left_makes_room(pool: ThreadPoolExecutor) -> None:
    output = BundlesOutput(4 * SIZE)
    left = Reader(output, Slice(1, runs=(0, 10), until=40, alone=True))
    make(begun(output), 40)
    left.close()
    assert output.held_bytes == 4 * SIZE
    reader = Reader(output, Slice(2, 1, (0, 10), until=10, alone=True))
    run = begun(output)
    make(run, 10)
    Waiting(pool, run, 100)
    assert output.held_bytes <= 4 * SIZE
    assert sum(len(left.log) for left in output._bundles[1].runs) < 3
    assert read(reader) == [*range(10)]


def test_busy_time_counts_by_the_share_of_runs_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(run_queue, "time", SimpleNamespace(monotonic=lambda: now_s))
    output = BundlesOutput()
    readers = [Reader(output, Slice(number, until=FAR, known=FAR)) for number in (1, 2)]
    one, two = begun(output, 2), begun(output, 2)
    now_s += 10  # both
    make(one, 20).finish()
    now_s += 4  # the other one
    assert output.busy_s == 12
    make(two, 20).finish()
    now_s += 100
    assert output.busy_s == 12
    for reader in readers:
        reader.close()

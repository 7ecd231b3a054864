"""What a consumer that reads at least once asks of workers that the test plays, and reports."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from forebay.service.blocks import Block, Component
from forebay.service.client import claims, slices
from forebay.service.client.claimer import Claimer
from forebay.service.client.claims import ClaimsMode
from forebay.service.client.positions import claimed_options
from forebay.service.delivery import EndOfSlice, Slice
from forebay.service.errors import FailedPrecondition
from forebay.service.proto import forebay_pb2 as pb

from .test_ordered_requests import Worker

TASKS = (5, 6)
WAIT_S = 30
MANY = 1 << 40


class Dispatcher:
    """Has bundles to claim, from these cursors on."""

    def __init__(self, cursors: Sequence[int]) -> None:
        self.cursors = dict(enumerate(cursors))
        self.requests: list[pb.ClaimBundlesRequest] = []
        self.given = 0
        self.done: set[int] = set()

    def call(self, request: pb.ClaimBundlesRequest, *_: Any, **__: Any) -> pb.ClaimBundlesResponse:
        self.requests.append(request)
        self.done.update(request.done)
        most = len(self.done) + request.most
        self.given = max(self.given, min(len(self.cursors), most))
        claims = {p: c for p, c in self.cursors.items() if p < self.given and p not in self.done}
        return pb.ClaimBundlesResponse(places=claims.keys(), cursors=claims.values())


class Claiming:
    """A consumer, its dispatcher, and two workers."""

    def __init__(self, lengths: Sequence[int], cursors: Sequence[int] = ()) -> None:
        self.lengths = lengths
        self.dispatcher: Any = Dispatcher([*cursors] or [0] * len(lengths))
        self.workers = {uid: Worker() for uid in (1, 2)}
        order = claimed_options({"shuffle": False, "bundle_splits": 1})
        order.bundles = len(lengths)
        links: Any = SimpleNamespace(
            get=lambda uid: self.workers.get(uid), all=lambda: [*self.workers.items()],
            open=lambda task: self.workers.get(task.worker_uid), start=lambda: None,
            close_if_idle=lambda uid: None, reachable=list,
        )  # fmt: skip
        self.taker = SimpleNamespace(begun=0, failed=False, left=lambda: 0)
        self.closed, self.woken = threading.Event(), threading.Event()
        claimer = Claimer(
            cast(Any, self.dispatcher), 1, fail=print, wake=self.woken.set, closed=self.closed,
            taker=cast(Any, self.taker),
        )  # fmt: skip
        self.mode = ClaimsMode(links, pb.JoinIterationResponse(order=order), claimer)
        self.got: list[tuple[int, int]] = []
        self.list_tasks(*TASKS)
        assert self.woken.wait(WAIT_S)

    def list_tasks(self, *tasks: int) -> None:
        listed = [pb.TaskInfo(task_id=task, worker_uid=task - 4) for task in tasks]
        news: Any = SimpleNamespace(tasks=listed, finished=False, version=1)
        self.mode.update(news)

    def take(self) -> bool:
        """A block, if one is here, which is used before the next one is taken."""
        taken = self.mode.take()
        if taken is not None:
            values: Any = taken[0].components[0].values
            self.got += [tuple(pair) for pair in values.tolist()]
            self.mode.used(taken[0])
        return taken is not None

    @property
    def asked(self) -> list[tuple[int, int, Slice]]:
        """Task, number and slice of what is outstanding."""
        return [
            (uid + 4, number, order)
            for uid, worker in self.workers.items()
            for number, order in worker.asked.items()
        ]

    def give(self, task: int, number: int, order: Slice, *, ends: bool = True) -> None:
        """What the slice asks for, and its end."""
        first, count = order.runs
        count = min(first + count, self.lengths[order.bundle]) - first
        client: Any = self.workers[task - 4]
        del client.asked[number]
        if count > 0:
            rows = np.array([(order.bundle, first + i) for i in range(count)])
            block = Block(count, (Component(rows),), order.bundle, first)
            self.mode.deliver(client, (task, number), block)
        if not ends:
            return
        complete = first + order.runs[1] > self.lengths[order.bundle]
        known = self.lengths[order.bundle] if complete else first + count
        self.mode.end((task, number), EndOfSlice(order.bundle, known, complete))


@pytest.fixture
def claiming() -> Iterator[list[Claiming]]:
    """Those that are to be closed."""
    made: list[Claiming] = []
    yield made
    for each in made:
        each.closed.set()
        each.mode.final_reports(1, 0)


@pytest.mark.parametrize("seed", range(20))
def test_whichever_worker_dies_all_behind_the_cursors_is_given_once_and_in_order(
    claiming: list[Claiming], seed: int
) -> None:
    """Also one that dies between a slice's last block and its end; nothing that lies behind a
    bundle's known end is asked of the other one."""
    draw = random.Random(seed)
    lengths = [draw.randint(1, 100) for _ in range(draw.randint(1, 4))]
    cursors = [draw.randint(0, length) for length in lengths]
    reading = Claiming(lengths, cursors)
    claiming.append(reading)
    tasks, ended = [*TASKS], set[int]()
    give_up_s = time.monotonic() + WAIT_S
    while len(reading.got) < sum(lengths) - sum(cursors):
        assert time.monotonic() < give_up_s
        while reading.take():
            pass
        if not (asked := reading.asked):
            time.sleep(0.001)  # the claimer asks for more
            continue
        task, number, order = draw.choice(asked)
        assert order.alone
        dies = len(tasks) > 1 and draw.random() < 0.1
        reading.give(task, number, order, ends=not dies)
        if sum(order.runs) > lengths[order.bundle] and not dies:
            ended.add(order.bundle)
        if dies:
            tasks.remove(task)
            asked_before = [(task, number) for task, number, _ in reading.asked]
            reading.list_tasks(*tasks)
            for other, new, again in reading.asked:
                assert other in tasks
                is_behind = again.bundle in ended and again.runs[0] > lengths[again.bundle]
                assert (other, new) in asked_before or not is_behind
    for bundle, (cursor, length) in enumerate(zip(cursors, lengths, strict=True)):
        assert [i for b, i in reading.got if b == bundle] == [*range(cursor, length)]


def test_an_incomplete_run_does_not_shorten_a_bundle(claiming: list[Claiming]) -> None:
    """Another worker may know of fewer elements than have come; only a bundle's end counts."""
    reading = Claiming([100], [50])
    claiming.append(reading)
    reading.take()
    (task, number, order) = reading.asked[0]
    reading.mode.end((task, number), EndOfSlice(order.bundle, 40, False))
    reading.take()


def test_a_bundle_that_ends_before_its_cursor_is_refused(claiming: list[Claiming]) -> None:
    reading = Claiming([100], [50])
    claiming.append(reading)
    reading.take()
    (task, number, order) = reading.asked[0]
    with pytest.raises(FailedPrecondition, match="at least 50 elements, and has 40 now"):
        reading.mode.end((task, number), EndOfSlice(order.bundle, 40, True))


def test_reports_have_the_cursor_within_a_block(claiming: list[Claiming]) -> None:
    reading = Claiming([100])
    claiming.append(reading)
    blocks = 0
    while (taken := reading.mode.take()) is None or taken[0].count < 16:
        if taken is not None:
            blocks += 1
            reading.mode.used(taken[0])
        for asked in reading.asked:
            reading.give(*asked)
    start = taken[0].index

    def reported(cursor: int) -> bool:
        deadline = time.monotonic() + WAIT_S
        while [*reading.dispatcher.requests[-1].cursors] != [cursor]:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    assert reported(start), "the trainer's iterator has not begun the block"
    reading.taker.left = lambda: 5
    reading.taker.begun = blocks + 1
    assert reported(start + 10), "the trainer works on the next one"
    reading.closed.set()
    ((words, _),) = reading.mode.final_reports(1, 5)
    assert isinstance(words, pb.ClaimBundlesRequest)
    assert ([*words.places], [*words.cursors]) == ([0], [start + 11])
    assert (len(words.done), words.most) == (0, 0)
    reading.mode.used(taken[0])
    assert reading.mode.take() is None, "what is here is for others"


@pytest.mark.parametrize(("looks", "asks_another"), [([60.0], False), ([0.0, *range(1, 12)], True)])
def test_a_worker_is_silent_only_while_the_consumer_waits(
    claiming: list[Claiming],
    monkeypatch: pytest.MonkeyPatch,
    looks: list[float],
    asks_another: bool,
) -> None:
    """If the trainer was busy for a minute, the blocks of that minute are still unread."""
    reading = Claiming([100])
    claiming.append(reading)
    reading.take()
    (first,) = reading.asked
    begun_s = time.monotonic()
    for later_s in looks:
        clock = SimpleNamespace(monotonic=lambda later_s=later_s: begun_s + later_s)
        monkeypatch.setattr(slices, "time", clock)
        reading.mode.ask_again()
    assert (reading.asked[0][0] != first[0]) == asks_another


@pytest.mark.parametrize(
    ("first", "then", "most"), [(0, 0, claims.FIRST_READ), (MANY, MANY, 8), (MANY, 0, 8)]
)
def test_so_many_claims_are_read_side_by_side_that_few_slices_are_asked_for(
    claiming: list[Claiming], monkeypatch: pytest.MonkeyPatch, first: int, then: int, most: int
) -> None:
    """The others are read later, and nothing of them is left out, also if the limit changes."""
    monkeypatch.setattr(claims, "PACE_S", 0)
    monkeypatch.setattr(claims, "MAX_SLICES_PER_S", first)
    reading = Claiming([200] * 8)
    claiming.append(reading)
    side_by_side, give_up_s = 0, time.monotonic() + WAIT_S
    while len(reading.got) < 8 * 200:
        assert time.monotonic() < give_up_s
        while reading.take():
            pass
        if asked := reading.asked:
            side_by_side = max(side_by_side, len({order.bundle for _, _, order in asked}))
            for each in asked:
                reading.give(*each)
        else:
            time.sleep(0.001)  # the claimer asks for more
        if len(reading.got) >= 1000:
            monkeypatch.setattr(claims, "MAX_SLICES_PER_S", then)
    assert sorted(reading.got) == [(bundle, i) for bundle in range(8) for i in range(200)]
    assert side_by_side <= most
    assert (side_by_side > claims.FIRST_READ) == bool(first)


def test_no_more_are_read_before_all_that_are_read_have_brought_something(
    claiming: list[Claiming], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers are busy with these: more would be begun, and elements would come even later."""
    monkeypatch.setattr(claims, "PACE_S", 0)
    monkeypatch.setattr(claims, "MAX_SLICES_PER_S", MANY)
    reading = Claiming([200] * 8)
    claiming.append(reading)
    oldest = None
    for _ in range(9):
        while reading.take():
            pass
        time.sleep(0.02)  # the claimer would have asked for more
        bundles = [order.bundle for _, _, order in reading.asked]
        assert len({*bundles}) <= claims.FIRST_READ
        oldest = bundles[0] if oldest is None else oldest
        for each in reading.asked:
            if each[2].bundle == oldest:
                reading.give(*each)

"""Fair shares, in virtual time: trainers that compete for elements get what they use."""

from __future__ import annotations

import math
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.service.blocks import Block
from forebay.service.delivery import AnyBlock, FirstComeOutput, Subscription, first_come
from forebay.service.delivery.windows import (
    AHEAD_S,
    FIRST,
    LEAST,
    MOST_AHEAD_S,
    PATIENCE_S,
    PIECES,
    SLACK,
    Windows,
)

from ..hypothesis_profiles import examples
from .contract import block

TICK_S = 5e-4
NETWORK_TICKS = 1
"""For a block to arrive, and for the word that it was taken."""


class World:
    """A task's output, and trainers that take its elements, tick by tick."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tick = 0
        self.trainers: list[Trainer] = []
        monkeypatch.setattr(first_come, "time", SimpleNamespace(monotonic=self.now_s))
        self.output = FirstComeOutput(max_bytes=1 << 40)
        self._to_produce: deque[tuple[int, Block]] = deque()

    def now_s(self) -> float:
        return self.tick * TICK_S

    def produce(self, elements: int, *, of_block: int = 1 << 20, per_s: float = 0) -> None:
        """All at once, or so many elements a second."""
        for first in range(0, elements, of_block):
            count = min(of_block, elements - first)
            tick = int((first + count) / per_s / TICK_S) if per_s else 0
            self._to_produce.append((tick, block(first, count)))

    def join(self, step_s: float = 1e-3, elements_a_step: int = 1) -> Trainer:
        self.trainers.append(Trainer(self, step_s, elements_a_step))
        return self.trainers[-1]

    def run(self, *, lockstep: bool = False, until_s: float = 60) -> None:
        """Until all is taken, or the time has come."""
        while self.now_s() < until_s:
            while self._to_produce and self._to_produce[0][0] <= self.tick:
                self.output.put(self._to_produce.popleft()[1])
                if not self._to_produce:
                    self.output.finish()
            for trainer in self.trainers:
                trainer.communicate()
            over = self.output.ended and not self.output.waiting_elements
            ready = [t.has() or (over and not t.subscription_holds()) for t in self.trainers]
            may_step = all(ready) or not lockstep
            for trainer in self.trainers:
                if may_step:
                    trainer.step()
            if over and not any(t.subscription_holds() for t in self.trainers):
                return
            self.tick += 1


class Trainer:
    """Takes some elements each step, if it has them, and says so of each block that it has used."""

    def __init__(self, world: World, step_s: float, elements_a_step: int) -> None:
        self.step_s, self.elements_a_step = step_s, elements_a_step
        self.taken = self.steps = 0
        self.last_s = 0.0
        self.most_held = 0
        self._world = world
        self._arriving: deque[tuple[int, Block]] = deque()
        self._blocks: deque[Block] = deque()
        self._of_first = 0  # elements taken of the first block
        self._saying: deque[tuple[int, Block]] = deque()
        self._next_step_s = world.now_s()
        subscription: Any = world.output.open(AnyBlock(hands_back=True))
        subscription.set_round_trip(2 * NETWORK_TICKS * TICK_S)
        self.subscription = subscription

    def has(self) -> bool:
        return bool(self._blocks)

    def subscription_holds(self) -> bool:
        return bool(self._blocks or self._arriving)

    def communicate(self) -> None:
        now = self._world.tick
        while self._saying and self._saying[0][0] <= now:
            self.subscription.received([self._saying.popleft()[1]])
        while isinstance(item := self.subscription.next(credit=True), tuple):
            self._arriving.append((now + NETWORK_TICKS, item[0]))
        while self._arriving and self._arriving[0][0] <= now:
            self._blocks.append(self._arriving.popleft()[1])
        held = sum(b.count for b in self._blocks) - self._of_first
        self.most_held = max(self.most_held, held)

    def step(self) -> None:
        now_s = self._world.now_s()
        if now_s < self._next_step_s or not self._blocks:
            return
        self.steps += 1
        self._next_step_s = now_s + self.step_s
        self.last_s = now_s
        for _ in range(self.elements_a_step):
            if not self._blocks:
                return
            self.taken += 1
            self._of_first += 1
            if self._of_first == self._blocks[0].count:
                used = self._blocks.popleft()
                self._saying.append((self._world.tick + NETWORK_TICKS, used))
                self._of_first = 0


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def are_even(world: World, elements: int) -> bool:
    even = elements / len(world.trainers)
    return all(0.7 * even <= trainer.taken <= 1.3 * even for trainer in world.trainers)


@pytest.mark.parametrize("trainers", [2, 4])
@pytest.mark.parametrize("elements", [103, 1_003, 5_000])
@pytest.mark.parametrize("per_s", [0, 1_000], ids=["fast", "slow_pipeline"])
def test_trainers_in_lockstep_get_the_same(
    world: World, trainers: int, elements: int, per_s: float
) -> None:
    """Otherwise one trainer would get all but the last few steps."""
    world.produce(elements, of_block=25, per_s=per_s)
    for _ in range(trainers):
        world.join()
    world.run(lockstep=True)
    taken = sorted(trainer.taken for trainer in world.trainers)
    assert sum(taken) == elements
    # The end of a slow pipeline comes without a warning: one may have a piece more.
    share, piece_s = (SLACK, MOST_AHEAD_S / PIECES) if per_s else (0.02, math.inf)
    assert taken[-1] - taken[0] <= max(4, min(share * elements / trainers, 1_000 * piece_s))


def test_a_late_trainer_gets_an_even_share_of_the_rest(world: World) -> None:
    world.produce(5_000)
    early = world.join()
    world.run(until_s=1)
    before = early.taken
    late = world.join()
    world.run()
    part = (5_000 - before) / 2
    assert 0.9 * part <= late.taken <= 1.1 * part


@pytest.mark.parametrize("trainers", [2, 4, 8])
@pytest.mark.parametrize("elements", [1_000, 30_000])
def test_equal_trainers_get_equal_shares(world: World, trainers: int, elements: int) -> None:
    """Also if they are as fast as they can be, and the operating system stops some for a while."""
    world.produce(elements)
    for number in range(trainers):
        stalled = world.join(step_s=TICK_S, elements_a_step=4)
        stalled._next_step_s += number % 3 * 0.01
    world.run()
    assert are_even(world, elements)


def test_a_slow_trainer_gets_what_it_uses_and_holds_up_no_other(world: World) -> None:
    world.produce(5_000, of_block=50)
    slow, fast = world.join(20e-3), world.join(1e-3)
    world.run()
    assert 5_000 / 30 < slow.taken < 5_000 / 15
    assert slow.last_s <= fast.last_s + 20e-3


def test_a_trainer_that_has_not_begun_holds_only_a_small_window(world: World) -> None:
    world.produce(5_000)
    idle, busy = world.join(), world.join()
    idle._next_step_s = 3.0  # its first step is still being compiled
    world.run(until_s=3.0)
    assert idle.most_held <= FIRST and busy.taken > 2_500


def test_no_trainer_holds_much_more_than_it_uses(world: World) -> None:
    world.produce(20_000)
    alone = world.join(1e-3, elements_a_step=10)  # 10,000 a second
    world.run()
    assert alone.last_s < 2_000 * 1.1e-3, "it never waited for long"
    assert 1.2 * 10_000 * AHEAD_S < alone.most_held <= PIECES * SLACK * 20_000


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_buffered_elements_are_always_given_to_some_trainer(data: st.DataObject) -> None:
    windows = Windows()
    members = [windows.open(0.0) for _ in range(data.draw(st.integers(1, 4)))]
    buffered, now_s = data.draw(st.integers(1, 500), "buffered"), 0.0
    ended = data.draw(st.booleans(), "ended")
    for _ in range(data.draw(st.integers(0, 30), "steps")):
        now_s += data.draw(st.sampled_from([0, 1e-4, 1e-2, 1.0]), "seconds")
        member = data.draw(st.sampled_from(members), "who")
        member.take(data.draw(st.integers(0, member.held), "takes"), now_s)
        room = member.room(buffered, ended, now_s)
        assert 0 <= room <= buffered
        member.give(room, now_s)
        buffered -= room
        assert windows.held == sum(each.held for each in members)
    last = data.draw(st.sampled_from(members), "the only one that goes on")
    while buffered:
        last.take(last.held, now_s)
        if not (room := last.room(buffered, ended, now_s)):
            assert last.retry_at_s is not None and now_s < last.retry_at_s
            now_s = last.retry_at_s
            room = last.room(buffered, ended, now_s)
        assert room, "it has nothing, and gets nothing"
        last.give(room, now_s)
        buffered -= room


def test_turns_are_bounded_in_time() -> None:
    windows = Windows()
    ahead, behind = windows.open(0.0), windows.open(0.0)
    behind.give(behind.room(1_000, False, 0.0), 0.0)
    for now_s in (0.0, 0.001):
        while room := ahead.room(1_000, False, now_s):
            ahead.give(room, now_s)
        ahead.take(ahead.held, now_s + 0.001)
    assert not ahead.room(1_000, False, 0.002)
    turn_s = ahead.retry_at_s
    assert turn_s == 0.001 + PATIENCE_S and ahead.room(1_000, False, turn_s) >= LEAST


def test_a_trainer_that_left_no_longer_competes() -> None:
    windows = Windows()
    first, second = windows.open(0.0), windows.open(0.0)
    second.give(3, 0.0)
    assert second.close() == 3 and second.close() == 0
    assert windows.held == 0 and first.room(2, True, 0.0) == 2


def waits_for_its_turn(output: FirstComeOutput) -> Subscription:
    """One that is a round ahead of another, which has taken nothing yet."""
    behind, ahead = (output.open(AnyBlock(hands_back=True)) for _ in range(2))
    assert isinstance(behind, Subscription) and isinstance(ahead, Subscription)
    behind.next(True)
    while ahead.retry_s() is None:
        item = ahead.next(True)
        if isinstance(item, tuple):
            ahead.received([item[0]])
    return ahead


def test_a_trainer_that_waits_for_its_turn_is_not_asked_in_vain(world: World) -> None:
    """Nor when it has no credit: its sender would ask without a pause."""
    world.output.put(block(0, 1_000))
    ahead = waits_for_its_turn(world.output)
    assert ahead.next(False) is None and ahead.retry_s() is None
    assert ahead.next(True) is None and ahead.retry_s()
    anybody: Any = world.output.open(AnyBlock())
    while anybody.next(True):
        pass
    assert ahead.next(True) is None and ahead.retry_s() is None

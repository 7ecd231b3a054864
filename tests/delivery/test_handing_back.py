"""A consumer that leaves hands back what its trainer did not take: nothing is lost or repeated."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.service.blocks import Block, split
from forebay.service.delivery import (
    ANY,
    AnyBlock,
    EndOfTask,
    EndPending,
    FirstComeOutput,
    RoundsOutput,
    Subscription,
    TaskFailed,
    TaskUnknown,
    first_come,
)
from forebay.service.delivery.read_requests import Rounds

from ..hypothesis_profiles import examples
from .contract import ROOM, TIMEOUT_S, Ledger, Reader, block, numbers

HANDS_BACK = AnyBlock(hands_back=True)


class Trainer(Reader):
    """Takes elements one by one, in the order in which they came."""

    def __init__(self, output: FirstComeOutput) -> None:
        super().__init__(output, HANDS_BACK)
        self.took: list[int] = []
        self.of_next = 0  # elements of the first block that it has

    def take(self) -> None:
        self.took.append(numbers(self.lacking[0])[self.of_next])
        self.of_next += 1
        if self.of_next == self.lacking[0].count:
            self.of_next = 0
            self.receive(1)

    def take_until(self, done: Callable[[], bool]) -> None:
        """Takes what it is given, and asks for more: who has nothing is given something."""
        while not done():
            if not isinstance(self.next(), Block):
                assert self.lacking, "there is something, and nobody is given it"
                self.take()

    def leave(self) -> None:
        left = list(self.lacking)
        if self.of_next:
            head, left[0] = split(left[0], self.of_next)
            self.subscription.received([head])
        self.subscription.hand_back(left)
        self.subscription.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes each time that anybody looks: nobody has to wait for another's turn."""
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)))
    monkeypatch.setattr(first_come, "time", clock)


@settings(
    max_examples=examples(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
@pytest.mark.usefixtures("clock")
def test_each_element_is_used_once_whichever_consumer_leaves_when(data: st.DataObject) -> None:
    ledger = Ledger()
    output = FirstComeOutput(ROOM, ledger)
    trainers = [Trainer(output) for _ in range(data.draw(st.integers(1, 3)))]
    stock = Reader(output, ANY)  # who hands nothing back, and is not waited for
    gone: list[Trainer] = []
    total = 0
    for _ in range(data.draw(st.integers(0, 40), "steps")):
        match data.draw(st.sampled_from(["put", "next", "next", "stock", "take", "take", "leave"])):
            case "put":
                size = data.draw(st.integers(1, 5), "size")
                output.put(block(total, size))
                total += size
            case "next":
                data.draw(st.sampled_from(trainers)).next(max_elements=3)
            case "stock" if isinstance(stock.next(), Block):
                stock.receive(1)
            case "take":
                trainer = data.draw(st.sampled_from(trainers))
                if trainer.lacking:
                    trainer.take()
            case "leave":
                gone.append(trainers.pop(data.draw(st.integers(0, len(trainers) - 1))))
                gone[-1].leave()
                trainers.append(Trainer(output))
    output.finish()
    last = Trainer(output)
    while trainers:
        for trainer in [last, *trainers]:
            while isinstance(trainer.next(), Block):
                pass
        last.take_until(lambda: not output.waiting_elements)
        held = sum(b.count for t in trainers for b in t.lacking)
        mine = last.subscription.next(credit=True)
        assert mine == (EndPending(held) if held else EndOfTask())
        assert output.wait_drained(0) == (not held and not last.lacking)
        trainer = trainers.pop()
        gone.append(trainer)
        trainer.leave()
    last.take_until(lambda: not output.waiting_elements)
    assert last.next() == EndOfTask(), "it is the last one that has any"
    while last.lacking:
        assert not output.wait_drained(0)
        last.take()
    assert output.wait_drained(0)
    used = [number for trainer in [*gone, last] for number in trainer.took]
    assert sorted([*used, *stock.got]) == [*range(total)]
    assert ledger.total == total and not ledger.dropped_parts


def test_what_is_handed_back_comes_first_and_in_its_order() -> None:
    output = FirstComeOutput()
    leaving, other = Trainer(output), Trainer(output)
    for number in range(4):
        output.put(block(number, 1))
    for _ in range(3):
        leaving.next()
    leaving.leave()
    for _ in range(4):
        other.next()
    assert other.got == [0, 1, 2, 3]


def test_a_killed_consumer_hands_nothing_back_and_holds_up_no_end() -> None:
    ledger = Ledger()
    output = FirstComeOutput(ROOM, ledger)
    killed = Trainer(output)
    output.put(block(0, 3))
    while isinstance(killed.next(), Block):
        pass
    other = Trainer(output)
    output.finish()
    assert other.next() == EndPending(3)
    killed.close()
    assert other.next() == EndOfTask() and output.wait_drained(0)
    assert sum(ledger.dropped_parts) == 3


def test_a_leaving_worker_no_longer_waits_for_elements_to_be_handed_back() -> None:
    output = FirstComeOutput()
    slow, other = Trainer(output), Trainer(output)
    output.put(block(0, 1))
    output.finish()
    slow.next()
    told: list[object] = []
    output.on_change = lambda output, _: told.append(output)
    waiting = threading.Thread(target=output.wait_drained, args=[TIMEOUT_S])
    waiting.start()
    output.forgo_handing_back()
    waiting.join(TIMEOUT_S)
    assert not waiting.is_alive() and told == [output] and other.next() == EndOfTask()


def test_a_leaving_worker_divides_what_it_has_evenly_and_at_once() -> None:
    output = FirstComeOutput(ROOM)
    trainers = [Trainer(output) for _ in range(3)]
    output.put(block(0, 900))
    assert isinstance(trainers[0].next(), Block)
    output.forgo_handing_back()
    for trainer in trainers:
        while isinstance(trainer.next(), Block):
            pass
    assert {len(trainer.got) for trainer in trainers} == {300} and not output.waiting_elements


def test_a_failed_or_cancelled_task_waits_for_no_consumer() -> None:
    for end in (TaskFailed("DATA_LOSS", "torn"), TaskUnknown()):
        output = FirstComeOutput(ROOM, ledger := Ledger())
        slow, other = Trainer(output), Trainer(output)
        output.put(block(0, 1))
        slow.next()
        if isinstance(end, TaskFailed):
            output.fail(end.code, end.message)
        else:
            output.cancel()
        assert other.next() == end and output.wait_drained(0)
        slow.leave()
        assert isinstance(other.next(), Block) == isinstance(end, TaskFailed)
        assert len(ledger.dropped_parts) == isinstance(end, TaskUnknown)


def test_other_policies_hand_nothing_back() -> None:
    subscription = RoundsOutput(1).open(Rounds(0, 1))
    assert isinstance(subscription, Subscription) and not subscription.hands_back
    with pytest.raises(TypeError, match="hands nothing back"):
        subscription.hand_back([])


def test_what_is_handed_back_is_lent_to_nobody_else() -> None:
    """The consumer that had it may still read its memory."""
    output = FirstComeOutput()
    loan: Any = object()
    output.put(replace(block(0, 2), loan=loan))
    leaving = Reader(output, HANDS_BACK)
    given = leaving.next()
    assert isinstance(given, Block) and given.loan is loan
    other = Reader(output, HANDS_BACK)
    leaving.subscription.hand_back([given])
    again = other.next()
    assert isinstance(again, Block) and numbers(again) == [0, 1] and again.loan is None


def test_an_empty_block_holds_up_nobody() -> None:
    output = FirstComeOutput()
    for each in (Block(0, ()), block(0, 1), Block(0, ())):
        output.put(each)
    output.finish()
    trainer = Trainer(output)
    for _ in range(3):
        assert isinstance(trainer.subscription.next(credit=True), tuple)
    assert trainer.next() == EndOfTask()

"""The budget that all outputs of a worker share: who has to wait, and who never does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.service.blocks import Block, Component
from forebay.service.delivery import (
    ANY,
    CachedOutput,
    FirstComeOutput,
    MemoryBudget,
    OutputCancelled,
    RoundsOutput,
)
from forebay.service.delivery.read_requests import AnyBlock, Cached, Rounds

from .contract import TIMEOUT_S, Reader, block

BLOCK = block(0, 1).payload_bytes
HANDS_BACK = AnyBlock(hands_back=True)


def in_background(call: Callable[[], object]) -> threading.Event:
    done = threading.Event()

    def run() -> None:
        call()
        done.set()

    threading.Thread(target=run, daemon=True).start()
    return done


@given(
    st.integers(1, 100),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40), st.booleans()), max_size=60),
)
def test_outputs_hold_no_more_than_the_budget(
    most: int, steps: list[tuple[int, int, bool]]
) -> None:
    """An output's only block is allowed beyond the budget. The reported bytes add up."""
    budget = MemoryBudget(most)
    shares = [budget.share() for _ in range(5)]
    held: list[list[int]] = [[] for _ in shares]
    for who, size, takes in steps:
        if takes:
            was_empty = not held[who]
            if shares[who].take(size):
                held[who].append(size)
                large = sum(own[0] for own in held if len(own) == 1)
                assert was_empty or budget.held <= most + large
            else:
                assert not was_empty
        elif held[who]:
            shares[who].release(held[who].pop())
        assert [share.held for share in shares] == [sum(own) for own in held]
        assert budget.held == sum(map(sum, held))
    for share in shares:
        share.close()
    assert not budget.held and not budget.active


def test_blocks_that_nobody_takes_do_not_starve_another_task() -> None:
    needed = threading.Event()
    budget = MemoryBudget(16 * BLOCK, needed.set)
    greedy, other = FirstComeOutput(budget=budget), FirstComeOutput(budget=budget)

    def put() -> None:
        with contextlib.suppress(OutputCancelled):
            for number in range(100):
                greedy.put(block(number, 1))

    stuck = in_background(put)
    assert needed.wait(TIMEOUT_S)
    assert greedy.held_bytes == 8 * BLOCK
    reader = Reader(other, ANY)
    for number in range(50):  # it always has room for one more, as they are taken
        other.put(block(number, 1))
        reader.next()
        reader.receive(1)
    assert reader.got == [*range(50)]
    assert not stuck.is_set()
    greedy.cancel()
    assert stuck.wait(TIMEOUT_S)
    assert not budget.held


def test_blocks_that_a_consumer_may_hand_back_count() -> None:
    budget = MemoryBudget(1 << 30)
    output = FirstComeOutput(budget=budget)
    reader = Reader(output, HANDS_BACK)
    for number in range(4):
        output.put(block(number, 1))
        reader.next()
    assert budget.held == 4 * BLOCK
    reader.receive(1)
    assert budget.held == 3 * BLOCK
    reader.subscription.hand_back(reader.lacking)
    reader.subscription.close()
    assert budget.held == 3 * BLOCK
    killed = Reader(output, ANY)
    killed.next()
    killed.close()
    assert budget.held == 2 * BLOCK
    assert output.shed(after=output.opens) == 2
    assert not budget.held


def test_a_consumer_that_needs_several_blocks_before_it_is_done_with_one_gets_them() -> None:
    """A batch spans them; and others hold all the memory."""
    budget = MemoryBudget(2 * BLOCK)
    budget.share().take(BLOCK)
    output = FirstComeOutput(budget=budget)
    reader = Reader(output, HANDS_BACK)
    blocks = [block(number, 1) for number in range(3)]

    def put() -> None:
        for item in blocks:
            output.put(item)

    produced = in_background(put)
    while len(reader.got) < 3:
        reader.next()
    assert produced.wait(TIMEOUT_S)


def test_memory_is_free_again_when_a_block_is_cut() -> None:
    """A single element has no shapes, as several of different shapes have."""
    budget = MemoryBudget(1 << 30)
    output = FirstComeOutput(budget=budget)
    shapes = np.array([[2, 1], [3, 1], [1, 4]])
    for _ in range(100):
        output.put(Block(3, (Component(np.arange(9), shapes),)))
    subscription: Any = output.open(ANY)
    for _ in range(300):
        assert isinstance(subscription.wait(0, max_elements=1), Block)
    assert not budget.held


def test_a_round_comes_whole_whatever_others_hold() -> None:
    budget = MemoryBudget(2 * BLOCK)
    budget.share().take(100 * BLOCK)
    output = RoundsOutput(4, budget=budget)
    for number in range(4):
        output.put(block(number, 1))
    readers = [Reader(output, Rounds(consumer, 4)) for consumer in range(4)]
    for reader in readers:
        reader.next()
    assert [reader.got for reader in readers] == [[0], [1], [2], [3]]


def test_a_window_has_its_size_whatever_others_hold() -> None:
    budget = MemoryBudget(2 * BLOCK)
    other = budget.share()
    other.take(BLOCK)
    output = CachedOutput(1 << 20, budget=budget)
    for number in range(20):
        output.put(block(number, 1))
    assert output.held_bytes >= 20 * BLOCK
    assert not other.take(BLOCK), "it counts for others"
    reader = Reader(output, Cached("trainer"))
    for _ in range(20):
        reader.next()
    assert reader.got == [*range(20)]


@pytest.mark.parametrize(
    "end", [FirstComeOutput.cancel, lambda output: output.fail("ABORTED", "why")]
)
def test_a_producer_that_waits_for_memory_is_released_when_a_task_ends(
    end: Callable[[FirstComeOutput], None],
) -> None:
    needed = threading.Event()
    budget = MemoryBudget(2 * BLOCK, needed.set)
    budget.share().take(BLOCK)
    output = FirstComeOutput(budget=budget)
    output.put(block(0, 1))

    def put() -> None:
        with pytest.raises(Exception, match=r"cancelled|after finish"):
            output.put(block(1, 1))

    waiting = in_background(put)
    assert needed.wait(TIMEOUT_S)
    end(output)
    assert waiting.wait(TIMEOUT_S)

"""The policy *cached*: who skips what, how far the producer runs ahead, and what outlives whom; and
the policy beside a model of it, under any history of trainers that come, leave and come again.

The model has no blocks. It knows how far each trainer has come, and what was put in one piece.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.service.block_limits import cost
from forebay.service.blocks import Block, Component
from forebay.service.delivery import (
    Cached,
    CachedOutput,
    EndOfTask,
    OutputCancelled,
    TaskUnknown,
    cached,
)
from forebay.service.delivery.cached import ENCODED_BLOCKS
from forebay.service.errors import InvalidArgument

from ..hypothesis_profiles import examples
from .contract import ROOM, TIMEOUT_S, Ledger, Reader, block

FOUR = cost(block(0, 4))


def read(output: CachedOutput, trainer_id: str) -> Reader:
    return Reader(output, Cached(trainer_id))


def test_the_producer_runs_ahead_of_the_fastest_trainer_only_so_far() -> None:
    output = CachedOutput(ROOM, ahead_bytes=2 * FOUR)
    slow, fast = read(output, "slow"), read(output, "fast")
    slow.next()
    for number in range(2):
        output.put(block(4 * number, 4))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(output.put, block(8, 4))
        try:
            slow.next(max_elements=3)
            assert not waiting.done(), "nobody has had the whole of any"
            fast.next()
            waiting.result(TIMEOUT_S)
            waiting = pool.submit(output.put, block(12, 4))
            slow.next()
            slow.close()
            fast.close()
            assert not waiting.done(), "who is behind, or goes, makes no room"
        finally:
            output.cancel()
        with pytest.raises(OutputCancelled):
            waiting.result(TIMEOUT_S)


def test_what_nobody_has_read_is_never_displaced() -> None:
    """However far ahead the producer may be: the window is what it may fill."""
    output = CachedOutput(2 * FOUR, ahead_bytes=ROOM)
    for number in range(2):
        output.put(block(4 * number, 4))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(output.put, block(8, 4))
        reader = read(output, "trainer")
        while not waiting.done():
            reader.next()
            assert output.held_bytes <= 2 * FOUR
        waiting.result(TIMEOUT_S)
    while reader.next() is not None:
        pass
    assert reader.got == [*range(12)]


def test_what_has_left_the_window_is_free() -> None:
    """However many trainers there are, it is kept once, and no longer than it is in the window."""
    output = CachedOutput(4 * FOUR)
    readers = [read(output, f"trainer {i}") for i in range(8)]
    arrays = []
    for number in range(20):
        values = np.arange(4 * number, 4 * number + 4)
        arrays.append(weakref.ref(values))
        output.put(Block(4, (Component(values),)))
        del values
        for reader in readers:
            item = reader.subscription.next(True)
            assert isinstance(item, tuple)
            reader.subscription.received([item[0]])
        del item
    gc.collect()
    assert [array() is not None for array in arrays] == [False] * 16 + [True] * 4


def test_what_a_block_was_encoded_to_is_kept_for_a_while() -> None:
    output = CachedOutput(ROOM)
    fast, slow = read(output, "fast"), read(output, "slow")
    made: list[int] = []

    def encode(item: object) -> None:
        assert isinstance(item, Block) and item.encodings is not None
        first = item.index

        def make() -> bytes:
            made.append(first)
            return b""

        assert item.encodings.get("codec", make) == b""

    for number in range(2 * ENCODED_BLOCKS):
        output.put(block(4 * number, 4))
        encode(fast.next())
    assert made == [4 * number for number in range(2 * ENCODED_BLOCKS)]
    made.clear()
    for _ in range(2 * ENCODED_BLOCKS):
        encode(slow.next())
    assert made == [4 * number for number in range(ENCODED_BLOCKS)]


def test_a_block_without_elements_displaces_nothing() -> None:
    output = CachedOutput(FOUR)
    fast, slow = read(output, "fast"), read(output, "slow")
    output.put(block(0, 4))
    slow.next(max_elements=1)
    fast.next()
    output.put(Block(0, ()))
    slow.next()
    assert slow.got == [0, 1, 2, 3] and slow.next() is None
    output.cancel()
    with pytest.raises(OutputCancelled):
        output.put(Block(0, ()))


def test_of_too_many_trainers_the_least_recent_one_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cached, "MAX_TRAINERS", 2)
    output = CachedOutput(ROOM)
    output.put(block(0, 4))
    first, second, third = (read(output, name) for name in ("first", "second", "third"))
    for reader in (first, second, first, third, first, second):
        reader.next(max_elements=1)
    assert first.got == [0, 1, 2] and second.got == [0, 0] and third.got == [0]


def test_a_trainer_that_returns_after_the_window_was_dropped_has_skipped_it() -> None:
    output = CachedOutput(ROOM)
    for number in range(3):
        output.put(block(4 * number, 4))
    before, ahead = read(output, "trainer"), read(output, "ahead")
    before.next()
    for _ in range(3):
        ahead.next()
    assert output.shed(after=output.opens) == 0
    again = read(output, "trainer")
    assert again.next() is None and ahead.next() is None
    output.put(block(12, 4))
    item = again.next()
    assert isinstance(item, Block) and item.skipped == 8 and again.got == [12, 13, 14, 15]
    ahead.next()
    assert ahead.got == [*range(16)]


def test_a_trainer_has_an_id() -> None:
    with pytest.raises(InvalidArgument, match="requires a non-empty trainer ID"):
        Cached("")


# -- the model -----------------------------------------------------------------------------------

TRAINERS = ["a", "b", "c"]


@dataclasses.dataclass
class ModelTrainer:
    at: int  # the number of the element that it wants next
    skipped: int = 0


class CachedModel(RuleBasedStateMachine):
    @initialize(window=st.integers(1, 6), ahead=st.integers(1, 6))
    def start(self, window: int, ahead: int) -> None:
        self.ledger = Ledger()
        self.window, self.ahead = window * FOUR, min(window, ahead) * FOUR
        self.output = CachedOutput(window * FOUR, self.ledger, ahead_bytes=ahead * FOUR)
        self.trainers: dict[str, ModelTrainer] = {}
        self.readers: list[tuple[str, Reader]] = []
        self.ends: list[int] = []  # where each block that was put ends
        self.begin = 0  # of what is kept
        self.given: set[int] = set()
        self.reported = 0  # elements given, counted for each trainer
        self.ended = False

    @property
    def stop(self) -> int:
        return self.ends[-1] if self.ends else 0

    def costs_from(self, first: int) -> int:
        """Of the blocks that end behind an element."""
        starts = [0, *self.ends]
        blocks = zip(starts, self.ends, strict=False)
        return sum(cost(block(a, b - a)) for a, b in blocks if b > first)

    @rule(size=st.integers(1, 8))
    def put(self, size: int) -> None:
        new = block(self.stop, size)
        fastest = max((trainer.at for trainer in self.trainers.values()), default=0)
        unread = self.costs_from(fastest)
        if self.ended or (unread and unread + cost(new) > self.ahead):
            return  # it would wait, or may not
        self.output.put(new)
        while self.begin < self.whole(fastest) and (
            self.costs_from(self.begin) + cost(new) > self.window
        ):
            self.begin = min(end for end in self.ends if end > self.begin)
        self.ends.append(self.stop + size)

    def whole(self, element: int) -> int:
        """The end of the last block that ends before it, or there."""
        return max((end for end in self.ends if end <= element), default=0)

    @rule(trainer=st.sampled_from(TRAINERS))
    def come(self, trainer: str) -> None:
        self.readers.append((trainer, read(self.output, trainer)))

    @precondition(lambda self: self.readers)
    @rule(
        which=st.integers(0, 1 << 30),
        credit=st.sampled_from([True] * 4 + [False]),
        limit=st.one_of(st.none(), st.integers(1, 5)),
    )
    def take(self, which: int, credit: bool, limit: int | None) -> None:
        name, reader = self.readers[which % len(self.readers)]
        trainer = self.trainers.get(name) or ModelTrainer(self.begin)
        item = reader.next(credit, limit)
        if trainer.at >= self.stop:
            assert item == (EndOfTask() if self.ended else None)
            return
        if not credit:
            assert item is None
            return
        assert isinstance(item, Block)
        at = max(trainer.at, self.begin)
        end = min(end for end in self.ends if end > at)
        expected = [*range(at, end)][:limit]
        assert reader.got[-item.count :] == expected
        assert item.skipped == at - trainer.at
        self.trainers[name] = ModelTrainer(expected[-1] + 1, trainer.skipped + item.skipped)
        self.given.update(expected)
        self.reported += len(expected)

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 1 << 30), receives=st.booleans())
    def go(self, which: int, receives: bool) -> None:
        _, reader = self.readers.pop(which % len(self.readers))
        if receives:
            reader.receive(len(reader.lacking))
        reader.close()

    @precondition(lambda self: len(self.readers) > 3)
    @rule()
    def finish(self) -> None:
        self.output.finish()
        self.ended = True

    @invariant()
    def the_window_is_bounded_and_what_is_new_is_kept(self) -> None:
        if not hasattr(self, "output"):
            return
        kept = [end for end in self.ends if end > self.begin]
        assert self.output.held_bytes == self.costs_from(self.begin)
        assert self.output.held_bytes <= self.window or len(kept) == 1
        assert self.output.waiting_elements == self.stop - len(self.given)
        assert self.output.wait_drained(0) == (self.ended and len(self.given) == self.stop)

    def teardown(self) -> None:
        """Each trainer has all but what it skipped; reports add up."""
        if not hasattr(self, "output"):
            return
        for _, reader in self.readers:
            reader.close()
        self.output.cancel()
        assert all(r.next() == TaskUnknown() for r in [read(self.output, t) for t in TRAINERS])
        assert self.ledger.total == self.reported + self.stop - len(self.given)


CachedModel.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestModel = CachedModel.TestCase

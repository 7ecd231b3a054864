"""*Cached*: every trainer reads all of it, one production for all of them.

A window slides over what the task produces. Each *trainer*, named by an id, has a position in it,
at which all who read under that id go on: an element goes to one of them, and to a trainer at most
once. Who is new begins with the oldest element of the window.

**Who is waited for.** The fastest trainer alone: the producer runs `ahead_bytes` ahead of it, and
no further. For what is new the oldest elements are forgotten. A trainer that had not come to them
yet skips them, and goes on with the oldest that there are; the next block that it is given says
how many they were (`Block.skipped`).

**What outlives whom.** Positions live as long as the task, whether anybody reads under that id or
not: who comes back goes on behind what it was given before. Of more than MAX_TRAINERS, the one that
was given something longest ago is forgotten, and would be new. What was on its way to a reader that
closes goes to nobody instead; with the task, on a worker that ends, go window and positions.

Blocks are shared: all trainers are given the same arrays, which nobody may write to. What a block
is compressed to on its way is kept for the next trainers, as long as it is one of the last blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..block_limits import check_block, cost
from ..blocks import Block, Encodings, strided
from .base import End, Listener, Subscription, TaskOutput, TaskUnknown, refused
from .orders import Cached, Order


class Skips:
    """Adds up what a trainer has skipped. Thread-safe."""

    def __init__(self) -> None:
        self.elements = 0
        self._lock = threading.Lock()

    def add(self, elements: int) -> bool:
        """So many more; whether it is time to say so, as they have about doubled."""
        with self._lock:
            before, self.elements = self.elements, self.elements + elements
            return before.bit_length() < self.elements.bit_length()


MAX_TRAINERS = 10_000
"""Whose positions are kept."""

ENCODED_BLOCKS = 8
"""The last ones that were given out: of these it is kept what they were compressed to."""


@dataclass(slots=True)
class _Trainer:
    """Where a trainer goes on: both count from the first of the task."""

    block: int
    element: int


class CachedOutput(TaskOutput):
    """One task's blocks, from one producer to any number of trainers, each block to all of them.

    `max_bytes` bound the window; of these, up to `ahead_bytes` have been given to no trainer yet.
    Blocks come and go as a whole. A trainer's subscriptions may be shared by threads. Elements are
    reported for each trainer that they are given to; that one is given to none, when the task ends.
    """

    def __init__(
        self,
        max_bytes: int = 1 << 30,
        listener: Listener | None = None,
        *,
        ahead_bytes: int = 8 << 20,
    ) -> None:
        super().__init__(max_bytes, listener)
        self._ahead_bytes = min(ahead_bytes, max_bytes)  # so what is new never displaces itself
        # By their number: each block, its cost, and the number of its first element.
        self._window: dict[int, tuple[Block, int, int]] = {}
        self._first = 0  # the oldest block there
        self._stop = 0  # behind the newest
        self._front = 0  # the oldest that no trainer has been given the whole of
        self._bytes = 0  # of all
        self._new_bytes = 0  # of those from the front on
        self._put = 0  # elements
        self._given = 0  # those before this one were, each to some trainer
        self._trainers: dict[str, _Trainer] = {}  # by when they were given something last

    def put(self, block: Block) -> None:
        check_block(block)
        if not block.count:  # it must not displace what trainers have yet to read
            with self.changed:
                self._check_open()
            return
        size = cost(block)
        with self.changed:
            while (
                self._end is None and self._new_bytes and self._new_bytes + size > self._ahead_bytes
            ):
                self.changed.wait()  # for a trainer, or for cancel()
            self._check_open()
            while self._first < self._front and self._bytes + size > self._max_bytes:
                self._bytes -= self._window.pop(self._first)[1]
                self._first += 1
            kept = replace(block, encodings=Encodings(), loan=None)
            self._window[self._stop] = kept, size, self._put
            self._stop += 1
            self._put += block.count
            self._bytes += size
            self._new_bytes += size
            self.changed.notify_all()
        self._tell()

    def _open(self, order: Order) -> Subscription | End:
        if not isinstance(order, Cached):
            return refused(order, "what is cached, to each trainer")
        return _CachedSubscription(self, order.trainer_id)

    @property
    def waiting_elements(self) -> int:
        with self.changed:
            return self._put - self._given

    def _holds(self) -> bool:
        return self._given < self._put

    def _clear(self) -> None:
        for number in range(self._front, self._stop):
            block, _, first = self._window[number]
            given = max(0, self._given - first)
            self._dropped([strided(block, given, 1, block.count - given)])
        self._window.clear()
        self._first = self._front = self._stop
        self._bytes = self._new_bytes = 0
        self._given = self._put

    def _give(
        self, trainer_id: str, credit: bool, max_elements: int | None
    ) -> tuple[Block, int] | End | None:
        """What is next for a trainer."""
        trainer = self._trainers.get(trainer_id)
        if isinstance(self._end, TaskUnknown) or (
            self._first == self._stop if trainer is None else trainer.block == self._stop
        ):
            return self._end
        if not credit:
            return None
        oldest = self._window[self._first][2]
        if trainer is None:
            trainer = _Trainer(self._first, oldest)
        self._trainers.pop(trainer_id, None)
        self._trainers[trainer_id] = trainer
        if len(self._trainers) > MAX_TRAINERS:
            del self._trainers[next(iter(self._trainers))]
        skipped = 0
        if trainer.block < self._first:
            skipped = oldest - trainer.element
            trainer.block, trainer.element = self._first, oldest
        whole, size, first = self._window[trainer.block]
        begun = trainer.element - first
        count = min(whole.count - begun, max_elements or whole.count)
        block = strided(whole, begun, 1, count)
        trainer.element += count
        self._given = max(self._given, trainer.element)
        if begun + count == whole.count:
            if trainer.block == self._front:
                if (passed := self._window.get(self._front - ENCODED_BLOCKS)) is not None:
                    assert passed[0].encodings is not None
                    passed[0].encodings.forget()
                self._front += 1
                self._new_bytes -= size
                self.changed.notify_all()
            trainer.block += 1
        if skipped:
            block = replace(block, skipped=skipped)
        return block, cost(block)


class _CachedSubscription(Subscription):
    """All that it has is whose it is."""

    output: CachedOutput

    def __init__(self, output: CachedOutput, trainer_id: str) -> None:
        super().__init__(output)
        self._trainer_id = trainer_id

    def next(self, credit: bool, max_elements: int | None = None) -> tuple[Block, int] | End | None:
        with self.output.changed:
            return self.output._give(self._trainer_id, credit, max_elements)

    def received(self, blocks: Sequence[Block]) -> None:
        self.output._acknowledged(blocks)

    def close(self, lacking: Sequence[Block] = ()) -> None:
        self.output._dropped(lacking)

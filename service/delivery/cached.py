"""*Cached*: every trainer reads the whole task, which is produced once.

The cache keeps the task's latest blocks. Each *trainer id* has a position in the task. All readers
under that id share the position: each element goes to one of them, so a trainer gets it at most
once. A new trainer begins with the oldest element of the cache.

**Backpressure.** The producer waits only for the fastest trainer: it runs at most `ahead_bytes`
ahead of it. New elements evict the oldest ones. A trainer that had not reached the evicted elements
skips them, and continues with the oldest that is kept. Its next block says how many it skipped
(`Block.skipped`).

**Lifetimes.** A position lives as long as the task, even without readers: a trainer that returns
continues behind its last element. With more than MAX_TRAINERS, the least recently served one is
forgotten, and would be new. Elements on their way to a reader that closes are lost to its trainer.
The cache and the positions vanish with the task, as when its worker ends.

Blocks are shared: all trainers get the same arrays, which nobody may write to. The encodings of the
last ENCODED_BLOCKS blocks are kept for the next trainers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..block_limits import check_block, cost
from ..blocks import Block, Encodings, strided
from .base import End, Listener, Subscription, TaskOutput, TaskUnknown, refused
from .memory import MemoryBudget
from .orders import Cached, Order


class Skips:
    """Counts the elements that a trainer has skipped. Thread-safe."""

    def __init__(self) -> None:
        self.elements = 0
        self._lock = threading.Lock()

    def add(self, elements: int) -> bool:
        """Add so many; return whether to report them, as the sum has about doubled."""
        with self._lock:
            before, self.elements = self.elements, self.elements + elements
            return before.bit_length() < self.elements.bit_length()


MAX_TRAINERS = 10_000
"""How many trainers' positions are kept."""

ENCODED_BLOCKS = 8
"""How many of the last blocks given out keep their encodings."""


@dataclass(slots=True)
class _Position:
    """A trainer's position; both numbers count from the task's first."""

    block: int
    element: int


class CachedOutput(TaskOutput):
    """One task's blocks, from one producer to any number of trainers, each block to all of them.

    `max_bytes` bound the cache; up to `ahead_bytes` of it have been given to no trainer yet. Only
    whole blocks are evicted. Threads may share a subscription. Elements are reported for each
    trainer that they are given to. Elements that nobody received are dropped when the task ends.
    """

    def __init__(
        self,
        max_bytes: int = 1 << 30,
        listener: Listener | None = None,
        *,
        ahead_bytes: int = 8 << 20,
        budget: MemoryBudget | None = None,
    ) -> None:
        super().__init__(max_bytes, listener, budget)
        self._ahead_bytes = min(ahead_bytes, max_bytes)  # so new blocks never evict each other
        # By their number: each block, its cost, and the number of its first element.
        self._kept: dict[int, tuple[Block, int, int]] = {}
        self._first = 0  # the oldest block in the cache
        self._stop = 0  # behind the newest
        self._front = 0  # the oldest block that no trainer has been given completely
        self._bytes = 0  # of all blocks in the cache
        self._new_bytes = 0  # of the blocks from the front on
        self._put = 0  # elements
        self._given = 0  # all elements before this one were given to some trainer
        self._trainers: dict[str, _Position] = {}  # the least recently served first

    def put(self, block: Block) -> None:
        check_block(block)
        if not block.count:  # it must not evict elements that trainers have yet to read
            with self.changed:
                self._check_open()
            return
        size = cost(block)
        with self.changed:
            # The cache's size is configured per worker, whatever other outputs hold.
            self._take_memory(
                size,
                lambda: bool(self._new_bytes) and self._new_bytes + size > self._ahead_bytes,
                lambda: not self._new_bytes or self._new_bytes + size <= self._ahead_bytes,
            )
            while self._first < self._front and self._bytes + size > self._max_bytes:
                freed = self._kept.pop(self._first)[1]
                self._bytes -= freed
                self._memory.release(freed)
                self._first += 1
            kept = replace(block, encodings=Encodings(), loan=None)
            self._kept[self._stop] = kept, size, self._put
            self._stop += 1
            self._put += block.count
            self._bytes += size
            self._new_bytes += size
            self.changed.notify_all()
        self._notify()

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
            block, _, first = self._kept[number]
            given = max(0, self._given - first)
            self._dropped([strided(block, given, 1, block.count - given)])
        self._kept.clear()
        self._memory.release(self._bytes)
        self._first = self._front = self._stop
        self._bytes = self._new_bytes = 0
        self._given = self._put

    def _give(
        self, trainer_id: str, credit: bool, max_elements: int | None
    ) -> tuple[Block, int] | End | None:
        """The trainer's next block with its cost, or the end, or None."""
        trainer = self._trainers.get(trainer_id)
        is_empty = self._first == self._stop
        if isinstance(self._end, TaskUnknown) or is_empty:
            return self._end
        if trainer is not None and trainer.block == self._stop:
            return self._end
        if not credit:
            return None
        oldest = self._kept[self._first][2]
        if trainer is None:
            trainer = _Position(self._first, oldest)
        self._trainers.pop(trainer_id, None)
        self._trainers[trainer_id] = trainer
        if len(self._trainers) > MAX_TRAINERS:
            del self._trainers[next(iter(self._trainers))]
        skipped = 0
        if trainer.block < self._first:
            skipped = oldest - trainer.element
            trainer.block, trainer.element = self._first, oldest
        whole, size, first = self._kept[trainer.block]
        begun = trainer.element - first
        count = min(whole.count - begun, max_elements or whole.count)
        block = strided(whole, begun, 1, count)
        trainer.element += count
        self._given = max(self._given, trainer.element)
        if begun + count == whole.count:
            if trainer.block == self._front:
                if (passed := self._kept.get(self._front - ENCODED_BLOCKS)) is not None:
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
    """A subscription without state but its trainer's id."""

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

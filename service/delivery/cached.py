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
from dataclasses import dataclass, replace

from ..block_limits import check_block, cost
from ..blocks import Block, Encodings, strided
from .base import End, Listener, Subscription, TaskOutput, TaskUnknown, refused
from .element_log import ElementLog
from .memory import MemoryBudget
from .read_requests import Cached, ReadRequest


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
    element: int
    near: int  # the block that it was given last


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
        self._log = ElementLog(self.memory)
        self._read = 0  # the first element of the oldest block that no trainer has completely
        self._new_bytes = 0  # of the blocks from there on
        self._given = 0  # all elements before this one were given to some trainer
        self._trainers: dict[str, _Position] = {}  # the least recently served first

    def put(self, block: Block) -> None:
        check_block(block)
        if not block.count:  # it must not evict elements that trainers have yet to read
            with self.lock:
                self._check_open()
            return
        size = cost(block)
        with self.lock:
            # The cache's size is configured per worker, whatever other outputs hold.
            self._take_memory(
                size,
                lambda: bool(self._new_bytes) and self._new_bytes + size > self._ahead_bytes,
                lambda: not self._new_bytes or self._new_bytes + size <= self._ahead_bytes,
            )
            self._log.drop_before(self._read, self._max_bytes)
            self._log.add(replace(block, encodings=Encodings(), loan=None), size)
            self._new_bytes += size
            self.changed.notify_all()
        self.on_change(self, None)

    def _open(self, request: ReadRequest) -> Subscription | End:
        if not isinstance(request, Cached):
            return refused(request, "what is cached, to each trainer")
        return _CachedSubscription(self, request.trainer_id)

    @property
    def waiting_elements(self) -> int:
        return max(0, self._log.stop - self._given)

    def _clear(self) -> None:
        self.listener.dropped(self.waiting_elements)
        self._log.clear()
        self._new_bytes = 0
        self._read = self._given = self._log.stop

    def give(
        self, trainer_id: str, credit: bool, max_elements: int | None
    ) -> tuple[Block, int] | End | None:
        """The trainer's next block with its cost, or the end, or None."""
        log, trainer = self._log, self._trainers.get(trainer_id)
        if isinstance(self._end, TaskUnknown) or not log:
            return self._end
        if trainer is not None and trainer.element == log.stop:
            return self._end
        if not credit:
            return None
        if trainer is None:
            trainer = _Position(log.start, log.first)
        self._trainers.pop(trainer_id, None)
        self._trainers[trainer_id] = trainer
        if len(self._trainers) > MAX_TRAINERS:
            del self._trainers[next(iter(self._trainers))]
        skipped = max(0, log.start - trainer.element)
        trainer.element += skipped
        kept = log.at(trainer.element, trainer.near)
        assert kept is not None, "it is neither before the oldest element nor behind the newest"
        count = min(kept.stop - trainer.element, max_elements or kept.block.count)
        block = strided(kept.block, trainer.element - kept.start, 1, count)
        trainer.element, trainer.near = trainer.element + count, kept.number
        self._given = max(self._given, trainer.element)
        if trainer.element == kept.stop and kept.start == self._read:
            if (passed := log.get(kept.number - ENCODED_BLOCKS)) is not None:
                assert passed.block.encodings is not None
                passed.block.encodings.forget()
            self._read = kept.stop
            self._new_bytes -= kept.cost
            self.changed.notify_all()
        if skipped:
            block = replace(block, skipped=skipped)
        return block, cost(block)


class _CachedSubscription(Subscription):
    output: CachedOutput

    def __init__(self, output: CachedOutput, trainer_id: str) -> None:
        super().__init__(output)
        self._trainer_id = trainer_id

    def next_locked(self, credit: bool, max_elements: int | None) -> tuple[Block, int] | End | None:
        return self.output.give(self._trainer_id, credit, max_elements)

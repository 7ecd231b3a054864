"""ElementLog: blocks of consecutive elements, which several readers read at their own positions.

Elements are numbered, and so are blocks. A reader's position is an element; with it the reader
keeps the number of the block that it was given last, so that the next one is found at once. Blocks
are dropped from the oldest on; the policy says up to which element, and how many bytes may stay.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..blocks import Block
from .memory import OutputMemory


@dataclass(slots=True)
class LoggedBlock:
    number: int
    block: Block
    cost: int
    start: int
    stop: int
    given: int = 0  # how many of its elements were, in any order; those given again count again
    readers: set[int] = field(default_factory=set)  # that have got some

    @property
    def element_bytes(self) -> int:
        """About."""
        return self.cost // (self.stop - self.start)


class ElementLog:
    """Not thread-safe."""

    def __init__(self, memory: OutputMemory, start: int = 0) -> None:
        """`memory` holds the blocks: what is dropped is released there. The first element put has
        the number `start`."""
        self.start = self.stop = start  # of the oldest element, and behind the newest
        self.first = 0  # the number of the oldest block
        self._next = 0
        self._memory = memory
        self._kept: dict[int, LoggedBlock] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[LoggedBlock]:
        return iter(self._kept.values())

    def __reversed__(self) -> Iterator[LoggedBlock]:
        return reversed(self._kept.values())

    def add(self, block: Block, cost: int) -> None:
        """Add the block, of at least one element, whose memory was taken."""
        kept = LoggedBlock(self._next, block, cost, self.stop, self.stop + block.count)
        self._kept[self._next] = kept
        self._next += 1
        self.stop = kept.stop

    def get(self, number: int) -> LoggedBlock | None:
        return self._kept.get(number)

    def at(self, element: int, near: int) -> LoggedBlock | None:
        """The block that has this element, or None. Faster if its number is `near` or the next."""
        if not self.start <= element < self.stop:
            return None
        for number in (near, near + 1):
            kept = self._kept.get(number)
            if kept is not None and kept.start <= element < kept.stop:
                return kept
        numbers = range(self.first, self._next)
        return self._kept[numbers[bisect_right(numbers, element, key=lambda n: self._kept[n].stop)]]

    def drop_before(self, element: int, most_bytes: int | None = None) -> None:
        """Drop the blocks before this element, the oldest first, until the output holds at most
        `most_bytes`."""
        first, freed, held = self.first, 0, self._memory.held
        while (kept := self._kept.get(first)) is not None:
            if kept.stop > element or (most_bytes is not None and held - freed <= most_bytes):
                break
            del self._kept[first]
            first += 1
            freed += kept.cost
            self.start = kept.stop
        if first > self.first:
            self.first = first
            self._memory.release(freed)

    def clear(self) -> None:
        self.drop_before(self.stop)

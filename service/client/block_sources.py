"""The block sources of datasets, by number, because graphs cannot hold Python objects.

Python cannot see how long TensorFlow uses what it made of a dataset, such as clones for
tf.distribute. So all sources of live datasets are kept, and an LRU of the sources of dropped ones.
"""

from __future__ import annotations

import collections
import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import FailedPrecondition

DROPPED = 1000
"""How many sources of dropped datasets are kept."""


@dataclass(frozen=True, eq=False)
class BlockSource:
    """Opens the blocks of one dataset. `keeps` must live as long as they may be opened."""

    open_blocks: Callable[[], Any]
    keeps: Any = None


class BlockSources:
    """Sources by number. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._sources: dict[int, BlockSource] = {}
        self._dropped: dict[int, None] = {}  # an LRU, least recently used first
        # Garbage collection appends to it at any moment, even in a thread that holds the lock.
        self._just_dropped: collections.deque[int] = collections.deque()

    def __len__(self) -> int:
        return len(self._sources)

    def add(self, source: BlockSource) -> int:
        """Keeps the source and returns its number."""
        with self._lock:
            number = next(self._numbers)
            self._sources[number] = source
            self._forget_some()
        return number

    def drop_with(self, number: int, owner: Any) -> None:
        """Moves the source to the LRU when the owner is collected; with None, now."""
        if owner is None:
            self._just_dropped.append(number)
        else:
            weakref.finalize(owner, self._just_dropped.append, number).atexit = False

    def use(self, number: int) -> BlockSource:
        """The source with this number. Raises FailedPrecondition if it was evicted."""
        with self._lock:
            self._forget_some()
            if number not in self._sources:
                raise FailedPrecondition(
                    f"the program dropped this dataset, and {DROPPED} others since, before its "
                    "iteration began: keep the dataset for as long as it is read"
                )
            if number in self._dropped:
                del self._dropped[number]
                self._dropped[number] = None
            return self._sources[number]

    def _forget_some(self) -> None:
        while self._just_dropped:
            self._dropped[self._just_dropped.popleft()] = None
        while len(self._dropped) > DROPPED:
            number = next(iter(self._dropped))
            del self._dropped[number], self._sources[number]

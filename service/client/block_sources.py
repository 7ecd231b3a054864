"""Where the blocks of datasets come from, by numbers: graphs hold none of Python's objects.

Nobody sees for how long TensorFlow goes on with what it has made of a dataset: clones for
tf.distribute, for instance. So what Python still knows is kept, and of what it has dropped, that
which was read last.
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
"""So many are kept of what was dropped."""


@dataclass(frozen=True, eq=False)
class BlockSource:
    """`keeps` has to live for as long as anybody opens its blocks."""

    open_blocks: Callable[[], Any]
    keeps: Any = None


class BlockSources:
    """Sources by number. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._sources: dict[int, BlockSource] = {}
        self._dropped: dict[int, None] = {}  # the one that was used longest ago comes first
        # Added to at any moment, wherever a thread collects garbage: also where it holds the lock.
        self._just_dropped: collections.deque[int] = collections.deque()

    def __len__(self) -> int:
        return len(self._sources)

    def add(self, source: BlockSource) -> int:
        """Its number from now on. It is kept."""
        with self._lock:
            number = next(self._numbers)
            self._sources[number] = source
            self._forget_some()
        return number

    def drop_with(self, number: int, owner: Any) -> None:
        """It has been dropped once the owner is no more; None is no more already."""
        if owner is None:
            self._just_dropped.append(number)
        else:
            weakref.finalize(owner, self._just_dropped.append, number).atexit = False

    def use(self, number: int) -> BlockSource:
        """Raises FailedPrecondition if it was forgotten."""
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

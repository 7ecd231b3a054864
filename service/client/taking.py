"""Giving a trainer the elements of an epoch, or their batches, and knowing how far it has come.

So what it was not given of a block can be handed back (leaving.py). Elements are counted in C.
Neither `Taking` nor what it is made of refers to itself, so that one that is dropped is closed at
once.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Any, Self

from ..blocks import Block
from .leaving import Taker

Blocks = Generator[Block, None, None]


class Progress(Taker):
    """How far a trainer has come with the block that it is being given."""

    def __init__(self, taking: Taking) -> None:
        self._taking = weakref.ref(taking)
        self._rest = itertools.repeat(True, 0)  # knows how often it has yet to be asked

    def counted(self, elements: Iterator[Any], count: int) -> Iterator[Any]:
        """A new block's elements, or what stands for them: each is given when it is taken."""
        self._rest = itertools.repeat(True, count)
        return itertools.compress(elements, self._rest)

    def set_left(self, count: int) -> None:
        """Of the block that is being given."""
        self._rest = itertools.repeat(True, count)

    def left(self) -> int:
        return operator.length_hint(self._rest)

    def leave(self) -> None:
        if (taking := self._taking()) is not None:
            taking.leave()

    def close(self) -> None:
        if (taking := self._taking()) is not None:
            taking.close()


class Taking:
    """An iterator over what `give` makes of an epoch's blocks. Not thread-safe but for `leave`."""

    def __init__(
        self,
        iterate: Callable[[Taker], Blocks],
        give: Callable[[Blocks, Progress], Iterator[Any]],
    ) -> None:
        """`iterate` begins the epoch, as Reader.iterate; `give` says how far it has come."""
        progress = Progress(self)
        self._blocks = iterate(progress)
        self._items = give(self._blocks, progress)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self._items)

    def leave(self) -> None:
        """Leave the iteration when the next element is asked for. Called by any thread."""
        self._items = iter(self.close, None)  # calls it, and ends, as it returns None

    def close(self) -> None:
        """Leave the iteration. Of a shared job others get what was not given here. Idempotent."""
        self._items = iter(())
        self._blocks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

"""Iterations of processes that train in step, which end behind the same element in each of them.

Under `MultiWorkerMirroredStrategy` a step is a collective operation: one process whose data ended
before the others' takes part in their steps on nothing, and where the dataset has no end, in none,
so that they wait for it for ever. So when these processes are told to stop, each says how many
elements TensorFlow has been given, and gives no more until all have said it; then each goes on up
to as many as any had.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Protocol

from ..blocks import Block, split
from .consumer import Consumer
from .leaving import Taker

Blocks = Generator[Block, None, None]


class Others(Protocol):
    """The processes that train in step, of which this is `me`, counted from 0."""

    me: int
    number: int

    def say(self, key: str, text: str) -> None:
        """To all of them; what was said first remains. Thread-safe."""

    def hear(self, key: str, timeout_s: float | None) -> str | None:
        """What was said; None if nothing was in time, or nobody can be asked. Thread-safe."""


finders: list[Callable[[], Others | None]] = []
"""What knows of a framework's processes."""


def find() -> Others | None:
    """Who trains in step with this process."""
    return next((others for finder in finders if (others := finder()) is not None), None)


class Ends:
    """How many elements each iteration has given, by its name, and may give. Thread-safe."""

    def __init__(self) -> None:
        self.changed = threading.Condition()  # guards all of this
        self._given: dict[str, int] = {}  # also by those that have ended
        self._open: set[str] = set()
        self._limits: Mapping[str, int] | None = None
        self._holding = 0

    def begin(self, name: str) -> str:
        """The iteration's own name: the same in all processes, which begin it in one order. One
        that follows another goes on counting: epochs may be longer in one process than in others.
        """
        with self.changed:
            names = (f"{name}/{number}" for number in itertools.count())
            own = next(one for one in names if one not in self._open)
            self._open.add(own)
            self._given.setdefault(own, 0)
            return own

    def end(self, name: str) -> None:
        with self.changed:
            self._open.discard(name)
            self.changed.notify_all()

    def hold(self) -> dict[str, int]:
        """What was given; nothing is until `let_go`."""
        with self.changed:
            self._holding += 1
            return dict(self._given)

    def let_go(self, limits: Mapping[str, int]) -> None:
        """Up to these, or to less, if another said so before."""
        with self.changed:
            before = limits if self._limits is None else self._limits
            self._limits = {name: min(n, before.get(name, 0)) for name, n in limits.items()}
            self._holding -= 1
            self.changed.notify_all()

    def forget_limits(self) -> None:
        """The program goes on."""
        with self.changed:
            self._limits = None

    def are_held(self) -> bool:
        return self._holding > 0

    def admitted(self, name: str, count: int) -> int:
        """How many of so many elements may be given. Waits while they are held."""
        with self.changed:
            self.changed.wait_for(lambda: not self.are_held())
            if self._limits is not None:
                count = max(0, min(count, self._limits.get(name, 0) - self._given[name]))
            self._given[name] += count
            self.changed.notify_all()
            return count

    def is_over(self, name: str) -> bool:
        """Whether it has given all that it may."""
        with self.changed:
            if name not in self._open:
                return True
            held = self._holding or self._limits is None
            return not held and self._given[name] >= (self._limits or {}).get(name, 0)


ends = Ends()


class EqualTaker(Taker):
    """How far an iteration has come with a block."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._left = 0
        self._stopped = False

    def admit(self, block: Block) -> Block | None:
        """What may be given of it."""
        with ends.changed:
            self._left = block.count
            ends.changed.wait_for(lambda: self._stopped or not ends.are_held())
            count = 0 if self._stopped else ends.admitted(self._name, block.count)
            self._left -= count
        if count == block.count:
            return block
        return split(block, count)[0] if count else None

    def is_over(self) -> bool:
        return self._stopped or ends.is_over(self._name)

    def wait_until_over(self, timeout_s: float) -> None:
        with ends.changed:
            ends.changed.wait_for(self.is_over, timeout_s)

    def left(self) -> int:
        return self._left

    def leave(self) -> None:
        with ends.changed:
            self._stopped = True
            ends.changed.notify_all()

    def close(self) -> None:
        """TensorFlow's thread closes the iteration, when it asks for more."""
        self.leave()


def blocks_of(iterate: Callable[[Taker], Blocks], name: str) -> Blocks:
    """Those of an iteration of this name, until all processes have as many elements of it."""
    own = ends.begin(name)
    given = EqualTaker(own)
    try:
        with closing(iterate(given)) as blocks:
            for block in blocks:
                if (admitted := given.admit(block)) is not None:
                    yield admitted
                if given.is_over():
                    return
    finally:
        ends.end(own)


def stop(consumer: Consumer) -> None:
    """Where TensorFlow is given equally much, it is given nothing more from now on."""
    if isinstance(consumer.taker, EqualTaker):
        consumer.taker.leave()


def leave(consumer: Consumer, timeout_s: float) -> None:
    """Have it end: where all have as many elements, or after that time."""
    if isinstance(consumer.taker, EqualTaker):
        consumer.taker.wait_until_over(timeout_s)
    consumer.leave()

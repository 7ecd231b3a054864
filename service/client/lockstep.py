"""Lockstep: in all processes of a training, an iteration ends after the same number of elements.

Under `MultiWorkerMirroredStrategy`, a step is a collective operation. A process whose data ends
early joins the others' steps without data. If the dataset is infinite, it joins none, and the
others wait for ever. So when these processes must stop, each publishes how many elements it gave to
TensorFlow, and pauses until all have done so. Then each continues up to the largest number.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Protocol

from ..blocks import Block, split
from ..errors import InvalidArgument
from ..task_context import TaskContext
from .open_iterations import OpenConsumer, Taker, stopping

log = logging.getLogger(__name__)

Blocks = Generator[Block, None, None]


class Peers(Protocol):
    """The processes that train in lockstep. This process is `me`, counted from 0."""

    me: int
    number: int

    def publish(self, key: str, text: str) -> None:
        """Publishes a text to all of them. The first text of a key stays. Thread-safe."""

    def receive(self, key: str, timeout_s: float | None) -> str | None:
        """The text of a key; None after the timeout, or without a service to ask. Thread-safe."""


def find_peers() -> Peers | None:
    """The processes that train in lockstep, this one included; None if it trains alone."""
    if sys.modules.get("tensorflow") is None:
        return None
    from .tf_coordination import task_peers

    return task_peers()


def warn_if_unshared(job_name: str | None) -> None:
    """Warns of duplicate elements if this is one of several tasks that train. The strategy that was
    made says so, or else the environment."""
    if job_name is not None:
        return
    if (others := find_peers()) is not None:
        trains, number = True, others.number
    else:
        try:
            context = TaskContext.from_env()
        except InvalidArgument:
            return  # whoever trains by this environment reports the error
        trains, number = context.trains, context.num_consumers
    if trains and number > 1:
        log.warning(
            "without a job_name each of the %d tasks that train, as its strategy or environment "
            "says, reads all elements for itself, and the service produces them %d times. With "
            "auto_shard_policy AUTO or DATA tf.distribute drops all but a task's part of them; "
            "with OFF, and without tf.distribute, each is trained on %d times; FILE is an error, "
            "as it finds no files. Give a job_name to share them, or call distribute_across",
            number, number, number,
        )  # fmt: skip


class ElementLimits:
    """How many elements each iteration, by its name, has given and may give. Thread-safe."""

    def __init__(self) -> None:
        self.changed = threading.Condition()  # guards all of this
        self._given: dict[str, int] = {}  # includes ended iterations
        self._open: set[str] = set()
        self._limits: Mapping[str, int] | None = None
        self.pauses = 0  # iterations are paused while there is any
        self._agreements: set[str] = set()
        # Of each iteration: the count at its beginning, and the elements of a batch.
        self._batches: dict[str, tuple[int, int]] = {}

    def begin(self, name: str, batch_size: int = 1) -> str:
        """Returns the iteration's own name. It is the same in all processes if they begin
        iterations in the same order. The next iteration of a name continues its count, because
        epochs may differ in length between processes.
        """
        with self.changed:
            own = self.next_of(name)
            self._open.add(own)
            self._batches[own] = self._given.setdefault(own, 0), batch_size
            return own

    def next_of(self, name: str) -> str:
        """The own name of the next iteration of this name."""
        names = (f"{name}/{number}" for number in itertools.count())
        return next(one for one in names if one not in self._open)

    def end(self, name: str) -> None:
        with self.changed:
            self._open.discard(name)
            self.changed.notify_all()

    def pause(self) -> dict[str, int]:
        """Pauses all iterations until `resume`. Returns how many elements each has given."""
        with self.changed:
            self.pauses += 1
            return dict(self._given)

    def resume(self, limits: Mapping[str, int]) -> None:
        """Resumes the iterations, up to these limits or lower ones that were set before."""
        with self.changed:
            before = limits if self._limits is None else self._limits
            self._limits = {name: min(n, before.get(name, 0)) for name, n in limits.items()}
            self.pauses -= 1
            self.changed.notify_all()

    def begin_agreement(self, agreement: str) -> None:
        """If this process must stop, this agreement sets limits. Up to these, iterations begin."""
        with self.changed:
            self._agreements.add(agreement)

    def end_agreement(self, agreement: str) -> None:
        """No iteration begins any more, if this process must stop."""
        with self.changed:
            self._agreements.discard(agreement)

    def forget_limits(self) -> None:
        """Removes the limits, because the program continues."""
        with self.changed:
            self._limits = None

    def admit_elements(self, name: str, count: int) -> int:
        """How many of `count` elements may be given. Waits while the iterations are paused."""
        with self.changed:
            self.changed.wait_for(lambda: not self.pauses)
            count = max(0, min(count, self._limit(name) - self._given[name]))
            self._given[name] += count
            self.changed.notify_all()
            return count

    def is_over(self, name: str) -> bool:
        """Whether the iteration has ended or reached its limit."""
        with self.changed:
            return name not in self._open or self._has_reached_limit(name)

    def _has_reached_limit(self, name: str) -> bool:
        return not self.pauses and self._given.get(name, 0) >= self._limit(name)

    def _limit(self, name: str) -> int:
        """At the end of a batch: a part of one would be a step with too little."""
        if self._limits is None:
            return sys.maxsize
        begun, size = self._batches.get(name, (0, 1))
        return begun + -(-max(0, self._limits.get(name, 0) - begun) // size) * size

    def may_give(self, name: str) -> bool:
        """Whether the iteration of this own name may give elements although this process must
        stop: others may have given some."""
        with self.changed:
            return bool(self._agreements) and not self._has_reached_limit(name)


element_limits = ElementLimits()


class LimitedTaker(Taker):
    """How far an iteration has come with a block."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._left = 0
        self._stopped = False

    def admit(self, block: Block) -> Block | None:
        """The part of the block that may be given, or None. Waits while paused."""
        with element_limits.changed:
            self._left = block.count
            element_limits.changed.wait_for(lambda: self._stopped or not element_limits.pauses)
            count = 0 if self._stopped else element_limits.admit_elements(self._name, block.count)
            self._left -= count
        if count == block.count:
            return block
        return split(block, count)[0] if count else None

    def is_over(self) -> bool:
        return self._stopped or element_limits.is_over(self._name)

    def wait_until_over(self, timeout_s: float) -> None:
        with element_limits.changed:
            element_limits.changed.wait_for(self.is_over, timeout_s)

    def left(self) -> int:
        return self._left

    def leave(self) -> None:
        with element_limits.changed:
            self._stopped = True
            element_limits.changed.notify_all()

    def close(self) -> None:
        """TensorFlow's thread closes the iteration, when it asks for more."""
        self.leave()

    def must_stop(self) -> bool:
        return stopping.is_set() and not element_limits.may_give(self._name)


def blocks_of(iterate: Callable[[Taker], Blocks], name: str, batch_size: int = 1) -> Blocks:
    """The blocks of an iteration of this name, up to the limit that all processes share: in whole
    batches, if the trainer makes some."""
    own = element_limits.begin(name, batch_size)
    given = LimitedTaker(own)
    try:
        with closing(iterate(given)) as blocks:
            for block in blocks:
                if (admitted := given.admit(block)) is not None:
                    yield admitted
                if given.is_over():
                    return
    finally:
        element_limits.end(own)


def must_stop(taker: Taker | None) -> bool:
    """Whether this process must stop, and the iteration must not begin. In lockstep, it begins if
    the others have given elements of it: they wait for this process in their steps."""
    return taker.must_stop() if isinstance(taker, LimitedTaker) else stopping.is_set()


def may_repeat(name: str) -> bool:
    """Whether another iteration of this name may begin."""
    return not stopping.is_set() or element_limits.may_give(element_limits.next_of(name))


def stop(consumer: OpenConsumer) -> None:
    """Give TensorFlow nothing more, if this consumer reads in lockstep."""
    if isinstance(consumer.taker, LimitedTaker):
        consumer.taker.leave()


def leave(consumer: OpenConsumer, timeout_s: float) -> None:
    """Leave once the consumer has reached the common limit, or after the timeout."""
    if isinstance(consumer.taker, LimitedTaker):
        consumer.taker.wait_until_over(timeout_s)
    consumer.leave()

"""*Rounds*: coordinated reads. In each round every consumer gets an element, or none does.

Element k of a task belongs to its round k // n, and to consumer k % n of n. A round's elements are
given once all of them were put. So if a worker stops early, all consumers end after the same round.
A block is kept until each consumer was given its elements, whether that consumer has subscribed yet
or not. The slowest consumer therefore holds up the others, once the buffer is full.

Rounds count from 0 in each task; the consumers map them to theirs (service/core/rounds.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from ..block_limits import check_block, cost
from ..blocks import Block, strided
from .base import (
    End,
    Listener,
    Part,
    Subscription,
    Superseded,
    TaskFailed,
    TaskOutput,
    TaskUnknown,
    refused,
)
from .memory import MemoryBudget
from .orders import Order, Rounds


class RoundsOutput(TaskOutput):
    """One task's elements, from one producer to `num_consumers` consumers in turn.

    It buffers up to `max_bytes`, or more if the slowest consumer needs that to go on.
    """

    def __init__(
        self,
        num_consumers: int,
        max_bytes: int = 64 << 20,
        listener: Listener | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        super().__init__(max_bytes, listener, budget)
        self.num_consumers = num_consumers
        self._at = list(range(num_consumers))  # each consumer's next element
        self._readers: dict[int, _RoundsSubscription] = {}  # by consumer, the latest
        self._blocks: list[tuple[Block, int]] = []  # with their cost; `index` is the element's
        self._bytes = 0
        self._stop = 0  # elements that were put

    def put(self, block: Block) -> None:
        check_block(block)
        size = cost(block)
        with self.changed:
            self._take_memory(
                size if block.count else 0,
                lambda: self._bytes + size > self._max_bytes,
                lambda: not self._can_go_on(),
            )
            if block.count:
                self._blocks.append((Block(block.count, block.components, None, self._stop), size))
                self._bytes += size
                self._stop += block.count
            self.changed.notify_all()
        self._notify()

    def finish(self) -> None:
        """As for any task; drops the last round if it is incomplete."""
        with self.changed:
            if self._end is None and (incomplete := self._stop - self._complete):
                self._stop = self._complete
                self._drop(incomplete)
        super().finish()

    def _open(self, order: Order) -> Subscription | End:
        if not isinstance(order, Rounds) or order.of != self.num_consumers:
            return refused(order, f"an element a round to each of {self.num_consumers} consumers")
        with self.changed:
            if isinstance(self._end, TaskUnknown):
                return self._end
            reached = self._at[order.consumer] // self.num_consumers
            if order.round != reached:
                return TaskFailed(
                    "FAILED_PRECONDITION",
                    f"Consumer {order.consumer} requested data for round {order.round} of the "
                    f"task, but the current round has already reached {reached}: it was "
                    "restarted, or another one has its consumer_index. Start all consumers again",
                )
            subscription = _RoundsSubscription(self, order.consumer)
            if (before := self._readers.get(order.consumer)) is not None:
                before.end = Superseded()
            self._readers[order.consumer] = subscription
            self.changed.notify_all()
            return subscription

    @property
    def waiting_elements(self) -> int:
        with self.changed:
            return sum(len(range(at, self._stop, self.num_consumers)) for at in self._at)

    @property
    def _complete(self) -> int:
        """How many elements belong to complete rounds."""
        return self._stop - self._stop % self.num_consumers

    def _can_go_on(self) -> bool:
        """Whether the buffer has an element for the slowest consumer."""
        return min(self._at) < self._complete

    def _holds(self) -> bool:
        return self.waiting_elements > 0

    def _clear(self) -> None:
        self._drop(self.waiting_elements)
        self._memory.release(self._bytes)
        self._blocks.clear()
        self._bytes = self._stop = 0
        self._at = list(range(self.num_consumers))

    def _drop(self, elements: int) -> None:
        if elements and self._listener is not None:
            self._listener.dropped(Part(elements))

    def _next(
        self, consumer: int, credit: bool, max_elements: int | None
    ) -> tuple[Block, int] | End | None:
        at, stride = self._at[consumer], self.num_consumers
        if at >= self._complete:
            return self._end
        if not credit:
            return None
        block, _ = self._blocks[bisect_right(self._blocks, at, key=_stop)]
        count = len(range(at, min(_stop((block, 0)), self._complete), stride))
        if max_elements is not None:
            count = min(count, max_elements)
        given = strided(block, at - block.index, stride, count)
        self._at[consumer] = at + count * stride
        slowest = min(self._at)
        while self._blocks and _stop(self._blocks[0]) <= slowest:
            freed = self._blocks.pop(0)[1]
            self._bytes -= freed
            self._memory.release(freed)
        self.changed.notify_all()
        given = Block(count, given.components, None, at // stride)
        return given, cost(given)


def _stop(kept: tuple[Block, int]) -> int:
    return kept[0].index + kept[0].count


class _RoundsSubscription(Subscription):
    """A block's `index` is its first element's round; each further element is one round later."""

    output: RoundsOutput

    def __init__(self, output: RoundsOutput, consumer: int) -> None:
        super().__init__(output)
        self.consumer = consumer
        self.end: End | None = None  # once a later subscription has replaced it

    def next(self, credit: bool, max_elements: int | None = None) -> tuple[Block, int] | End | None:
        with self.output.changed:
            return self.end or self.output._next(self.consumer, credit, max_elements)

    def received(self, blocks: Sequence[Block]) -> None:
        self.output._acknowledged(blocks)

    def close(self, lacking: Sequence[Block] = ()) -> None:
        with self.output.changed:
            if self._is_there():
                del self.output._readers[self.consumer]
        self.output._dropped(lacking)

    def _is_there(self) -> bool:
        return self.output._readers.get(self.consumer) is self

"""*Rounds*: coordinated reads. In each round every consumer gets an element, or none does.

Element k of a task belongs to its round k // n, and to consumer k % n of n. A round's elements are
given once all of them were put. So if a worker stops early, all consumers end after the same round.
A block is kept until each consumer was given its elements, whether that consumer has subscribed yet
or not. The slowest consumer therefore holds up the others, once the buffer is full.

Rounds count from 0 in each task; the consumers map them to theirs (service/core/rounds.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..block_limits import check_block, cost
from ..blocks import Block, strided
from .base import (
    END_OF_TASK,
    End,
    EndOfTask,
    Listener,
    Subscription,
    Superseded,
    TaskFailed,
    TaskOutput,
    TaskUnknown,
    refused,
)
from .element_log import ElementLog
from .memory import MemoryBudget
from .read_requests import ReadRequest, Rounds


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
        self._begin()
        self._readers: dict[int, _RoundsSubscription] = {}  # by consumer, the latest

    def _begin(self) -> None:
        """The next element is the first one."""
        self._log = ElementLog(self.memory)
        self._stop = 0  # elements that were put
        self._at = list(range(self.num_consumers))  # each consumer's next element
        self._near = [0] * self.num_consumers  # the block that it was given last

    def put(self, block: Block) -> None:
        check_block(block)
        size = cost(block)
        with self.lock:
            self._take_memory(
                size if block.count else 0,
                lambda: self.memory.held + size > self._max_bytes,
                lambda: min(self._at) >= self._complete,  # the slowest consumer lacks an element
            )
            if block.count:
                self._log.add(block, size)
                self._stop += block.count
            self.changed.notify_all()
        self.on_change(self, None)

    def finish(self, end: End = END_OF_TASK) -> None:
        """As for any task; one that ends drops the last round if it is incomplete."""
        with self.lock:
            if self._end is None and isinstance(end, EndOfTask):
                self.listener.dropped(self._stop - self._complete)
                self._stop = self._complete
        super().finish(end)

    def _open(self, request: ReadRequest) -> Subscription | End:
        if not isinstance(request, Rounds) or request.of != self.num_consumers:
            return refused(request, f"an element a round to each of {self.num_consumers} consumers")
        with self.changed:
            if isinstance(self._end, TaskUnknown):
                return self._end
            reached = self._at[request.consumer] // self.num_consumers
            if request.round != reached:
                return TaskFailed(
                    "FAILED_PRECONDITION",
                    f"Consumer {request.consumer} requested data for round {request.round} of the "
                    f"task, but the current round has already reached {reached}: it was "
                    "restarted, or another one has its consumer_index. Start all consumers again",
                )
            subscription = _RoundsSubscription(self, request.consumer)
            if (before := self._readers.get(request.consumer)) is not None:
                before.end = Superseded()
            self._readers[request.consumer] = subscription
            self.changed.notify_all()
            return subscription

    @property
    def waiting_elements(self) -> int:
        return sum(len(range(at, self._stop, self.num_consumers)) for at in self._at)

    @property
    def _complete(self) -> int:
        """How many elements belong to complete rounds."""
        return self._stop - self._stop % self.num_consumers

    def _clear(self) -> None:
        self.listener.dropped(self.waiting_elements)
        self._log.clear()
        self._begin()

    def give(
        self, consumer: int, credit: bool, max_elements: int | None
    ) -> tuple[Block, int] | End | None:
        at, stride = self._at[consumer], self.num_consumers
        if at >= self._complete:
            return self._end
        if not credit:
            return None
        kept = self._log.at(at, self._near[consumer])
        assert kept is not None, "what a consumer was not given is kept"
        count = len(range(at, min(kept.stop, self._complete), stride))
        if max_elements is not None:
            count = min(count, max_elements)
        given = strided(kept.block, at - kept.start, stride, count)
        self._at[consumer], self._near[consumer] = at + count * stride, kept.number
        self._log.drop_before(min(self._at))
        self.changed.notify_all()
        given = Block(count, given.components, None, at // stride)
        return given, cost(given)


class _RoundsSubscription(Subscription):
    """A block's `index` is its first element's round; each further element is one round later."""

    output: RoundsOutput

    def __init__(self, output: RoundsOutput, consumer: int) -> None:
        super().__init__(output)
        self.consumer = consumer
        self.end: End | None = None  # once a later subscription has replaced it

    def next_locked(self, credit: bool, max_elements: int | None) -> tuple[Block, int] | End | None:
        return self.end or self.output.give(self.consumer, credit, max_elements)

    def close(self, lacking: Sequence[Block] = ()) -> None:
        with self.output.lock:
            if self.output._readers.get(self.consumer) is self:
                del self.output._readers[self.consumer]
        super().close(lacking)

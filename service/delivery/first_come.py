"""*First come, first served*: each block goes to the first consumer that asks for one.

A subscription that hands back returns what its trainer did not take; the next ones that ask get it.
The output is drained only when trainers have taken everything, so its task stays until then.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from dataclasses import replace

from ..block_limits import check_block, cost
from ..blocks import Block, split
from .base import (
    End,
    EndOfTask,
    EndPending,
    Listener,
    Subscription,
    TaskOutput,
    TaskUnknown,
    elements_of,
    refused,
)
from .in_flight import InFlightElements
from .memory import MemoryBudget
from .read_requests import AnyBlock, ReadRequest
from .windows import Windows


class FirstComeOutput(TaskOutput):
    """One producer, any number of consumers; each block goes to exactly one.

    Subscriptions that do not hand back have no state of their own: several threads may share one.
    """

    def __init__(
        self,
        max_bytes: int = 64 << 20,
        listener: Listener | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        super().__init__(max_bytes, listener, budget)
        self._blocks: collections.deque[tuple[Block, int]] = collections.deque()  # with their cost
        self._bytes = 0
        self._buffered = 0  # elements of those
        self._windows = Windows()  # of the subscriptions that hand back
        self._awaits_takes = True
        self.in_flight: InFlightElements = InFlightElements()

    def put(self, block: Block) -> None:
        check_block(block)
        size = cost(block)
        with self.changed:
            self._take_memory(
                block.values_bytes,
                lambda: bool(self._blocks) and self._bytes + size > self._max_bytes,
                lambda: False,
            )
            self._blocks.append((replace(block, position=self.in_flight.put), size))
            self.in_flight.put += block.count
            self._bytes += size
            self._buffered += block.count
            self.changed.notify_all()
        self.on_change(self, None)

    def _open(self, request: ReadRequest) -> Subscription | End:
        if not isinstance(request, AnyBlock):
            return refused(request, "any block to anybody")
        return _HandingBack(self) if request.hands_back else _FirstComeSubscription(self)

    def forgo_handing_back(self) -> None:
        with self.changed:
            self._awaits_takes = False
            self.changed.notify_all()
        self.on_change(self, None)

    @property
    def waiting_elements(self) -> int:
        return self._buffered

    def _holds(self) -> bool:
        return bool(self._blocks) or self._awaits(self._windows.held)

    def _awaits(self, elements: int) -> bool:
        """Whether to wait for so many elements that subscriptions hold."""
        return elements > 0 and self._awaits_takes and isinstance(self._end, EndOfTask)

    def _clear(self) -> None:
        self._drop([block for block, _ in self._blocks])
        self._blocks.clear()
        self._bytes = self._buffered = 0

    def _drop(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.in_flight.drop(block.position, block.count)
        self._done_with(blocks)
        self.listener.dropped(elements_of(blocks))

    def _done_with(self, blocks: Sequence[Block]) -> None:
        self.memory.release(sum(block.values_bytes for block in blocks))


class _FirstComeSubscription(Subscription):
    """Its elements count as taken once given: nobody tells when its trainer takes them."""

    output: FirstComeOutput

    def next_locked(
        self, credit: bool, max_elements: int | None
    ) -> tuple[Block, int] | End | EndPending | None:
        output = self.output
        if not output._blocks:
            return output._end
        if not credit:
            return None
        block, size = output._blocks.popleft()
        output._bytes -= size
        if max_elements is not None and block.count > max_elements:
            block, rest = split(block, max_elements)
            size, rest_size = cost(block), cost(rest)
            output._blocks.appendleft((rest, rest_size))
            output._bytes += rest_size
        output._buffered -= block.count
        if not self.hands_back:
            output.in_flight.take(block.position, block.count, time.monotonic())
        output.changed.notify_all()
        return block, size

    def received(self, blocks: Sequence[Block]) -> None:
        self.output._done_with(blocks)
        super().received(blocks)

    def close(self, lacking: Sequence[Block] = ()) -> None:
        self.output._done_with(lacking)
        super().close(lacking)


class _HandingBack(_FirstComeSubscription):
    hands_back = True

    def __init__(self, output: FirstComeOutput) -> None:
        super().__init__(output)
        with output.changed:
            self._window = output._windows.open(time.monotonic())

    def next_locked(
        self, credit: bool, max_elements: int | None
    ) -> tuple[Block, int] | End | EndPending | None:
        output, window = self.output, self._window
        now_s = time.monotonic()
        buffered = output._buffered if credit else 0
        if output._awaits_takes:
            room = window.room(buffered, output.ended, now_s)
        else:  # what has arrived does not end with the worker
            room = window.even_room(buffered)
        if room:
            limit = room if max_elements is None else min(room, max_elements)
            item = super().next_locked(credit, limit)
            assert isinstance(item, tuple)
            window.give(item[0].count, now_s)
            return item
        # A block without elements needs no room: windows count elements.
        empty = bool(credit and output._blocks and not output._blocks[0][0].count)
        item = super().next_locked(empty, None)
        others = output._windows.held - window.held
        if isinstance(item, EndOfTask) and output._awaits(others):
            return EndPending(others)
        return item

    def retry_s(self) -> float | None:
        with self.output.changed:
            at_s = self._window.retry_at_s
            return None if at_s is None else max(0.0, at_s - time.monotonic())

    def set_round_trip(self, seconds: float) -> None:
        self._window.round_trip_s = seconds

    def received(self, blocks: Sequence[Block]) -> None:
        output = self.output
        with output.changed:
            now_s = time.monotonic()
            self._window.take(sum(block.count for block in blocks), now_s)
            for block in blocks:
                output.in_flight.take(block.position, block.count, now_s)
            output.changed.notify_all()
        super().received(blocks)

    def hand_back(self, blocks: Sequence[Block]) -> None:
        output = self.output
        with output.changed:
            if isinstance(output._end, TaskUnknown):
                output._drop(blocks)
            else:
                # The consumer may still map the lent memory, so it cannot be passed on again.
                blocks = [replace(block, loan=None) for block in blocks]
                sized = [(block, cost(block)) for block in blocks]
                output._blocks.extendleft(reversed(sized))
                output._bytes += sum(size for _, size in sized)
                output._buffered += sum(block.count for block in blocks)
            self._leave()

    def close(self, lacking: Sequence[Block] = ()) -> None:
        with self.output.lock:
            self._leave()
            self.output._drop(lacking)

    def _leave(self) -> None:
        self._window.close()
        self.output.changed.notify_all()

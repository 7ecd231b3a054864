"""*Any*: first come, first served. Each block goes to one consumer, whoever asks for it first."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from ..block_limits import check_block, cost
from ..blocks import Block, split
from .base import End, Listener, Subscription, TaskOutput, refused
from .orders import AnyBlock, Order


class AnyOutput(TaskOutput):
    """One task's blocks, from one producer to any number of consumers, each block to one.

    Its subscriptions have no state of their own: several threads may share one.
    """

    def __init__(self, max_bytes: int = 64 << 20, listener: Listener | None = None) -> None:
        super().__init__(max_bytes, listener)
        self._blocks: collections.deque[tuple[Block, int]] = collections.deque()  # with their cost
        self._bytes = 0

    def put(self, block: Block) -> None:
        check_block(block)
        size = cost(block)
        with self.changed:
            while self._end is None and self._blocks and self._bytes + size > self._max_bytes:
                self.changed.wait()  # for a consumer, or for cancel()
            self._check_open()
            self._blocks.append((block, size))
            self._bytes += size
            self.changed.notify_all()
        self._tell()

    def _open(self, order: Order) -> Subscription | End:
        if not isinstance(order, AnyBlock):
            return refused(order, "any block to anybody")
        return _AnySubscription(self)

    @property
    def waiting_elements(self) -> int:
        with self.changed:
            return sum(block.count for block, _ in self._blocks)

    def _holds(self) -> bool:
        return bool(self._blocks)

    def _clear(self) -> None:
        self._dropped(block for block, _ in self._blocks)
        self._blocks.clear()
        self._bytes = 0


class _AnySubscription(Subscription):
    output: AnyOutput

    def next(self, credit: bool, max_elements: int | None = None) -> tuple[Block, int] | End | None:
        output = self.output
        with output.changed:
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
            output.changed.notify_all()
            return block, size

    def received(self, blocks: Sequence[Block]) -> None:
        self.output._acknowledged(blocks)

    def close(self, lacking: Sequence[Block] = ()) -> None:
        self.output._dropped(lacking)

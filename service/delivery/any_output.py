"""*Any*: first come, first served. Each block goes to one consumer, whoever asks for it first.

Who hands back gives what its trainer did not take to whoever asks next. Until a trainer has taken
all, the output is not drained, so that its task is there for what may come back.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import replace

from ..block_limits import check_block, cost
from ..blocks import Block, split
from .base import (
    End,
    EndOfTask,
    HeldByOthers,
    Listener,
    Subscription,
    TaskOutput,
    TaskUnknown,
    refused,
)
from .orders import AnyBlock, Order


class AnyOutput(TaskOutput):
    """One task's blocks, from one producer to any number of consumers, each block to one.

    Subscriptions that do not hand back have no state of their own: several threads may share one.
    """

    def __init__(self, max_bytes: int = 64 << 20, listener: Listener | None = None) -> None:
        super().__init__(max_bytes, listener)
        self._blocks: collections.deque[tuple[Block, int]] = collections.deque()  # with their cost
        self._bytes = 0
        self._held = 0  # elements that subscriptions have, and may hand back
        self._awaits_takes = True

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
        return _HandingBack(self) if order.hands_back else _AnySubscription(self)

    def forgo_handing_back(self) -> None:
        with self.changed:
            self._awaits_takes = False
            self.changed.notify_all()
        self._tell()

    @property
    def waiting_elements(self) -> int:
        with self.changed:
            return sum(block.count for block, _ in self._blocks)

    def _holds(self) -> bool:
        return bool(self._blocks) or self._awaits(self._held)

    def _awaits(self, elements: int) -> bool:
        """Whether these, which subscriptions have, are still worth waiting for."""
        return elements > 0 and self._awaits_takes and isinstance(self._end, EndOfTask)

    def _clear(self) -> None:
        self._dropped(block for block, _ in self._blocks)
        self._blocks.clear()
        self._bytes = 0


class _AnySubscription(Subscription):
    output: AnyOutput

    def next(
        self, credit: bool, max_elements: int | None = None
    ) -> tuple[Block, int] | End | HeldByOthers | None:
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


class _HandingBack(_AnySubscription):
    hands_back = True
    _mine = 0  # elements of those that are held

    def next(
        self, credit: bool, max_elements: int | None = None
    ) -> tuple[Block, int] | End | HeldByOthers | None:
        output = self.output
        with output.changed:
            item = super().next(credit, max_elements)
            if isinstance(item, tuple):
                self._hold(item[0].count)
            others = output._held - self._mine
            if isinstance(item, EndOfTask) and output._awaits(others):
                return HeldByOthers(others)
            return item

    def received(self, blocks: Sequence[Block]) -> None:
        with self.output.changed:
            self._hold(-sum(block.count for block in blocks))
        super().received(blocks)

    def hand_back(self, blocks: Sequence[Block]) -> None:
        output = self.output
        with output.changed:
            if isinstance(output._end, TaskUnknown):
                output._dropped(blocks)
            else:
                # Whose memory they lie in, their consumer has, too.
                blocks = [replace(block, loan=None) for block in blocks]
                sized = [(block, cost(block)) for block in blocks]
                output._blocks.extendleft(reversed(sized))
                output._bytes += sum(size for _, size in sized)
            self._hold(-sum(block.count for block in blocks))

    def close(self, lacking: Sequence[Block] = ()) -> None:
        with self.output.changed:
            self._hold(-self._mine)
        super().close(lacking)

    def _hold(self, elements: int) -> None:
        """So many more."""
        self._mine += elements
        self.output._held += elements
        self.output.changed.notify_all()

"""A policy that the seam has to fit besides those that there are, as a sketch: nothing of the
transport knows of it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.service.block_limits import check_block, cost
from forebay.service.blocks import Block, strided
from forebay.service.delivery import End, Listener, Order, Subscription, TaskOutput, TaskUnknown
from forebay.service.delivery.base import refused


@dataclass(frozen=True, slots=True)
class Rounds(Order):
    """Coordinated reads: in each round consumer `consumer` of `of` gets an element."""

    consumer: int
    of: int


class _Window(TaskOutput):
    """A run of elements; each subscription is at a position in it."""

    def __init__(self, max_bytes: int, listener: Listener | None = None) -> None:
        super().__init__(max_bytes, listener)
        self.window: list[Block] = []  # one element each, numbered by `index`
        self.first = self.stop = 0
        self.given: set[int] = set()
        self.positions: dict[_Position, int] = {}  # what each wants next

    def put(self, block: Block) -> None:
        check_block(block)
        for at in range(block.count):
            element = strided(block, at, 1, 1)
            with self.changed:
                while self._end is None and not self.make_room(cost(element)):
                    self.changed.wait()
                self._check_open()
                self.window.append(Block(1, element.components, None, self.stop))
                self.stop += 1
                self.changed.notify_all()
            self._tell()  # before it waits for room for the next one

    def forget_one(self) -> None:
        block = self.window.pop(0)
        if block.index not in self.given:
            self._dropped([block])
        self.first += 1

    def is_full(self, size: int) -> bool:
        return bool(self.window) and sum(map(cost, self.window)) + size > self._max_bytes

    @abstractmethod
    def make_room(self, size: int) -> bool:
        """Forget something, so that an element of this size fits; False if that must wait."""

    @property
    def waiting_elements(self) -> int:
        with self.changed:
            return sum(block.index not in self.given for block in self.window)

    def _holds(self) -> bool:
        return self.waiting_elements > 0

    def _clear(self) -> None:
        while self.window:
            self.forget_one()


class _Position(Subscription):
    output: _Window

    def __init__(self, output: _Window, index: int, stride: int) -> None:
        super().__init__(output)
        self.stride = stride
        output.positions[self] = index

    def next(self, credit: bool, max_elements: int | None = None) -> tuple[Block, int] | End | None:
        output = self.output
        with output.changed:
            index = max(output.positions[self], output.first)
            if isinstance(output._end, TaskUnknown) or index >= output.stop:
                return output._end
            if not credit:
                return None
            block = output.window[index - output.first]
            output.given.add(index)
            output.positions[self] = index + self.stride
            output.changed.notify_all()
            return block, cost(block)

    def received(self, blocks: Sequence[Block]) -> None:
        self.output._acknowledged(blocks)

    def close(self, lacking: Sequence[Block] = ()) -> None:
        with self.output.changed:
            del self.output.positions[self]
            self.output.changed.notify_all()
        self.output._dropped(lacking)


class RoundsOutput(_Window):
    """Waits for the slowest consumer: a round is over when each has its element."""

    def open(self, order: Order) -> Subscription | End:
        if not isinstance(order, Rounds):
            return refused(order, "an element to each consumer a round")
        return _Position(self, order.consumer, order.of)

    def make_room(self, size: int) -> bool:
        slowest = min(self.positions.values(), default=0)
        while self.is_full(size) and self.first < slowest:
            self.forget_one()
        return not self.is_full(size)

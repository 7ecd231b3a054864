"""What every delivery policy must do; each policy subclasses `DeliveryContract`.

Elements are their own numbers: 0, 1, 2 … in the order in which they were put.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.service.block_limits import cost
from forebay.service.blocks import Block, Component
from forebay.service.delivery import (
    End,
    EndPending,
    Listener,
    OutputCancelled,
    ReadRequest,
    Subscription,
    TaskFailed,
    TaskOutput,
    TaskUnknown,
)

from ..hypothesis_profiles import examples

ROOM = 1 << 30
TIMEOUT_S = 30.0


def block(first: int, count: int, bundle: int | None = None) -> Block:
    return Block(count, (Component(np.arange(first, first + count)),), bundle, first)


def numbers(item: Block) -> list[int]:
    values = item.components[0].values
    assert isinstance(values, np.ndarray)
    assert len(values) == item.count
    return [int(x) for x in values]


class Ledger(Listener):
    """Adds up."""

    def __init__(self) -> None:
        self.acknowledged_parts: list[int] = []
        self.dropped_parts: list[int] = []

    def acknowledged(self, elements: int) -> None:
        self.acknowledged_parts += [elements] if elements else []

    def dropped(self, elements: int) -> None:
        self.dropped_parts += [elements] if elements else []

    @property
    def total(self) -> int:
        return sum(self.acknowledged_parts + self.dropped_parts)


class Subscribed:
    """A subscription, what it was given, and what of that was not received yet."""

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self.got: list[int] = []
        self.lacking: deque[Block] = deque()

    def next(
        self, credit: bool = True, max_elements: int | None = None
    ) -> Block | End | EndPending | None:
        item = self.subscription.next(credit, max_elements)
        if not isinstance(item, tuple):
            return item
        assert credit
        assert item[1] == cost(item[0])
        assert 0 < item[0].count <= (max_elements or item[0].count)
        self.got += numbers(item[0])
        self.lacking.append(item[0])
        return item[0]

    def receive(self, blocks: int) -> None:
        self.subscription.received([self.lacking.popleft() for _ in range(blocks)])

    def close(self) -> None:
        self.subscription.close(list(self.lacking))
        self.lacking.clear()


class Reader(Subscribed):
    """Opens the subscription, which must be possible."""

    def __init__(self, output: TaskOutput, request: ReadRequest) -> None:
        opened = output.open(request)
        assert isinstance(opened, Subscription), opened
        super().__init__(opened)


class DeliveryContract(ABC):
    """Subclasses say how the policy is made, asked and fed, and what is whose."""

    after_the_end: type[Exception] = RuntimeError
    """What a producer that goes on gets."""

    @abstractmethod
    def make(self, max_bytes: int, listener: Listener | None = None) -> TaskOutput: ...

    @abstractmethod
    def request(self, reader: int, readers: int) -> ReadRequest: ...

    def block(self, first: int, count: int) -> Block:
        return block(first, count)

    def put(self, output: TaskOutput, block: Block) -> None:
        output.put(block)

    def finish(self, output: TaskOutput) -> None:
        output.finish()

    @abstractmethod
    def end(self, total: int) -> End:
        """What readers get in the end."""

    @abstractmethod
    def left(self, reader: int, got: list[list[int]], total: int) -> bool:
        """Whether there is something for the reader, if `total` elements were put."""

    @abstractmethod
    def check(self, got: list[list[int]], total: int) -> None:
        """Each reader got what is its own, if none was dropped."""

    def has_ended(self, output: TaskOutput) -> bool:
        return output.ended

    def is_drained(self, output: TaskOutput) -> bool:
        return output.wait_drained(0) and not output.waiting_elements

    def is_reported(self, ledger: Ledger, given_to: Counter[int], total: int) -> bool:
        """Whether the reports add up, after all were closed: `given_to` counts each element."""
        return ledger.total == sum(max(1, given_to[number]) for number in range(total))

    def readers(self, output: TaskOutput, count: int) -> list[Reader]:
        return [Reader(output, self.request(i, count)) for i in range(count)]

    def late(self, output: TaskOutput) -> list[Reader]:
        """Who may come besides two readers."""
        return [Reader(output, self.request(1, 2))]

    # -- one thread ----------------------------------------------------------------------------

    @settings(
        max_examples=examples(150),
        deadline=None,
        suppress_health_check=[HealthCheck.differing_executors],  # one test, several policies
    )
    @given(data=st.data(), count=st.integers(1, 4), may_drop=st.booleans())
    def test_whatever_happens(self, data: st.DataObject, count: int, may_drop: bool) -> None:
        """Nothing twice, nothing lost while nobody is dropped, no reader idle without need,
        every change told, and reports that add up.
        """
        ledger = Ledger()
        output = self.make(ROOM, ledger)
        told: list[TaskOutput] = []
        output.on_change = lambda output, _: told.append(output)
        readers = self.readers(output, count)
        live = dict(enumerate(readers))
        got = [reader.got for reader in readers]
        total = 0
        for _ in range(data.draw(st.integers(0, 25), "steps")):
            match data.draw(st.sampled_from(["put", "take", "take", "receive", "drop"])):
                case "put":
                    size = data.draw(st.integers(1, 9), "size")
                    told.clear()
                    self.put(output, self.block(total, size))
                    total += size
                    assert output in told
                case "take" if live:
                    i = data.draw(st.sampled_from([*live]), "reader")
                    credit = data.draw(st.booleans(), "credit")
                    limit = data.draw(st.sampled_from([None, 1, 2, 5]), "limit")
                    expected = credit and self.left(i, got, total)
                    assert isinstance(live[i].next(credit, limit), Block) == expected
                case "receive" if live:
                    i = data.draw(st.sampled_from([*live]), "reader")
                    live[i].receive(data.draw(st.integers(0, len(live[i].lacking)), "blocks"))
                case "drop" if may_drop and live:
                    live.pop(data.draw(st.sampled_from([*live]), "reader")).close()
        told.clear()
        self.finish(output)
        assert output in told and self.has_ended(output)
        for i, reader in live.items():
            while self.left(i, got, total):
                assert isinstance(reader.next(), Block)
            assert reader.next() == reader.next(credit=False) == self.end(total)
        if len(live) == count:
            self.check(got, total)
            assert self.is_drained(output)
        given_to = Counter(number for numbers in got for number in numbers)
        for reader in live.values():
            reader.receive(len(reader.lacking))
            reader.close()
        output.cancel()
        assert self.is_reported(ledger, given_to, total)

    def test_failure_comes_after_what_came_before(self) -> None:
        output = self.make(ROOM)
        readers = self.readers(output, 2)
        self.put(output, self.block(0, 4))
        output.fail("DATA_LOSS", "torn")
        for reader in [*readers, *self.late(output)]:
            while isinstance(reader.next(), Block):
                pass
            assert reader.next() == TaskFailed("DATA_LOSS", "torn")
        with pytest.raises(self.after_the_end):
            self.put(output, self.block(4, 1))

    def test_cancelled(self) -> None:
        ledger = Ledger()
        output = self.make(ROOM, ledger)
        told: list[TaskOutput] = []
        output.on_change = lambda output, _: told.append(output)
        readers = self.readers(output, 2)
        self.put(output, self.block(0, 4))
        told.clear()
        output.cancel()
        assert output in told
        assert [reader.next() for reader in readers] == [TaskUnknown()] * 2
        assert output.wait_drained(0) and output.waiting_elements == 0
        assert self.is_reported(ledger, Counter(), 4)
        with pytest.raises(OutputCancelled):
            self.put(output, self.block(4, 1))

    def test_an_order_of_no_policy_is_answered(self) -> None:
        answer = self.make(ROOM).open(ReadRequest())
        assert isinstance(answer, TaskFailed) and answer.code == "INVALID_ARGUMENT"
        assert "ReadRequest()" in answer.message

    def test_what_cannot_travel_is_not_taken(self) -> None:
        output = self.make(ROOM)
        odd = self.block(0, 1)
        with pytest.raises(TypeError, match="object cannot travel"):
            odd = Block(1, (Component(np.array([None], object)),), odd.bundle, odd.index)
            self.put(output, odd)
        assert output.waiting_elements == 0

    # -- threads -------------------------------------------------------------------------------

    def test_memory_is_bounded(self) -> None:
        size = cost(self.block(0, 4))
        output = self.make(3 * size)
        readers = self.readers(output, 2)
        with ThreadPoolExecutor(1) as pool:
            producing = pool.submit(self.produce, output, 30, 4)
            try:
                got = [reader.got for reader in readers]
                while any(self.left(i, got, 120) for i in range(2)):
                    assert output.waiting_elements <= 12
                    for reader in readers:
                        item = reader.subscription.wait(0.01)
                        if isinstance(item, Block):
                            reader.got += numbers(item)
            finally:
                output.cancel()
            producing.result(TIMEOUT_S)
        self.check(got, 120)

    def test_a_producer_that_waits_is_freed_by_cancel(self) -> None:
        output = self.make(1)
        self.put(output, self.block(0, 1))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(self.put, output, self.block(1, 1))
            output.cancel()
            with pytest.raises(OutputCancelled):
                waiting.result(TIMEOUT_S)

    def test_many_threads(self) -> None:
        """Each reader waits to be told, as a carrier does; nobody is forgotten."""
        ledger = Ledger()
        output = self.make(20 * cost(self.block(0, 4)), ledger)
        changes = threading.Condition()
        changed = 0

        def on_change(*_: Any) -> None:
            nonlocal changed
            with changes:
                changed += 1
                changes.notify_all()

        def is_new(seen: int) -> bool:
            return changed != seen

        output.on_change = on_change
        readers = self.readers(output, 4)

        def read(reader: Reader) -> None:
            while True:
                seen = changed  # before it looks
                item = reader.next(max_elements=3)
                if isinstance(item, Block):
                    reader.receive(1)
                elif item is not None:
                    reader.close()
                    return
                else:
                    with changes:
                        assert changes.wait_for(partial(is_new, seen), TIMEOUT_S)

        with ThreadPoolExecutor(5) as pool:
            running = [pool.submit(read, reader) for reader in readers]
            try:
                pool.submit(self.produce, output, 200, 4).result(TIMEOUT_S)
                for future in running:
                    future.result(TIMEOUT_S)
            finally:
                output.cancel()
        got = [reader.got for reader in readers]
        self.check(got, 800)
        assert ledger.total == sum(map(len, got)) and not ledger.dropped_parts

    def produce(self, output: TaskOutput, blocks: int, size: int) -> None:
        for number in range(blocks):
            self.put(output, self.block(number * size, size))
        self.finish(output)

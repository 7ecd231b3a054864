"""The policies under their contract: those that there are, and those that must fit."""

from __future__ import annotations

import itertools

from forebay.service.blocks import Block
from forebay.service.delivery import (
    ANY,
    Addressed,
    AddressedOutput,
    AnyOutput,
    BundleRun,
    Cached,
    CachedOutput,
    End,
    EndOfBundle,
    EndOfTask,
    Listener,
    Order,
    OutputCancelled,
    Part,
    Rounds,
    RoundsOutput,
    TaskOutput,
)

from .contract import ROOM, DeliveryContract, Ledger, Reader, block


class TestAny(DeliveryContract):
    def make(self, max_bytes: int, listener: Listener | None = None) -> TaskOutput:
        return AnyOutput(max_bytes, listener)

    def order(self, reader: int, readers: int) -> Order:
        return ANY

    def end(self, total: int) -> End:
        return EndOfTask()

    def left(self, reader: int, got: list[list[int]], total: int) -> bool:
        return sum(map(len, got)) < total

    def check(self, got: list[list[int]], total: int) -> None:
        assert sorted(itertools.chain(*got)) == [*range(total)]
        assert all(numbers == sorted(numbers) for numbers in got)


class Strides(DeliveryContract):
    """Reader i of n has elements i, i + n, …"""

    def left(self, reader: int, got: list[list[int]], total: int) -> bool:
        return reader + len(got) * len(got[reader]) < total

    def check(self, got: list[list[int]], total: int) -> None:
        assert got == [[*range(i, total, len(got))] for i in range(len(got))]


class Fed(AddressedOutput):
    """Has a bundle that is run for its readers, and for one who wants nothing of it."""

    run: BundleRun

    def feed(self, readers: int = 1) -> None:
        nobody = Addressed(7, 1 << 40, 1 << 10)
        self.run = self.begin([*Addressed(7, 0, readers).together(), nobody])


class TestAddressed(Strides):
    after_the_end = OutputCancelled

    def make(self, max_bytes: int, listener: Listener | None = None) -> TaskOutput:
        return Fed(max_bytes, listener)

    def order(self, reader: int, readers: int) -> Order:
        return Addressed(7, reader, readers)

    def readers(self, output: TaskOutput, count: int) -> list[Reader]:
        assert isinstance(output, Fed)
        output.feed(count)
        return super().readers(output, count)

    def late(self, output: TaskOutput) -> list[Reader]:
        return []

    def block(self, first: int, count: int) -> Block:
        return block(first, count, bundle=7)

    def put(self, output: TaskOutput, block: Block) -> None:
        assert isinstance(output, Fed)
        if not hasattr(output, "run"):
            output.feed()
        output.run.put(block)

    def finish(self, output: TaskOutput) -> None:
        assert isinstance(output, Fed)
        output.run.finish()
        output.finish()

    def end(self, total: int) -> End:
        return EndOfBundle(7, total)


class Together(RoundsOutput):
    """For as many consumers as come."""

    def expect(self, consumers: int) -> None:
        told = self._on_change
        super().__init__(consumers, self._max_bytes, self._listener)
        self.on_change(told)


class TestRounds(Strides):
    def make(self, max_bytes: int, listener: Listener | None = None) -> TaskOutput:
        return Together(1, max_bytes, listener)

    def order(self, reader: int, readers: int) -> Order:
        return Rounds(reader, readers)

    def readers(self, output: TaskOutput, count: int) -> list[Reader]:
        assert isinstance(output, Together)
        output.expect(count)
        return super().readers(output, count)

    def late(self, output: TaskOutput) -> list[Reader]:
        return []

    def end(self, total: int) -> End:
        return EndOfTask()

    def left(self, reader: int, got: list[list[int]], total: int) -> bool:
        return super().left(reader, got, total - total % len(got))

    def check(self, got: list[list[int]], total: int) -> None:
        super().check(got, total - total % len(got))


class TestCached(DeliveryContract):
    """Nobody is left behind in a window that holds all: test_cached.py has those who are."""

    def make(self, max_bytes: int, listener: Listener | None = None) -> TaskOutput:
        return CachedOutput(ROOM, listener, ahead_bytes=max_bytes)

    def order(self, reader: int, readers: int) -> Order:
        return Cached(f"trainer {reader}")

    def end(self, total: int) -> End:
        return EndOfTask()

    def left(self, reader: int, got: list[list[int]], total: int) -> bool:
        return len(got[reader]) < total

    def check(self, got: list[list[int]], total: int) -> None:
        assert got == [[*range(total)]] * len(got)


def test_a_reader_is_given_what_a_closed_one_left() -> None:
    output = AnyOutput()
    gone, there = (Reader(output, ANY) for _ in range(2))
    output.put(block(0, 4))
    gone.next(max_elements=1)
    gone.close()
    there.next()
    assert there.got == [1, 2, 3]


def test_reports_name_what_has_a_name() -> None:
    ledger = Ledger()
    output = AnyOutput(ROOM, ledger)
    reader = Reader(output, ANY)
    for number, bundle in enumerate([1, 1, 2, None, None]):
        output.put(block(4 * number, 4, bundle))
        reader.next()
    reader.receive(5)
    assert ledger.acknowledged_parts == [Part(8, 1, 0), Part(4, 2, 8), Part(8, None, 12)]

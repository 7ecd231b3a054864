"""The policies under their contract: those that there are, and those that must fit."""

from __future__ import annotations

import itertools
from collections import Counter

from forebay.service.blocks import Block
from forebay.service.delivery import (
    ANY,
    BundleRun,
    BundlesOutput,
    Cached,
    CachedOutput,
    End,
    EndOfSlice,
    EndOfTask,
    FirstComeOutput,
    Listener,
    OutputCancelled,
    ReadRequest,
    Rounds,
    RoundsOutput,
    Slice,
    Subscription,
    TaskOutput,
)

from .contract import ROOM, DeliveryContract, Ledger, Reader, block


class TestAny(DeliveryContract):
    def make(self, max_bytes: int, listener: Listener | None = None) -> TaskOutput:
        return FirstComeOutput(max_bytes, listener)

    def request(self, reader: int, readers: int) -> ReadRequest:
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


MANY = 1000
"""Elements that the readers of a bundle ask for: it has fewer."""


class Fed(BundlesOutput):
    """Has a bundle, whose only run begins with the first block or reader."""

    run: BundleRun | None = None

    def running(self) -> BundleRun:
        if self.run is None:
            asking = self.open(Slice(7, runs=(0, 1), until=1))  # it stays
            assert isinstance(asking, Subscription), asking
            self.run = self.next_run(1, 0)
            assert self.run is not None
        return self.run


class TestBundles(Strides):
    """As `Strides`, of elements that nobody has passed: test_bundles.py has those that are."""

    after_the_end = OutputCancelled

    def make(self, max_bytes: int, listener: Listener | None = None) -> TaskOutput:
        return Fed(max_bytes, listener)

    def request(self, reader: int, readers: int) -> ReadRequest:
        runs = tuple(n for i in range(reader, MANY, readers) for n in (i, 1))
        return Slice(7, runs=runs, until=MANY, reader=reader, readers=readers)

    def readers(self, output: TaskOutput, count: int) -> list[Reader]:
        assert isinstance(output, Fed)
        output.running()
        return super().readers(output, count)

    def block(self, first: int, count: int) -> Block:
        return block(first, count, bundle=7)

    def put(self, output: TaskOutput, block: Block) -> None:
        assert isinstance(output, Fed)
        output.running().put(block)

    def finish(self, output: TaskOutput) -> None:
        assert isinstance(output, Fed)
        output.running().finish()

    def has_ended(self, output: TaskOutput) -> bool:
        assert isinstance(output, Fed)
        return output.running().ended

    def is_drained(self, output: TaskOutput) -> bool:
        """It ends with its consumers, and its elements are kept for them until then."""
        return not output.ended

    def is_reported(self, ledger: Ledger, given_to: Counter[int], total: int) -> bool:
        """Nothing is lost: what was given and never arrived is made again."""
        return not ledger.dropped_parts and ledger.total <= given_to.total()

    def late(self, output: TaskOutput) -> list[Reader]:
        return []

    def end(self, total: int) -> End:
        return EndOfSlice(7, total, True)


class Together(RoundsOutput):
    """For as many consumers as come."""

    def expect(self, consumers: int) -> None:
        told = self.on_change
        super().__init__(consumers, self._max_bytes, self.listener)
        self.on_change = told


class TestRounds(Strides):
    def make(self, max_bytes: int, listener: Listener | None = None) -> TaskOutput:
        return Together(1, max_bytes, listener)

    def request(self, reader: int, readers: int) -> ReadRequest:
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

    def request(self, reader: int, readers: int) -> ReadRequest:
        return Cached(f"trainer {reader}")

    def end(self, total: int) -> End:
        return EndOfTask()

    def left(self, reader: int, got: list[list[int]], total: int) -> bool:
        return len(got[reader]) < total

    def check(self, got: list[list[int]], total: int) -> None:
        assert got == [[*range(total)]] * len(got)

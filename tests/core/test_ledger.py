"""The ledger against a model that keeps each split by itself."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.journal.proto import events_pb2 as ev
from forebay.service import ranges
from forebay.service.core.ledger import Ledger
from forebay.service.core.splits import ledgers

from ..hypothesis_profiles import examples

Part = tuple[int, int, int]  # pass, first, stop


class Books(RuleBasedStateMachine):
    """Random requests; whoever has splits may begin, hand back, lose and find them. Other sources
    may be zipped with it, or further splits of it be found.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Part] = []
        self.lost: list[Part] = []
        self.begun: Counter[tuple[int, int]] = Counter()  # by (pass, split)
        self.back: set[tuple[int, int]] = set()  # handed back, and not leased since

    @initialize(sizes=st.lists(st.integers(0, 12), max_size=3))
    def open(self, sizes: list[int]) -> None:
        """Of several, the others are leased with the first one; one of no size grows."""
        sources = [ev.SplitSource(count=size) for size in sizes]
        for source in sources[1:]:
            source.leased_with = 0
        growing = ev.SplitSource(saved_chunks=ev.SavedChunks(path="/save"))
        self.ledger, *self.others = ledgers(sources or [growing])
        self.size = min(sizes, default=0)
        assert self.ledger.is_zipped == bool(self.others)
        assert self.others == [Ledger(size, leased_with=0) for size in sizes[1:]]
        assert self.ledger.grows == (not sizes)

    @precondition(lambda self: self.ledger.grows)
    @rule(count=st.integers(0, 4), complete=st.booleans())
    def grow(self, count: int, complete: bool) -> None:
        self.size += count
        names = [f"s{number}" for number in range(self.size)]
        self.ledger.grow(names[self.size - count :], complete)
        assert (self.ledger.names, self.ledger.grows) == (names, not complete)

    @rule(later=st.integers(-1, 2), or_later=st.booleans(), want=st.integers(1, 5))
    def lease(self, later: int, or_later: bool, want: int) -> None:
        ledger = self.ledger
        asked = max(0, ledger.pass_number + later)
        offer = ledger.offer(ledger.size_together, asked, or_later)
        assert 0 <= offer.stop - offer.first <= offer.total <= self.size
        assert offer.stop <= self.size
        if offer.starts:
            assert not self.back, "a pass begins while one before it is owed something"
            ledger.start(offer.pass_number)
        if asked >= ledger.pass_number and not offer.total:
            assert not self.back
            assert ledger.next == self.size
            assert offer.waits == ledger.grows
        stop = min(offer.stop, offer.first + want)
        if stop > offer.first:
            assert offer.pass_number <= max(asked, ledger.pass_number)
            leased = {(offer.pass_number, n) for n in range(offer.first, stop)}
            assert leased.isdisjoint(self.of(self.held) | self.of(self.lost) | set(self.begun))
            assert not self.back or leased <= self.back
            self.back -= leased
            ledger.lease(offer.pass_number, offer.first, stop)
            self.held.append((offer.pass_number, offer.first, stop))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), back=st.integers(0, 5))
    def end(self, which: int, back: int) -> None:
        number, first, stop = self.held.pop(which % len(self.held))
        kept = max(first, stop - back)
        self.ledger.begin(number, first, kept)
        self.begun.update((number, split) for split in range(first, kept))
        if kept < stop:
            self.ledger.give_back(number, kept, stop)
            self.back.update((number, split) for split in range(kept, stop))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def lose(self, which: int) -> None:
        part = self.held.pop(which % len(self.held))
        self.ledger.lose(*part)
        self.lost.append(part)

    @precondition(lambda self: self.lost)
    @rule(which=st.integers(0, 99))
    def find(self, which: int) -> None:
        part = self.lost.pop(which % len(self.lost))
        self.ledger.find(*part)
        self.held.append(part)

    @staticmethod
    def of(parts: list[Part]) -> set[tuple[int, int]]:
        return {(number, split) for number, first, stop in parts for split in range(first, stop)}

    @invariant()
    def every_split_is_in_one_place(self) -> None:
        if not hasattr(self, "ledger"):
            return
        ledger, now = self.ledger, self.ledger.pass_number
        assert max(self.begun.values(), default=1) == 1
        places = {
            "held": {n for p, n in self.of(self.held) if p == now},
            "lost": {n for p, n in self.of(self.lost) if p == now},
            "begun": {n for p, n in self.begun if p == now},
            "returned": {n for r in ledger.returned for n in range(*r)},
        }
        assert sum(map(len, places.values())) == len(set().union(*places.values()))
        assert set().union(*places.values()) == set(range(ledger.next))
        assert ledger.leased == len(places["held"])
        assert ranges.total(ledger.begun) == len(places["begun"])
        assert ranges.total(ledger.lost) == len(places["lost"])
        left = {(p, n) for p, kept in ledger.left_over.items() for r in kept for n in range(*r)}
        assert left | {(now, n) for n in places["returned"]} == self.back
        assert ledger.owes == bool(self.back)


TestLedger = Books.TestCase
TestLedger.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)

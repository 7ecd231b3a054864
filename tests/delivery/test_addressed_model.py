"""The policy *addressed* beside a model of it, under any history: producers that are displaced,
runs that are begun again for some, readers of several generations that come, leave and come back.

The model has no blocks. It knows who has which place in which run, and how far each run was put.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.service.blocks import Block
from forebay.service.delivery import (
    Addressed,
    AddressedOutput,
    BundleForgotten,
    BundleRun,
    End,
    EndOfBundle,
    OutputCancelled,
    Subscription,
    Superseded,
    TaskFailed,
)
from forebay.service.delivery.orders import BundleReader as Place

from ..hypothesis_profiles import examples
from .contract import Ledger, Subscribed, block

BUNDLES = range(2)
INDEX = st.integers(0, 6)
CHOICE = st.integers(0, 1 << 30)
AHEAD = st.sampled_from([0] * 12 + [1, -1])  # of the newest generation


@dataclass(eq=False)
class ModelRun:
    handle: BundleRun
    bundle: int
    index: int
    stop: int
    places: dict[Place, ModelReader | int]  # who is there, or from where on one is awaited
    end: End | None = None
    given: set[int] = field(default_factory=set)

    def at(self, place: Place) -> int:
        who = self.places[place]
        return who if isinstance(who, int) else who.index

    @property
    def kept(self) -> int:
        """All before is forgotten, but for what shares a block with what is not."""
        return min([self.stop, *(self.at(place) for place in self.places)])


@dataclass(eq=False)
class ModelReader:
    order: Addressed
    index: int  # of what it wants next
    run: ModelRun | None = None
    end: End | None = None
    real: Subscribed = field(init=False)


class AddressedModel(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.ledger = Ledger()
        self.output = AddressedOutput(1 << 30, self.ledger)
        self.generation = 0
        self.begun: set[int] = set()
        self.runs: list[ModelRun] = []  # all that ever were
        self.readers: list[ModelReader] = []  # that are not closed
        self.put_elements = 0

    # -- the model -----------------------------------------------------------------------------

    def reach(self, generation: int) -> bool:
        if generation > self.generation:
            self.generation = generation
            for reader in self.readers:
                self.end(reader, Superseded(generation))
            for run in self.runs:
                run.places.clear()
            self.begun.clear()
        return generation == self.generation

    def end(self, reader: ModelReader, end: End) -> None:
        reader.end = reader.end or end

    def take_place(self, run: ModelRun, place: Place) -> None:
        who = run.places.pop(place, None)
        if isinstance(who, ModelReader):
            self.end(who, BundleForgotten(run.bundle, who.index))

    def seat(self, reader: ModelReader) -> None:
        order = reader.order
        for run in self.runs:
            if run.bundle == order.bundle and order.reader in run.places:
                first = self.first_kept(run)
                if first <= order.index:
                    before = run.places[order.reader]
                    if isinstance(before, ModelReader):
                        self.end(before, Superseded(self.generation))
                    run.places[order.reader] = reader
                    reader.run = run
                    return
        self.end(reader, BundleForgotten(order.bundle, order.index))

    def first_kept(self, run: ModelRun) -> int:
        """Where blocks begin, the only thing that is taken from the real one."""
        return run.handle.blocks[0].block.index if run.handle.blocks else run.handle.kept

    # -- what happens --------------------------------------------------------------------------

    @rule(
        bundle=st.sampled_from(BUNDLES),
        index=INDEX,
        stride=st.integers(1, 3),
        some=st.integers(1, 7),
        ahead=AHEAD,
    )
    def begin(self, bundle: int, index: int, stride: int, some: int, ahead: int) -> None:
        generation = max(0, self.generation + ahead)
        orders = Addressed(bundle, index, stride, generation).together()
        orders = [order for i, order in enumerate(orders) if some >> i & 1] or orders
        if generation < self.generation:
            with pytest.raises(OutputCancelled):
                self.output.begin(orders)
            return
        handle = self.output.begin(orders)
        self.reach(generation)
        self.begun.add(bundle)
        waiting = [r for r in self.readers if r.run is None and r.end is None]
        places = {order.reader: order.index for order in orders}
        for run in self.runs:
            if run.bundle == bundle:
                for place in places:
                    self.take_place(run, place)
        first = min(places.values())
        assert handle.index == first
        self.runs.append(ModelRun(handle, bundle, first, first, {**places}))
        for reader in waiting:
            if reader.order.bundle == bundle:
                self.seat(reader)

    @precondition(lambda self: self.runs)
    @rule(which=CHOICE, size=st.integers(1, 4), what=st.sampled_from(["put"] * 4 + ["end", "fail"]))
    def produce(self, which: int, size: int, what: str) -> None:
        run = self.runs[which % len(self.runs)]
        put = block(run.stop, size, run.bundle)

        def act() -> None:
            match what:
                case "put":
                    run.handle.put(put)
                case "end":
                    run.handle.finish()
                case _:
                    run.handle.fail("DATA_LOSS", "torn")

        if not run.places:
            with pytest.raises(OutputCancelled):
                act()
        elif run.end is not None:
            with pytest.raises(RuntimeError):
                act()
        else:
            act()
            if what == "put":
                run.stop += size
                self.put_elements += size
            else:
                failed = what == "fail"
                run.end = (
                    TaskFailed("DATA_LOSS", "torn") if failed else EndOfBundle(run.bundle, run.stop)
                )

    @precondition(lambda self: self.runs)
    @rule(which=CHOICE)
    def give_up(self, which: int) -> None:
        run = self.runs[which % len(self.runs)]
        run.handle.cancel()
        for place in list(run.places):
            self.take_place(run, place)

    @rule(
        bundle=st.sampled_from(BUNDLES),
        index=INDEX,
        stride=st.integers(1, 3),
        ahead=AHEAD,
    )
    def open(self, bundle: int, index: int, stride: int, ahead: int) -> None:
        order = Addressed(bundle, index, stride, max(0, self.generation + ahead))
        is_known = self.reach(order.generation)
        opened = self.output.open(order)
        if not is_known:
            assert opened == Superseded(self.generation)
            return
        reader = ModelReader(order, index)
        if bundle in self.begun:
            self.seat(reader)
        if reader.end is not None:
            assert opened == reader.end
        else:
            assert isinstance(opened, Subscription)
            reader.real = Subscribed(opened)
            self.readers.append(reader)

    @precondition(lambda self: self.readers)
    @rule(which=CHOICE, credit=st.sampled_from([True] * 4 + [False]), limit=st.integers(1, 5))
    def read(self, which: int, credit: bool, limit: int) -> None:
        reader = self.readers[which % len(self.readers)]
        run, item = reader.run, reader.real.next(credit, limit)
        if reader.end is not None:
            assert item == reader.end
        elif run is None:
            assert item is None
        elif reader.index >= run.stop:
            assert item == run.end
        elif not credit:
            assert item is None
        else:
            assert isinstance(item, Block)
            stride = reader.order.stride
            assert (item.bundle, item.index) == (run.bundle, reader.index)
            mine = [*range(reader.index, reader.index + item.count * stride, stride)]
            assert reader.real.got[-item.count :] == mine
            run.given.update(mine)
            reader.index = mine[-1] + stride

    @precondition(lambda self: self.readers)
    @rule(which=CHOICE)
    def close(self, which: int) -> None:
        reader = self.readers.pop(which % len(self.readers))
        reader.real.receive(len(reader.real.lacking))
        reader.real.close()
        if reader.run is not None and reader.end is None:
            del reader.run.places[reader.order.reader]

    # -- what always holds ---------------------------------------------------------------------

    @invariant()
    def what_is_kept_is_what_somebody_awaits(self) -> None:
        """Runs without readers are forgotten; of the others, the blocks that every reader of the
        run has moved past: nobody else bounds it.
        """
        if not hasattr(self, "output"):
            return
        live = [run for run in self.runs if run.places]
        assert {*self.output._all_runs()} == {run.handle for run in live}
        assert sum(map(len, self.output._runs.values())) == len(live)
        assert len(self.output._waiting) == sum(
            r.run is None and r.end is None for r in self.readers
        )
        for run in live:
            blocks = run.handle.blocks
            assert all(kept.stop > run.kept for kept in blocks)
            assert (blocks[0].block.index <= run.kept) if blocks else run.kept == run.stop
            assert run.handle._bytes == sum(kept.cost for kept in blocks)
        for run in self.runs:
            if not run.places:
                assert not run.handle.blocks

    def teardown(self) -> None:
        """What was put to a run was given to some reader of it, or reported as dropped."""
        if not hasattr(self, "output"):
            return
        self.output.cancel()
        assert not self.output.waiting_elements and not self.output._runs
        given = sum(len(run.given) for run in self.runs)
        assert sum(part.count for part in self.ledger.dropped_parts) == self.put_elements - given


AddressedModel.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestModel = AddressedModel.TestCase

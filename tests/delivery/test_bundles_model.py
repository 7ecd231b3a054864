"""Bundles under random readers and producers: each slice gets what it asked for, and its end.

One thread does all. A producer that would wait gives the turn to others instead (`Room`), and is
called again once it is told. So a wake-up that is lost, or a wait for ever, is seen as such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.service.block_limits import cost
from forebay.service.blocks import Block
from forebay.service.delivery import (
    BundleRun,
    BundlesOutput,
    End,
    EndOfSlice,
    MemoryBudget,
    OutputCancelled,
    Slice,
    TaskFailed,
    bundles,
)
from forebay.service.delivery.read_requests import MAX_INDEX

from ..hypothesis_profiles import examples
from .contract import Subscribed, block

SIZE = cost(block(0, 1))
MOST = 2
STEPS = 3000


class WouldWait(Exception):
    """The producer comes again later, with the same block."""


class Room:
    """In the place of a run's condition: `notify_all` is noted, and `wait` gives up the turn."""

    def __init__(self) -> None:
        self.told = True

    def notify_all(self) -> None:
        self.told = True

    def wait(self, timeout_s: float | None) -> None:
        self.told = timeout_s is not None  # it would look again by itself
        raise WouldWait


class Reading:
    """A slice that was asked for."""

    def __init__(self, output: BundlesOutput, request: Slice) -> None:
        opened: Any = output.open(request)
        self.request = request
        self.subscribed = Subscribed(opened)
        self.end: End | None = None

    def asked(self, length: int) -> list[int]:
        runs = zip(self.request.runs[::2], self.request.runs[1::2], strict=True)
        return [i for first, count in runs for i in range(first, first + count) if i < length]


class Group:
    """Readers, and what makes their bundles."""

    def __init__(self, data: st.DataObject) -> None:
        def draw(low: int, high: int, label: str) -> int:
            return data.draw(st.integers(low, high), label)

        self.draw = draw
        self.budget = MemoryBudget(draw(1, 20, "budget") * SIZE)
        self.output = BundlesOutput(
            draw(0, 10, "memory") * SIZE, budget=self.budget, max_runs=draw(1, 5, "most runs")
        )
        self.output.on_change = self.poll
        self.lengths = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=4), "lengths")
        self.fails_at: dict[int, int] = {}
        self.readers = draw(1, 3, "readers")
        self.places = [0] * self.readers  # of each reader: bundles before are read
        self.next = [0] * self.readers  # of each reader, in its bundle
        self.seen = [0] * self.readers  # elements of its bundle that it knows of
        self.open: list[tuple[int, Reading]] = []
        self.asleep: set[Reading] = set()
        self.done: list[Reading] = []
        self.runs: list[BundleRun] = []
        self.most_runs = 0

    # -- readers -------------------------------------------------------------------------------

    def ask(self, reader: int) -> None:
        """For elements, or how many there are, as OrderedMode does."""
        place, outstanding = self.places[reader], [o for i, o in self.open if i == reader]
        if place == len(self.lengths):
            return
        start, seen = self.next[reader], self.seen[reader]
        if start < seen and self.draw(0, 3, "asks for elements"):
            stop = self.draw(start + 1, seen, "until")
            step = self.draw(1, 3, "step")
            first = start + self.draw(0, min(2, stop - start - 1), "first")
            runs = tuple(n for i in range(first, stop, step) for n in (i, 1))
            if step == 1:
                runs = (first, stop - first)
            self.next[reader] = stop
        elif any(not each.request.runs for each in outstanding):
            return
        else:
            runs = ()
        firsts = [min(each.request.runs[0::2]) for each in outstanding if each.request.runs]
        firsts += [runs[0]] if runs else []
        counts = not runs and self.draw(0, 4, "counts") == 0
        request = Slice(
            bundle=place,
            place=place,
            runs=runs,
            until=MAX_INDEX if counts else self.next[reader],
            known=MAX_INDEX if counts else seen,
            keep=MAX_INDEX if counts else min(firsts, default=self.next[reader]),
            floor=place,
            reader=reader,
            readers=self.readers,
            position=self.draw(0, 9, "position"),
        )
        self.open.append((reader, Reading(self.output, request)))
        self.poll()

    def poll(self, output: Any = None, changed: Iterable[Any] | None = None) -> None:
        """A carrier looks for something in each slice that does not sleep, or that the output named
        when it told of news."""
        if output is not None:
            named = None if changed is None else set(changed)
            self.asleep = {
                reading
                for reading in self.asleep
                if named is not None and reading.subscribed.subscription not in named
            }
        for reader, reading in list(self.open):
            while reading not in self.asleep:
                item = reading.subscribed.next()
                if not isinstance(item, Block):
                    break
            if reading in self.asleep:
                continue
            if item is None:
                if reading.subscribed.subscription.sleeps:
                    self.asleep.add(reading)
                continue
            assert not isinstance(item, TaskFailed) or self.fails_at
            self.open.remove((reader, reading))
            self.done.append(reading)
            reading.end = item  # type: ignore[assignment]
            self.leave(reader, reading)

    def leave(self, reader: int, reading: Reading) -> None:
        reading.subscribed.receive(len(reading.subscribed.lacking))
        reading.subscribed.close()
        if not isinstance(reading.end, EndOfSlice) or reading.end.bundle != self.places[reader]:
            return
        end, place = reading.end, self.places[reader]
        self.seen[reader] = max(self.seen[reader], end.length)
        is_read = end.complete and self.next[reader] >= end.length
        if is_read and all(i != reader for i, _ in self.open):
            self.places[reader], self.next[reader], self.seen[reader] = place + 1, 0, 0

    def cut(self, at: int) -> None:
        """A reader's connection has gone; it asks for the rest again."""
        reader, reading = self.open.pop(at)
        reading.subscribed.close()
        runs = reading.subscribed.subscription.runs  # type: ignore[attr-defined]
        rest = Reading(self.output, replaced(reading.request, runs))
        rest.subscribed.got[:0] = reading.subscribed.got
        if reading.request.runs and not runs:
            self.done.append(reading)
            return rest.subscribed.close()
        self.open.append((reader, rest))
        rest.request = reading.request
        self.poll()
        return None

    # -- producers -----------------------------------------------------------------------------

    def begin(self) -> None:
        if (run := self.output.next_run(MOST, 0)) is not None:
            room: Any = Room()
            run.room = room
            self.runs.append(run)

    def produce(self, run: BundleRun) -> None:
        length = self.lengths[run.number]
        fails_at = self.fails_at.get(run.number, length + 1)
        try:
            if run.stop >= fails_at:
                run.fail("DATA_LOSS", f"bundle {run.number} is torn")
                self.runs.remove(run)
            elif run.stop >= length:
                run.finish()
                self.runs.remove(run)
            else:
                most = min(length, fails_at) - run.stop
                count = self.draw(1, min(9, most), "size")
                run.put(block(run.stop, count, run.number))
        except WouldWait:
            run.waits = True  # still
        except OutputCancelled:
            self.runs.remove(run)

    def ready(self) -> list[BundleRun]:
        """The runs whose producer has not to wait."""
        return [run for run in self.runs if run.room.told]  # type: ignore[attr-defined]

    # -- all -----------------------------------------------------------------------------------

    def step(self) -> None:
        match self.draw(0, 9, "what"):
            case 0 | 1 | 2:
                self.ask(self.draw(0, self.readers - 1, "reader"))
            case 3 | 4:
                self.begin()
            case 5 if self.open:
                self.cut(self.draw(0, len(self.open) - 1, "cut"))
            case _ if self.ready():
                runs = self.ready()
                self.produce(runs[self.draw(0, len(runs) - 1, "run")])
        self.check()

    def check(self) -> None:
        output = self.output
        kept = [
            b.cost
            for bundle in output._bundles.values()
            for r in bundle.runs
            for b in reversed(r.log)
        ]
        assert output.held_bytes == sum(kept)
        queue = output.queue
        assert queue.busy == sum(run.busy for run in self.runs)
        assert set(queue.begun) == {run for run in self.runs if not run.dropped}
        assert len(queue.begun) <= queue.max_runs

    def finish(self) -> None:
        """Everybody reads to the end, and nobody waits for ever."""
        with pytest.MonkeyPatch.context() as later:
            later.setattr(bundles, "STILL_READS_S", 0)  # who has read all is not waited for
            for _ in range(STEPS):
                for reader in range(self.readers):
                    self.drain(reader)
                self.begin()
                for run in self.ready():
                    self.produce(run)
                self.check()
                if not self.open and all(place == len(self.lengths) for place in self.places):
                    return
        raise AssertionError(f"they wait: {[reading.request for _, reading in self.open]}")

    def drain(self, reader: int) -> None:
        """As `ask`, for all that it knows."""
        if self.places[reader] == len(self.lengths):
            return
        place, start, seen = self.places[reader], self.next[reader], self.seen[reader]
        outstanding = [o for i, o in self.open if i == reader]
        if start < seen:
            runs: tuple[int, ...] = (start, seen - start)
            self.next[reader] = seen
        elif outstanding and any(o.request.known == seen == o.request.until for o in outstanding):
            return
        else:
            runs = ()
        firsts = [o.request.runs[0] for o in outstanding if o.request.runs]
        keep = min([*firsts, *runs[:1]], default=start)
        request = Slice(
            place, place, runs, self.next[reader], seen, keep, place, reader, self.readers
        )
        self.open.append((reader, Reading(self.output, request)))
        self.poll()


def replaced(request: Slice, runs: tuple[int, ...]) -> Slice:
    names = ("bundle", "place", "until", "known", "keep", "floor", "reader", "readers", "position")
    return Slice(runs=runs, **{name: getattr(request, name) for name in names})


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    """What depends on time is due at once."""
    monkeypatch.setattr(bundles, "ANSWER_S", 0)
    monkeypatch.setattr(bundles, "AHEAD_BYTES", 3 * SIZE)


Test = Callable[..., None]


def model(test: Test) -> Test:
    checked = given(data=st.data(), steps=st.integers(0, 60))(test)
    return settings(max_examples=examples(200), deadline=None)(checked)


@model
def test_every_slice_gets_its_elements_and_its_end(data: st.DataObject, steps: int) -> None:
    group = Group(data)
    for _ in range(steps):
        group.step()
    group.finish()
    for reading in group.done:
        length = group.lengths[reading.request.bundle]
        assert reading.subscribed.got == reading.asked(length)
        if (end := reading.end) is not None:
            assert isinstance(end, EndOfSlice) and end.length <= length
            assert end.length == length or not end.complete
    floor = len(group.lengths)
    for reader in range(group.readers):
        last = Slice(floor, floor, floor=floor, reader=reader, readers=group.readers)
        Reading(group.output, last).subscribed.close()
    assert not group.budget.held and not group.budget.active
    assert not group.output._bundles.keys() - {floor}
    for run in list(group.runs):
        with pytest.raises(OutputCancelled):
            run.finish()


@model
def test_an_order_may_interleave_more_bundles_than_may_have_begun(
    data: st.DataObject, steps: int
) -> None:
    group, window = Group(data), steps % 5
    order = sorted((i, bundle) for bundle, n in enumerate(group.lengths) for i in range(n))
    for position, (i, bundle) in enumerate(order):
        asked = Slice(bundle, bundle, (i, 1), until=i + 1, keep=i, position=position)
        group.open.append((0, Reading(group.output, asked)))
        for _ in range(STEPS):
            group.poll()
            if len(group.open) <= window:
                break
            group.begin()
            for run in group.ready():
                group.produce(run)
            group.check()
        else:
            raise AssertionError(f"element {i} of bundle {bundle} does not come")
    assert all(reading.subscribed.got == [reading.request.runs[0]] for reading in group.done)


@model
def test_what_is_cancelled_frees_all(data: st.DataObject, steps: int) -> None:
    group = Group(data)
    for _ in range(steps):
        group.step()
    group.output.on_change = lambda *_: None
    group.output.cancel()
    assert not group.budget.held and not group.budget.active
    assert all(run.dropped and run.room.told for run in group.runs)  # type: ignore[attr-defined]
    assert not group.output.queue.busy


@model
def test_errors_reach_whoever_lacks_elements_behind_them(data: st.DataObject, steps: int) -> None:
    group = Group(data)
    group.fails_at = {0: group.draw(0, group.lengths[0], "fails at")}
    for _ in range(steps):
        group.step()
    with pytest.MonkeyPatch.context() as later:
        later.setattr(bundles, "STILL_READS_S", 0)  # the others have not read for long
        for _ in range(STEPS):
            group.drain(0)
            group.begin()
            for run in group.ready():
                group.produce(run)
            group.check()
            failed = [reading for reading in group.done if isinstance(reading.end, TaskFailed)]
            if any(reading.request.reader == 0 for reading in failed):
                break
        else:
            raise AssertionError("no error came")
        for reading in group.done:
            got = reading.subscribed.got
            assert got == reading.asked(MAX_INDEX)[: len(got)]
            if reading.request.bundle == 0 and isinstance(reading.end, TaskFailed):
                assert all(index < group.fails_at[0] for index in got)
        # The memory is free once the readers have gone on.
        for _, reading in group.open:
            reading.subscribed.close()
        group.output.on_change = lambda *_: None
        for reader in range(group.readers):
            last = Slice(99, 99, floor=99, reader=reader, readers=group.readers)
            Reading(group.output, last).subscribed.close()
        assert not group.output.held_bytes and not group.output._bundles.keys() - {99}

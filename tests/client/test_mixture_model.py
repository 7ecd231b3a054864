"""Consumers in order, against a walk along the line: any sources, groups, changes and workers.

The workers are this test's: they answer in any order, some of what they are asked, at any time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.blocks import Block, Component
from forebay.service.client import bundle_lengths, order_plan, ordered, read_ahead, source_plan
from forebay.service.client.ordered import OrderedMode
from forebay.service.client.positions import OrderedRead
from forebay.service.delivery import EndOfSlice, Slice
from forebay.service.delivery.read_requests import MAX_INDEX, runs_after
from forebay.service.order import epoch_order
from forebay.service.picks import shares
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.schedule import Schedule

from ..picked import picked
from .test_ordered_requests import Worker, links_to

TASK, EACH = 5, 1000  # an element is its bundle's number times EACH, and its index


class Mixture:
    """Sources by the lengths of their bundles, their weights, and how they are read."""

    def __init__(self, seed: int, sources: int | None = None) -> None:
        self.rnd = rnd = random.Random(seed)
        numbers = range(sources or rnd.randint(1, 4))
        self.lengths = [
            [rnd.choice([0, 1, 3, 7, 30]) for _ in range(rnd.randint(1, 12))] for _ in numbers
        ]
        for lengths in self.lengths:
            lengths[0] = lengths[0] or 2
        self.shares = self.weights()
        self.spec: dict[str, Any] = {
            "seed": seed, "shuffle": rnd.random() < 0.7, "cycle_length": rnd.choice([1, 2, 3, 16]),
            "block_length": rnd.choice([1, 2, 5, 50]),
        }  # fmt: skip
        self.firsts = [sum(map(len, self.lengths[:n])) for n in range(len(self.lengths) + 1)]
        self.changes: list[ev.ScheduleChange] = []

    def weights(self) -> tuple[int, ...]:
        found = [self.rnd.choice([0, 1, 1, 10, 0.01, 0.002, 300]) for _ in self.lengths]
        return shares(found if sum(found) else [1] * len(found))

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.shares, self.changes)

    def change(self, place: int, step: int) -> ev.ScheduleChange:
        if self.rnd.random() < 0.5:
            return ev.ScheduleChange(place=place, shares=self.weights())
        return ev.ScheduleChange(place=place, skipped=self.rnd.choice([1, step, 60 * step]))

    def source(self, number: int) -> Iterator[int]:
        """Its elements, as if it were read by itself."""
        lengths, epoch = self.lengths[number], 0
        while True:
            order = ev.OrderSpec(bundles=len(lengths), **self.spec)
            bundles, epoch_of = epoch_order(order, lengths, epoch)
            places, indexes = epoch_of.elements(0, epoch_of.known_until)
            first = epoch * self.firsts[-1] + self.firsts[number]
            yield from ((first + bundles[places]) * EACH + indexes).tolist()
            epoch += 1

    def line(self, until: int) -> list[int]:
        """What stands at the places before this one that are not left out."""
        stretches = [(0, self.shares)]
        left_out: set[int] = set()
        for change in self.changes:
            if change.skipped:
                left_out |= {*range(change.place, min(until, change.place + change.skipped))}
            else:
                kept = [each for each in stretches if each[0] < change.place]
                stretches = [*kept, (change.place, tuple(change.shares))]
        elements = [self.source(number) for number in range(len(self.lengths))]
        found: list[int] = []
        stops = [*(first for first, _ in stretches[1:]), until]
        for (first, here), stop in zip(stretches, stops, strict=True):
            sources = picked(here, 0, max(0, min(stop, until) - first)).tolist()
            found += [next(elements[source]) for source in sources]
        return [element for place, element in enumerate(found) if place not in left_out]


class Consumer:
    """One of a group, and its worker."""

    def __init__(self, mixture: Mixture, known: Sequence[bool], read: OrderedRead) -> None:
        sizes = [len(lengths) for lengths in mixture.lengths]
        self.lengths = [length for lengths in mixture.lengths for length in lengths]
        joined = pb.JoinIterationResponse(
            order=ev.OrderSpec(
                bundles=sum(sizes), source_bundles=sizes if read.sources else (), **mixture.spec
            ),
            lengths=[n if k else -1 for n, k in zip(self.lengths, known, strict=True)],
            news=pb.ConsumerHeartbeatResponse(version=1, changes=mixture.changes),
        )
        self.mixture, self.worker = mixture, Worker()
        self.mode = OrderedMode(read, links_to(self.worker), joined)
        news = pb.ConsumerHeartbeatResponse(version=1)
        for uid in (1, 2):
            news.tasks.add(task_id=TASK + uid, worker_uid=uid, worker_address="a")
        self.mode.update(news)
        self.got: list[int] = []
        self.refused = False  # connections, by the second worker

    def take(self, until: int) -> None:
        while len(self.got) < until and (taken := self.mode.take()) is not None:
            values = taken[0].components[0].values
            assert isinstance(values, np.ndarray)
            self.got += values.tolist()

    @property
    def slices(self) -> list[Slice]:
        return [order for order in self.worker.asked.values() if order.runs]

    def asks_little(self, most_requests: int, most_runs: int) -> None:
        queried = [order.bundle for order in self.worker.asked.values() if not order.runs]
        assert all(queried.count(bundle) <= 2 for bundle in queried), "one ahead, one needed"
        assert all(len(order.runs) <= 2 * most_runs for order in self.slices)
        assert most_runs < 50 or len(self.slices) <= 2 * most_requests
        of = {self.worker.tasks[number] for number in self.worker.asked}
        assert not (self.refused and TASK + 2 in of)

    def hear(self, **news: Any) -> None:
        self.mode.answered(pb.ConsumerHeartbeatResponse(**news))

    def serve(self, part: float) -> None:
        """The worker answers some of what it was asked."""
        rnd = self.mixture.rnd
        for number in [number for number in self.worker.asked if rnd.random() < part]:
            if (request := self.worker.asked.pop(number, None)) is not None:
                self._answer((self.worker.tasks[number], number), request)

    def _answer(self, key: tuple[int, int], request: Slice) -> None:
        rnd, length = self.mixture.rnd, self.lengths[request.bundle % len(self.lengths)]
        rest = request
        while rest.runs and rest.runs[0] < length:
            first, count = rest.runs[:2]
            count = min(count, length - first, rnd.choice([1, 7, 100]))
            values = Component(request.bundle * EACH + np.arange(first, first + count))
            block = Block(count, (values,), request.bundle, first)
            self.mode.deliver(self.worker.client, key, block)
            rest = replace(rest, runs=runs_after(rest.runs, count))
            if rest.runs and rnd.random() < 0.2:  # the rest comes later
                self.worker.asked[key[1]] = rest
                return
        known = max(request.stop, request.enough, request.until + 1, request.known + 1)
        known += rnd.choice([0, 3, 100])  # it may have made more
        is_all = request.known >= MAX_INDEX or (length <= known and not request.runs)
        ended = EndOfSlice(request.bundle, length if is_all else min(length, known), is_all)
        self.mode.end(key, ended)


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(n, marks=pytest.mark.long) for n in range(20, 300))]
)
def test_it_is_the_walk(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = Mixture(seed)
    rnd = mixture.rnd
    window = rnd.choice([200, 2000, 64 << 20])
    monkeypatch.setattr(read_ahead, "WINDOW_BYTES", window)
    monkeypatch.setattr(read_ahead, "EARLY_BYTES", window // 8)
    consumers, batch = rnd.choice([1, 2, 3]), rnd.choice([1, 2, 5, 12])
    step, goal = consumers * batch, rnd.randint(20, 60) * batch
    start = rnd.choice([0, 0, step * rnd.randint(0, 100), rnd.randint(0, 1000)])
    share = rnd.choice([0, 0.5, 1, 1])
    known = [rnd.random() < share for _ in range(mixture.firsts[-1])]
    for _ in range(rnd.choice([0, 0, 1, 3])):  # while nobody reads
        place = mixture.schedule.place_of(rnd.randint(0, 60) * step)
        mixture.changes.append(mixture.change(place, step))
    sources = tuple((str(number), share) for number, share in enumerate(mixture.shares))
    how: dict[str, Any] = {"batch_size": batch, "num_consumers": consumers, **mixture.spec}
    group = [
        Consumer(
            mixture,
            known,
            OrderedRead(sources=sources, start_position=start, consumer_index=n, **how),
        )
        for n in range(consumers)
    ]
    begin = mixture.schedule.position_of(start)
    next_change = rnd.randint(0, 30)
    for now in range(20_000):
        for each in rnd.sample(group, consumers):
            each.take(goal if rnd.random() < 0.3 else min(goal, len(each.got) + 1))
            each.serve(rnd.choice([0, 0.5, 1]))
            if rnd.random() < 0.02:
                each.mode._plan.plan_anew()
        if now == next_change and len(mixture.changes) < 8:
            _change(mixture, group, step)
            next_change = now + rnd.choice([1, 1, 2, 5, 30])
        if all(len(each.got) >= goal for each in group):
            break
    until = begin + goal * consumers
    skipped = sum(change.skipped for change in mixture.changes)
    expected = mixture.line(until + skipped)[begin:until]
    for number, each in enumerate(group):
        mine = [e for at, e in enumerate(expected) if at // batch % consumers == number]
        assert each.got[:goal] == mine


@pytest.mark.parametrize(
    "seed", [*range(40), *(pytest.param(n, marks=pytest.mark.long) for n in range(40, 300))]
)
def test_a_dataset_by_itself_is_the_walk_of_its_epochs(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And little is asked for; of who refuses connections nothing."""
    mixture = Mixture(seed, sources=1)
    rnd, total = mixture.rnd, sum(mixture.lengths[0])
    most_requests, most_runs = rnd.choice([3, 2000]), rnd.choice([1, 3, 1000])
    for module in (order_plan, source_plan):
        monkeypatch.setattr(module, "MAX_REQUESTS", most_requests)
    monkeypatch.setattr(source_plan, "MAX_SLICE_RUNS", most_runs)
    monkeypatch.setattr(ordered, "CUT_S", rnd.choice([0.0, 3600.0]))
    monkeypatch.setattr(bundle_lengths, "MAX_QUERIES", rnd.choice([2, 1000]))
    monkeypatch.setattr(read_ahead, "WINDOW_BYTES", rnd.choice([200, 64 << 20]))
    consumers, batch, drop = rnd.choice([1, 2, 3]), rnd.choice([1, 2, 5]), rnd.random() < 0.3
    step, start = consumers * batch, rnd.choice([0, rnd.randint(0, 3 * total)])
    share = rnd.choice([0, 0.5, 1])
    sizes = [1, step, 3 * step, total, 2 * total + 3]
    for _ in range(rnd.choice([0, 0, 1, 3])):  # while nobody reads
        place = rnd.randint(0, 4 * total)
        mixture.changes.append(ev.ScheduleChange(place=place, skipped=rnd.choice(sizes)))
    how: dict[str, Any] = {"batch_size": batch, "num_consumers": consumers, **mixture.spec}
    reads = [
        OrderedRead(start_position=start, drop_remainder=drop, consumer_index=n, **how)
        for n in range(consumers)
    ]
    source = mixture.source(0)
    line = [next(source) for _ in range(12 * total)]
    epoch, begin = divmod(start, total)

    def to_give() -> list[int]:
        """The places of what is left of the epoch."""
        left_out = {p for c in mixture.changes for p in range(c.place, c.place + c.skipped)}
        here = [p for p in range(epoch * total + begin, (epoch + 1) * total) if p not in left_out]
        return here[: len(here) // step * step] if drop else here

    for _ in range(3):
        is_first_left = {*range(epoch * total, epoch * total + begin)} <= {
            p for c in mixture.changes for p in range(c.place, c.place + c.skipped)
        }
        if not is_first_left and not to_give():  # the rest is empty: the next epoch begins
            epoch, begin = epoch + 1, 0
        group = [  # each knows other lengths
            Consumer(mixture, [rnd.random() < share for _ in mixture.lengths[0]], read)
            for read in reads
        ]
        ended: set[int] = set()
        next_change = rnd.randint(0, 20)
        for now in range(20_000):
            for number in rnd.sample(range(consumers), consumers):
                group[number].take(rnd.choice([len(group[number].got) + 1, 1 << 20]))
                group[number].asks_little(most_requests, most_runs)
                if rnd.random() < 0.01:
                    group[number].mode.refused(2)
                    group[number].refused = True
                group[number].serve(rnd.choice([0, 0.1, 0.5, 1]))
                if group[number].mode.has_ended():
                    ended.add(number)
            if len(ended) == consumers:
                break
            if now == next_change and not ended:
                change = ev.ScheduleChange(skipped=rnd.choice(sizes))
                _propose(mixture, group, step, change, total)
                next_change = now + rnd.choice([1, 5, 30])
        for number, each in enumerate(group):
            assert drop or not each.slices
            found = [line[p] for at, p in enumerate(to_give()) if at // batch % consumers == number]
            assert each.got == found
            reads[number].given = -(-len(found) // batch)
            assert reads[number].finish()
            assert reads[number].position() == (epoch + 1) * total
        epoch, begin = epoch + 1, 0


def _change(mixture: Mixture, group: list[Consumer], step: int) -> None:
    _propose(mixture, group, step, mixture.change(0, step))


def _propose(
    mixture: Mixture,
    group: list[Consumer],
    step: int,
    change: ev.ScheduleChange,
    total: int | None = None,
) -> None:
    """Propose a change some way behind who is furthest, and decide it if all agree."""
    rnd, epochs = mixture.rnd, [each.mode._plan.epoch for each in group]
    taken = [each.mode._hold.taken for each in group]
    furthest = max(
        epoch.first_place + epoch.schedule.place_of(at)
        for epoch, at in zip(epochs, taken, strict=True)
    )
    schedule = mixture.schedule
    behind = schedule.position_of(furthest) + rnd.choice([0, 0, 1, step, 5 * step])
    change.place = place = schedule.place_of(behind)
    nobody_knows = total is not None and all(epoch.total is None for epoch in epochs)
    if nobody_knows and place + change.skipped > (total or 0):  # an epoch may end before
        return
    for each in group:
        each.hear(proposal=pb.Proposal(number=1 + len(mixture.changes), place=place))
    refused = any(each.mode._hold._answer.place > place for each in group)
    for each in group:
        each.hear(changes=[] if refused else [change])
    if not refused:
        mixture.changes.append(change)

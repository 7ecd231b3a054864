"""What a worker tells of its leases, and how far its pipeline may be ahead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from forebay.service.blocks import Block, Component
from forebay.service.delivery import AnyBlock
from forebay.service.delivery.first_come import FirstComeOutput
from forebay.service.delivery.in_flight import FIRST
from forebay.service.pipelines import Run, SplitRange
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.worker.lease_reports import LeaseReports


class Reporting:
    """A task whose splits have an element each."""

    def __init__(self, *, needs: int = 1) -> None:
        self.output = FirstComeOutput()
        self.reports = LeaseReports(self.output)
        self.reports.begin_run(cast(Run, SimpleNamespace(needs=needs, waiting=0, most=0)))
        opened: Any = self.output.open(AnyBlock(True))
        self.trainer = opened
        self.next = 0

    def lease(self, lease_id: int, count: int) -> SplitRange:
        self.reports.begin(lease_id, count)
        self.next += count
        return self.reports.given(lease_id, SplitRange(self.next - count, count, 0))

    def make(self, splits: SplitRange) -> None:
        values = np.arange(splits.first, splits.first + splits.count)
        self.output.put(Block(splits.count, (Component(values),)))
        splits.made(splits.count)

    def give(self) -> Block:
        item: Any = self.trainer.next(True)
        return item[0]

    def give_one(self) -> Block:
        item: Any = self.trainer.next(True, 1)
        return item[0]

    def take(self, count: int) -> None:
        while count > 0:
            block = self.give()
            count -= block.count
            self.trainer.received([block])

    def told(self, **how: Any) -> dict[str, Any]:
        request = pb.LeaseSplitsRequest()
        self.reports.add_to(request)
        return {field.name: list(value) if field.is_repeated else value
                for field, value in request.ListFields()}  # fmt: skip


def test_a_lease_is_taken_when_trainers_have_its_elements() -> None:
    task = Reporting()
    first, second = task.lease(1, 2), task.lease(2, 3)
    task.make(first)
    block = task.give()
    assert task.told() == {}, "made and given, and not taken"
    task.trainer.received([block])
    task.take(2 - block.count)
    assert task.told() == {"taken": [1]}
    task.make(second)
    task.trainer.close([task.give()])
    task.output.cancel()  # with what was not given
    assert task.told() == {"lost": [2], "dropped": 3}
    assert task.told() == {}, "it is told once"


def test_a_drained_worker_tells_that_all_arrived() -> None:
    task = Reporting()
    first, second = task.lease(1, 2), task.lease(2, 2)
    task.make(first)
    task.give()
    request = pb.LeaseSplitsRequest()
    task.reports.all_delivered(request)
    assert (list(request.taken), request.all_taken) == ([1], True), "2 was never made"
    assert second.count == 2


def test_the_kept_part_of_a_returned_lease_goes_on() -> None:
    task = Reporting()
    whole = task.lease(1, 5)
    task.reports.replace(1, 7, unstarted=3)
    task.make(SplitRange(whole.first, 2, 0))
    task.reports.given(7, SplitRange(0, 2, 0)).made(2)
    task.take(2)
    assert task.told() == {"taken": [7]}


def test_a_pipeline_waits_for_trainers() -> None:
    task = Reporting()
    task.make(task.lease(1, FIRST))
    assert not task.reports.most_splits()
    assert not task.reports.wait(0), "nobody takes anything"
    task.take(FIRST)
    assert task.reports.wait(0)
    assert task.reports.most_splits() >= FIRST


def test_a_slow_trainer_makes_few_leases() -> None:
    task, leases = Reporting(), 0
    task.output.in_flight.bound = 400
    task.make(task.lease(1, 400))
    for _ in range(390):
        task.trainer.received([task.give_one()])
        if task.reports.most_splits():
            assert task.reports.wait(1)
            task.make(task.lease(leases, task.reports.most_splits()))
            leases += 1
    assert 1 < leases < 5, "not one for each element"


def test_idle_processes_do_not_make_elements_that_trainers_have_no_use_for() -> None:
    task = Reporting()
    task.make(task.lease(1, FIRST // 2))
    assert task.reports.wait(4), "all are idle, and what was made is not enough"
    large = task.lease(2, 8)
    assert task.reports.wait(9), "one of nine is idle, and the others may take long"
    task.make(large)
    assert not task.reports.wait(4)


def test_what_a_pack_needs_is_not_waited_for() -> None:
    task = Reporting(needs=256)
    assert task.reports.most_splits() == task.reports.lacking() == 256
    pack = task.lease(1, 100)
    assert task.reports.wait(0) and task.reports.most_splits() == 156
    task.lease(2, 156)
    assert not task.reports.most_splits() + task.reports.lacking(), "it has what it needs"
    task.make(SplitRange(pack.first, 256, 0, made=pack.made))
    assert not task.reports.wait(0) and not task.reports.most_splits()
    task.take(256 - FIRST + 1)
    assert task.reports.wait(0) and task.reports.most_splits() >= 256


def test_of_a_part_of_a_range_it_is_known_that_it_was_made() -> None:
    task = Reporting()
    large = task.lease(1, 1000)
    task.make(SplitRange(large.first, 990, 0, made=large.made))
    task.take(990)
    assert task.reports.wait(0) and task.told() == {}
    task.make(SplitRange(990, 10, 0, made=large.made))
    task.take(10)
    assert task.told() == {"taken": [1]}


def test_a_feed_that_drains_does_not_wait_for_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Reporting()
    woken: list[bool] = []
    task.make(task.lease(1, FIRST))

    def wait(_: float) -> None:
        assert not woken, "it waits on"
        woken.append(True)
        task.output.lock.release()  # as a condition does
        task.reports.wake()
        task.output.lock.acquire()

    monkeypatch.setattr(task.output.changed, "wait", wait)
    assert not task.reports.wait(0)


def test_a_pipeline_gets_more_splits_if_it_makes_nothing_of_those_that_it_has() -> None:
    task = Reporting()
    for lease_id in range(1, 8):  # such as to fill a batch of 1,000
        splits = task.lease(lease_id, max(FIRST, task.reports.most_splits()))
        assert task.reports.wait(0)
    assert splits.count >= 100


def test_what_mixes_splits_reports_no_lease() -> None:
    task = Reporting(needs=0)
    task.make(task.lease(1, FIRST))
    task.take(FIRST)
    assert not task.reports.are_exact
    assert task.told() == {}


def test_a_report_that_did_not_arrive_is_made_again() -> None:
    given = Reporting()
    given.make(given.lease(7, 4))
    given.take(4)
    given.make(given.lease(8, 2))
    given.output.cancel()
    first, again, later = (pb.LeaseSplitsRequest() for _ in range(3))
    given.reports.add_to(first)
    assert (list(first.taken), list(first.lost), first.dropped) == ([7], [8], 2)
    given.reports.restore(first)
    given.reports.add_to(again)
    assert again == first
    given.reports.add_to(later)
    assert later == pb.LeaseSplitsRequest()


def test_trainers_that_hold_everything_do_not_starve_another_one() -> None:
    task = Reporting()
    task.make(task.lease(1, FIRST))
    assert not task.reports.wait(0), "there is something to give"
    other: Any = task.output.open(AnyBlock(True))
    while isinstance(task.trainer.next(True) or other.next(True), tuple):
        pass
    assert task.output.waiting_elements == 0 and task.output.in_flight.untaken == FIRST
    assert task.reports.wait(0)

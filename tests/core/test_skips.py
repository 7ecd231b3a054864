"""Splits of Python datasets that are skipped: how many may be, and each is counted once."""

from __future__ import annotations

import pytest

from forebay.journal.splits import MAX_REASON
from forebay.service.core import commands as c
from forebay.service.core.state import MAX_SKIPS, skip_caller
from forebay.service.core.status import status
from forebay.service.errors import NotFound, Unavailable

from .given import Given
from .test_ordered import Ordered


class ReadSplits(Given):
    """By two workers."""

    def __init__(self) -> None:
        super().__init__()
        self.workers = [self.worker(number) for number in (1, 2)]
        self.joined = self.iteration("j")
        self.tasks = [*map(self.task_of, self.workers)]

    def skip(
        self,
        task: int,
        split: int,
        number: int,
        limit: int = 3,
        reason: str = "why",
        records: int = 0,
    ) -> bool:
        task_id = self.tasks[task]
        command = c.SkipSplit(
            request=(skip_caller(task_id), number), task_id=task_id, split=split, element=7,
            reason=reason, limit=limit, records=records,
        )  # fmt: skip
        return self.when(command)

    @property
    def shown(self) -> dict[str, object]:
        ((found,),) = (job["iterations"] for job in status(self.state)["jobs"])
        return dict(found)


def test_the_limit_is_of_the_iteration_whichever_workers_skip() -> None:
    reading = ReadSplits()
    assert reading.skip(0, 5, 1)
    assert reading.then == ["split_skipped"]
    assert reading.skip(0, 5, 1)
    assert reading.then == [], "as a request is repeated"
    assert reading.skip(1, 9, 1)
    assert reading.skip(1, 10, 2)
    assert not reading.skip(0, 6, 2)
    assert reading.then == []
    assert not reading.skip(0, 6, 2, limit=3)
    assert reading.skip(0, 6, 2, limit=4)
    assert reading.shown["skipped"] == 4
    first = {"worker_address": "w:1", "split": 5, "element": 7, "reason": "why", "records": 0}
    assert isinstance(shown := reading.shown["skips"], list) and shown[0] == first


def test_a_record_counts_once_whoever_reads_it_how_often() -> None:
    reading = ReadSplits()
    assert reading.skip(0, 5, 1, records=1)
    assert reading.then == ["split_skipped"]
    assert reading.skip(1, 5, 1, limit=1, records=1)
    assert reading.then == []
    assert not reading.skip(1, 6, 2, records=3)
    assert reading.skip(1, 6, 3, records=2)
    assert reading.skip(0, 5, 2, records=1)
    assert not reading.skip(0, 5, 3)
    assert reading.shown["skipped"] == 3


def test_remembered_skips_are_bounded() -> None:
    reading = ReadSplits()
    for number in range(1, 2 * MAX_SKIPS + 1):
        assert reading.skip(0, number, number, limit=100, reason="x" * 5_000)
    skips = reading.state.iterations[reading.joined.iteration_id].skips
    assert [skip.split for skip in skips] == [*range(MAX_SKIPS + 1, 2 * MAX_SKIPS + 1)]
    assert {len(skip.reason) for skip in skips} == {MAX_REASON}


def test_a_skip_needs_a_task() -> None:
    reading = ReadSplits()
    reading.when(c.LoseWorker(worker_id=reading.workers[0], reason="no sign of life"))
    with pytest.raises(Unavailable):
        reading.skip(0, 5, 1)
    reading.worker(1)
    assert reading.skip(0, 5, 1)
    reading.when(c.CompleteTask(task_id=reading.tasks[0]))
    assert skip_caller(reading.tasks[0]) not in reading.state.answers
    with pytest.raises(NotFound):
        reading.skip(0, 6, 2)


def test_a_job_keeps_the_number_of_skipped_splits_of_a_removed_iteration() -> None:
    reading = ReadSplits()
    reading.skip(0, 5, 1)
    for task_id in reading.tasks:
        reading.when(c.CompleteTask(task_id=task_id))
    reading.when(c.LeaveIteration(consumer_id=reading.joined.consumer_id, reason="r"))
    reading.when(c.CollectIteration(iteration_id=reading.joined.iteration_id))
    (job,) = status(reading.state)["jobs"]
    assert (job["iterations"], job["skipped_splits"]) == ([], 1)


def test_an_ordered_job_keeps_the_number_while_nobody_reads_it() -> None:
    """Each iteration leaves out the same, so it is no sum."""
    given = Ordered()
    worker = given.worker(1)
    for splits in (2, 1):
        consumer = given.join(of=1)
        task_id = given.task_of(worker)
        for split in range(splits):
            asked = (skip_caller(task_id), split + 1)
            given.when(
                c.SkipSplit(
                    request=asked, task_id=task_id, split=split, element=0, reason="", limit=3
                )
            )
        given.leave(consumer)
        (job,) = status(given.state)["jobs"]
        assert (job["iterations"], job["skipped_splits"]) == ([], 2)

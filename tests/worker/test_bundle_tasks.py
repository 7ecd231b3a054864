"""A task of an ordered read, with a pipeline and consumers of the test's."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.blocks import Block, Component
from forebay.service.checksums import Checksum
from forebay.service.delivery import (
    BundlesOutput,
    End,
    EndOfSlice,
    Slice,
    Subscription,
    TaskFailed,
    TaskUnknown,
)
from forebay.service.errors import MOST_TOLD, InvalidArgument, PipelineError
from forebay.service.pipelines import PythonRules, SplitRange
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto.python_pb2 import PythonDataset
from forebay.service.worker.bundle_tasks import BundleReports, BundleTask
from forebay.service.worker.read_errors import MOST_ERRORS, ReadErrors
from forebay.service.worker.task_pipeline import Pipelines
from forebay.service.worker.task_states import Ended
from forebay.service.worker.tasks import TaskDependencies

from ..delivery.contract import block, numbers
from ..standbys import wait_until

TIMEOUT_S = 30.0
JOB = 5
BUNDLES = 50
BUNDLE_SPLITS = 10
SPLITS = BUNDLES * BUNDLE_SPLITS - 3
ENDLESS = 1 << 40


class Made:
    """A run of a bundle: its elements are its splits, unless `lengths` says otherwise. A *slow*
    one's do not come before it is cancelled, or `go` is set."""

    def __init__(self, pipelines: Fake, splits: SplitRange, number: int, start: int) -> None:
        self.number, self.start = number, start
        self.length = pipelines.lengths.get(number, splits.count)
        self.is_slow = number in pipelines.slow
        self.entered, self.go, self.cancelled = (threading.Event() for _ in range(3))
        self.over = False
        self.error = pipelines.errors.get(number)

    def blocks(self) -> Iterator[Block]:
        self.entered.set()
        try:
            if self.is_slow:
                assert self.go.wait(TIMEOUT_S)
            for index in range(self.start, self.length):
                if self.cancelled.is_set():
                    return
                if self.error is not None and index == 5:
                    raise self.error
                yield block(index, 1, self.number)
        finally:
            self.over = True

    def cancel(self) -> None:
        self.cancelled.set()
        self.go.set()


class Fake(Pipelines):
    """Datasets of SPLITS splits."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: dict[int, int] = {}
        self.slow: set[int] = set()
        self.errors: dict[int, BaseException] = {}
        self.made: list[Made] = []
        self.asked: list[tuple[SplitRange, int, int, int]] = []
        self.opening: Callable[[int], None] = lambda number: None
        self.closed = False

    def open(self, *_: Any) -> Any:
        return SimpleNamespace(bundle=self._bundle, close=self._close)

    def _bundle(self, splits: SplitRange, *, number: int, seed: int, start: int) -> Made:
        self.opening(number)
        self.asked.append((splits, number, seed, start))
        self.made.append(Made(self, splits, number, start))
        return self.made[-1]

    def _close(self) -> None:
        self.closed = True


class Task:
    """A BundleTask, and what it reports."""

    def __init__(self, pipelines: Fake) -> None:
        sources = [ev.SplitSource(count=SPLITS)]
        function = ev.PythonFunction()
        definition = ev.DatasetDefinition(sources=sources, python_function=function)
        graph = PythonDataset(splits=b"pickled").SerializeToString()
        dataset = SimpleNamespace(definition=definition, graph=graph)
        dispatcher: Any = SimpleNamespace(get_dataset=lambda *_, **__: dataset)
        self.reports: list[Any] = []
        self.output = BundlesOutput(1 << 20)
        self.bundle_reports, self.errors = BundleReports(), ReadErrors()
        order = ev.OrderSpec(bundles=BUNDLES, bundle_splits=BUNDLE_SPLITS, seed=7)
        self.runner = BundleTask(
            pb.Task(task_id=1, job_id=JOB, num_sources=1, order=order), self.output,
            TaskDependencies(
                dispatcher, threading.Semaphore(), pipelines,
                lambda _, event: self.reports.append(event) or [],  # type: ignore[func-returns-value]
                errors=self.errors,
            ),
            self.bundle_reports,
        )  # fmt: skip
        self.runner.start()

    def read(self, bundle: int, count: int = BUNDLE_SPLITS, first: int = 0) -> Subscription:
        request = Slice(bundle, bundle, (first, count), until=first + count, keep=first)
        opened: Any = self.output.open(request)
        return opened


def given(subscription: Subscription) -> tuple[list[int], End]:
    found: list[int] = []
    while isinstance(item := subscription.wait(TIMEOUT_S), Block):
        found += numbers(item)
    assert item is not None, "it waits"
    return found, item


@pytest.fixture
def pipelines() -> Fake:
    return Fake()


@pytest.fixture
def task(pipelines: Fake) -> Iterator[Task]:
    task = Task(pipelines)
    yield task
    task.runner.cancel()
    assert task.runner.join(TIMEOUT_S)
    assert pipelines.closed and all(made.over for made in pipelines.made if made.entered.is_set())
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("forebay-task-1")]
    assert task.reports == [Ended(1)]
    assert not task.output.held_bytes


def test_bundles_are_run_as_they_are_asked_for(task: Task, pipelines: Fake) -> None:
    last = BUNDLES - 1
    for number in (3, 3 + 2 * BUNDLES, last):
        count = 7 if number == last else 10
        elements = [*range(4, count)]
        got, end = given(task.read(number, BUNDLE_SPLITS - 4, first=4))
        assert got == elements and isinstance(end, EndOfSlice) and end.length == count
    assert not task.bundle_reports.take(), "none of them was run from its beginning"
    assert pipelines.asked == [
        (SplitRange(30, 10, 0), 3, 7, 4),
        (SplitRange(30, 10, 2), 3 + 2 * BUNDLES, 7, 4),
        (SplitRange(last * 10, 7, 0), last, 7, 4),
    ]


def test_the_checksum_of_a_whole_bundle_is_kept_until_it_is_taken(task: Task) -> None:
    found: dict[int, int] = {}
    lengths: dict[int, int] = {}

    def take() -> bool:
        for checked in task.bundle_reports.take():
            assert checked.job_id == JOB
            found.update(zip(checked.bundles, checked.checksums, strict=True))
            lengths.update(zip(checked.bundles, checked.lengths, strict=True))
        return found.keys() == {3, 4}

    for number in (3, 4):
        given(task.read(number))
    wait_until(take)
    expected = Checksum()
    expected.add(block(0, BUNDLE_SPLITS, 3))
    assert found[3] == expected.value
    assert lengths == {3: BUNDLE_SPLITS, 4: BUNDLE_SPLITS}
    assert not task.bundle_reports.take()


def test_a_bundle_without_a_thread_fails_alone(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit of processes bounds threads, too."""
    wait_until(lambda: hasattr(task.runner, "_runs"))

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(task.runner._runs, "submit", refuse)
        found, end = given(task.read(3))
    assert not found and isinstance(end, TaskFailed) and end.code == "RESOURCE_EXHAUSTED"
    assert "bundle 3 " in end.message and "cycle_length" in end.message
    assert given(task.read(4))[0] == [*range(BUNDLE_SPLITS)]


def test_so_many_run_at_a_time_while_any_number_waits(task: Task, pipelines: Fake) -> None:
    """Those that wait for readers have made as much ahead as there is room for."""
    for number in range(20):
        pipelines.lengths[number] = ENDLESS
    readers = [task.read(number, 1) for number in range(20)]
    wait_until(lambda: len(pipelines.made) == 20 and task.output.queue.busy == 0)
    pipelines.slow.update(range(20, 30))
    slow = [task.read(number) for number in range(20, 30)]
    wait_until(lambda: sum(made.entered.is_set() for made in pipelines.made) == 22)
    assert task.output.queue.busy == 2
    assert [made.number for made in pipelines.made[20:]] == [20, 21]
    for reader in readers:
        assert given(reader)[0] == [0]
    assert given(task.read(0, 5, first=1))[0] == [*range(1, 6)], "it goes on all the same"
    for number in range(20, 30):
        wait_until(lambda n=number: len(pipelines.made) > n)
        pipelines.made[number].go.set()
    assert [given(reader)[0] for reader in slow] == [[*range(10)]] * 10


def test_a_bundle_that_is_slow_to_open_holds_up_no_other(task: Task, pipelines: Fake) -> None:
    slow = threading.Event()
    pipelines.opening = lambda number: None if number else assert_set(slow)
    first, *others = [task.read(number) for number in range(5)]
    for reader in others:
        assert given(reader)[0] == [*range(10)]
    slow.set()
    assert given(first)[0] == [*range(10)]


def assert_set(event: threading.Event) -> None:
    assert event.wait(TIMEOUT_S)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (PipelineError("DATA_LOSS", "torn"), "DATA_LOSS", "torn"),
        (InvalidArgument("no such split"), "INVALID_ARGUMENT", "no such split"),
        (KeyError("a bug"), "INTERNAL", "the worker failed: KeyError('a bug')"),
    ],
)
@pytest.mark.parametrize("opening", [False, True])
def test_an_error_ends_its_bundle_and_no_other(
    task: Task, pipelines: Fake, error: Exception, code: str, message: str, opening: bool
) -> None:
    def fail(number: int) -> None:
        if number == 3:
            raise error

    if opening:
        pipelines.opening = fail
    else:
        pipelines.errors[3] = error
    got, end = given(task.read(3))
    assert got == ([] if opening else [*range(5)])
    assert end == TaskFailed(code, message)
    assert given(task.read(4))[0] == [*range(10)]
    assert not task.runner._live
    wait_until(task.errors.told)
    (told,) = task.errors.told()
    assert (told.job_id, told.code, told.message, told.for_good) == (JOB, code, message, False)


def test_a_block_that_cannot_travel_is_told(
    task: Task, pipelines: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = Block(1, (Component(np.array([None], object)),), 3, 0)
    monkeypatch.setattr(Made, "blocks", lambda _: iter([odd]))
    _, end = given(task.read(3))
    assert isinstance(end, TaskFailed) and "object cannot travel" in end.message
    assert pipelines.made[0].cancelled.is_set()


def test_an_order_that_is_not_the_datasets_is_an_error(pipelines: Fake, task: Task) -> None:
    """And not a reader that waits for ever."""
    task.runner._bundles = 0
    _, end = given(task.read(3))
    assert isinstance(end, TaskFailed) and "ZeroDivisionError" in end.message


@pytest.mark.parametrize(("cores", "processes"), [(3, 0), (2, 3), (8, 3)])
def test_so_many_run_at_once_and_cancel_ends_them_in_the_middle_of_an_element(
    pipelines: Fake, monkeypatch: pytest.MonkeyPatch, cores: int, processes: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    pipelines.python = PythonRules(processes=processes)
    pipelines.slow.update(range(5))
    task = Task(pipelines)
    readers = [task.read(number) for number in range(5)]
    wait_until(lambda: sum(made.entered.is_set() for made in pipelines.made) == 3)
    task.runner.cancel()
    task.runner.cancel()
    assert task.runner.join(TIMEOUT_S)
    assert len(pipelines.made) == 3 and all(made.over for made in pipelines.made)
    assert [given(reader) for reader in readers] == [([], TaskUnknown())] * 5
    assert pipelines.closed and not task.runner._live


def test_cancel_while_a_bundle_is_opened_ends_its_run(pipelines: Fake) -> None:
    pipelines.slow.add(0)
    opening, go = threading.Event(), threading.Event()

    def open_(_: int) -> None:
        opening.set()
        assert_set(go)

    pipelines.opening = open_
    task = Task(pipelines)
    task.read(0)
    assert_set(opening)
    task.runner.cancel()
    go.set()
    assert task.runner.join(TIMEOUT_S)
    assert pipelines.made[0].cancelled.is_set()


def test_runs_that_nobody_needs_any_more_free_their_resources(task: Task, pipelines: Fake) -> None:
    pipelines.lengths[0] = ENDLESS
    reader = task.read(0, 1)
    wait_until(lambda: pipelines.made and task.output.queue.busy == 0)
    assert not pipelines.made[0].over
    reader.close()
    task.output.open(Slice(1, 1, floor=1))
    wait_until(lambda: pipelines.made[0].over)
    assert pipelines.made[0].cancelled.is_set()


def test_while_it_drains_its_consumers_read_on_and_nothing_is_lost(
    task: Task, pipelines: Fake
) -> None:
    task.read(0, 1)
    task.runner.drain(0)
    assert task.runner.undelivered(5) is None
    assert given(task.read(1))[0] == [*range(10)]
    assert not task.runner.may_be_parked and task.runner.shed() == 0


def test_a_dataset_that_cannot_be_opened_fails_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(*_: Any) -> Any:
        raise PipelineError("DATA_LOSS", "torn")

    pipelines = Fake()
    monkeypatch.setattr(pipelines, "open", torn)
    task = Task(pipelines)
    assert task.runner.join(TIMEOUT_S)
    assert task.output.open(Slice(0)) == TaskFailed("DATA_LOSS", "torn")
    (told,) = task.errors.told()
    assert (told.task_id, told.code, told.for_good) == (1, "DATA_LOSS", True)
    assert task.reports == [Ended(1)]


def test_the_last_errors_are_told_again_and_the_same_one_is_counted() -> None:
    errors, one = ReadErrors(), pb.Task(task_id=1, job_id=JOB)
    for number in range(3 * MOST_ERRORS):
        errors.add(one, "UNKNOWN", f"no {number}", for_good=True)
    traced = "begins " + 9_999 * "x" + " ends"
    for task_id in (2, 3):
        errors.add(pb.Task(task_id=task_id, job_id=JOB), "UNKNOWN", traced, for_good=False)
    for _ in range(2):
        *_, before, told = errors.told()
        assert len(errors.told()) == MOST_ERRORS and before.message == f"no {3 * MOST_ERRORS - 1}"
        assert (told.times, told.task_id, len(told.message)) == (2, 3, MOST_TOLD)
        assert told.message.startswith("begins ") and told.message.endswith(" ends")
    errors.forget()
    assert errors.told() == []

"""A task's runner, with a pipeline and a dispatcher of the test's."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.blocks import Block, Component
from forebay.service.delivery import (
    ANY,
    AnyBlock,
    Cached,
    CachedOutput,
    EndOfTask,
    FirstComeOutput,
    Subscription,
    TaskFailed,
)
from forebay.service.errors import ForebayError, NotFound, PipelineError, Unavailable
from forebay.service.pipelines import SkipReport, SplitFeed
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.worker.task_pipeline import Datasets, Pipelines
from forebay.service.worker.task_states import Complete, Ended, HandedOut
from forebay.service.worker.tasks import DeliveryCounter, TaskDependencies, TaskRunner

TIMEOUT_S = 30


class Away:
    """A dispatcher that gives no lease, until whoever asks is stopped."""

    def get_dataset(self, dataset_id: str, *, with_graph: bool) -> Any:
        return SimpleNamespace(
            definition=ev.DatasetDefinition(sources=[ev.SplitSource()]), graph=b""
        )

    def call(self, *_: Any, closed: threading.Event, **__: Any) -> Any:
        closed.wait(2 * TIMEOUT_S)
        raise Unavailable("stopped")


class Untravelled(Pipelines):
    """Blocks that cannot travel, by a run that asks for splits until it is closed, and then waits
    for the answer, as TensorFlow's do."""

    def open(self, *_: Any) -> Any:
        return SimpleNamespace(run=self._run, close=lambda: None)

    def _run(self, feed: SplitFeed) -> Any:
        def blocks() -> Iterator[Block]:
            try:
                yield Block(1, (Component(np.array([None], object)),))
            finally:
                with contextlib.suppress(ForebayError):
                    feed.next_range(0, 0, False)

        return SimpleNamespace(blocks=blocks, cancel=lambda: None)


def needs(dispatcher: Any, pipelines: Pipelines, report: Any) -> TaskDependencies:
    return TaskDependencies(dispatcher, threading.Semaphore(), pipelines, report)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it is a bug
def test_a_block_that_cannot_be_sent_fails_its_task_while_no_dispatcher_answers() -> None:
    output = FirstComeOutput()
    runner = TaskRunner(
        pb.Task(task_id=1, num_sources=1), output, needs(Away(), Untravelled(), lambda *_: [])
    )  # fmt: skip
    runner.start()
    opened: Any = output.open(ANY)
    end = opened.wait(TIMEOUT_S)
    runner.cancel()
    assert runner.join(TIMEOUT_S)
    assert isinstance(end, TaskFailed) and "object cannot travel" in end.message


class Heard:
    """A dispatcher that records what workers tell it."""

    def __init__(self) -> None:
        self.completed = threading.Event()

    def get_dataset(self, dataset_id: str, *, with_graph: bool) -> Any:
        return SimpleNamespace(definition=ev.DatasetDefinition(), graph=b"")

    def call(self, request: Any, *_: Any, **__: Any) -> None:
        assert isinstance(request, pb.CompleteTaskRequest)
        self.completed.set()


class Numbers(Pipelines):
    def open(self, *_: Any) -> Any:
        block = Block(3, (Component(np.arange(3)),))
        run = SimpleNamespace(blocks=lambda: iter([block]), cancel=lambda: None)
        return SimpleNamespace(run=lambda feed: run, close=lambda: None)


@pytest.mark.parametrize("arrives", [True, False])
def test_a_shard_counts_as_read_only_when_its_last_element_has_arrived(arrives: bool) -> None:
    """Handing it out is not enough: the worker may die while the element is on its way."""
    dispatcher, counter = Heard(), DeliveryCounter()
    output = FirstComeOutput(listener=counter)
    runner = TaskRunner(
        pb.Task(task_id=1), output, needs(dispatcher, Numbers(), lambda *_: [Complete(1)]), counter
    )  # fmt: skip
    runner.start()
    opened: Any = output.open(ANY)
    while not isinstance(given := opened.next(True), tuple):
        pass
    assert output.wait_drained(TIMEOUT_S)
    assert not runner.join(0.2)
    assert not dispatcher.completed.is_set()
    if arrives:
        opened.received([given[0]])
    else:  # and its consumer does not come again
        opened.close([given[0]])
    assert runner.join(TIMEOUT_S)
    assert dispatcher.completed.is_set()


def test_a_pipeline_that_has_ended_does_not_wait_for_trainers() -> None:
    closed = threading.Event()

    class Closed(Numbers):
        def open(self, *_: Any) -> Any:
            opened = super().open()
            opened.close = closed.set
            return opened

    output = FirstComeOutput()
    runner = TaskRunner(
        pb.Task(task_id=1), output, needs(Heard(), Closed(), lambda *_: [])
    )  # fmt: skip
    runner.start()
    opened: Any = output.open(AnyBlock(hands_back=True))
    held: list[Block] = []
    while not output.ended or output.waiting_elements:
        if isinstance(given := opened.next(True), tuple):
            held.append(given[0])
        elif len(held) > 1:
            opened.received([held.pop(0)])
    assert closed.wait(TIMEOUT_S) and not output.wait_drained(0)
    opened.received(held)
    assert runner.join(TIMEOUT_S)


class GivingUp(Away):
    """A dispatcher that does not list the task any more."""

    def call(self, *_: Any, closed: threading.Event, **__: Any) -> Any:
        raise NotFound("no task 1")


class Skipping(Pipelines):
    """A block, a split that is skipped if it may be, and a block."""

    def open(self, *arguments: Any) -> Any:
        def blocks() -> Iterator[Block]:
            yield Block(3, (Component(np.arange(3)),))
            if not arguments[3](SkipReport(3, 0, "why", 1)):
                raise PipelineError("UNKNOWN", "why")
            yield Block(2, (Component(np.arange(2)),))

        run = SimpleNamespace(blocks=blocks, cancel=lambda: None)
        return SimpleNamespace(run=lambda feed: run, close=lambda: None)


def test_a_task_that_was_given_up_skips_a_split_and_delivers_what_it_made() -> None:
    output = FirstComeOutput()
    told: list[HandedOut | Ended] = []

    def tell(_: TaskRunner, what: HandedOut | Ended) -> list[Any]:
        told.append(what)
        return []

    runner = TaskRunner(
        pb.Task(task_id=1, num_sources=1), output, needs(GivingUp(), Skipping(), tell)
    )  # fmt: skip
    runner.start()
    opened: Any = output.open(ANY)
    found, given = 0, None
    while given is None or isinstance(given, tuple):
        found += given[0].count if given is not None else 0
        given = opened.next(True)
    assert found == 5 and isinstance(given, EndOfTask)
    assert runner.join(TIMEOUT_S)
    assert told == [Ended(1)]  # and is not said to be complete


class Registry:
    """A dispatcher with one dataset."""

    def __init__(self) -> None:
        self.known = pb.JournalPosition(journal_id="first")
        self.graph = "digest.1-1"
        self.asked = 0

    def get_dataset(self, dataset_id: str, *, with_graph: bool) -> pb.GetDatasetResponse:
        self.asked += 1
        definition = ev.DatasetDefinition()
        if dataset_id.startswith("python"):
            definition.python_function.blob = self.graph
        else:
            definition.tf_data_graph.blob = self.graph
        size = 3000 if dataset_id.endswith("large") else 1000
        return pb.GetDatasetResponse(definition=definition, graph=bytes(size))


@pytest.mark.parametrize("dataset_id", ["d", "python"])
def test_a_dataset_is_fetched_once_for_the_name_of_its_graph_in_a_journal(dataset_id: str) -> None:
    dispatcher = Registry()
    datasets = Datasets(dispatcher)  # type: ignore[arg-type]
    task = pb.Task(dataset_id=dataset_id, graph="digest.1-1")
    assert datasets.of(task) == datasets.of(task)
    assert dispatcher.asked == 1
    dispatcher.known = pb.JournalPosition(journal_id="second")
    datasets.of(task)
    datasets.of(pb.Task(dataset_id="other", graph="digest.1-1"))
    assert dispatcher.asked == 3
    for _ in range(2):  # of an early version, whose graphs may share a name
        datasets.of(pb.Task(dataset_id="d"))
    assert dispatcher.asked == 5


def test_a_dataset_that_was_replaced_during_the_fetch_is_not_cached() -> None:
    dispatcher = Registry()
    datasets = Datasets(dispatcher)  # type: ignore[arg-type]
    before = pb.Task(dataset_id="d", graph="digest.1-0")
    for _ in range(2):
        assert datasets.of(before).definition.tf_data_graph.blob == "digest.1-1"
    assert dispatcher.asked == 2


def test_the_dataset_cache_is_bounded_in_bytes() -> None:
    dispatcher = Registry()
    datasets = Datasets(dispatcher, most_bytes=2500)  # type: ignore[arg-type]
    for number in (0, 1, 0, 2, 0, 1):  # two of them at a time, those that were used last
        datasets.of(pb.Task(dataset_id=str(number), graph="digest.1-1"))
    assert dispatcher.asked == 4
    for name in ("large", "0", "1"):  # one larger than all that is kept takes nobody's place
        datasets.of(pb.Task(dataset_id=name, graph="digest.1-1"))
    assert dispatcher.asked == 5


class Drained(Pipelines):
    """A pipeline without an end, until it is cancelled."""

    def open(self, *_: Any) -> Any:
        cancelled = threading.Event()

        def blocks() -> Iterator[Block]:
            yield Block(3, (Component(np.arange(3)),))
            cancelled.wait(2 * TIMEOUT_S)

        run = SimpleNamespace(blocks=blocks, cancel=cancelled.set)
        return SimpleNamespace(run=lambda feed: run, close=lambda: None)


@pytest.mark.parametrize("drained", [True, False])
def test_a_cached_task_ends_only_with_its_worker(drained: bool) -> None:
    """A cached pipeline that reaches an end has failed for every trainer, and does not complete."""
    dispatcher, output = Heard(), CachedOutput()
    told: list[object] = []

    def tell(_: TaskRunner, event: object) -> list[Any]:
        told.append(type(event))
        return []

    runner = TaskRunner(
        pb.Task(task_id=1, cross_trainer_cache=True), output,
        needs(dispatcher, Drained() if drained else Numbers(), tell),
    )  # fmt: skip
    runner.start()
    trainers = [output.open(Cached(name)) for name in "ab"]
    for trainer in trainers:
        assert isinstance(trainer, Subscription)
        given = trainer.wait(TIMEOUT_S)
        assert isinstance(given, Block) and given.count == 3
    if drained:
        runner.drain(time.monotonic() + TIMEOUT_S)
    ends = [trainer.wait(TIMEOUT_S) for trainer in trainers if isinstance(trainer, Subscription)]
    assert runner.join(TIMEOUT_S)
    assert not dispatcher.completed.is_set()
    if drained:
        assert ends == [EndOfTask()] * 2 and told == [HandedOut]
    else:
        assert all(isinstance(end, TaskFailed) and "be infinite" in end.message for end in ends)
        assert told == [Ended]

"""A task's runner, with a pipeline and a dispatcher of the test's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.blocks import Block, Component
from forebay.service.delivery import ANY, AnyOutput, Subscription, TaskFailed
from forebay.service.errors import ForebayError, Unavailable
from forebay.service.pipelines import SplitFeed
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.worker.observer import Observer
from forebay.service.worker.task_states import Complete
from forebay.service.worker.tasks import Arrivals, Pipelines, TaskRunner

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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it is a bug
def test_a_block_that_cannot_travel_ends_its_task_though_no_dispatcher_answers() -> None:
    output = AnyOutput()
    runner = TaskRunner(
        pb.Task(task_id=1, num_sources=1), Away(), output,  # type: ignore[arg-type]
        threading.Semaphore(), Untravelled(), Observer(), lambda *_: [],
    )  # fmt: skip
    runner.start()
    opened = output.open(ANY)
    assert isinstance(opened, Subscription)
    end = opened.wait(TIMEOUT_S)
    runner.cancel()
    assert runner.join(TIMEOUT_S)
    assert isinstance(end, TaskFailed) and "object cannot travel" in end.message


class Heard:
    """A dispatcher that keeps what it is told."""

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
def test_a_shard_is_read_once_its_last_element_has_arrived(arrives: bool) -> None:
    """Not when it was handed out: its worker may die with what is on its way."""
    dispatcher, arrivals = Heard(), Arrivals()
    output = AnyOutput(listener=arrivals)
    runner = TaskRunner(
        pb.Task(task_id=1), dispatcher, output,  # type: ignore[arg-type]
        threading.Semaphore(), Numbers(), Observer(), lambda *_: [Complete(1)], arrivals,
    )  # fmt: skip
    runner.start()
    opened = output.open(ANY)
    assert isinstance(opened, Subscription)
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

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
from forebay.service.worker.tasks import Pipelines, TaskRunner

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

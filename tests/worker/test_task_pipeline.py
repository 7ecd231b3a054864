"""What a task's pipeline asks the dispatcher."""

from __future__ import annotations

import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

from forebay.journal.proto import events_pb2 as ev
from forebay.service.delivery.first_come import FirstComeOutput
from forebay.service.pipelines import SkipReport
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.worker.task_pipeline import Pipelines, TaskPipeline


class Dispatcher:
    """Refuses a number that comes behind a later one, as a dispatcher does."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def call(self, request: Any, *_: Any, closed: threading.Event) -> pb.SkipSplitResponse:
        if request.request.number % 2:
            time.sleep(0.01)  # while another one may overtake
        self.numbers.append(request.request.number)
        return pb.SkipSplitResponse(skipped=True)


def test_bundles_that_skip_side_by_side_ask_one_after_the_other() -> None:
    dispatcher = Dispatcher()
    task, nobody = pb.Task(task_id=5), cast(Any, None)
    pipeline = TaskPipeline(task, cast(Any, dispatcher), Pipelines(), nobody)
    report = SkipReport(1, 2, "why", 100, 1)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(pipeline._may_skip, [report] * 20))
    assert dispatcher.numbers == [*range(1, 21)]


def test_nothing_is_kept_of_a_run_that_has_ended() -> None:
    """Such as its graph and its tables, while trainers read the last elements."""

    class Running:
        needs = 1

    class Registry:
        def get_dataset(self, *_: Any, **__: Any) -> pb.GetDatasetResponse:
            sources = [ev.SplitSource(count=1)]
            return pb.GetDatasetResponse(definition=ev.DatasetDefinition(sources=sources))

    class Opened(Pipelines):
        def open(self, *_: Any) -> Any:
            return SimpleNamespace(run=lambda feed: Running(), close=lambda: None)

    task, nobody = pb.Task(task_id=5), cast(Any, None)
    pipeline = TaskPipeline(task, cast(Any, Registry()), Opened(), nobody, output=FirstComeOutput())
    run = weakref.ref(pipeline.open(lambda _: None))
    assert run() is not None
    pipeline.free()
    assert run() is None

"""What a task's pipeline asks the dispatcher."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

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

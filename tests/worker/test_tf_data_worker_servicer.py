"""What a worker of ours answers to TensorFlow's protocol."""

from __future__ import annotations

import gc
import logging
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.service.delivery import Cached, CachedOutput, End, ReadRequest, Subscription
from forebay.service.errors import InvalidArgument
from forebay.service.proto import forebay_pb2
from forebay.service.proto import tf_service_pb2 as pb
from forebay.service.worker import tf_data_worker_servicer
from forebay.service.worker.tf_data_worker_servicer import TfDataWorkerServicer, _TaskElements

from ..delivery.contract import block, numbers


def cached(output: CachedOutput) -> SimpleNamespace:
    task = forebay_pb2.Task(task_id=1, cross_trainer_cache=True)
    return SimpleNamespace(task=task, output=output)


def test_a_cached_job_refuses_a_trainer_without_an_id() -> None:
    servicer = TfDataWorkerServicer(lambda _: cached(CachedOutput()))  # type: ignore[arg-type, return-value]
    with pytest.raises(InvalidArgument, match="cache requires a non-empty trainer ID"):
        servicer.get_element(pb.GetElementRequest(task_id=1))


def test_elements_that_a_stock_client_skips_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Its protocol cannot tell the client about skipped elements."""
    output = CachedOutput(1)
    fast: Any = output.open(Cached("fast"))
    elements = _TaskElements(cached(output))  # type: ignore[arg-type]
    got = []
    with caplog.at_level(logging.WARNING, "forebay"):
        for number in range(8):
            output.put(block(4 * number, 4))
            assert isinstance(fast.next(True), tuple)
            if number % 2 == 0:
                item: Any = elements.next(Cached("slow"))
                got += numbers(item)
    assert got == [0, 8, 16, 24]
    said = [record.getMessage() for record in caplog.records]
    assert ["'slow'" in text and text.split(" skipped ")[1].split()[0] for text in said] == [
        "7", "14", "21",
    ]  # fmt: skip


def test_the_number_of_remembered_trainers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf_data_worker_servicer, "MAX_TRAINERS", 2)
    opened = []

    class Output(CachedOutput):
        def open(self, request: ReadRequest, *, notify: bool = True) -> Subscription | End:
            found = super().open(request, notify=notify)
            opened.append(weakref.ref(found))
            return found

    output = Output()
    output.put(block(0, 4))
    elements = _TaskElements(cached(output))  # type: ignore[arg-type]
    got = []
    for trainer in ("first", "second", "first", "third", "first", "second"):
        item: Any = elements.next(Cached(trainer))
        got += numbers(item)
    assert got == [0, 0, 1, 0, 2, 1]  # as the task knows who is who
    gc.collect()
    assert [subscription() is not None for subscription in opened] == [True, False, False, True]

"""Elements of rounds for TensorFlow's consumers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from forebay.service.blocks import Block, Component
from forebay.service.delivery import RoundsOutput
from forebay.service.errors import PipelineError, Unavailable
from forebay.service.proto import tf_service_pb2 as pb
from forebay.service.worker import tf_data_worker_servicer
from forebay.service.worker.tf_data_worker_servicer import TfDataWorkerServicer

TASK = 7
TIMEOUT_S = 10


@pytest.fixture
def output() -> RoundsOutput:
    return RoundsOutput(2)


@pytest.fixture
def servicer(output: RoundsOutput, monkeypatch: pytest.MonkeyPatch) -> TfDataWorkerServicer:
    """Answers with the element's number."""

    def respond(block: Block) -> pb.GetElementResponse:
        (number,) = np.asarray(block.components[0].values).tolist()
        return pb.GetElementResponse(element_index=number)

    monkeypatch.setattr(tf_data_worker_servicer, "response_maker", lambda _: respond)
    monkeypatch.setattr(tf_data_worker_servicer, "EXPECTED_S", 0.0)
    monkeypatch.setattr(tf_data_worker_servicer, "WAIT_S", 0.1)
    monkeypatch.setattr(tf_data_worker_servicer, "LOOK_AGAIN_S", 0.1)
    runner: Any = SimpleNamespace(output=output, pipeline=SimpleNamespace(definition=None))
    return TfDataWorkerServicer({TASK: runner}.get)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as running:
        yield running


def ask(servicer: TfDataWorkerServicer, consumer: int, number: int, task_id: int = TASK) -> int:
    request = pb.GetElementRequest(
        task_id=task_id, consumer_index=consumer, round_index=number, allow_skip=True
    )
    return servicer.get_element(request).element_index


def put(output: RoundsOutput, first: int, count: int) -> None:
    output.put(Block(count, (Component(np.arange(first, first + count)),)))


def test_a_round_is_given_when_all_have_asked_for_it(
    servicer: TfDataWorkerServicer, output: RoundsOutput, pool: ThreadPoolExecutor
) -> None:
    put(output, 0, 4)
    both = [pool.submit(ask, servicer, consumer, 50) for consumer in (0, 1)]
    assert [asked.result() for asked in both] == [0, 1]
    both = [pool.submit(ask, servicer, consumer, 51) for consumer in (1, 0)]
    assert [asked.result() for asked in both] == [3, 2]


def test_a_consumer_whose_answer_was_lost_gets_it_again(
    servicer: TfDataWorkerServicer, output: RoundsOutput, pool: ThreadPoolExecutor
) -> None:
    asked = [pool.submit(ask, servicer, consumer, 3) for consumer in (0, 0, 1, 1)]
    put(output, 0, 8)
    assert [one.result() for one in asked] == [0, 0, 1, 1]
    with pytest.raises(PipelineError, match="current round has already reached 3"):
        ask(servicer, 0, 0)


def test_all_wait_for_an_element_however_long_it_takes(
    servicer: TfDataWorkerServicer, output: RoundsOutput, pool: ThreadPoolExecutor
) -> None:
    """If requests timed out, all consumers would repeat them and vote to remove the task."""
    both = [pool.submit(ask, servicer, consumer, 0) for consumer in (0, 1)]
    put(output, 0, 1)  # half a round
    with pytest.raises(TimeoutError):
        both[0].result(0.4)
    put(output, 1, 1)
    assert [asked.result() for asked in both] == [0, 1]


def test_wrong_requests_are_refused(servicer: TfDataWorkerServicer) -> None:
    for consumer in (-1, 2):
        with pytest.raises(PipelineError, match="configured for only 2 consumers"):
            ask(servicer, consumer, 0)
    with pytest.raises(PipelineError, match="only 2 consumers"):
        servicer.get_element(pb.GetElementRequest(task_id=TASK))
    with pytest.raises(Unavailable, match="Task 8 not found"):
        ask(servicer, 0, 0, task_id=8)


def test_consumers_that_wait_for_others_are_released_when_the_task_ends(
    servicer: TfDataWorkerServicer, output: RoundsOutput, pool: ThreadPoolExecutor
) -> None:
    put(output, 0, 4)
    asked = pool.submit(ask, servicer, 0, 50)
    with pytest.raises(TimeoutError):
        asked.result(0.4)  # which it waits for as long as it takes
    output.cancel()
    with pytest.raises(Unavailable, match="stopped"):
        asked.result()


def test_a_worker_that_leaves_ends_no_trainer(
    servicer: TfDataWorkerServicer, output: RoundsOutput, pool: ThreadPoolExecutor
) -> None:
    output.finish()
    for asked in [pool.submit(ask, servicer, consumer, 0) for consumer in (0, 1)]:
        with pytest.raises(Unavailable, match="stopped"):
            asked.result()


@pytest.mark.parametrize("consumers", [(0, 0, 0), (0, 0, 1, 1)])  # the others did not ask, or did
def test_a_request_that_was_cancelled_leaves_no_thread(
    servicer: TfDataWorkerServicer,
    output: RoundsOutput,
    pool: ThreadPoolExecutor,
    consumers: tuple[int, ...],
) -> None:
    gone = threading.Event()
    details: Any = SimpleNamespace(
        method="/tensorflow.data.WorkerService/GetElement", invocation_metadata=()
    )
    handler: Any = servicer.handlers().service(details)

    def abort(_: grpc.StatusCode, reason: str) -> None:
        raise Unavailable(reason)

    context = SimpleNamespace(is_active=lambda: not gone.is_set(), abort=abort)
    requests = [
        pb.GetElementRequest(task_id=TASK, consumer_index=consumer, round_index=5)
        for consumer in consumers
    ]
    asked = [
        pool.submit(handler.unary_unary, request.SerializeToString(), context)
        for request in requests
    ]
    try:
        gone.set()
        for one in asked:
            with pytest.raises(Unavailable, match=r"the client that asked .* has gone"):
                one.result(TIMEOUT_S)
        both = [pool.submit(ask, servicer, consumer, 5) for consumer in (0, 1)]
        put(output, 0, 2)
        assert [one.result(TIMEOUT_S) for one in both] == [0, 1]
    finally:
        output.cancel()  # or those who wait would for ever

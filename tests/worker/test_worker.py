"""A worker's instructions, carried out without a dispatcher."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from forebay.service import pipelines
from forebay.service.client.datasets import list_datasets
from forebay.service.client.dispatcher_status import fetch_status
from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.connections.grpc_server import bind
from forebay.service.delivery import ANY, TaskFailed, TaskOutput
from forebay.service.errors import InvalidArgument, Unavailable, Unimplemented
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.worker import WorkerOptions
from forebay.service.worker import worker as module
from forebay.service.worker.saves import StreamWriter
from forebay.service.worker.task_states import ABSENT, ENDED, RUNNING, Listed
from forebay.service.worker.tasks import TaskRunner
from forebay.service.worker.worker import Worker


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError("no room")])
def test_a_task_without_a_thread_fails_and_holds_up_no_other(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = TaskRunner.start

    def start_others(runner: TaskRunner) -> None:
        if runner.task.task_id == 1:
            raise error
        start(runner)

    monkeypatch.setattr(TaskRunner, "start", start_others)
    worker = Worker(WorkerOptions(dispatcher="127.0.0.1:1"))
    worker.tasks.handle(Listed(1, {i: pb.Task(task_id=i) for i in (1, 2)}, set(), 0))
    assert [worker.tasks.states.state(i) for i in (1, 2)] == [ENDED, RUNNING]
    runner = worker.tasks.runner_of(1)
    assert runner is not None and worker.tasks.runner_of(2) is not None
    opened: Any = runner.output.open(ANY)
    told = opened.wait(0)
    assert isinstance(told, TaskFailed) and str(error) in told.message
    worker.stop()


def test_a_task_that_cannot_be_made_is_retried_and_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, failing = module._output, {1}

    def output(task: pb.Task, *args: Any) -> TaskOutput:
        if task.task_id in failing:
            raise MemoryError("no room")
        return real(task, *args)

    monkeypatch.setattr(module, "_output", output)
    worker = Worker(WorkerOptions(dispatcher="127.0.0.1:1"))
    both = Listed(1, {i: pb.Task(task_id=i) for i in (1, 2)}, set(), 0)
    worker.tasks.handle(both)
    assert "task 1 cannot be made" in caplog.text and "no room" in caplog.text
    assert [worker.tasks.states.state(i) for i in (1, 2)] == [ABSENT, RUNNING]
    worker.tasks.handle(Listed(1, {2: pb.Task(task_id=2)}, set(), 0))
    failing.clear()
    worker.tasks.handle(both)
    assert [worker.tasks.states.state(i) for i in (1, 2)] == [RUNNING, RUNNING]
    worker.stop()


def test_a_task_keeps_only_its_own_part_of_the_message(tmp_path: Path) -> None:
    """A part of a protobuf message keeps the whole message: 1,000 tasks would keep 1,000 lists."""
    worker = Worker(WorkerOptions(dispatcher="127.0.0.1:1"))
    response = pb.WorkerHeartbeatResponse(worker_id=1)
    response.tasks.add(task_id=1, dataset_id="as it came")
    response.streams.add(save_id=1, path=str(tmp_path))
    worker._reconcile(response)
    response.tasks[0].dataset_id = response.streams[0].path = "changed"
    runner = worker.tasks.runner_of(1)
    assert runner is not None and runner.task.dataset_id == "as it came"
    (writer,) = worker._streams._writers.values()
    assert writer.stream.path == str(tmp_path)
    worker.stop()


def test_a_worker_that_drains_lets_saves_commit_before_it_cancels_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[bool] = []

    def write(writer: StreamWriter) -> bool:
        assert writer.draining.wait(20)
        ended.append(writer.cancelled.is_set())
        return False

    monkeypatch.setattr(StreamWriter, "write", write)
    worker = Worker(WorkerOptions(dispatcher="127.0.0.1:1"))
    worker._streams.reconcile([pb.Stream(save_id=1)])
    worker.stop(drain=True)
    assert ended == [False]


def test_a_worker_whose_dispatcher_is_gone_says_goodbye_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempt, said = DispatcherClient._attempt, []

    def watched(client: DispatcherClient, method: str, *arguments: Any) -> Any:
        said.append(method.rpartition("/")[2])
        return attempt(client, method, *arguments)

    monkeypatch.setattr(DispatcherClient, "_attempt", watched)
    worker = Worker(WorkerOptions(dispatcher="127.0.0.1:1"))
    worker.tasks.handle(Listed(1, {}, set(), 0))
    worker.stop()
    assert said == ["LeaveService"]


def test_a_client_that_calls_a_worker_as_a_dispatcher_is_told_so() -> None:
    server = grpc.server(ThreadPoolExecutor(1), handlers=module.dispatcher_handlers("h:1"))
    address = bind(server, "127.0.0.1", 0)
    server.start()
    with DispatcherClient(address) as client:
        said = "this address is a worker's; use the address of its dispatcher instead: h:1"
        with pytest.raises(InvalidArgument, match=said):
            fetch_status(client, 20)
        with pytest.raises(InvalidArgument, match=said):
            list_datasets(address, timeout_s=20)
    server.stop(0).wait()


def test_a_client_that_calls_another_service_as_a_dispatcher_is_told_so() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    address = bind(server, "127.0.0.1", 0)
    server.start()
    with (
        DispatcherClient(address) as client,
        pytest.raises(Unimplemented, match=f"what answers at {address} is no .*dispatcher"),
    ):
        fetch_status(client, 20)
    server.stop(0).wait()


def test_a_stopped_worker_leaves_no_thread_behind() -> None:
    before = {*threading.enumerate()}
    worker = Worker(WorkerOptions(dispatcher="127.0.0.1:1"))
    address = bind(worker._grpc, "127.0.0.1", 0)
    worker._grpc.start()
    with pytest.raises(InvalidArgument, match="this address is a worker's"):
        list_datasets(address, timeout_s=20)
    answers = [each for each in {*threading.enumerate()} - before if "worker-grpc" in each.name]
    assert answers
    worker.stop()
    for thread in answers:
        thread.join(20)
        assert not thread.is_alive()


def test_a_stopped_worker_releases_its_traced_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server of the same process could not use them."""
    forgotten: list[bool] = []
    monkeypatch.setattr(pipelines, "load", lambda libraries: None)
    monkeypatch.setattr(pipelines, "forget_idle", lambda: forgotten.append(True))
    worker = Worker(WorkerOptions(dispatcher="127.0.0.1:1", dispatcher_timeout_ms=1))
    with pytest.raises(Unavailable):
        worker.start()
    assert forgotten == [True]


def test_a_worker_that_drains_says_so_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    def call(client: DispatcherClient, request: Any, response: Any, **_: Any) -> Any:
        said.append(request)
        return response()

    monkeypatch.setattr(DispatcherClient, "call", call)
    worker = Worker(WorkerOptions(dispatcher="127.0.0.1:1"))
    worker.tasks.handle(Listed(1, {}, set(), 0))
    worker.stop(drain=True)
    drains, leaves = said
    assert drains.draining and not drains.wait_ms
    assert isinstance(leaves, pb.LeaveServiceRequest)
    assert worker._registration.draining, "heartbeats say it, too"


def test_an_orderly_end_without_a_dispatcher_asks_no_questions(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker(WorkerOptions(dispatcher="127.0.0.1:1"))
    worker.tasks.handle(Listed(1, {}, set(), 0))
    with caplog.at_level(logging.INFO):
        worker.stop(drain=True)
    assert "leaves while no dispatcher answers" in caplog.text
    assert "is it running" not in caplog.text


@pytest.mark.parametrize(("budget", "warns"), [(0, False), (100_000, True), (64 << 20, False)])
def test_a_small_memory_budget_is_warned_of(
    budget: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    Worker(WorkerOptions(dispatcher="127.0.0.1:1", memory_budget=budget)).stop()
    assert ("--memory-budget is 100000 bytes" in caplog.text) == warns


@pytest.mark.parametrize(
    ("host", "dispatcher", "may"),
    [
        ("127.0.0.1", "127.0.0.1:1", True),
        ("localhost", "grpc://localhost:1,[::1]:1", True),
        ("::1", "127.0.0.1:1", True),
        ("127.0.0.1", "dispatcher:1", False),
        ("127.0.0.1", "127.0.0.1:1,10.0.0.7:1", False),
        ("0.0.0.0", "127.0.0.1:1", False),
    ],
)
def test_python_datasets_run_by_default_only_on_loopback(
    host: str, dispatcher: str, may: bool
) -> None:
    assert module.may_run_python(WorkerOptions(dispatcher=dispatcher, host=host)) is may
    assert module.may_run_python(WorkerOptions(dispatcher=dispatcher, host=host, allow_python=True))

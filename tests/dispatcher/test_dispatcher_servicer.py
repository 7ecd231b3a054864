"""Forebay's own protocol: bad requests are refused in words, and harm nothing."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.journal.verification import verify
from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.dispatcher import bounds
from forebay.service.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto import metrics_pb2
from forebay.service.proto.python_pb2 import PythonDataset
from forebay.service.user_metrics import counter
from forebay.storage import open_storage

from ..standbys import wait_until
from ..stock import GRAPH, DispatcherProcess
from ..transfer_servers import SERVERS

METHODS = [name.removesuffix("Request") for name in pb.DESCRIPTOR.message_types_by_name
           if name.endswith("Request")]  # fmt: skip


@pytest.fixture(scope="module")
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DispatcherProcess]:
    journal = tmp_path_factory.mktemp("journal")
    with DispatcherProcess(journal) as running:
        yield running
    storage = open_storage(str(journal))
    assert verify(storage).ok
    storage.close()


@pytest.fixture
def client(dispatcher: DispatcherProcess) -> Iterator[DispatcherClient]:
    opened = DispatcherClient(dispatcher.target)
    yield opened
    opened.close()


def register(client: DispatcherClient, **fields: object) -> str:
    request = pb.RegisterDatasetRequest(graph=GRAPH, **fields)  # type: ignore[arg-type]
    return client.call(request, pb.RegisterDatasetResponse).dataset_id


def job(client: DispatcherClient, dataset_id: str, **fields: object) -> int:
    request = pb.GetOrCreateJobRequest(dataset_id=dataset_id, **fields)  # type: ignore[arg-type]
    return client.call_numbered(request, pb.GetOrCreateJobResponse).job_id


def test_unknown_ids(client: DispatcherClient) -> None:
    with pytest.raises(NotFound, match=r"Dataset id 4711 not found: .*; register"):
        client.get_dataset("4711", with_graph=True)
    with pytest.raises(NotFound, match="4711"):
        job(client, "4711")
    with pytest.raises(NotFound, match="4711"):
        client.call(pb.JoinIterationRequest(job_id=4711), pb.JoinIterationResponse)
    with pytest.raises(NotFound, match="4711"):
        client.call(pb.ConsumerHeartbeatRequest(consumer_id=4711), pb.ConsumerHeartbeatResponse)
    with pytest.raises(NotFound, match="4711"):
        client.call(pb.LeaseSplitsRequest(task_id=4711, want=1), pb.LeaseSplitsResponse)
    client.call(pb.LeaveIterationRequest(consumer_id=4711), pb.LeaveIterationResponse)
    client.call(pb.LeaveServiceRequest(worker_id=4711), pb.LeaveServiceResponse)


def test_datasets_that_make_no_sense(client: DispatcherClient) -> None:
    with pytest.raises(InvalidArgument, match="without a graph"):
        client.call(pb.RegisterDatasetRequest(), pb.RegisterDatasetResponse)
    with pytest.raises(InvalidArgument, match="GraphDef"):
        client.call(pb.RegisterDatasetRequest(graph=b"not a graph"), pb.RegisterDatasetResponse)
    for source in (
        ev.SplitSource(),
        ev.SplitSource(count=-1),
        ev.SplitSource(arithmetic=ev.Arithmetic(stop=9)),
    ):
        with pytest.raises(InvalidArgument, match="step other than 0"):
            register(client, sources=[source])


@pytest.mark.parametrize(
    ("said", "why"),
    [
        *(({"structure": text}, "no JSON object") for text in ("x", "[" * 100_000, "{", "[]", "7")),
        ({"structure": "{" + " " * bounds.MAX_STRUCTURE + "}"}, "structure has 524290 characters"),
        ({"structure": json.dumps({"dict": [["x" * 60_000, {}]]})}, "a name of 60000 characters"),
        ({"python": PythonDataset(python="x" * 60_000)}, "PythonDataset.python has 60000"),
        ({"python": PythonDataset(packages={"x" * 60_000: "1"})}, "PythonDataset.packages has 60"),
        ({"python": PythonDataset(packages={"numpy": "1" * 60_000})}, "PythonDataset.packages has"),
        ({"metadata": b"\xff" * 5_000}, "metadata does not parse"),
        ({"python": b"\xff" * 5_000}, "as a Python dataset do not parse"),
        ({"python": PythonDataset(files=b"\x91" * 500_000)}, "as a Python dataset do not parse"),
        ({"python": PythonDataset(files=b"\xdd\xff\xff\xff\xff")}, "dataset do not parse"),
        (
            {"python": PythonDataset(files=b"\x81\xa7options\x81\xa1a" + b"\x91" * 500_000)},
            "dataset do not parse",
        ),
        (
            {"python": PythonDataset(packages=dict.fromkeys(map(str, range(1001)), ""))},
            "PythonDataset.packages has more than 1000",
        ),
    ],
)
def test_what_a_dataset_says_is_bounded(
    client: DispatcherClient, said: dict[str, Any], why: str
) -> None:
    python = said.pop("python", None)
    given: dict[str, Any] = (
        {"graph": GRAPH}
        if python is None
        else {"python": python if isinstance(python, bytes) else python.SerializeToString()}
    )
    request = pb.RegisterDatasetRequest(**given, **said)
    with pytest.raises(InvalidArgument, match=why):
        client.call(request, pb.RegisterDatasetResponse)


def test_lease_requests_that_make_no_sense_are_refused(client: DispatcherClient) -> None:
    dataset_id = register(client, sources=[ev.SplitSource(count=10)])
    for sharding in (ev.OFF, ev.DYNAMIC):
        job_id = job(client, dataset_id, sharding=sharding)
        client.call(pb.JoinIterationRequest(job_id=job_id), pb.JoinIterationResponse)
    worker = pb.WorkerHeartbeatRequest(transfer_servers=SERVERS, address="leases:1", uid=1)
    off, dynamic = client.call(worker, pb.WorkerHeartbeatResponse).tasks[-2:]
    ask = pb.LeaseSplitsRequest(task_id=off.task_id, want=1)
    with pytest.raises(FailedPrecondition, match="not sharded dynamically"):
        client.call(ask, pb.LeaseSplitsResponse)
    ask = pb.LeaseSplitsRequest(task_id=dynamic.task_id, source=3, want=1)
    with pytest.raises(InvalidArgument, match="no number 3"):
        client.call(ask, pb.LeaseSplitsResponse)
    request = ev.Request(number=5)
    ask = pb.LeaseSplitsRequest(task_id=dynamic.task_id, want=2, request=request)
    lease = client.call(ask, pb.LeaseSplitsResponse)
    assert client.call(ask, pb.LeaseSplitsResponse) == lease, "the same request, the same answer"
    ask.request.number = 4
    with pytest.raises(InvalidArgument, match=r"request 4 .* request 5"):
        client.call(ask, pb.LeaseSplitsResponse)
    back = pb.LeaseSplitsRequest(task_id=dynamic.task_id)
    back.returned.add(lease_id=lease.lease_id, count=lease.count + 1)
    with pytest.raises(InvalidArgument, match="cannot be returned"):
        client.call(back, pb.LeaseSplitsResponse)


def test_user_metrics_are_summed_over_tasks_and_shown(client: DispatcherClient) -> None:
    """Repeated and reordered totals of a task count once. If a worker begins a task anew, both runs
    count. Totals of another journal or of an unknown iteration do not."""
    dataset_id = register(client, sources=[ev.SplitSource(count=10)])
    job_id = job(client, dataset_id, job_name="counts")
    client.call(pb.JoinIterationRequest(job_id=job_id), pb.JoinIterationResponse)
    worker = pb.WorkerHeartbeatRequest(transfer_servers=SERVERS, address="counts:1", uid=3)
    task = client.call(worker, pb.WorkerHeartbeatResponse).tasks[-1]

    def told(task_id: int, run: int, splits: int, iteration_id: int) -> metrics_pb2.TaskMetrics:
        totals = metrics_pb2.Metrics(metrics=[counter("n", "c", 10 * splits)], splits=splits)
        ids = {"iteration_id": iteration_id, "task_id": task_id, "run": run}
        return metrics_pb2.TaskMetrics(totals=totals, **ids)

    def shown() -> list[int]:
        status = json.loads(client.call(pb.GetStatusRequest(), pb.GetStatusResponse).status)
        ((found,),) = (each["iterations"] for each in status["jobs"] if each["name"] == "counts")
        if found["metrics"] is None:
            return []
        return [value["counter"] for value in found["metrics"]["values"]]

    mine, others = task.iteration_id, 4711
    assert shown() == []
    for metrics, counted in [
        ([told(1, 1, 2, mine)], 20),
        ([told(1, 1, 2, mine), told(2, 1, 1, mine)], 30),
        ([told(1, 1, 1, mine)], 30),  # which the others have overtaken
        ([told(1, 1, 4, mine), told(1, 2, 1, others)], 50),
        ([told(1, 2, 1, mine)], 60),
    ]:
        del worker.metrics[:]
        worker.metrics.extend(metrics)
        client.call(worker, pb.WorkerHeartbeatResponse)
        assert shown() == [counted]
    stranger = DispatcherClient(client.addresses[0], known=pb.JournalPosition(journal_id="other"))
    with contextlib.closing(stranger):
        worker.metrics.append(told(3, 1, 1, mine))
        stranger.call(worker, pb.WorkerHeartbeatResponse)
    assert shown() == [60]
    complete = pb.CompleteTaskRequest(task_id=task.task_id, metrics=told(1, 2, 2, mine))
    client.call(complete, pb.CompleteTaskResponse)
    leave = pb.LeaveServiceRequest(worker_id=4711, metrics=[told(2, 1, 2, mine)])
    client.call(leave, pb.LeaveServiceResponse)
    assert shown() == [80]


def test_the_answer_to_a_join_has_the_position_of_the_journal(client: DispatcherClient) -> None:
    job_id = job(client, register(client, sources=[ev.SplitSource(count=1)]))
    joined = client.call(pb.JoinIterationRequest(job_id=job_id), pb.JoinIterationResponse)
    beat = pb.ConsumerHeartbeatRequest(consumer_id=joined.consumer_id)
    told = client.call(beat, pb.ConsumerHeartbeatResponse).journal
    assert joined.journal.journal_id == told.journal_id
    assert 0 < joined.journal.sequence <= told.sequence


def test_who_knows_the_version_is_not_told_its_tasks_again(client: DispatcherClient) -> None:
    job_id = job(client, register(client, sources=[ev.SplitSource(count=1)]))
    joined = client.call(pb.JoinIterationRequest(job_id=job_id), pb.JoinIterationResponse)
    beat = pb.ConsumerHeartbeatRequest(
        consumer_id=joined.consumer_id, version=joined.news.version, wait_ms=60_000
    )
    for number in range(4711, 4714):  # workers of other tests may be there
        worker = pb.WorkerHeartbeatRequest(
            transfer_servers=SERVERS, address=f"127.0.0.1:{number}", uid=number
        )
        client.call(worker, pb.WorkerHeartbeatResponse)
        news = client.call(beat, pb.ConsumerHeartbeatResponse)
        assert {*range(4711, number + 1)} <= {task.worker_uid for task in news.tasks}
        beat.version = news.version
    beat.wait_ms = 1
    again = client.call(beat, pb.ConsumerHeartbeatResponse)
    assert again.version == beat.version and not again.tasks


def test_a_consumer_that_was_removed_before_its_answer_hears_why(
    client: DispatcherClient, dispatcher: DispatcherProcess
) -> None:
    """The same holds for a read in bundles, whose answer has the order."""
    dataset_id = register(client, sources=[ev.SplitSource(count=5)])
    order = ev.OrderSpec(cycle_length=1, block_length=1)
    how = pb.GetOrCreateJobRequest(dataset_id=dataset_id, job_name="o", sharding="OFF", order=order)
    joining = pb.JoinIterationRequest(job=how, member=ev.GroupMember(consumers=1, batch_size=1))
    client.call_numbered(joining, pb.JoinIterationResponse)
    with contextlib.closing(DispatcherClient(dispatcher.target)) as other:
        removal = pb.RemoveDatasetRequest(dataset_id=dataset_id, force=True)
        other.call_numbered(removal, pb.RemoveDatasetResponse)
    with pytest.raises(NotFound, match=f"its dataset {dataset_id} was removed"):
        client.call_numbered(joining, pb.JoinIterationResponse, again=True)


def test_a_request_that_names_no_caller(client: DispatcherClient) -> None:
    request = pb.JoinIterationRequest(request=ev.Request(number=1))
    with pytest.raises(InvalidArgument, match="caller"):
        client.call(request, pb.JoinIterationResponse)


@pytest.mark.parametrize("method", METHODS)
def test_garbage_is_refused(dispatcher: DispatcherProcess, method: str) -> None:
    rng = random.Random(method)
    with grpc.insecure_channel(dispatcher.address) as channel:
        send = channel.unary_unary(f"/forebay.v1.Dispatcher/{method}", None, None)
        for _ in range(30):
            garbage = rng.randbytes(rng.randint(1, 60))
            try:
                send(garbage, timeout=10)
            except grpc.RpcError as error:
                refused = ("INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "UNIMPLEMENTED")
                assert error.code().name in refused, error
        with pytest.raises(grpc.RpcError) as unknown:
            channel.unary_unary("/forebay.v1.Dispatcher/Nonsense", None, None)(b"", timeout=10)
        assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_dispatcher_whose_disk_is_full_says_so_and_loses_nothing(tmp_path: Path) -> None:
    command = ["-c", (
        "import resource, runpy, signal, sys;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY));"
        "sys.argv[0] = 'forebay';"
        "runpy.run_module('forebay.service.cli', run_name='__main__')"
    )]  # fmt: skip

    class Full(DispatcherProcess):
        def __init__(self) -> None:
            super().__init__(tmp_path)
            self.stop()
            self._command[:2] = command
            self._server = self._start()

    full = Full()
    client = DispatcherClient(full.target)
    known = []
    with pytest.raises(Unavailable):
        for number in range(1000):
            request = pb.RegisterDatasetRequest(graph=GRAPH, structure=f'{{"opaque":"{number}"}}')
            answer = client.call(request, pb.RegisterDatasetResponse, patience_s=1)
            known.append(answer.dataset_id)
    client.close()
    assert full.wait() == 1
    assert known
    with DispatcherProcess(tmp_path) as again:
        client = DispatcherClient(again.target)
        for number, dataset_id in enumerate(known):
            found = client.get_dataset(dataset_id, with_graph=False).definition
            assert found.structure == f'{{"opaque":"{number}"}}'
        client.close()


def leave_epochs(client: DispatcherClient, count: int, **fields: object) -> None:
    """Join a named job's epochs, one after the other, and leave each at once."""
    dataset_id = register(client, sources=[ev.SplitSource(count=1000)])
    job_id = job(client, dataset_id, job_name="left early", **fields)
    for epoch in range(count):
        request = pb.JoinIterationRequest(job_id=job_id, epoch=epoch)
        joined = client.call_numbered(request, pb.JoinIterationResponse)
        leave = pb.LeaveIterationRequest(consumer_id=joined.consumer_id)
        client.call(leave, pb.LeaveIterationResponse)


def tasks_of(client: DispatcherClient, worker: pb.WorkerHeartbeatRequest) -> int:
    return len(client.call(worker, pb.WorkerHeartbeatResponse).tasks)


@pytest.mark.parametrize("sharding", ["OFF", "DYNAMIC"])
def test_workers_keep_only_the_latest_epochs_that_were_left_early(sharding: str) -> None:
    with DispatcherProcess("memory:", max_idle_iterations=2) as dispatcher:
        client = DispatcherClient(dispatcher.target)
        worker = pb.WorkerHeartbeatRequest(transfer_servers=SERVERS, address="epochs:1", uid=1)
        assert tasks_of(client, worker) == 0
        leave_epochs(client, 5, sharding=ev.Sharding.Value(sharding))
        wait_until(lambda: tasks_of(client, worker) == 2)
        client.close()


def test_an_epoch_that_was_left_early_is_collected_after_a_time() -> None:
    options = {"dynamic_gc_timeout_ms": 20, "job_gc_check_interval_ms": 50}
    with DispatcherProcess("memory:", max_idle_iterations=-1, **options) as dispatcher:
        client = DispatcherClient(dispatcher.target)
        worker = pb.WorkerHeartbeatRequest(transfer_servers=SERVERS, address="epochs:1", uid=1)
        assert tasks_of(client, worker) == 0
        leave_epochs(client, 2, sharding=ev.DYNAMIC)
        wait_until(lambda: tasks_of(client, worker) == 0)
        client.close()


def test_a_request_for_splits_counts_as_a_sign_of_life() -> None:
    with DispatcherProcess("memory:", worker_timeout_ms=1_500) as dispatcher:
        client = DispatcherClient(dispatcher.target)
        dataset_id = register(client, sources=[ev.SplitSource(count=1000)])
        worker = pb.WorkerHeartbeatRequest(transfer_servers=SERVERS, address="busy:1", uid=1)
        client.call(worker, pb.WorkerHeartbeatResponse)
        job_id = job(client, dataset_id, sharding=ev.DYNAMIC)
        client.call(pb.JoinIterationRequest(job_id=job_id), pb.JoinIterationResponse)
        [task] = client.call(worker, pb.WorkerHeartbeatResponse).tasks
        registered = client.get_dataset(dataset_id, with_graph=False).definition
        assert registered.tf_data_graph.blob == task.graph != ""
        for _ in range(30):  # for twice its timeout
            ask = pb.LeaseSplitsRequest(task_id=task.task_id, want=1)
            assert client.call(ask, pb.LeaseSplitsResponse, patience_s=5).count == 1
            time.sleep(0.1)
        client.close()

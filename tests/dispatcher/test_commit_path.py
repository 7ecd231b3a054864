"""Killed at every point of its commit path, the dispatcher never hands a split out twice.

On Forebay's service, where requests are numbered, none is missing either.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.journal.verification import verify
from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.dispatcher.recovery import recover
from forebay.service.proto import forebay_pb2 as pb
from forebay.storage import open_storage

from ..forks import DISPATCHER, Fork
from ..stock import GRAPH, DispatcherProcess, ServerProcess
from ..transfer_servers import SERVERS

POINTS = ["before-append", "after-append", "before-reply"]
CRASHES = 4
SPLITS = 300
JOIN_EVERY = 10  # splits
CRASHING = Path(__file__).parent.parent / "crashing_dispatcher.py"


class CrashingDispatcher(DispatcherProcess):
    """Crashes CRASHES times at a point, and is started again each time."""

    def __init__(self, storage: Path, point: str) -> None:
        self._random = random.Random(point)
        self._point = point
        self._storage = storage
        super().__init__(storage)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_up)

    def crash_from_now_on(self) -> None:
        self._server.kill()
        self._server = self._crashing()
        self._thread.start()

    def _crashing(self) -> ServerProcess:
        n = self._random.randint(2, 40)
        command = [str(CRASHING), self._point, str(n), str(self._storage), str(self._port)]
        server = ServerProcess(Fork(command, DISPATCHER))
        server.first_line()
        return server

    def _keep_up(self) -> None:
        for crash in range(CRASHES):
            self._server.wait()
            last = crash == CRASHES - 1
            self._server = self._start() if last else self._crashing()
        self._over.set()

    def wait_until_over(self) -> None:
        assert self._over.wait(60)
        self._thread.join()


def prepare(client: DispatcherClient) -> tuple[str, int, int]:
    """A worker with a task over SPLITS splits; (dataset id, task id, iteration id)."""
    register = pb.RegisterDatasetRequest(graph=GRAPH, sources=[ev.SplitSource(count=SPLITS)])
    dataset_id = client.call(register, pb.RegisterDatasetResponse).dataset_id
    job = client.call_numbered(
        pb.GetOrCreateJobRequest(dataset_id=dataset_id, sharding=ev.DYNAMIC),
        pb.GetOrCreateJobResponse,
    )
    client.call_numbered(pb.JoinIterationRequest(job_id=job.job_id), pb.JoinIterationResponse)
    beat = client.call(
        pb.WorkerHeartbeatRequest(transfer_servers=SERVERS, address="w:1", uid=1),
        pb.WorkerHeartbeatResponse,
    )
    return dataset_id, beat.tasks[0].task_id, beat.tasks[0].iteration_id


@pytest.mark.parametrize("point", POINTS)
def test_leases_are_neither_repeated_nor_lost(tmp_path: Path, point: str) -> None:
    """Nor is a job without its consumer, or two for one request."""
    with CrashingDispatcher(tmp_path, point) as dispatcher:
        client = DispatcherClient(dispatcher.target)
        dataset_id, task_id, iteration_id = prepare(client)
        dispatcher.crash_from_now_on()
        iterations = {iteration_id}
        job = pb.GetOrCreateJobRequest(dataset_id=dataset_id, sharding=ev.DYNAMIC)
        joining = pb.JoinIterationRequest(job=job)
        got: list[int] = []
        begun: list[int] = []
        for number in range(1, 10 * SPLITS):
            request = pb.LeaseSplitsRequest(
                request=ev.Request(number=number), task_id=task_id, want=1, begun=begun
            )
            lease = client.call(request, pb.LeaseSplitsResponse)
            if lease.end_of_splits:
                break
            got += range(lease.first, lease.first + lease.count)
            begun = [lease.lease_id]
            if number % JOIN_EVERY == 0:
                joined = client.call_numbered(joining, pb.JoinIterationResponse)
                assert [task.worker_address for task in joined.news.tasks] == ["w:1"]
                iterations.add(joined.iteration_id)
        dispatcher.wait_until_over()
        client.close()
    assert got == list(range(SPLITS))
    storage = open_storage(str(tmp_path))
    assert verify(storage).ok
    state, _ = recover(storage)
    assert state.iterations.keys() == iterations
    assert {i.job_id for i in state.iterations.values()} == state.jobs.keys()
    assert [len(i.consumers) for i in state.iterations.values()] == [1] * len(state.jobs)
    assert len(state.jobs) == 1 + SPLITS // JOIN_EVERY

"""Two dispatchers on one storage, of which one leads at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from forebay.journal.proto import events_pb2 as ev
from forebay.journal.verification import verify
from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.connections.grpc_server import LEADER_KEY
from forebay.service.dispatcher.candidate import Candidate
from forebay.service.dispatcher.options import DispatcherOptions
from forebay.service.errors import ForebayError, Unavailable
from forebay.service.processes import free_port
from forebay.service.proto import forebay_pb2 as pb
from forebay.storage import MemoryStorage, open_storage
from forebay.storage.server_storage import ServerStorage

from ..standbys import (
    LEASE_MS,
    LONG_LEASE_MS,
    ON_ALL,
    PATIENCE_S,
    leader_of,
    leads,
    running_pair,
    status,
    wait_until,
)
from ..stock import GRAPH, DispatcherProcess, call
from ..transfer_servers import SERVERS
from .leading import until


def test_a_client_of_several_dispatchers_of_which_none_answers_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    nowhere = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
    with DispatcherClient(nowhere) as client, pytest.raises(Unavailable):
        client.call(pb.GetStatusRequest(), pb.GetStatusResponse, patience_s=1)
    assert caplog.text.count("asks the dispatcher") == 1


SPLITS = 500
AT_A_TIME = 100
"""Leases that are asked for whenever some are waited for: more than are given until one looks."""


@pytest.fixture
def pair(any_storage: str) -> Iterator[list[DispatcherProcess]]:
    with running_pair(any_storage) as running:
        yield running


@pytest.fixture
def calm_pair(any_storage: str) -> Iterator[list[DispatcherProcess]]:
    """The first one leads, and is not displaced."""
    with running_pair(any_storage, LONG_LEASE_MS) as running:
        yield running


def names(standby: DispatcherProcess, leader: DispatcherProcess) -> bool:
    try:
        status(standby)
    except grpc.RpcError as error:
        return f"ask {leader.address}" in str(error.details())
    return False  # it leads


def health(dispatcher: DispatcherProcess) -> int:
    with grpc.insecure_channel(dispatcher.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        answer: int = check(health_pb2.HealthCheckRequest(), timeout=5).status
    return answer


class Leases:
    """Leases splits of a task, one by one, with whoever leads; what it got, in order."""

    def __init__(self, service: str, splits: int = SPLITS) -> None:
        self.client = DispatcherClient(service)
        register = pb.RegisterDatasetRequest(graph=GRAPH, sources=[ev.SplitSource(count=splits)])
        dataset_id = self.client.call(register, pb.RegisterDatasetResponse).dataset_id
        job = self.client.call_numbered(
            pb.GetOrCreateJobRequest(dataset_id=dataset_id, sharding=ev.DYNAMIC),
            pb.GetOrCreateJobResponse,
        )
        join = pb.JoinIterationRequest(job_id=job.job_id)
        self.client.call_numbered(join, pb.JoinIterationResponse)
        beat = pb.WorkerHeartbeatRequest(transfer_servers=SERVERS, address="w:1", uid=1)
        self._task_id = self.client.call(beat, pb.WorkerHeartbeatResponse).tasks[0].task_id
        self.got: list[int] = []
        self._wanted = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while True:
            number += 1
            self._wanted.acquire()
            request = pb.LeaseSplitsRequest(
                request=ev.Request(number=number), task_id=self._task_id, want=1
            )
            with contextlib.suppress(Unavailable):
                lease = self.client.call(request, pb.LeaseSplitsResponse)
                if lease.end_of_splits:
                    return
                self.got += range(lease.first, lease.first + lease.count)

    def wait_for_more(self) -> None:
        """Some, with others to come."""
        before = len(self.got)
        self._wanted.release(AT_A_TIME)
        wait_until(lambda: len(self.got) > before + 5 or not self._thread.is_alive())

    def finish(self) -> list[int]:
        self._wanted.release(SPLITS + 1)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self.client.close()
        return self.got


def test_a_standby_answers_with_the_leader(calm_pair: list[DispatcherProcess]) -> None:
    leader, standby = calm_pair
    wait_until(names, standby, leader)
    with pytest.raises(grpc.RpcError) as raised:
        status(standby)
    error = raised.value
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    metadata: Any = error.trailing_metadata()
    assert (LEADER_KEY, leader.address) in [tuple(pair) for pair in metadata]
    with pytest.raises(grpc.RpcError) as stock:
        call(standby, "GetWorkers")
    assert stock.value.code() == grpc.StatusCode.UNAVAILABLE
    serving = health_pb2.HealthCheckResponse
    assert health(leader) == serving.SERVING
    assert health(standby) == serving.NOT_SERVING


def test_a_client_that_knows_the_standby_only_finds_the_leader(
    calm_pair: list[DispatcherProcess],
) -> None:
    leases = Leases(calm_pair[1].target, splits=20)
    assert leases.finish() == list(range(20))


@ON_ALL
def test_a_killed_leader_is_succeeded_and_no_split_is_lost_or_repeated(
    pair: list[DispatcherProcess], any_storage: str
) -> None:
    leases = Leases(",".join(one.address for one in pair))
    for killed, other in ((0, 1), (1, 0), (0, 1)):
        leases.wait_for_more()
        pair[killed].kill()
        wait_until(leads, pair[other])
        pair[killed].restart()
    assert leases.finish() == list(range(SPLITS))
    # Three were killed; who is silent on a busy machine may be succeeded as well.
    wait_until(lambda: any(leads(one, 4) for one in pair))
    for one in pair:
        assert one.stop() == 0
    assert verify(open_storage(any_storage)).ok


@pytest.mark.parametrize("any_storage", ["redis", "postgres"], indirect=True)
def test_a_leader_whose_process_is_dead_is_succeeded_before_its_lease_expires(
    any_storage: str,
) -> None:
    """On local files its lock is free; here its connections are gone, and nobody listens."""
    options = DispatcherOptions(standby=True, leader_lease_ms=LONG_LEASE_MS)

    async def succeed(leader: DispatcherProcess) -> None:
        storage = open_storage(any_storage)
        assert isinstance(storage, ServerStorage)
        taking = asyncio.create_task(Candidate(storage, options, "here:1").take_over())
        await until(lambda: bool(storage._watch._seen))
        leader.kill()
        dispatcher = await asyncio.wait_for(taking, PATIENCE_S)
        assert dispatcher.state.term == 2
        await dispatcher.close()
        storage.close()

    asyncio.run(succeed(DispatcherProcess(any_storage, leader_lease_ms=LONG_LEASE_MS)))


def test_a_standby_says_who_leads_and_not_to_stop_it(caplog: pytest.LogCaptureFixture) -> None:
    storage = MemoryStorage()
    storage.open_writer("the dispatcher there:1")

    async def stand_by() -> None:
        candidate = Candidate(storage, DispatcherOptions(standby=True), "here:1")
        taking = asyncio.create_task(candidate.take_over())
        await until(lambda: bool(caplog.messages))
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)

    with caplog.at_level(logging.INFO):
        asyncio.run(stand_by())
    assert caplog.messages == [f"stands by: {storage.url} is led by the dispatcher there:1"]


@pytest.mark.long
def test_a_leader_that_is_stopped_hands_over_at_once(calm_pair: list[DispatcherProcess]) -> None:
    """The standby need not wait until the lease expires."""
    assert calm_pair[0].stop() == 0
    wait_until(leads, calm_pair[1], 2)


@pytest.mark.parametrize("any_storage", ["redis", "postgres"], indirect=True)
def test_a_paused_leader_is_displaced_and_stands_by(
    pair: list[DispatcherProcess], any_storage: str
) -> None:
    first, second = pair
    leases = Leases(f"{first.address},{second.address}")
    for old, new, term in ((first, second, 2), (second, first, 3)):
        leases.wait_for_more()
        with old.paused():
            wait_until(leads, new, term)
            leases.wait_for_more()
        # From its first answer on, it tells nothing that it knows from its own time.
        for _ in range(20):
            led = leader_of(old)
            assert led is None or led > term  # as one that is silent on a busy machine gives way
        wait_until(lambda: names(old, new) or leads(old, term + 1))  # noqa: B023
    assert leases.finish() == list(range(SPLITS))
    for one in pair:
        assert one.stop() == 0
    assert verify(open_storage(any_storage)).ok


@pytest.mark.parametrize("any_storage", ["files"], indirect=True)
def test_a_paused_leader_on_local_files_keeps_the_lead_until_it_is_killed(
    pair: list[DispatcherProcess],
) -> None:
    first, second = pair
    leases = Leases(f"{first.address},{second.address}")
    leases.wait_for_more()
    with first.paused():
        time.sleep(2 * LEASE_MS / 1000)  # as long as a lease on a server would be over
        assert names(second, first)
    leases.wait_for_more()
    assert leader_of(first) == 1
    with first.paused():
        first.kill()
        wait_until(leads, second, 2)
    assert leases.finish() == list(range(SPLITS))


def test_a_leader_restarted_at_its_address_need_not_wait_for_the_lease(any_storage: str) -> None:
    """It can listen there only if its former process has ended."""
    with DispatcherProcess(any_storage, leader_lease_ms=LONG_LEASE_MS) as dispatcher:
        dispatcher.kill_and_restart()
        assert leads(dispatcher, 2)


def refused(*options: str) -> str:
    """What a dispatcher says that ends at once."""
    command = [sys.executable, "-m", "forebay.service.cli", "dispatcher", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 1
    assert not ended.stdout
    return ended.stderr.splitlines()[-1]


def test_a_dispatcher_without_standby_exits_if_another_one_leads(any_storage: str) -> None:
    with DispatcherProcess(any_storage, leader_lease_ms=LONG_LEASE_MS) as leader:
        assert "is in use by" in refused(f"--storage={any_storage}", "--leader-lease-ms=300")
        assert leader_of(leader) == 1


def test_a_standby_refuses_storages_that_cannot_have_one(tmp_path: Path) -> None:
    assert "memory: cannot be shared" in refused("--standby")
    said = refused("--standby", f"--storage={tmp_path}", "--host=0.0.0.0", "--insecure")
    assert "--address HOST:%port%" in said


def test_a_closed_client_tries_no_other_dispatcher(calm_pair: list[DispatcherProcess]) -> None:
    client = DispatcherClient(calm_pair[1].target)
    client.close()
    with pytest.raises(ForebayError):
        client.call(pb.GetStatusRequest(), pb.GetStatusResponse)

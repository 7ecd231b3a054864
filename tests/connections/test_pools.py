"""Pools of workers: two teams with a pool each, and a thief who has the credentials of one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from forebay import service
from forebay.journal.proto import events_pb2 as ev
from forebay.service import Credentials, DispatcherConfig, DispatchServer, WorkerConfig
from forebay.service.client.dispatcher_status import fetch_status
from forebay.service.connections import data_keys
from forebay.service.connections.access import AccessRules
from forebay.service.connections.admission import Identity
from forebay.service.connections.data_keys import KnownKeys, SigningKeys
from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.dispatcher import permissions
from forebay.service.errors import PermissionDenied, Unauthenticated
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.servers import WorkerServer

from ..certificates import Authority, using
from ..standbys import wait_until
from ..transport.peers import Consumer

RULES = """
[[grant]]
to = ["viewer"]
roles = ["viewer"]
[[grant]]
to = ["team-a"]
roles = ["trainer", "python"]
datasets = ["a/*", "common"]
[[grant]]
to = ["team-b"]
roles = ["trainer", "python"]
datasets = ["b/*", "common"]
[[grant]]
to = ["pool-a"]
roles = ["worker"]
datasets = ["a/*", "common"]
[[grant]]
to = ["pool-b"]
roles = ["worker"]
datasets = ["b/*", "common"]
"""

SPLITS = [*range(4)]
MAGIC = "987654321"  # what a thief's refused heartbeats say


def function(split: int) -> Iterator[int]:
    yield split


@pytest.fixture(scope="module")
def cluster(
    authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[DispatchServer, Path]]:
    rules = tmp_path_factory.mktemp("rules") / "access.toml"
    rules.write_text(RULES)
    options: dict[str, Any] = authority.issue("dispatcher").files()
    with ExitStack() as stack:
        dispatcher = stack.enter_context(
            DispatchServer(DispatcherConfig(access_file=str(rules), **options))
        )
        for pool in ("pool-a", "pool-b"):
            how: dict[str, Any] = {
                **authority.issue(pool).files(), "allow_python": True, "heartbeat_interval_ms": 200
            }  # fmt: skip
            stack.enter_context(using(authority.issue(pool)))
            stack.enter_context(WorkerServer(WorkerConfig(dispatcher.target, **how)))
        with using(authority.issue("team-a")):
            service.register_dataset(
                dispatcher.target, function, splits=SPLITS, dataset_id="common"
            )
            service.register_dataset(dispatcher.target, tf.data.Dataset.range(9), dataset_id="a/1")
        with using(authority.issue("team-b")):
            numbers = tf.data.Dataset.range(10**7)
            service.register_dataset(dispatcher.target, numbers, dataset_id="b/1")
            service.register_dataset(
                dispatcher.target, function, splits=SPLITS, dataset_id="b/code"
            )
        yield dispatcher, rules


def test_each_team_is_served_by_its_own_pool(
    cluster: tuple[DispatchServer, Path], authority: Authority
) -> None:
    target, found = cluster[0].target, []
    for team, own in (("a", "a/1"), ("b", "b/1")):
        with using(authority.issue(f"team-{team}")):
            read = service.read(target, own, job_name=f"{team}-1", data_transfer_protocol="tcp")
            assert [*itertools.islice(read, 9)] == [*range(9)]
            read.close()
            how: Any = {"processing_mode": "distributed_epoch"}
            assert sorted(service.read(target, "common", job_name=f"{team}-2", **how)) == SPLITS
            for dataset_id in (own, "common"):
                tasks = joined(target, dataset_id, f"{team}-off", sharding=ev.OFF).news.tasks
                found.append({task.worker_uid for task in tasks})
    (a, a_common), (b, b_common) = found[:2], found[2:]
    assert len(a) == len(b) == 1
    assert a | b == a_common == b_common, "both pools are granted the common dataset"


class Thief:
    """Calls with the credentials of pool A."""

    def __init__(self, target: str, credentials: Credentials) -> None:
        self.credentials = credentials
        with using(credentials):
            self.client = DispatcherClient(target)

    def call(self, request: Any, patience_s: float = 20) -> Any:
        response = type(request).__name__.removesuffix("Request") + "Response"
        with using(self.credentials):
            return self.client.call(request, getattr(pb, response), patience_s=patience_s)

    def beat(self, address: str, uid: int, **fields: Any) -> pb.WorkerHeartbeatResponse:
        server = ev.TransferServer(protocol="tcp", address=address)
        beat = pb.WorkerHeartbeatRequest(
            address=address, uid=uid, transfer_servers=[server], **fields
        )
        return self.call(beat)


def joined(target: str, dataset_id: str, name: str, **how: Any) -> pb.JoinIterationResponse:
    job = pb.GetOrCreateJobRequest(
        dataset_id=dataset_id, job_name=f"dataset_id=/{dataset_id}/{name}", **how
    )
    member = ev.GroupMember(consumers=1, batch_size=1) if "order" in how else None
    joining = pb.JoinIterationRequest(job=job, member=member)
    with DispatcherClient(target) as client:
        answer = client.call_numbered(joining, pb.JoinIterationResponse)
        wait_until(lambda: bool(answer.news.tasks) or beaten(client, answer))
        return answer


def beaten(client: DispatcherClient, answer: pb.JoinIterationResponse) -> bool:
    beat = pb.ConsumerHeartbeatRequest(consumer_id=answer.consumer_id)
    answer.news.CopyFrom(client.call(beat, pb.ConsumerHeartbeatResponse, patience_s=20))
    return bool(answer.news.tasks)


def test_a_thief_with_one_pool_s_credentials_opens_no_door_of_another(
    cluster: tuple[DispatchServer, Path], authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_keys, "WAIT_S", 0.0)
    target = cluster[0].target
    order = ev.OrderSpec(cycle_length=1, block_length=1, bundle_splits=1)
    with using(authority.issue("team-b")):
        reads = joined(target, "b/1", "b-3", sharding=ev.DYNAMIC)
        shared = joined(target, "common", "b-4", sharding=ev.DYNAMIC)
        ordered = joined(target, "b/code", "b-5", order=order)
        theirs = service.read(target, "b/1", job_name="b-6")
        assert next(theirs) == 0
    (task,) = reads.news.tasks
    common = next(t for t in shared.news.tasks if t.worker_uid == task.worker_uid)
    with using(authority.issue("viewer")), DispatcherClient(target) as client:
        status = fetch_status(client, 20)
    (worker_b,) = (w for w in status["workers"] if w["address"] == task.worker_address)
    order_job = next(job for job in status["jobs"] if job["name"].endswith("/b-5"))
    thief = Thief(target, authority.issue("pool-a"))
    number = ev.Request(caller="x", number=1)
    shared_job = next(job for job in status["jobs"] if job["name"].endswith("/b-4"))
    lie = pb.ReadError(job_id=shared_job["job_id"], code="NOT_FOUND", message=MAGIC, times=1)
    for request, said in [
        (pb.GetDatasetRequest(dataset_id="b/1", with_graph=True), "dataset 'b/1'"),
        (pb.LeaseSplitsRequest(task_id=task.task_id, want=9, request=number), "dataset 'b/1'"),
        (pb.LeaseSplitsRequest(task_id=task.task_id, want=9), "dataset 'b/1'"),
        (pb.SkipSplitRequest(task_id=task.task_id, request=number), "dataset 'b/1'"),
        (pb.CompleteTaskRequest(task_id=task.task_id), "dataset 'b/1'"),
        (pb.CompleteTaskRequest(task_id=common.task_id), "which has other grants"),
        (pb.LeaveServiceRequest(worker_id=worker_b["worker_id"]), "which has other grants"),
        (pb.CommitChunkRequest(save_id=1), "everything, as this call needs"),
        (pb.EndStreamRequest(save_id=1), "everything, as this call needs"),
        (pb.ConsumerHeartbeatRequest(consumer_id=reads.consumer_id), "needs the role trainer"),
        (pb.ClaimBundlesRequest(consumer_id=reads.consumer_id), "needs the role trainer"),
        (pb.ListDatasetsRequest(), "needs the role operator or viewer"),
        (pb.GetStatusRequest(), "needs the role operator or viewer"),
    ]:
        with pytest.raises(PermissionDenied, match=said):
            thief.call(request)
    for address, uid, said in [
        (task.worker_address, task.worker_uid, "with other grants"),
        (task.worker_address, 5, "with other grants"),
        ("localhost:1", task.worker_uid, "process number"),
        ("team-b.example:1", 5, "does not name that host"),
    ]:
        with pytest.raises(PermissionDenied, match=said):
            thief.beat(address, uid, errors=[lie])

    lies = pb.BundleChecksums(
        job_id=order_job["job_id"], bundles=SPLITS, checksums=SPLITS, lengths=[9] * 4
    )
    load = pb.JobLoad(job_id=order_job["job_id"], elements=10**9)
    answer = thief.beat("localhost:1", 5, checked=[lies], loads=[load])
    mine = {listed.dataset_id for listed in answer.tasks}
    assert mine <= {"a/1", "common"}
    everyone = [*(one.consumer_id for one in (reads, ordered)), 4711]
    asked = pb.FindGoneConsumersRequest(consumer_ids=everyone, task_ids=[task.task_id])
    gone = [[*thief.call(asked).gone]]
    asked.left = True
    gone.append([*thief.call(asked).gone])
    assert gone == [everyone] * 2, "theirs are as one that nobody has"
    try:
        assert "has expired" in stolen(thief, reads, task, [*answer.data_keys])
    finally:
        thief.call(pb.LeaveServiceRequest(worker_id=answer.worker_id))
        thief.client.close()
    with using(authority.issue("viewer")), DispatcherClient(target) as client:
        assert MAGIC not in json.dumps(fetch_status(client, 20))
    with using(authority.issue("team-b")):
        read = service.read(
            target, "b/code", job_name="b-7", ordered=True, shuffle=False, bundle_splits=1
        )
        assert [*read] == SPLITS, "nobody believed the lengths"
        assert [*itertools.islice(theirs, 10**5)] == [*range(1, 10**5 + 1)]
        theirs.close()


def stolen(
    thief: Thief, reads: pb.JoinIterationResponse, task: pb.TaskInfo, keys: list[bytes]
) -> str:
    """What comes of reading another team's task at its worker, by a credential that is signed with
    the keys of the thief's own pool."""
    signing = SigningKeys()
    signing._keys = keys
    holder = Identity("certificate", ("pool-a", "localhost", "127.0.0.1"))
    signed = signing.sign(reads.consumer_id, reads.iteration_id, holder)
    addresses = [
        (server.protocol, server.address)
        for server in task.transfer_servers
        if server.protocol == "tcp"
    ]
    with using(thief.credentials):
        reading = Consumer(
            addresses,
            reads.consumer_id,
            uid=task.worker_uid,
            reads=task.task_id,
            give_up_s=0.1,
            credential=lambda: (signed, 1),
        )
        try:
            return str(reading.get())
        finally:
            reading.client.close()


def test_a_key_of_one_pool_signs_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_keys, "WAIT_S", 0.0)
    a, b, peer = SigningKeys(), SigningKeys(), Identity("token", ("x",), b"x")
    both = a.sign(1, 2, peer) + b.sign(1, 2, peer)
    for keys, other in ((a, b), (b, a)):
        known = KnownKeys()
        known.learn(keys.all())
        assert known.check(both, 1, peer) == 2
        with pytest.raises(Unauthenticated, match="has expired"):
            known.check(other.sign(1, 2, peer), 1, peer)
        with pytest.raises(Unauthenticated, match="of another form"):
            known.check(both[:-1], 1, peer)


def test_a_pool_s_changed_grants_are_in_force_with_the_next_call(
    cluster: tuple[DispatchServer, Path], authority: Authority
) -> None:
    dispatcher, rules = cluster
    thief = Thief(dispatcher.target, authority.issue("pool-a"))
    wanted = pb.GetDatasetRequest(dataset_id="b/1")

    def may() -> bool:
        try:
            thief.call(wanted)
        except PermissionDenied:
            return False
        return True

    def runs_both() -> bool:
        with using(authority.issue("team-b")):
            return len(joined(dispatcher.target, "b/1", "b-8", sharding=ev.OFF).news.tasks) == 2

    try:
        assert not may()
        rules.write_text(RULES.replace('["a/*", "common"]', '["*"]'))
        wait_until(may)
        wait_until(runs_both)
        rules.write_text(RULES)
        wait_until(lambda: not may())
        wait_until(lambda: not runs_both())
    finally:
        rules.write_text(RULES)
        thief.client.close()


def test_who_has_the_role_no_longer_is_not_taken_for_a_worker_of_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the file had changed while the call was on its way."""
    rules = tmp_path / "access.toml"
    rules.write_text('[[grant]]\nto = ["x"]\nroles = ["viewer"]\n')
    caller = Identity("token", ("x",), b"x")
    monkeypatch.setattr(permissions, "current_caller", lambda _: caller)
    none: Any = None
    with pytest.raises(PermissionDenied, match="role worker no longer"):
        permissions.Permissions(AccessRules(str(rules)), none).of_worker()

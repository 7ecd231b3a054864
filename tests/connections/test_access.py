"""Access rules: what each role may do, and with which datasets and jobs."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
import tensorflow as tf

from forebay import service
from forebay.service import Credentials, DispatcherConfig, DispatchServer, WorkerConfig
from forebay.service.client.waiting import fetch_status
from forebay.service.connections.access import ROLES, AccessRules
from forebay.service.connections.credentials import serves_tensorflow
from forebay.service.connections.dispatcher_client import SERVICE, DispatcherClient
from forebay.service.connections.grpc_server import connect
from forebay.service.dispatcher.options import DispatcherOptions
from forebay.service.dispatcher.permissions import METHODS
from forebay.service.errors import (
    ForebayError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
)
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.servers import WorkerServer

from ..certificates import Authority, using

EACH_ROLE = "".join(f'[[grant]]\nto = ["{role}"]\nroles = ["{role}"]\n' for role in ROLES)
RULES = (
    EACH_ROLE
    + """
[[grant]]
to = ["dispatcher"]
roles = ["viewer"]
[[grant]]
to = ["team-a"]
roles = ["trainer"]
datasets = ["a/*"]
jobs = ["a-*"]
max_datasets = 2
max_jobs = 1
max_consumers = 1
[[grant]]
to = ["team-b*"]
roles = ["trainer", "python"]
datasets = ["b/*", "common"]
"""
)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def server(authority: Authority) -> Credentials:
    return authority.issue("server")


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("rules") / "access.toml"
    path.write_text(RULES)
    return path


@pytest.fixture(scope="module")
def dispatcher(authority: Authority, rules: pathlib.Path) -> Iterator[DispatchServer]:
    files: dict[str, Any] = authority.issue("dispatcher").files()
    with DispatchServer(DispatcherConfig(**files, access_file=str(rules))) as dispatcher:
        yield dispatcher


def calls(address: str, credentials: Credentials) -> Iterator[tuple[str, grpc.StatusCode, str]]:
    """The answer to each method, of empty requests."""
    with connect(address, credentials=credentials) as channel:
        for method in METHODS:
            call: Any = channel.unary_unary(f"/{SERVICE}/{method}", None, None)
            try:
                call(b"", timeout=20)
            except grpc.RpcError as error:
                yield method, error.code(), error.details() or ""
            else:
                yield method, grpc.StatusCode.OK, ""


def test_each_method_has_a_role() -> None:
    face = {name.removesuffix("Request") for name in pb.DESCRIPTOR.message_types_by_name}
    methods = {name for name in face if f"{name}Response" in pb.DESCRIPTOR.message_types_by_name}
    assert METHODS.keys() == methods


@pytest.mark.parametrize("role", [*ROLES, "nobody"])
def test_a_role_may_call_its_methods_and_no_other(
    role: str, dispatcher: DispatchServer, authority: Authority
) -> None:
    for method, code, details in calls(dispatcher.address, authority.issue(role)):
        allowed = role in METHODS[method][0]
        assert (code != grpc.StatusCode.PERMISSION_DENIED) == allowed, (method, code, details)
        if not allowed:
            assert f"certificate {role}" in details and f"may not call {method}" in details
            assert "it needs the role" in details and "--access-file" in details


def numbers(count: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(count)


def function(split: int) -> Iterator[int]:
    yield split


def test_a_stolen_token_opens_only_its_own_doors(
    dispatcher: DispatchServer, authority: Authority
) -> None:
    """Python, removal, and what is another team's: each is refused, and nothing is lost."""
    target = dispatcher.target
    worker = authority.issue("worker")
    files: dict[str, Any] = worker.files()
    register, read = service.register_dataset, service.read
    with (
        using(worker),
        WorkerServer(WorkerConfig(target, allow_python=True, **files)),
    ):
        with using(authority.issue("team-b-7")):
            register(target, function, splits=[*range(4)], dataset_id="b/code")
            register(target, numbers(10**9), dataset_id="common")
            assert sorted(read(target, "b/code", job_name="b-1")) == [*range(4)]
            theirs = read(target, "common", job_name="b-2")
            assert next(theirs) == 0
        with using(authority.issue("team-a")):
            register(target, numbers(10), dataset_id="a/1")
            assert len([*read(target, "a/1", job_name="a-1")]) == 10
            for refused, said in (
                (lambda: register(target, function, splits=[1], dataset_id="a/2"), "python"),
                (lambda: register(target, numbers(10), dataset_id="b/1"), "dataset 'b/1'"),
                (
                    lambda: register(target, numbers(10)),
                    "a dataset without dataset_id=",
                ),
                (lambda: [*read(target, "common", job_name="a-1")], "dataset 'common'"),
                (lambda: [*read(target, "a/1", job_name="b-1")], "job 'b-1'"),
                (lambda: [*read(target, "a/1")], "an anonymous job"),
                (lambda: service.remove_dataset(target, "a/1"), "it needs the role operator"),
                (lambda: service.list_datasets(target), "it needs the role operator or viewer"),
            ):
                with pytest.raises(PermissionDenied, match=said):
                    refused()
            client = DispatcherClient(target)
            answers = set()
            (own,) = fetch_status(client, 20, workers_only=True)["workers"]
            for number in range(own["worker_id"], own["worker_id"] + 50):  # others are near
                beat = pb.ConsumerHeartbeatRequest(consumer_id=number)
                with pytest.raises((PermissionDenied, NotFound)) as raised:
                    client.call(beat, pb.ConsumerHeartbeatResponse, patience_s=20)
                answers.add(raised.type)
                with suppress(PermissionDenied):  # who has left may leave again
                    leave = pb.LeaveIterationRequest(consumer_id=number)
                    client.call(leave, pb.LeaveIterationResponse, patience_s=20)
            assert answers == {PermissionDenied, NotFound}
            client.close()
            register(target, numbers(11), dataset_id="a/2")
            with pytest.raises(ResourceExhausted, match=r"covers 2 datasets .*allows 2"):
                register(target, numbers(12), dataset_id="a/3")
            with pytest.raises(ResourceExhausted, match="covers 1 jobs already"):
                [*read(target, "a/1", job_name="a-2")]
            service.wait_for_workers(target, 1)
        with using(authority.issue("team-b-7")):
            assert [*itertools.islice(theirs, 10**5)] == [*range(1, 10**5 + 1)]
            theirs.close()


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ("grant = 3", "has no grant"),
        ("[[grant", "is not TOML"),
        ("[[grants]]\nto = ['x']", "has 'grants': it is a list of"),
        ("[[grant]]\nto = ['x']\nroles = ['king']", "grant 1: 'king' is no role; use trainer"),
        ("[[grant]]\nto = 'x'\nroles = ['viewer']", "to must be a list of strings, and is 'x'"),
        ("[[grant]]\nto = ['x']\nroles = ['viewer']\njob = ['y']", "grant 1 has job: a grant has"),
        ("[[grant]]\nto = ['x']\nroles = ['viewer']\nmax_jobs = -1", "max_jobs must be a number"),
    ],
)
def test_wrong_rules_are_refused(content: str, wrong: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "access.toml"
    path.write_text(content)
    with pytest.raises(InvalidArgument, match=wrong):
        AccessRules(str(path))


def test_rules_need_tls_and_stock_clients_are_let_in_only_where_asked(server: Credentials) -> None:
    with pytest.raises(ForebayError, match="without TLS: nobody proves who he is"):
        DispatchServer(DispatcherConfig(access_file="/some/file"))

    def serves(**options: Any) -> bool:
        credentials = server if options.pop("tls", False) else None
        return serves_tensorflow(DispatcherOptions(**options), credentials)

    assert serves()
    assert not serves(tls=True)
    assert not serves(host="192.0.2.1", insecure=True)
    assert serves(host="192.0.2.1", insecure=True, allow_tensorflow_clients=True)
    with pytest.raises(InvalidArgument, match="cannot speak TLS"):
        serves(tls=True, allow_tensorflow_clients=True)

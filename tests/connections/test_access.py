"""Access rules: what each role may do, and with which datasets and jobs."""

from __future__ import annotations

import dataclasses
import itertools
import re
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import tensorflow as tf
import trustme

from forebay import service
from forebay.journal.proto import events_pb2 as ev
from forebay.service import Credentials, DispatcherConfig, DispatchServer, WorkerConfig
from forebay.service.client import heartbeats
from forebay.service.client.dispatcher_status import fetch_status
from forebay.service.connections import data_keys
from forebay.service.connections.access import ROLES, AccessRules
from forebay.service.connections.admission import Admission, Identity, of_certificate
from forebay.service.connections.credentials import client_context, serves_tensorflow
from forebay.service.connections.data_keys import KnownKeys, SigningKeys
from forebay.service.connections.dispatcher_client import SERVICE, DispatcherClient
from forebay.service.connections.grpc_server import connect
from forebay.service.delivery import FirstComeOutput
from forebay.service.dispatcher.options import DispatcherOptions
from forebay.service.dispatcher.permissions import METHODS
from forebay.service.errors import (
    AnotherJournal,
    ForebayError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)
from forebay.service.processes import free_port
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.servers import WorkerServer
from forebay.service.transport import BlockServer
from forebay.service.transport import client as block_client

from ..certificates import Authority, token, using
from ..standbys import wait_until
from ..transport.peers import Consumer

EACH_ROLE = "".join(f'[[grant]]\nto = ["{role}"]\nroles = ["{role}"]\n' for role in ROLES)
RULES = (
    EACH_ROLE
    + """
[[grant]]
to = ["dispatcher"]
roles = ["viewer"]
[[grant]]
to = ["own-*"]
roles = ["trainer"]
datasets = ["own/*"]
[[grant]]
to = ["own-graphs"]
roles = ["trainer", "graphs"]
datasets = ["own/*"]
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
[[grant]]
to = ["steers-a-reads-b"]
roles = ["trainer"]
datasets = ["b/*"]
[[grant]]
to = ["steers-a*"]
roles = ["scheduler"]
jobs = ["a-*"]
"""
)


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rules") / "access.toml"
    path.write_text(RULES)
    return path


@pytest.fixture(scope="module")
def http_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def dispatcher(authority: Authority, rules: Path, http_port: int) -> Iterator[DispatchServer]:
    options: dict[str, Any] = authority.issue("dispatcher").files()
    options |= {"access_file": str(rules), "http_port": http_port}
    with DispatchServer(DispatcherConfig(**options)) as dispatcher:
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
    servicer = {name.removesuffix("Request") for name in pb.DESCRIPTOR.message_types_by_name}
    methods = {
        name for name in servicer if f"{name}Response" in pb.DESCRIPTOR.message_types_by_name
    }
    assert METHODS.keys() == methods


@pytest.mark.parametrize("role", [*ROLES, "nobody"])
def test_a_role_may_call_its_methods_and_no_other(
    role: str, dispatcher: DispatchServer, authority: Authority
) -> None:
    for method, code, details in calls(dispatcher.address, authority.issue(role)):
        allowed = role in METHODS[method][0]
        assert (code != grpc.StatusCode.PERMISSION_DENIED) == allowed, (method, code, details)
        assert code != grpc.StatusCode.UNKNOWN, (method, details)
        if not allowed:
            assert f"certificate {role}" in details and f"may not call {method}" in details
            assert "it needs the role" in details and "--access-file" in details


def numbers(count: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(count)


def function(split: int) -> Iterator[int]:
    yield split


def save(target: str) -> None:
    service.distributed_save(numbers(10), "/tmp/never", target)


def test_a_stolen_token_opens_only_its_own_doors(
    dispatcher: DispatchServer, authority: Authority
) -> None:
    """Python, removal, and what is another team's: each is refused, and nothing is lost."""
    target = dispatcher.target
    worker = authority.issue("worker")
    files: dict[str, Any] = worker.files()
    register, read = service.register_dataset, service.read
    with using(worker), WorkerServer(WorkerConfig(target, allow_python=True, **files)):
        reading = numbers(1).map(lambda _: tf.io.read_file("/etc/hostname"))
        with using(authority.issue("team-b-7")):
            register(target, reading, dataset_id="b/files")  # as it may register code
            register(target, function, splits=[*range(4)], dataset_id="b/code")
            register(target, numbers(10**9), dataset_id="common")
            assert sorted(read(target, "b/code", job_name="b-1")) == [*range(4)]
            theirs = read(target, "common", job_name="b-2")
            assert next(theirs) == 0
        with using(authority.issue("own-graphs")):
            register(target, reading, dataset_id="own/graphs")
        with using(authority.issue("team-a")):
            register(target, numbers(10), dataset_id="a/1")
            assert len([*read(target, "a/1", job_name="a-1")]) == 10
            for refused, said in (
                (lambda: register(target, function, splits=[1], dataset_id="a/2"), "python"),
                (lambda: register(target, numbers(10), dataset_id="b/1"), "dataset 'b/1'"),
                (lambda: register(target, numbers(10)), "a dataset without dataset_id="),
                (
                    lambda: register(target, reading, dataset_id="a/2"),
                    r"\(ReadFile\) .* role graphs",
                ),
                (lambda: [*read(target, "common", job_name="a-1")], "dataset 'common'"),
                (lambda: [*read(target, "a/1", job_name="b-1")], "job 'b-1'"),
                (lambda: [*read(target, "a/1")], "an anonymous job"),
                (lambda: service.remove_dataset(target, "a/1"), "it needs the role operator"),
                (lambda: save(target), "do not cover everything"),
                (lambda: service.list_datasets(target), "it needs the role operator or viewer"),
            ):
                with pytest.raises(PermissionDenied, match=said):
                    refused()
            with DispatcherClient(target) as client:
                many = pb.StartSaveRequest(sources=[ev.SplitSource()] * 6_000)
                with pytest.raises(PermissionDenied, match="do not cover everything"):  # uncounted
                    client.call(many, pb.StartSaveResponse, patience_s=20)
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
            known = pb.JournalPosition(journal_id="7e15" * 8, sequence=1, lasting=True)
            with (
                DispatcherClient(target, known=known) as client,
                pytest.raises(AnotherJournal, match=r"a/1 \(certificate team-a.*\) claims to know"),
            ):
                get = pb.GetDatasetRequest(dataset_id="a/1")
                client.call(get, pb.GetDatasetResponse, patience_s=0.01)
            register(target, numbers(11), dataset_id="a/2")
            with pytest.raises(ResourceExhausted, match=r"covers 2 datasets .*allows 2"):
                register(target, numbers(12), dataset_id="a/3")
            register(target, numbers(11), dataset_id="a/2")
            with pytest.raises(ResourceExhausted, match=r"may not join it: .*covers 1 jobs"):
                [*read(target, "a/1", job_name="a-2")]
            assert not [*read(target, "a/1", job_name="a-1")], "its job is there, and over"
            service.wait_for_workers(target, 1)
        with using(authority.issue("team-b-7")):
            assert [*itertools.islice(theirs, 10**5)] == [*range(1, 10**5 + 1)]
            theirs.close()


def test_who_steers_some_jobs_steers_no_others_and_is_on_record(
    dispatcher: DispatchServer, authority: Authority
) -> None:
    target, worker = dispatcher.target, authority.issue("worker")
    files: dict[str, Any] = worker.files()
    with using(worker), WorkerServer(WorkerConfig(target, **files)):
        with using(authority.issue("own-1")):
            service.register_dataset(target, numbers(100), dataset_id="own/steered")
            for job in ("a-steered", "b-steered"):
                with service.read(target, "own/steered", ordered=True, job_name=job) as elements:
                    assert len([*itertools.islice(elements, 3)]) == 3
            with pytest.raises(PermissionDenied, match="it needs the role scheduler"):
                service.skip_steps(target, "a-steered", 10, 20)
        with using(authority.issue("steers-a")):
            with pytest.raises(PermissionDenied, match="job 'b-steered'"):
                service.skip_steps(target, "b-steered", 10, 20)
            service.skip_steps(target, "a-steered", 10, 20)
            for job, new in (("a-steered", "b-fork"), ("b-steered", "a-fork")):
                refused = f"job '{job if job[0] == 'b' else new}'"
                with pytest.raises(PermissionDenied, match=refused):
                    service.fork_job(target, job, new, at_step=10)
            assert service.fork_job(target, "a-steered", "a-fork", at_step=10) == 10
            with pytest.raises(PermissionDenied, match="may not call"):
                service.batch_of(target, "a-steered", 10)
            with pytest.raises(PermissionDenied, match="may not call"):
                [*service.read(target, "own/steered", ordered=True, job_name="a-steered")]
        with using(authority.issue("own-1")):
            line = [*service.read(target, "own/steered", ordered=True)]
            assert service.batch_of(target, "a-steered", 10).tolist() == [line[20]]
            assert service.batch_of(target, "a-fork", 10).tolist() == [line[10]]
        with using(authority.issue("steers-a-reads-b")), DispatcherClient(target) as client:
            replay = pb.GetOrCreateJobRequest(dataset_id="b/1", schedule_of="a-steered")
            with pytest.raises(PermissionDenied, match=r"may not replay it: .* job 'a-steered'"):
                client.call(pb.JoinIterationRequest(job=replay), pb.JoinIterationResponse)
        with using(authority.issue("team-b-7")), pytest.raises(PermissionDenied, match="own/steer"):
            service.batch_of(target, "a-steered", 10)
        with using(authority.issue("viewer")), DispatcherClient(target) as client:
            status = fetch_status(client, 20)
    steered, forked = status["schedules"]
    assert forked["changes"][0]["who"].startswith("certificate steers-a,")
    (named,) = [job["name"] for job in status["jobs"] if job["job_id"] == steered["job_id"]]
    assert named.endswith("a-steered")
    (change,) = steered["changes"]
    assert change["who"].startswith("certificate steers-a,")


# -- credentials of data connections ---------------------------------------------------------------

TASK, ITERATION, CONSUMER = 5, 70, 9


def test_numbers_of_calls_are_each_peer_s_own(
    dispatcher: DispatchServer, authority: Authority
) -> None:
    """A repeated call of one peer is not answered with what another one got."""
    target, worker = dispatcher.target, authority.issue("worker")
    files: dict[str, Any] = worker.files()

    def join(name: str, caller: str = "x", job_name: str = "") -> pb.JoinIterationResponse:
        with using(authority.issue(name)), DispatcherClient(target) as client:
            job = pb.GetOrCreateJobRequest(
                dataset_id=f"own/{name}", job_name=job_name or name, sharding=ev.Sharding.OFF
            )
            numbered = ev.Request(caller=caller, number=1)
            request = pb.JoinIterationRequest(request=numbered, job=job)
            return client.call(request, pb.JoinIterationResponse, patience_s=20)

    def beat(name: str, request: pb.ConsumerHeartbeatRequest) -> None:
        with using(authority.issue(name)), DispatcherClient(target) as client:
            client.call(request, pb.ConsumerHeartbeatResponse, patience_s=20)

    with using(worker), WorkerServer(WorkerConfig(target, **files)):
        for name in ("own-a", "own-b"):
            with using(authority.issue(name)):
                service.register_dataset(target, numbers(1000), dataset_id=f"own/{name}")
        first = join("own-a")
        other = join("own-b")
        assert first.consumer_id != other.consumer_id
        assert join("own-a").consumer_id == first.consumer_id, "a repetition"
        for caller in ("task/7/0", "", "x" * 101):
            with pytest.raises(InvalidArgument, match="names its caller"):
                join("own-a", caller)
        with pytest.raises(PermissionDenied, match="another dataset's jobs"):
            join("own-a", "y", "dataset_id=/own/own-b/x")
        theirs = pb.HeldTask(task_id=other.news.tasks[0].task_id, round=1, received=1)
        with pytest.raises(InvalidArgument, match="is not one of the iteration of consumer"):
            rounds = pb.RoundReport(held=[theirs])
            beat("own-a", pb.ConsumerHeartbeatRequest(consumer_id=first.consumer_id, rounds=rounds))


def test_who_shares_a_dataset_cannot_tell_lengths_of_its_bundles(
    dispatcher: DispatchServer, authority: Authority
) -> None:
    target, splits = dispatcher.target, [*range(4)]
    worker, honest, liar = map(authority.issue, ("worker", "team-b-1", "team-b-2"))
    how: dict[str, Any] = {**worker.files(), "allow_python": True, "heartbeat_interval_ms": 200}

    def known() -> int:
        with using(authority.issue("viewer")), DispatcherClient(target) as client:
            jobs = fetch_status(client, 20)["jobs"]
        (own,) = [job for job in jobs if job["name"].endswith("/mine")]
        return int(own["order"]["known_lengths"])

    with using(worker), WorkerServer(WorkerConfig(target, **how)):
        with using(honest):
            service.register_dataset(target, function, splits=splits, dataset_id="b/shared")
        with using(liar), DispatcherClient(target) as client:
            found = client.get_dataset("b/shared", with_graph=True)
            again = pb.RegisterDatasetRequest(
                dataset_id="b/shared",
                python=found.graph,
                sources=found.definition.sources,
                structure=found.definition.structure,
                metadata=found.definition.metadata,
                lengths=[7] * 4,
            )
            assert not client.call(again, pb.RegisterDatasetResponse, patience_s=20).differs
            order = ev.OrderSpec(cycle_length=1, block_length=1, bundle_splits=1)
            job = pb.GetOrCreateJobRequest(dataset_id="b/shared", job_name="lies", order=order)
            member = ev.GroupMember(consumers=1, batch_size=1)
            joining = pb.JoinIterationRequest(job=job, member=member)
            joined = client.call_numbered(joining, pb.JoinIterationResponse)
            assert joined.lengths == [-1] * 4
            lies = pb.ConsumerHeartbeatRequest(
                consumer_id=joined.consumer_id, bundles=splits, lengths=[9] * 4
            )
            client.call(lies, pb.ConsumerHeartbeatResponse, patience_s=20)
        with using(honest):
            read = service.read(
                target, "b/shared", job_name="mine", ordered=True, shuffle=False, bundle_splits=1
            )
            assert [*read] == splits
        wait_until(lambda: known() == 4)  # the worker has told them


def test_names_in_certificates_are_read_whole() -> None:
    def names(**certificate: Any) -> tuple[str, ...]:
        hosts = certificate.pop("hosts", ["a.example", "::1", "x@a.example"])
        issued = trustme.CA().issue_cert(*hosts, **certificate)
        der = ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode())
        return of_certificate(der).names

    assert names(common_name="x") == ("x", "a.example", "::1", "x@a.example")
    assert names() == ("a.example", "::1", "x@a.example")
    assert names(common_name="operator\0.evil")[0] == "operator\0.evil"


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> SigningKeys:
    monkeypatch.setattr(data_keys, "WAIT_S", 0.0)
    return SigningKeys()


@pytest.mark.parametrize("tokens", [False, True])
def test_a_data_connection_needs_the_credential_of_its_consumer_peer_and_iteration(
    tokens: bool,
    keys: SigningKeys,
    server: Credentials,
    authority: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer, thief = authority.issue("trainer"), authority.issue("thief")
    if tokens:
        named = [token(tmp_path / name, name * 9) for name in ("trainer", "thief")]
        server = dataclasses.replace(server, token_file=",".join(named))
        trainer, thief = (dataclasses.replace(trainer, token_file=path) for path in named)
    known = KnownKeys()
    known.learn(keys.all())
    blocks = BlockServer(1, credentials=server, keys=known)
    for task, iteration in ((TASK, ITERATION), (TASK + 1, ITERATION + 1)):
        output = FirstComeOutput()
        blocks.sessions.add_task(task, output, iteration)
        output.finish()
    blocks.start()
    try:

        def answer(
            who: Credentials,
            credential: bytes | Callable[[], bytes],
            *,
            task: int = TASK,
            consumer: int = CONSUMER,
            give_up_s: float = 0.1,
        ) -> str:
            """What comes of reading the task over TCP. A function's credentials are new ones."""
            numbers = itertools.count()
            with using(who):
                reading: Consumer = Consumer(
                    [address for address in blocks.addresses if address[0] == "tcp"],
                    consumer,
                    uid=1,
                    reads=task,
                    give_up_s=give_up_s,
                    credential=lambda: (
                        (credential, 1)
                        if isinstance(credential, bytes)
                        else (credential(), next(numbers))
                    ),
                    fail=lambda error: reading.arrived.put(f"{type(error).__name__}: {error}"),
                )
                try:
                    found = reading.get()
                    return found if isinstance(found, str) else type(found[1]).__name__
                finally:
                    reading.client.close()

        issued = keys.sign(CONSUMER, ITERATION, identity(trainer))
        assert answer(trainer, issued) == "EndOfTask"
        assert "given to somebody else" in answer(thief, issued)
        assert "given to somebody else" in answer(trainer, issued, consumer=CONSUMER + 1)
        assert "is not one of iteration 70" in answer(trainer, issued, task=TASK + 1)
        assert "no credential" in answer(trainer, b"")
        assert "of another form" in answer(trainer, issued[:-1])
        for bit in (64, 128, 256, 8 * len(issued) - 1):  # iteration, holder, signature
            changed = bytearray(issued)
            changed[bit // 8] ^= 1 << bit % 8
            assert "it was changed" in answer(trainer, bytes(changed))
        assert "has expired" in answer(
            trainer, SigningKeys().sign(CONSUMER, ITERATION, identity(trainer))
        )
        assert answer(trainer, issued) == "EndOfTask", "nobody was disturbed"

        monkeypatch.setattr(block_client, "UNFIT_S", 0.0)
        newer, asked = SigningKeys(), itertools.count()  # of a dispatcher that has just begun

        def learn_late() -> bytes:
            if next(asked) == 3:
                known.learn(newer.all())
            return newer.sign(CONSUMER, ITERATION, identity(trainer))

        assert answer(trainer, learn_late, give_up_s=60) == "EndOfTask"
        unfit = answer(thief, lambda: issued, give_up_s=60)
        assert unfit.startswith("Unauthenticated") and "given to somebody else" in unfit
    finally:
        blocks.stop()


@pytest.mark.parametrize("protocol", ["tcp", "grpc"])
def test_a_token_that_the_worker_lacks_is_an_error_in_the_trainer(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    monkeypatch.setattr(heartbeats, "HEARTBEAT_S", 0.3)
    monkeypatch.setattr(block_client, "UNFIT_S", 1.0)
    certificates: dict[str, Any] = authority.issue("all").files()
    theirs, mine = (token(tmp_path / f"{name}.token", name * 9) for name in ("worker", "trainer"))
    dispatcher = DispatchServer(DispatcherConfig(token_file=f"{theirs},{mine}", **certificates))
    target = dispatcher.target
    how: Any = {"data_transfer_protocol": protocol}
    with (
        dispatcher,
        WorkerServer(WorkerConfig(target, token_file=theirs, **certificates)),
        using(Credentials(**certificates, token_file=mine)),
    ):
        dataset_id = service.register_dataset(target, numbers(10))
        with pytest.raises(Unauthenticated, match="token is not one that is known here"):
            [*service.read(target, dataset_id, **how)]


def identity(credentials: Credentials) -> Identity:
    """Who a dispatcher finds a peer with these credentials to be."""
    if credentials.token_file:
        return Admission(credentials).of_token(credentials.loaded().token)
    name = Path(credentials.tls_cert).stem
    return Identity("certificate", (name, "localhost", "127.0.0.1"))


def test_keys_are_told_before_they_sign_and_expire(
    keys: SigningKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    peer, known = Identity("token", ("x",), b"x"), KnownKeys()
    keys = SigningKeys()
    signed = []
    for _ in range(5):
        known.learn(keys.all())
        now += data_keys.PERIOD_S - 1
        before = keys.sign(CONSUMER, ITERATION, peer)  # the worker has heard nothing since
        assert known.check(before, CONSUMER, peer) == ITERATION
        signed.append(before)
        now += 1
    for old in signed[:3]:
        with pytest.raises(Unauthenticated, match="has expired"):
            known.check(old, CONSUMER, peer)
    now += 10 * data_keys.PERIOD_S
    assert known.check(signed[-1], CONSUMER, peer) == ITERATION, "while no dispatcher answers"
    known.learn(SigningKeys().all())
    with pytest.raises(Unauthenticated, match="has expired"):
        known.check(signed[-1], CONSUMER, peer)


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ("grant = 3", "Expected `array`, got `int` - at "),
        ("[[grant", "is not TOML"),
        ("[[grants]]\nto = ['x']", "is not a list of .* unknown field `grants`"),
        ("[[grant]]\nto = ['x']\nroles = ['king']", "'king' is no role; use trainer"),
        (
            "[[grant]]\nto = 'x'\nroles = ['viewer']",
            r"Expected `array`, got `str` - at `\$.grant\[0\].to`",
        ),
        ("[[grant]]\nto = ['x']\nroles = ['viewer']\njob = ['y']", "unknown field `job`"),
        ("[[grant]]\nto = ['x']\nroles = ['viewer']\nmax_jobs = -1", "Expected `int` >= 0"),
    ],
)
def test_wrong_rules_are_refused(content: str, wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "access.toml"
    path.write_text(content)
    with pytest.raises(InvalidArgument, match=wrong):
        AccessRules(str(path))


def test_new_rules_are_in_force_for_the_next_call_and_wrong_ones_are_not(
    dispatcher: DispatchServer,
    rules: Path,
    authority: Authority,
    http_port: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    viewer, said, denied = client_context(authority.issue("viewer")), "", 0
    sample = 'forebay_denied_calls_total{method="ListDatasets",reason="forbidden"} '

    def counted() -> float:
        url = f"https://localhost:{http_port}/metrics"
        with urllib.request.urlopen(url, context=viewer, timeout=20) as answer:
            (*_, count) = re.findall(
                re.escape(sample) + "(.*)", f"{sample}0\n{answer.read().decode()}"
            )
        return float(count)

    with using(authority.issue("newcomer")), closing(DispatcherClient(dispatcher.target)) as client:

        def may_list() -> bool:
            nonlocal denied
            try:
                client.call(pb.ListDatasetsRequest(), pb.ListDatasetsResponse, patience_s=20)
            except PermissionDenied:
                denied += 1
                return False
            return True

        def complains(why: str) -> bool:
            nonlocal said
            assert may_list(), "the old rules stay in force"
            said += capsys.readouterr().err
            return (
                re.search(f"--access-file {rules}: .* the old stay in force: .*{why}", said)
                is not None
            )

        try:
            before = counted()
            assert not may_list()
            granted = f'{RULES}[[grant]]\nto = ["new*"]\nroles = ["viewer"]\n'
            rules.write_text(granted)
            wait_until(may_list)
            rules.write_text(f"{granted}[[grant")
            wait_until(lambda: complains("is not TOML: Expected"))
            rules.write_text(granted.replace('"trainer"', '"king"'))
            wait_until(lambda: complains("'king' is no role; use trainer"))
            rules.write_text(RULES)
            wait_until(lambda: not may_list())
            assert counted() - before == denied
        finally:
            rules.write_text(RULES)


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

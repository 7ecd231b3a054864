"""Who is let in: certificates, tokens and users; and what those hear who are not."""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from forebay.service import Credentials, DispatcherConfig, DispatchServer, ForebayError
from forebay.service.connections import credentials as module
from forebay.service.connections import tunnel
from forebay.service.connections.admission import Admission, Identity
from forebay.service.connections.credentials import client_context
from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.connections.grpc_server import bind, connect, interceptors, metadata_of
from forebay.service.connections.tls_socket import TlsSocket
from forebay.service.errors import Unauthenticated, Unavailable
from forebay.service.http.families import Measured
from forebay.service.http.server import HttpServer, HttpThread
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto import transfer_pb2 as wire
from forebay.service.transport import frames, messages
from forebay.service.transport import server as block_servers
from forebay.service.transport.server import MAX_STRANGERS

from ..certificates import Authority, files, holder, token, using
from ..standbys import wait_until
from ..stock import GRAPH
from ..transport.peers import UID, Consumer, Proxy, Rule, only, say, started, task, whole

pytestmark = pytest.mark.usefixtures("at_once")

PATIENCE_S = 20
CLOCKS = "check the clocks of both hosts"


def mixed(own: Credentials, authorities: Credentials) -> Credentials:
    """Own certificate, and the authorities that another one knows."""
    return Credentials(tls_ca=authorities.tls_ca, tls_cert=own.tls_cert, tls_key=own.tls_key)


# -- data connections ------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["tcp", "unix"])
def test_blocks_of_all_sizes_arrive(
    closing: ExitStack, server: Credentials, trainer: Credentials, protocol: str
) -> None:
    worker = started(closing, credentials=server)
    sizes = iter([1, 3_000, 70_000, 600_000, 5_000_001, 9] * 4)
    task(worker, 1, 24, lambda: next(sizes))
    with using(trainer):
        reading = Consumer(only(worker, protocol), reads=1, closing=closing)
        assert reading.numbers() == [*range(1, 25)]


def refused_by_worker(
    closing: ExitStack,
    server: Credentials | None,
    client: Credentials | None,
    protocol: str = "tcp",
) -> str:
    """Why a consumer cannot read over TCP, or gRPC."""
    worker = started(closing, credentials=server)
    task(worker, 1, 1)
    addresses = only(worker, "tcp")
    if protocol == "grpc":
        pool = closing.enter_context(ThreadPoolExecutor(2))
        admission = None if server is None else Admission(server)
        calls = grpc.server(pool, [tunnel.handlers(worker.serve, admission)])
        addresses = [("grpc", bind(calls, "127.0.0.1", 0, server))]
        calls.start()
        closing.callback(lambda: calls.stop(None).wait())
    with using(client):
        reading = Consumer(addresses, reads=1, give_up_s=0.1, open_tunnel=tunnel.open_tunnel)
        closing.callback(reading.client.close)
        said = reading.get()
    assert isinstance(said, str), said
    assert not worker.sessions.read_tasks()
    return said


class Observed:
    """Has no metrics."""

    def unhealthy(self) -> str:
        return ""

    def unready(self) -> str:
        return ""

    async def measured(self) -> list[Measured]:
        return []


def refused_by_http(
    closing: ExitStack, server: Credentials | None, client: Credentials | None
) -> str:
    """Why somebody cannot see a server's metrics."""
    thread = HttpThread(HttpServer(Observed(), server))
    closing.callback(thread.stop)
    thread.start("127.0.0.1", 0)
    port = int(thread.address.rpartition(":")[2])
    asking = (
        http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        if client is None
        else http.client.HTTPSConnection(
            "127.0.0.1", port, timeout=PATIENCE_S, context=client_context(client)
        )
    )
    closing.callback(asking.close)
    try:
        asking.request("GET", "/metrics")
        answer = asking.getresponse()
    except OSError as error:
        return str(error)
    assert answer.status in (400, 401)
    return answer.read().decode()


class Case(NamedTuple):
    server: Credentials | None
    client: Credentials | None
    client_says: str  # a regular expression
    server_says: str  # a pattern
    browser_says: str
    """At the HTTP port, where the client is not Forebay's; "": the connection is closed."""


@pytest.fixture(scope="module")
def cases(
    authority: Authority,
    stranger: Authority,
    server: Credentials,
    trainer: Credentials,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Case]:
    """What is wrong: the server's and the client's credentials, and what both of them say."""
    strange = stranger.issue("strange")
    secret = token(tmp_path_factory.mktemp("tokens") / "t", "secret\n")
    expired = authority.issue("expired", begins=-9, ends=-1 / 24)  # or a clock is an hour off
    early = authority.issue("early", begins=1 / 24, ends=9)
    elsewhere = authority.issue("elsewhere", "elsewhere.example")
    return {
        "a client of another authority": Case(
            server, mixed(strange, server), "does not accept the certificate",
            "unable to get local issuer certificate; give both sides certificates of",
            "",
        ),
        "an expired client": Case(
            server, expired, f"it has expired; renew it, or {CLOCKS}",
            f"certificate has expired; renew it; or {CLOCKS}", "",
        ),
        "a client of the next hour": Case(
            server, early, "does not accept the certificate",
            f"certificate is not yet valid; wait, or {CLOCKS}", "",
        ),
        "a client without a certificate": Case(
            server, holder(server, secret), "asks for a certificate",
            "no certificate", "no certificate was sent",
        ),
        "a server of another authority": Case(
            mixed(strange, server), trainer,
            "unable to get local issuer certificate; give both sides certificates of",
            "no authority that it knows has signed it", "unable to get local issuer certificate",
        ),
        "an expired server": Case(
            expired, trainer, f"certificate has expired; renew it; or {CLOCKS}",
            f"it has expired; renew it, or {CLOCKS}", "certificate has expired",
        ),
        "a server of the next hour": Case(
            early, trainer, f"certificate is not yet valid; wait, or {CLOCKS}",
            "does not accept the certificate", "certificate is not yet valid",
        ),
        "a server elsewhere": Case(
            elsewhere, trainer, "not valid for '127.0.0.1'; have it issued with this name",
            "does not accept the certificate", "certificate is not valid for '127.0.0.1'",
        ),
        "a plain client": Case(
            server, None, "speaks TLS", "does not speak TLS, and this server does",
            "",
        ),
        "a plain server": Case(
            None, trainer, "this process has credentials|or this process without",
            "speaks TLS, and this process does not|HTTPS traffic",
            "wrong version number",
        ),
    }  # fmt: skip


CASES = [
    *("a client of another authority", "an expired client", "a client of the next hour"),
    *("a server of another authority", "an expired server", "a server of the next hour"),
    *("a server elsewhere", "a client without a certificate", "a plain client", "a plain server"),
]


@pytest.mark.parametrize("port", ["tcp", "grpc", "http"])
@pytest.mark.parametrize("case", CASES)
def test_a_wrong_connection_is_refused_on_both_sides(
    closing: ExitStack,
    caplog: pytest.LogCaptureFixture,
    cases: dict[str, Case],
    case: str,
    port: str,
) -> None:
    theirs, ours, client_says, server_says, browser_says = cases[case]
    caplog.set_level(logging.INFO)
    if port == "http":
        assert browser_says in refused_by_http(closing, theirs, ours)
    else:
        assert re.search(client_says, refused_by_worker(closing, theirs, ours, port))
    if port != "grpc":  # gRPC's own server says nothing
        reason = re.compile(f"127.0.0.1.*({server_says})")
        wait_until(lambda: reason.search(caplog.text) is not None)


@pytest.mark.parametrize(
    ("begins", "ends", "valid"), [(-9, -1, False), (1, 9, False), (-1, 1, True)]
)
def test_a_server_says_that_its_certificate_is_not_valid_now(
    authority: Authority, caplog: pytest.LogCaptureFixture, begins: float, ends: float, valid: bool
) -> None:
    authority.issue(f"from{begins}", begins=begins, ends=ends).loaded()
    assert ("peers will refuse it; replace the file" in caplog.text) != valid


@pytest.mark.parametrize("says", ["", "FBY1", "\x16\x03\x01\x02\x00\x01", "GET / HTTP/1.1\r\n\r\n"])
def test_garbage_disturbs_nobody(
    closing: ExitStack, server: Credentials, trainer: Credentials, says: str
) -> None:
    worker = started(closing, credentials=server)
    task(worker, 1, 3)
    with socket.create_connection(("127.0.0.1", worker.port)) as sock:
        sock.sendall(says.encode("latin-1") + b"\xff" * 50 * bool(says))
        with using(trainer):
            assert Consumer(only(worker, "tcp"), reads=1, closing=closing).numbers() == [1, 2, 3]
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while sock.recv(4096):
                pass


def test_a_handshake_byte_by_byte_ends(
    closing: ExitStack, server: Credentials, trainer: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_servers, "_HANDSHAKE_S", 3.0)
    worker = started(closing, credentials=server)
    task(worker, 1, 3)
    with socket.create_connection(("127.0.0.1", worker.port), PATIENCE_S) as sock:
        sock.sendall(b"\x16\x03\x01\x40\x00")
        with using(trainer):
            assert Consumer(only(worker, "tcp"), reads=1, closing=closing).numbers() == [1, 2, 3]
        with pytest.raises(ConnectionError):
            for _ in range(PATIENCE_S * 20):
                sock.sendall(b"\x01")
                time.sleep(0.05)


def test_who_makes_many_connections_and_says_nothing_harms_nobody_else(
    closing: ExitStack, server: Credentials, trainer: Credentials
) -> None:
    worker = started(closing, credentials=server)
    task(worker, 1, 3)

    def connected() -> socket.socket:
        address, theirs = ("127.0.0.1", worker.port), ("127.0.0.2", 0)
        return closing.enter_context(socket.create_connection(address, source_address=theirs))

    silent = [connected() for _ in range(MAX_STRANGERS)]
    one_more = connected()
    one_more.settimeout(PATIENCE_S)
    assert one_more.recv(1) == b"", "it is closed at once"
    with using(trainer):
        assert Consumer(only(worker, "tcp"), reads=1, closing=closing).numbers() == [1, 2, 3]
    silent.pop().close()
    with pytest.raises(TimeoutError):  # one is served again, as soon as the end is noticed
        for _ in range(100):
            again = connected()
            again.settimeout(0.2)
            assert again.recv(1) == b""


def test_a_consumer_that_stalls_loses_nothing_and_holds_up_nobody(
    closing: ExitStack, server: Credentials, trainer: Credentials
) -> None:
    worker = started(closing, credentials=server)
    task(worker, 1, 30, lambda: 1 << 20)
    task(worker, 2, 3)
    sock = socket.create_connection(("127.0.0.1", worker.port), PATIENCE_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    sock.settimeout(None)
    frames.set_timeout(sock, socket.SO_RCVTIMEO, PATIENCE_S)
    tls = TlsSocket(sock, trainer, server_name="localhost", peer="the worker")
    closing.callback(tls.close)
    tls.handshake(PATIENCE_S)
    hello = wire.Hello(version=messages.VERSION, consumer_id=7, worker_uid=UID)
    say(tls, wire.ToWorker(hello=hello))
    say(tls, wire.ToWorker(read=wire.Read(task_id=1, any=wire.Any())))
    say(tls, wire.ToWorker(credit=wire.Credit(bytes=1 << 30)))
    with using(trainer):
        assert Consumer(only(worker, "tcp"), reads=2, closing=closing).numbers() == [1, 2, 3]
    for _ in range(100):
        say(tls, wire.ToWorker(ping=wire.Ping()))
    reader = frames.FrameReader(tls, "the worker")
    blocks = 0
    while blocks < 30:
        frame = reader.read()
        assert frame is not None
        message = wire.ToConsumer.FromString(frame.header)
        blocks += message.HasField("block")
    say(tls, wire.ToWorker(ping=wire.Ping()))


def test_a_small_message_that_finds_no_room_is_not_sent(
    closing: ExitStack, server: Credentials, trainer: Credentials
) -> None:
    """A record that was made and not sent would be missing in the stream."""
    ends = socket.socketpair()
    theirs = closing.enter_context(TlsSocket(ends[0], server, server_name=None, peer="a client"))
    ours = closing.enter_context(
        TlsSocket(ends[1], trainer, server_name="localhost", peer="a server")
    )
    with ThreadPoolExecutor(1) as pool:
        shaking = pool.submit(theirs.handshake, PATIENCE_S)
        ours.handshake(PATIENCE_S)
        shaking.result()
    small, sent = frames.encode(b"x" * 200), 0
    while frames.send_at_once(theirs, small):
        sent += 1
    assert not frames.send_at_once(theirs, small)
    reader = frames.FrameReader(ours, "a server")
    for _ in range(sent):
        assert reader.read() == (b"x" * 200, frames.NO_PAYLOAD)
    assert frames.send_at_once(theirs, frames.encode(b"y"))
    assert (reader.read() or b"")[0] == b"y"


def test_a_worker_stops_though_a_consumer_says_nothing(
    closing: ExitStack, server: Credentials
) -> None:
    worker = started(closing, credentials=server)
    closing.enter_context(socket.create_connection(("127.0.0.1", worker.port)))
    half = closing.enter_context(socket.create_connection(("127.0.0.1", worker.port)))
    half.sendall(b"\x16\x03\x01")
    worker.stop()
    assert not [t for t in threading.enumerate() if t.name == "forebay-blocks-receiver"]


def test_another_user_reads_over_tcp_instead(
    closing: ExitStack, server: Credentials, trainer: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = started(closing, credentials=server)
    task(worker, 1, 2)
    own = os.geteuid()
    with using(trainer):
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        reading = Consumer(only(worker, "unix"), reads=1, give_up_s=0.1, closing=closing)
        assert f"user {own} runs the worker, and not {own + 1}" in str(reading.get())
        both = Consumer(worker.addresses, reads=1, consumer_id=2, closing=closing)
        assert both.numbers() == [1, 2]


def test_a_unix_socket_is_not_for_other_users(server: Credentials) -> None:
    admission = Admission(server)
    assert admission.of_user(os.geteuid()) == Identity("user", (str(os.geteuid()),))
    with pytest.raises(Unauthenticated, match="read over TCP, with credentials"):
        admission.of_user(os.geteuid() + 1)


# -- tokens ----------------------------------------------------------------------------------------


@pytest.fixture
def with_tokens(server: Credentials, tmp_path: Path) -> Credentials:
    """A server that knows two tokens."""
    tokens = [token(tmp_path / f"{name}.token", f"{name}-secret\n") for name in ("new", "old")]
    return Credentials(**files(server) | {"token_file": ",".join(tokens)})


def test_a_token_opens_a_data_connection(
    closing: ExitStack, with_tokens: Credentials, tmp_path: Path, caplog: Any
) -> None:
    worker = started(closing, credentials=with_tokens)
    task(worker, 1, 2)
    for number, path in enumerate(with_tokens.token_file.split(",")):
        if number:
            task(worker, 1 + number, 2)
        with using(holder(with_tokens, path)):
            reading = Consumer(
                only(worker, "tcp"), reads=1 + number, consumer_id=number + 1, closing=closing
            )
            assert reading.numbers() == [1, 2]
    wrong = token(tmp_path / "wrong", "guess")
    said = refused_by_worker(closing, with_tokens, holder(with_tokens, wrong))
    assert "the token is not one that is known here: give the client" in said
    wait_until(lambda: "the token is not one that is known here" in caplog.text)
    certificate = Credentials(**files(with_tokens) | {"token_file": ""})
    assert "no token was sent" in refused_by_worker(closing, with_tokens, certificate)


# -- calls -----------------------------------------------------------------------------------------


def status(target: str, credentials: Credentials | None) -> str:
    """What a call of the dispatcher brings: its answer, or the error."""
    with using(credentials), DispatcherClient(target) as client:
        try:
            return client.call(
                pb.GetStatusRequest(), pb.GetStatusResponse, patience_s=PATIENCE_S
            ).status
        except ForebayError as error:
            return f"{type(error).__name__}: {error}"


@pytest.fixture(scope="module")
def dispatcher(authority: Authority) -> Iterator[DispatchServer]:
    own = authority.issue("dispatcher", "localhost")
    with DispatchServer(DispatcherConfig(**files(own))) as dispatcher:
        yield dispatcher


def test_a_wrong_call_is_refused_with_the_reason(
    closing: ExitStack,
    dispatcher: DispatchServer,
    authority: Authority,
    stranger: Authority,
    server: Credentials,
    trainer: Credentials,
    tmp_path: Path,
) -> None:
    target = dispatcher.target
    assert status(target, trainer).startswith("{")
    address = target.replace("localhost", "127.0.0.1")
    for _ in range(100):  # that begin no handshake disturb nobody
        port = dispatcher.address.rpartition(":")[2]
        closing.enter_context(socket.create_connection(("127.0.0.1", int(port)), PATIENCE_S))
    assert status(target, trainer).startswith("{")
    no_certificate = holder(server, token(tmp_path / "t", "secret"))
    for client, at, said in (
        (None, target, "speaks TLS, and this process has no credentials: give them"),
        (no_certificate, target, "asks for a certificate, and this process has none"),
        (
            authority.issue("old", begins=-2, ends=-1 / 24),
            target,
            f"has expired; renew it, or {CLOCKS}",
        ),
        (authority.issue("soon", begins=1 / 24), target, f"is not yet valid; wait, or {CLOCKS}"),
        (mixed(stranger.issue("other"), server), target, "no authority that it knows"),
        (stranger.issue("other"), target, "unable to get local issuer certificate"),
        (trainer, address, "IP address mismatch, certificate is not valid for '127.0.0.1'"),
    ):
        found = status(at, client)
        assert found.startswith("Unauthenticated") and said in found, found
    assert dispatcher._num_workers() == 0, "it goes on"


def test_a_plain_dispatcher_is_told_from_one_with_tls(trainer: Credentials) -> None:
    with DispatchServer() as plain:
        assert "does not speak TLS, and this process has credentials" in status(
            plain.target, trainer
        )
        assert status(plain.target, None).startswith("{")


def test_a_call_needs_a_token_that_the_dispatcher_knows(
    with_tokens: Credentials, tmp_path: Path
) -> None:
    new, old = with_tokens.token_file.split(",")
    wrong = token(tmp_path / "wrong", "guess")
    certificate = Credentials(**files(with_tokens) | {"token_file": ""})
    with DispatchServer(DispatcherConfig(**files(with_tokens))) as dispatcher:
        assert status(dispatcher.target, holder(with_tokens, new)).startswith("{")
        assert status(dispatcher.target, holder(with_tokens, old)).startswith("{")
        refused = status(dispatcher.target, holder(with_tokens, wrong))
        assert refused.startswith("Unauthenticated: the token is not one that is known here")
        assert "no token was sent" in status(dispatcher.target, certificate)

        own_file = tmp_path / "own"
        dataset = pb.RegisterDatasetRequest(graph=GRAPH)
        job = pb.GetOrCreateJobRequest(sharding="OFF")
        own = holder(with_tokens, token(own_file, "new-secret"))
        with (
            using(own),
            contextlib.closing(DispatcherClient(dispatcher.target)) as client,
            ThreadPoolExecutor(2) as pool,
        ):
            registered = client.call(dataset, pb.RegisterDatasetResponse)
            job.dataset_id = registered.dataset_id
            joining = pb.JoinIterationRequest(job=job)
            joined = client.call_numbered(joining, pb.JoinIterationResponse)
            beat = pb.ConsumerHeartbeatRequest(
                consumer_id=joined.consumer_id, version=joined.news.version, wait_ms=1_500
            )
            poll = pool.submit(client.call, beat, pb.ConsumerHeartbeatResponse, timeout_s=20)
            token(Path(new), "newer-secret")
            stale = holder(with_tokens, token(tmp_path / "stale", "new-secret"))
            wait_until(lambda: "not one that is known" in status(dispatcher.target, stale))
            asked = pool.submit(client.call, pb.GetStatusRequest(), pb.GetStatusResponse)
            wait([asked], 0.5)
            assert not asked.done(), "it is repeated"
            assert poll.result().data_credential, "who was let in is answered"
            assert not asked.done()
            token(own_file, "newer-secret")
            assert asked.result().status


def test_a_handshake_may_be_slow(
    closing: ExitStack, dispatcher: DispatchServer, trainer: Any
) -> None:
    """gRPC gives up a plain connection that takes 50 to 500 ms, and tries again."""

    def slowly() -> Rule:
        waits = [0.8]  # before the first bytes

        def rule(data: bytes) -> tuple[bytes, bool]:
            time.sleep(waits.pop() if waits else 0)
            return data, True

        return rule

    proxy = Proxy(int(dispatcher.address.rpartition(":")[2]), lambda: (whole, slowly()))
    closing.callback(proxy.close)
    assert status(f"localhost:{proxy.port}", trainer).startswith("{")


class _Says(grpc.GenericRpcHandler):  # type: ignore[type-arg] # generic in its stubs only
    """Answers each call with who has sent it."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def service(self, _: grpc.HandlerCallDetails) -> Any:
        def answer(_: bytes, context: Any) -> bytes:
            return str(self._admission.of_call(context)).encode()

        return grpc.unary_unary_rpc_method_handler(answer)


def who(closing: ExitStack, theirs: Credentials, ours: Credentials) -> str:
    """Who a server thinks has called it."""
    pool = closing.enter_context(ThreadPoolExecutor(2))
    admission = Admission(theirs)
    server = grpc.server(pool, handlers=[_Says(admission)], interceptors=interceptors(admission))
    address = bind(server, "127.0.0.1", 0, theirs)
    server.start()
    try:
        with connect(address, credentials=ours) as channel:
            call: Any = channel.unary_unary("/a/b", None, None)
            return str(call(b"", timeout=PATIENCE_S, metadata=metadata_of(ours)), "utf-8")
    finally:
        server.stop(None).wait()


def test_a_caller_has_an_identity(
    closing: ExitStack, server: Credentials, trainer: Credentials, with_tokens: Credentials
) -> None:
    assert who(closing, server, trainer) == "certificate trainer, trainer.example"
    new, old = with_tokens.token_file.split(",")
    assert who(closing, with_tokens, holder(server, new)) == "token new"
    assert who(closing, with_tokens, holder(server, old)) == "token old"


def test_a_fork_has_its_credentials_whatever_other_threads_did(server: Credentials) -> None:
    with module._files_of(server).lock:
        child = os.fork()
        if not child:
            os._exit(0 if server.loaded().key else 1)
        for _ in range(PATIENCE_S * 100):
            if ended := os.waitpid(child, os.WNOHANG)[0]:
                break
            time.sleep(0.01)
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert ended, "it waits for a lock that another thread held"


def test_a_port_that_closes_each_connection_may_be_a_dispatcher_s_soon(
    closing: ExitStack, trainer: Credentials
) -> None:
    listener = closing.enter_context(socket.create_server(("127.0.0.1", 0)))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    threading.Thread(target=accept, daemon=True).start()
    client = DispatcherClient(f"127.0.0.1:{listener.getsockname()[1]}", credentials=trainer)
    closing.callback(client.close)
    closing.callback(listener.shutdown, socket.SHUT_RDWR)
    with pytest.raises(Unavailable, match="closed the connection instead of speaking TLS"):
        client.call(pb.GetStatusRequest(), pb.GetStatusResponse, patience_s=1)


def test_nothing_is_sent_in_plain(closing: ExitStack, trainer: Credentials) -> None:
    ours, theirs = socket.socketpair()
    closing.enter_context(theirs)
    tls = closing.enter_context(TlsSocket(ours, trainer, server_name="localhost", peer="it"))
    with pytest.raises(NotImplementedError, match="in plain"):
        tls.sendall(b"secret")

"""How requests are received: in pieces, within bounds, after the caller's role was looked at."""

from __future__ import annotations

import asyncio
import gc
import os
import ssl
import threading
import time
import urllib.request
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from forebay.service import Credentials, DispatcherConfig, DispatchServer
from forebay.service.connections import requests
from forebay.service.connections.access import ROLES
from forebay.service.connections.credentials import client_context
from forebay.service.connections.dispatcher_client import SERVICE, DispatcherClient
from forebay.service.connections.grpc_server import (
    bind,
    connect,
    generic_handler,
    is_listened_on,
    server_options,
)
from forebay.service.connections.requests import PIECE_BYTES, RequestReceiver, ask
from forebay.service.dispatcher import bounds
from forebay.service.dispatcher.permissions import METHODS
from forebay.service.errors import ForebayError, InvalidArgument, Unavailable
from forebay.service.processes import ChildProcess, forebay, free_port
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto import tf_service_pb2 as tf_pb
from forebay.service.proto.metrics_pb2 import Metric, Metrics, TaskMetrics
from forebay.service.worker.bundle_tasks import MOST_REPORTED

from ..certificates import Authority

MOST_GROWTH_KB = 100 << 10
MOST_STALL_S = 5.0
"""Of processor time, below a leader's lease: it was 14 s for 12 MB."""


class Call:
    """As a server's call, which has these pieces, and then says no more."""

    def __init__(self, *pieces: bytes, ends: bool = True, of: str = "a connection") -> None:
        self._pieces = iter(pieces)
        self._ends = ends
        self._of = of

    def peer(self) -> str:
        return self._of

    async def read(self) -> Any:
        for piece in self._pieces:
            return piece
        if not self._ends:
            await asyncio.sleep(1e9)
        return grpc.aio.EOF  # type: ignore[attr-defined]


class Channel:
    """Records what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def unary_unary(self, *_: Any) -> Any:
        return lambda request, **_: self.sent.append(request)

    def stream_unary(self, *_: Any) -> Any:
        return lambda pieces, **_: self.sent.extend(pieces)


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 5])
def test_what_is_sent_in_pieces_is_received_whole(size: int) -> None:
    request, channel = bytes(range(251)) * (size // 251) + bytes(size % 251), Channel()
    ask(channel, "/a/B", request, timeout=1)
    assert [len(piece) for piece in channel.sent[:-1]] == [PIECE_BYTES] * (size // PIECE_BYTES)

    async def received() -> bytes:
        # A whole last piece is the only one that is waited for behind.
        async with RequestReceiver().request(
            Call(*channel.sent, ends=False), "a", size + 1
        ) as data:
            return bytes(data.pop())

    assert asyncio.run(received()) == request


def test_bytes_under_way_are_bounded_in_all_and_by_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "SMALL_BYTES", 50)

    async def check() -> None:
        receiver = RequestReceiver(memory_bytes=1_600)

        async def refused(peer: str, size: int, most: int = 1_000) -> str:
            with pytest.raises(ForebayError) as error:
                async with receiver.request(Call(bytes(size)), peer, most):
                    pass
            return f"{type(error.value).__name__}: {error.value}"

        assert "InvalidArgument: the request has more than 99 bytes" in await refused("a", 100, 99)
        async with receiver.request(Call(bytes(150)), "a", 1_000):
            assert "Unavailable: 201 bytes of the requests of a" in await refused("a", 51)
            async with (
                receiver.request(Call(bytes(50)), "a", 1_000),
                receiver.request(Call(bytes(1)), "a", 1_000),
            ):
                pass  # a sign of life is never refused
            async with receiver.request(Call(bytes(100)), "b", 1_000):
                assert "and 301 of all" in await refused("c", 51)
            async with receiver.request(Call(bytes(100)), "c", 1_000):
                pass
        async with receiver.request(Call(bytes(200)), "a", 1_000):
            pass  # what was refused counts no more

    asyncio.run(check())


def test_who_sends_slowly_holds_up_himself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "TURNS", 2)
    monkeypatch.setattr(requests, "RECEIVE_S", 0.2)

    async def receive(receiver: RequestReceiver, call: Call) -> str:
        try:
            async with receiver.request(call, "a team", 1_000):
                return "received"
        except Unavailable:
            return "late"

    async def check() -> None:
        receiver = RequestReceiver()
        slow = [asyncio.create_task(receive(receiver, Call(ends=False))) for _ in range(5)]
        await asyncio.sleep(0.01)
        assert await receive(receiver, Call(b"a", of="another connection")) == "received"
        assert not any(task.done() for task in slow)
        assert await asyncio.gather(*slow) == ["late"] * 5

    asyncio.run(check())


def nested(depth: int) -> bytes:
    source = b""
    for _ in range(depth):
        source = b"\x1a" + bytes([len(source) & 127 | 128, len(source) >> 7]) + source
    return source


HELD = pb.ConsumerHeartbeatRequest(rounds=pb.RoundReport(held=[pb.HeldTask()] * 5_001))


@pytest.mark.parametrize(
    ("kind", "data", "why"),
    [
        (pb.RegisterDatasetRequest, b"\x1a\x00" * 95_000, "RegisterDatasetRequest.sources"),
        (pb.RegisterDatasetRequest, b"\x1a\x80\x00" * 5_001, "RegisterDatasetRequest.sources"),
        (pb.RegisterDatasetRequest, nested(3) * 5_001, "RegisterDatasetRequest.sources"),
        (pb.RegisterDatasetRequest, b"\x48\x01" * 1_001, "RegisterDatasetRequest.lengths"),
        (pb.RegisterDatasetRequest, b"\x38\x01" * 3, "RegisterDatasetRequest.compression"),
        (pb.RegisterDatasetRequest, (b"\x1a\x5a" + b"\x78\1" * 45) * 30, "1000 fields"),
        (pb.StartSaveRequest, b"\x22\x00" * 5_001, "StartSaveRequest.sources"),
        *((pb.WorkerHeartbeatRequest, bytes([tag, 0]) * 5_001, "WorkerHeartbeatRequest")
          for tag in (0x1A, 0x22, 0x52, 0x62, 0x6A, 0x7A)),
        (pb.LeaseSplitsRequest, b"\x3a\x00" * 5_001, "LeaseSplitsRequest.returned"),
        (pb.ConsumerHeartbeatRequest, HELD.SerializeToString(), "RoundReport.held"),
        (pb.ListDatasetsRequest, b"\x18\x01" * 1_001, "1000 fields that are not known"),
        (pb.GetStatusRequest, b"\x7a\x00" * 1_001, "1000 fields that are not known"),
        (tf_pb.ClientHeartbeatRequest, b"\x7a\x00" * 1_001, "1000 fields that are not known"),
        (
            pb.WorkerHeartbeatRequest,
            pb.WorkerHeartbeatRequest(
                metrics=[TaskMetrics(totals=Metrics(metrics=[Metric()] * 1_000))]
            ).SerializeToString() * 500,
            "WorkerHeartbeatRequest has more than 500000 fields",
        ),
    ],
)  # fmt: skip
def test_parts_are_counted_before_they_are_parsed(
    kind: Any, data: bytes, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these shapes took a third of a second, of which others had none."""

    def parsed(*_: Any) -> Any:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(bounds, "parsed", parsed)
    with pytest.raises(InvalidArgument, match=why):
        asyncio.run(bounds.parse(kind, data))


def test_a_peers_requests_are_parsed_one_at_a_time() -> None:
    """Others wait for one of them at most."""
    parsing, most = [0], [0]

    async def parse(kind: Any, data: Any) -> Any:
        parsing[0] += 1
        most[0] = max(most[0], parsing[0])
        await asyncio.sleep(0.01)
        parsing[0] -= 1
        return kind.FromString(data)

    async def answer(_: Any) -> Any:
        return pb.GetStatusResponse()

    async def check(peers: list[str]) -> int:
        methods = {"C": (answer, pb.GetStatusRequest, pb.GetStatusResponse)}
        most[0] = 0
        handler = generic_handler("a.B", methods, admit=lambda *_: peers.pop(), parse=parse)
        server = grpc.aio.server(handlers=[handler])
        address = bind(server, "localhost", 0)
        await server.start()
        async with connect(address, is_async=True) as channel:
            call = channel.unary_unary("/a.B/C", None, None)
            await asyncio.gather(*(call(b"", timeout=60) for _ in peers))
        await server.stop(None)
        return most[0]

    assert asyncio.run(check(["a"] * 5)) == 1
    assert asyncio.run(check(["a", "a", "b", "b"])) == 2


def test_numbers_of_lists_are_counted_too() -> None:
    """A byte becomes eight."""
    many = pb.ConsumerHeartbeatRequest(refused=[1 << 40] * 100_001).SerializeToString()
    with pytest.raises(InvalidArgument, match="lists of the ConsumerHeartbeatRequest have more"):
        asyncio.run(bounds.parse(pb.ConsumerHeartbeatRequest, many))


def test_a_worker_may_report_bundles_of_many_jobs() -> None:
    """It repeats a heartbeat that is refused."""
    beat = pb.WorkerHeartbeatRequest(address="w:1", uid=1)
    for job in range(1, 31):
        many = range(MOST_REPORTED)
        beat.checked.add(job_id=job, bundles=many, checksums=many, lengths=many)
    sent = beat.SerializeToString()
    assert len(sent) < requests.MAX_REQUEST_BYTES
    assert asyncio.run(bounds.parse(pb.WorkerHeartbeatRequest, sent)) == beat


def test_what_has_few_parts_is_parsed_whatever_it_is() -> None:
    request = pb.RegisterDatasetRequest(lengths=range(100_001), graph=b"\x1a\x00" * 200_000)
    request.sources.add().count = 3
    sent = request.SerializeToString()
    assert asyncio.run(bounds.parse(pb.RegisterDatasetRequest, sent)) == request
    for data in (b"\x1a\xff\xff\xff\xff\x0f", b"\xff" * 30, b"\x1a", b"\x0c", b"\x1b\x1b\x1b"):
        with pytest.raises(InvalidArgument, match="do not parse"):
            asyncio.run(bounds.parse(pb.RegisterDatasetRequest, data))


# -- of each role ----------------------------------------------------------------------------------


class Attacked(NamedTuple):
    """A server in a process of its own."""

    address: str
    process: int
    http_port: int


@pytest.fixture(scope="module")
def dispatcher(authority: Authority, tmp_path_factory: Any) -> Iterator[Attacked]:
    rules = tmp_path_factory.mktemp("rules") / "access.toml"
    rules.write_text("".join(f'[[grant]]\nto = ["{r}"]\nroles = ["{r}"]\n' for r in ROLES))
    port = free_port()
    options: Any = authority.issue("dispatcher").files() | {"access_file": str(rules)}
    with DispatchServer(DispatcherConfig(**options, http_port=port)) as server:
        assert server._process is not None
        yield Attacked(server.address, server._process.pid, port)


@pytest.fixture
def worker(dispatcher: Attacked, authority: Authority) -> Iterator[Attacked]:
    port, http_port = free_port(), free_port()
    files = authority.issue("worker").files()
    process = ChildProcess(
        forebay(
            "service.cli", "worker", f"--dispatcher={dispatcher.address}", f"--port={port}",
            f"--http-port={http_port}", f"--address=localhost:{port}",
            *(f"--{name.replace('_', '-')}={value}" for name, value in files.items()),
        ),
        None,
    )  # fmt: skip
    try:
        for wanted in (http_port, port):
            while not is_listened_on(f"localhost:{wanted}", 1):
                assert process.poll() is None
                time.sleep(0.05)
        yield Attacked(f"localhost:{port}", process.pid, http_port)
    finally:
        process.kill()
        process.finish()


def memory_kb(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def worked_s(process: int) -> float:
    """The processor time that it took until now."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Others(threading.Thread):
    """Asks for /healthz and, as an operator, makes a call, all the time. A stall is what the server
    worked while one of them waited, whatever else the machine did."""

    def __init__(self, server: Attacked, authority: Authority) -> None:
        super().__init__(daemon=True)
        own = authority.issue("operator")
        self._process = server.process
        self._url = f"https://localhost:{server.http_port}/healthz"
        self._context: ssl.SSLContext = client_context(own)
        self._channel = connect(server.address, credentials=own)
        self._over = threading.Event()
        self.longest_s, self.answers = 0.0, 0

    def run(self) -> None:
        while not self._over.is_set():
            for ask_once in (self._probe, self._call):
                since_s = worked_s(self._process)
                ask_once()
                self.longest_s = max(self.longest_s, worked_s(self._process) - since_s)
                self.answers += 1

    def _probe(self) -> None:
        with urllib.request.urlopen(self._url, context=self._context, timeout=60) as answer:
            assert answer.status == 200

    def _call(self) -> None:
        try:
            ask(self._channel, f"/{SERVICE}/ListDatasets", b"", timeout=60)
        except grpc.RpcError as error:  # of a worker
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error

    def stop(self) -> float:
        self._over.set()
        self.join()
        self._channel.close()
        assert self.answers
        return self.longest_s


LARGE = (64 << 20) * b"\x1a\x00"
MANY = (PIECE_BYTES // 2 - 100) * b"\x1a\x00"
NESTED = nested(300) * 800
REFUSED = "/tensorflow.data.DispatcherService/WorkerUpdate"


def attack(
    server: Attacked, attacks: list[tuple[Credentials, str, bytes, bool]]
) -> tuple[list[str], int]:
    """What is answered to these requests side by side, each whole or in pieces, and the most memory
    that the server has meanwhile, in KB."""
    said = ["" for _ in attacks]

    def send(number: int, own: Credentials, path: str, request: bytes, whole: bool) -> None:
        with connect(server.address, credentials=own) as channel:
            try:
                if whole:
                    channel.unary_unary(path, None, None)(request, timeout=60)
                else:
                    ask(channel, path, request, timeout=60)
                said[number] = "OK"
            except grpc.RpcError as error:
                said[number] = f"{error.code().name}: {error.details()}"

    threads = [threading.Thread(target=send, args=(n, *one)) for n, one in enumerate(attacks)]
    for thread in threads:
        thread.start()
    most = 0
    while any(thread.is_alive() for thread in threads):
        most = max(most, memory_kb(server.process))
        time.sleep(0.01)
    return said, most


@pytest.mark.parametrize("role", [*ROLES, "nobody"])
def test_large_requests_take_neither_memory_nor_time_of_others(
    role: str, dispatcher: Attacked, authority: Authority
) -> None:
    own, others = authority.issue(role), Others(dispatcher, authority)
    before = memory_kb(dispatcher.process)
    others.start()
    attacks = [
        (own, f"/{SERVICE}/{method}" if method != REFUSED else method, *request)
        for method in ("RegisterDataset", "GetStatus", "WorkerHeartbeat", REFUSED)
        for request in ((LARGE, True), (LARGE, False), (MANY, False), (NESTED, False))
    ]
    said, most = attack(dispatcher, attacks)
    assert others.stop() < MOST_STALL_S
    may = [method for method, (roles, _) in METHODS.items() if role in roles]
    for (_, path, *_), why in zip(attacks, said, strict=True):
        method = path.rpartition("/")[2]
        if path == REFUSED or (method not in may and method != "GetStatus"):
            assert why.startswith(("PERMISSION_DENIED", "RESOURCE_EXHAUSTED: ")), (method, why)
        else:
            assert not why.startswith("OK") or method == "GetStatus", (method, why)
    allowed = 2 * len(LARGE) >> 10 if "RegisterDataset" in may else 0  # which is put together
    assert most < before + MOST_GROWTH_KB + allowed, said


def test_a_workers_port_receives_no_large_requests(worker: Attacked, authority: Authority) -> None:
    """Of all roles at once: it has no use for any of them but in tunnels."""
    others, before = Others(worker, authority), memory_kb(worker.process)
    others.start()
    attacks = [
        (own, path, request, whole)
        for own in map(authority.issue, [*ROLES, "nobody"])
        for path, request, whole in (
            ("/tensorflow.data.WorkerService/GetElement", LARGE, True),
            ("/tensorflow.data.WorkerService/ProcessTask", NESTED, False),
            ("/forebay.v1.Worker/Transfer", LARGE, False),
            ("/forebay.v1.Worker/Transfer", LARGE, True),
            (f"/{SERVICE}/RegisterDataset", LARGE, False),
            (f"/{SERVICE}/RegisterDataset", MANY, False),
        )
    ]
    said, most = attack(worker, attacks)
    assert others.stop() < MOST_STALL_S
    for (_, path, *_), why in zip(attacks, said, strict=True):
        assert not why.startswith("OK") or "Transfer" in path, (path, why)
    assert most < before + MOST_GROWTH_KB, said


@pytest.mark.parametrize("datasets", [True, False])
def test_messages_that_inflate_are_refused(datasets: bool) -> None:
    """Of a server without credentials too, where those that carry datasets are large."""
    got: list[int] = []

    def answer(data: bytes, _: Any) -> bytes:
        got.append(len(data))
        return b""

    handler = grpc.method_handlers_generic_handler(
        "a.B", {"C": grpc.unary_unary_rpc_method_handler(answer)}
    )
    server = grpc.server(
        ThreadPoolExecutor(1), handlers=[handler], options=server_options(None, datasets=datasets)
    )
    address = bind(server, "localhost", 0)
    server.start()
    try:
        with connect(address) as channel:
            call = channel.unary_unary("/a.B/C", None, None)
            with pytest.raises(grpc.RpcError, match="Compression algorithm 'gzip' is disabled"):
                call(bytes(100 << 20), compression=grpc.Compression.Gzip, timeout=60)
            call(bytes(PIECE_BYTES - 100), timeout=60)
            if datasets:
                call(bytes(2 * PIECE_BYTES), timeout=60)
            else:
                with pytest.raises(grpc.RpcError, match="larger than max"):
                    call(bytes(2 * PIECE_BYTES), timeout=60)
    finally:
        server.stop(None)
    assert got == [PIECE_BYTES - 100, 2 * PIECE_BYTES][: 1 + datasets]


def test_a_dataset_fits_into_the_memory_of_its_dispatcher() -> None:
    """Of deploy/kubernetes, 2 GiB: registering takes several times its bytes."""
    assert RequestReceiver(2 << 30).most_of_one == 256 << 20
    assert RequestReceiver(64 << 30).most_of_one == requests.MAX_DATASET_BYTES


def test_a_large_dataset_is_registered_in_pieces(
    dispatcher: Attacked, authority: Authority
) -> None:
    request = pb.RegisterDatasetRequest(metadata=bytes(9 * PIECE_BYTES))
    client = DispatcherClient(dispatcher.address, credentials=authority.issue("trainer"))
    with client, pytest.raises(InvalidArgument, match="a dataset without a graph"):
        client.call(request, pb.RegisterDatasetResponse)


@pytest.mark.parametrize("error", [InvalidArgument("no"), KeyError("a bug")])
def test_a_refused_request_is_freed_at_once(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Not when the garbage collector comes: errors refer to the frames that have it."""

    class Held:
        pass

    alive = weakref.WeakSet[Held]()

    async def check() -> None:
        loop = asyncio.get_running_loop()
        shared: asyncio.Future[None] = loop.create_future()
        waiting: list[asyncio.Task[str]] = []

        async def wait_again() -> str:
            """Its frame has the same error, and it goes on behind it."""
            try:
                await shared
            except type(error):
                await asyncio.sleep(0.3)
            return "went on"

        async def refuse(request: Any) -> Any:
            held = Held()
            alive.add(held)
            if not waiting:
                waiting.append(asyncio.create_task(wait_again()))
                loop.call_later(0.05, shared.set_exception, error)
            try:
                await shared
            except type(error) as cause:
                await asyncio.sleep(0.01)
                raise type(error)(str(cause), held.__class__.__name__) from cause

        methods = {"GetStatus": (refuse, pb.GetStatusRequest, pb.GetStatusResponse)}
        server = grpc.aio.server()
        server.add_generic_rpc_handlers([generic_handler(SERVICE, methods)])
        address = bind(server, "127.0.0.1", 0)
        await server.start()
        async with connect(address, is_async=True) as channel:
            call = channel.unary_unary(f"/{SERVICE}/GetStatus", None, None)
            for _ in range(5):
                with pytest.raises(grpc.aio.AioRpcError):
                    await call(b"")
            assert len(alive) <= 1
        assert await asyncio.wait_for(waiting[0], 20) == "went on"
        await server.stop(None)

    gc.disable()
    try:
        asyncio.run(check())
    finally:
        gc.enable()
    tracebacks = [record for record in caplog.records if record.exc_info]
    assert len(tracebacks) == isinstance(error, KeyError), "and a bug is logged once a minute"

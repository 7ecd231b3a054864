"""How requests are received: in pieces, within bounds, after the caller's role was looked at."""

from __future__ import annotations

import asyncio
import pathlib
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from forebay.service import Credentials, DispatcherConfig, DispatchServer
from forebay.service.connections import requests
from forebay.service.connections.access import ROLES
from forebay.service.connections.credentials import client_context
from forebay.service.connections.dispatcher_client import SERVICE, DispatcherClient
from forebay.service.connections.grpc_server import connect
from forebay.service.connections.requests import PIECE_BYTES, RequestReceiver, ask
from forebay.service.dispatcher import bounds
from forebay.service.dispatcher.permissions import METHODS
from forebay.service.errors import ForebayError, InvalidArgument, Unavailable
from forebay.service.processes import free_port
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.worker.bundle_reports import MOST_REPORTED

from ..certificates import Authority

MOST_GROWTH_KB = 100 << 10
MOST_STALL_S = 5.0
"""Below a leader's lease: it may have been 14 s for 12 MB."""


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
            return data

    assert asyncio.run(received()) == request


def test_bytes_under_way_are_bounded_in_all_and_by_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "SMALL_BYTES", 50)

    async def check() -> None:
        receiver = RequestReceiver(most=300, most_of_one=200)

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
            async with receiver.request(Call(bytes(150)), "b", 1_000):
                assert "and 351 of all" in await refused("c", 51)
            async with receiver.request(Call(bytes(150)), "c", 1_000):
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


@pytest.mark.parametrize(
    "data",
    [b"\x1a\x00" * 100_001, b"\x48\x01" * 100_001, b"\x1a\x80\x00" * 100_001, nested(3) * 40_000],
    ids=["empty parts", "numbers", "long lengths", "nested"],
)
def test_parts_are_counted_before_they_are_parsed(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parsed(*_: Any) -> Any:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(bounds, "parsed", parsed)
    with pytest.raises(InvalidArgument, match="RegisterDatasetRequest has more than 100000 fields"):
        asyncio.run(bounds.parse(pb.RegisterDatasetRequest, data))


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


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def dispatcher(authority: Authority, tmp_path_factory: Any) -> Iterator[tuple[DispatchServer, int]]:
    rules = tmp_path_factory.mktemp("rules") / "access.toml"
    rules.write_text("".join(f'[[grant]]\nto = ["{r}"]\nroles = ["{r}"]\n' for r in ROLES))
    port = free_port()
    options: Any = authority.issue("dispatcher").files() | {"access_file": str(rules)}
    with DispatchServer(DispatcherConfig(**options, http_port=port)) as server:
        yield server, port


def memory_kb(process: int) -> int:
    status = pathlib.Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


class Prober(threading.Thread):
    """Asks for /healthz all the time."""

    def __init__(self, port: int, credentials: Credentials) -> None:
        super().__init__(daemon=True)
        self._url = f"https://localhost:{port}/healthz"
        self._context: ssl.SSLContext = client_context(credentials)
        self.longest_s, self._over = 0.0, threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            since = time.monotonic()
            with urllib.request.urlopen(self._url, context=self._context, timeout=60) as answer:
                assert answer.status == 200
            self.longest_s = max(self.longest_s, time.monotonic() - since)

    def stop(self) -> float:
        self._over.set()
        self.join()
        return self.longest_s


LARGE = (64 << 20) * b"\x1a\x00"
REFUSED = "/tensorflow.data.DispatcherService/WorkerUpdate"
MANY = (PIECE_BYTES // 2 - 100) * b"\x1a\x00"


@pytest.mark.parametrize("role", [*ROLES, "nobody"])
def test_large_requests_take_neither_memory_nor_time_of_others(
    role: str, dispatcher: tuple[DispatchServer, int], authority: Authority
) -> None:
    server, port = dispatcher
    process = server._process
    assert process is not None
    own = authority.issue(role)
    prober = Prober(port, own)
    prober.start()
    before, most = memory_kb(process.pid), 0
    said: list[tuple[str, str]] = []

    def attack(method: str, request: bytes, whole: bool = False) -> None:
        with connect(server.address, credentials=own) as channel:
            path = method if method == REFUSED else f"/{SERVICE}/{method}"
            try:
                if whole:
                    channel.unary_unary(path, None, None)(request, timeout=60)
                else:
                    ask(channel, path, request, timeout=60)
                said.append((method, "OK"))
            except grpc.RpcError as error:
                said.append((method, f"{error.code().name}: {error.details()}"))

    attacks = [
        threading.Thread(target=attack, args=(method, *request))
        for method in ("RegisterDataset", "GetStatus", "WorkerHeartbeat", REFUSED)
        for request in ((LARGE, True), (LARGE,), (MANY,))
    ]
    for thread in attacks:
        thread.start()
    while any(thread.is_alive() for thread in attacks):
        most = max(most, memory_kb(process.pid))
        time.sleep(0.01)
    assert prober.stop() < MOST_STALL_S
    may = [method for method, (roles, _) in METHODS.items() if role in roles]
    for method, why in said:
        if method not in may and method != "GetStatus":
            assert why.startswith(("PERMISSION_DENIED", "RESOURCE_EXHAUSTED: ")), (method, why)
        else:
            assert not why.startswith("OK") or method == "GetStatus", (method, why)
    allowed = 3 * len(LARGE) >> 10 if "RegisterDataset" in may else 0  # which is put together
    assert most < before + MOST_GROWTH_KB + allowed, said


def test_a_large_dataset_is_registered_in_pieces(
    dispatcher: tuple[DispatchServer, int], authority: Authority
) -> None:
    request = pb.RegisterDatasetRequest(metadata=bytes(9 * PIECE_BYTES))
    client = DispatcherClient(dispatcher[0].target, credentials=authority.issue("trainer"))
    with client, pytest.raises(InvalidArgument, match="a dataset without a graph"):
        client.call(request, pb.RegisterDatasetResponse)

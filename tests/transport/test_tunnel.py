"""The data connection through gRPC: the same one, whatever is between."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from forebay.chaos.proxy import Proxies
from forebay.service.blocks import Block
from forebay.service.connections import tunnel
from forebay.service.connections.grpc_server import bind
from forebay.service.delivery import EndOfTask, FirstComeOutput

from ..standbys import wait_until
from .peers import TIMEOUT_S, Consumer, TunnelledWorker, task
from .samples import SAMPLES, assert_same

TASK = 5


@pytest.fixture(autouse=True)
def leave_no_tunnel() -> Iterator[None]:
    yield
    gc.collect()  # of a socket that nobody closed, pytest makes an error
    wait_until(lambda: not named_threads("forebay-tunnel"))


def named_threads(name: str) -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(name)]


def consumer_at(address: str, **options: Any) -> Consumer:
    return Consumer([("grpc", address)], open_tunnel=tunnel.open_tunnel, **options)


@pytest.fixture
def worker(closing: ExitStack) -> TunnelledWorker:
    return TunnelledWorker(closing)


def test_every_kind_of_block_arrives(worker: TunnelledWorker, closing: ExitStack) -> None:
    output = FirstComeOutput()
    worker.blocks.sessions.add_task(TASK, output)
    for block in SAMPLES.values():
        output.put(block)
    output.finish()
    consumer = consumer_at(worker.address, reads=TASK, closing=closing)
    for expected in SAMPLES.values():
        got = consumer.take()[1]
        assert isinstance(got, Block)
        assert_same(got, expected)
    assert consumer.take() == (TASK, EndOfTask())
    assert worker.hosts.get() == "127.0.0.1"


def test_a_connection_that_is_cut_is_resumed(worker: TunnelledWorker, closing: ExitStack) -> None:
    proxies = Proxies()
    closing.callback(proxies.close)
    port = proxies.add("worker", int(worker.address.rpartition(":")[2]))
    task(worker.blocks, TASK, 400, lambda: 200 << 10)
    consumer = consumer_at(f"127.0.0.1:{port}", reads=TASK, credit_bytes=4 << 20)
    closing.callback(consumer.client.close)
    numbers = []
    while isinstance(item := consumer.take()[1], Block):
        numbers.append(item.index)
        if len(numbers) % 100 == 50:
            proxies.disturb("worker", "cut")
    assert numbers == [*range(1, 401)]


def test_a_consumer_that_closes_is_forgotten_at_once(
    worker: TunnelledWorker, closing: ExitStack
) -> None:
    """Its farewell arrives before the tunnel ends; otherwise its blocks were kept for minutes."""
    task(worker.blocks, TASK, 50, lambda: 1 << 20)
    consumer = consumer_at(worker.address, reads=TASK, credit_bytes=8 << 20)
    consumer.take()
    consumer.client.close()
    wait_until(lambda: TASK not in worker.blocks.sessions.read_tasks())


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_tunnel_that_is_forgotten_ends(worker: TunnelledWorker) -> None:
    """As any socket; `leave_no_tunnel` waits for that."""
    assert tunnel.open_tunnel(worker.address, TIMEOUT_S).fileno() >= 0


def test_a_grpc_server_that_stops_ends_its_tunnels(
    worker: TunnelledWorker, closing: ExitStack
) -> None:
    worker.blocks.sessions.add_task(TASK, FirstComeOutput())
    consumer = consumer_at(worker.address, reads=TASK, give_up_s=0.1, closing=closing)
    wait_until(lambda: TASK in worker.blocks.sessions.read_tasks())
    worker.grpc.stop(0).wait()
    assert "out of reach" in str(consumer.get())


def test_closing_does_not_wait_for_a_host_that_is_silent(
    worker: TunnelledWorker, closing: ExitStack
) -> None:
    proxies = Proxies()
    closing.callback(proxies.close)
    port = proxies.add("worker", int(worker.address.rpartition(":")[2]))
    worker.blocks.sessions.add_task(TASK, FirstComeOutput())
    consumer = consumer_at(f"127.0.0.1:{port}", reads=TASK)
    wait_until(lambda: TASK in worker.blocks.sessions.read_tasks())
    proxies.disturb("worker", "stall", 600)
    consumer.client.close()
    assert named_threads("forebay-tunnel") != []  # the worker's end does not know yet
    proxies.disturb("worker", "cut")


def test_a_tunnel_more_than_there_may_be_is_refused(
    worker: TunnelledWorker, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel, "MAX_TUNNELS", 2)
    small = TunnelledWorker(closing)
    for _ in range(2):
        closing.callback(tunnel.open_tunnel(small.address, TIMEOUT_S).close)
    with pytest.raises(ConnectionError, match=r"RESOURCE_EXHAUSTED.*2 tunnels already"):
        tunnel.open_tunnel(small.address, TIMEOUT_S)


def test_a_server_without_tunnels(closing: ExitStack) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    address = bind(server, "127.0.0.1", 0)
    server.start()
    closing.callback(lambda: server.stop(0).wait())
    with pytest.raises(ConnectionError, match="UNIMPLEMENTED"):
        tunnel.open_tunnel(address, TIMEOUT_S)


def test_a_worker_that_is_gone_is_reported_as_refusing() -> None:
    """Consumers report this to the dispatcher, as they do over sockets."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConnectionRefusedError, match="UNAVAILABLE"):
        tunnel.open_tunnel(f"127.0.0.1:{port}", TIMEOUT_S)


def test_a_host_that_accepts_and_never_answers_is_given_up(closing: ExitStack) -> None:
    silent = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
    with pytest.raises(ConnectionError, match="it does not answer"):
        tunnel.open_tunnel(f"127.0.0.1:{silent.getsockname()[1]}", 0.5)


def test_a_consumer_that_takes_nothing_fills_no_memory(
    worker: TunnelledWorker, closing: ExitStack
) -> None:
    """Nobody reads the socket: the worker's side stops sending, and the rest of it stays there."""
    sent = 0
    release = threading.Event()

    def flood(sock: socket.socket) -> None:
        nonlocal sent
        sock.settimeout(1)
        try:
            while not release.is_set():
                sent += sock.send(bytes(1 << 20))
        except TimeoutError:
            release.set()

    def serve(sock: socket.socket, _: object, __: object) -> None:
        threading.Thread(target=flood, args=(sock,), name="test-flood").start()
        closing.callback(sock.close)

    server = grpc.server(ThreadPoolExecutor(4), handlers=[tunnel.handlers(serve)])
    address = bind(server, "127.0.0.1", 0)
    server.start()
    closing.callback(lambda: server.stop(0).wait())
    end = tunnel.open_tunnel(address, TIMEOUT_S)
    closing.callback(end.close)
    assert release.wait(TIMEOUT_S)
    assert sent < 64 << 20


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.1.2.3:77", ("10.1.2.3", 77)),
        ("ipv6:%5B::1%5D:77", ("::1", 77)),
        ("ipv6:[fe80::2]:1", ("fe80::2", 1)),
        ("unix:/tmp/socket", ("", 0)),
        ("", ("", 0)),
    ],
)
def test_where_a_peer_is(peer: str, address: tuple[str, int]) -> None:
    assert tunnel._address(peer) == address

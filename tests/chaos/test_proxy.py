"""The proxy passes bytes on, and cuts and stalls when it is told to."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from forebay.chaos.proxy import Proxies

TIMEOUT_S = 30
TCP_SYN_SENT = 2  # a state of Linux's


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what it is sent."""

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)
            except ConnectionError:  # that is what is tested
                pass

    def accept() -> None:
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:  # closed
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.fixture
def proxies() -> Iterator[Proxies]:
    running = Proxies()
    yield running
    running.close()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), TIMEOUT_S)


def ask(connection: socket.socket, question: bytes) -> bytes:
    connection.sendall(question)
    answer = b""
    while len(answer) < len(question) and (data := connection.recv(1 << 16)):
        answer += data
    return answer


def test_it_passes_on_and_cuts(proxies: Proxies, echo: int) -> None:
    port = proxies.add("a", echo)
    with connect(port) as one, connect(port) as two:
        question = bytes(range(256)) * 4000
        assert ask(one, question) == question and ask(two, b"x") == b"x"
        proxies.disturb("a", "cut")
        for connection in (one, two):
            with pytest.raises(ConnectionResetError):
                connection.recv(1)
    with connect(port) as three:
        assert ask(three, b"again") == b"again"


def test_it_stalls_and_loses_nothing(proxies: Proxies, echo: int) -> None:
    port, other = proxies.add("a", echo), proxies.add("b", echo)
    with connect(port) as stalled, connect(other) as free:
        assert ask(stalled, b"x") == b"x"
        proxies.disturb("a", "stall", 600)
        stalled.setblocking(False)
        stalled.send(b"held")
        assert ask(free, b"y") == b"y"
        with pytest.raises(BlockingIOError):
            stalled.recv(1)
        stalled.settimeout(TIMEOUT_S)
        proxies.disturb("a", "stall", 0)
        assert ask(stalled, b"") == b"" and stalled.recv(4) == b"held"


def test_its_network_is_cut_silently_and_whole_again(proxies: Proxies, echo: int) -> None:
    port = proxies.add("a", echo)
    with connect(port) as connection, socket.socket() as other:
        assert ask(connection, b"x") == b"x"
        proxies.disturb("a", "silence", 600)
        connection.setblocking(False)
        connection.send(b"lost")
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.connect(("127.0.0.1", port))
        state = struct.unpack_from("B", other.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1))
        assert state == (TCP_SYN_SENT,)
        with pytest.raises(BlockingIOError):
            connection.recv(1)
        proxies.disturb("a", "silence", 0)
        for each in (connection, other):
            each.settimeout(TIMEOUT_S)
        assert ask(connection, b"") == b"" and connection.recv(4) == b"lost"  # it was sent again
        connected = select.poll()  # `select` knows no descriptors beyond 1023
        connected.register(other, select.POLLOUT)
        assert connected.poll(TIMEOUT_S * 1000)
        assert ask(other, b"y") == b"y"


def test_it_loses_answers_and_then_cuts(proxies: Proxies, echo: int) -> None:
    port = proxies.add("a", echo)
    with connect(port) as connection:
        assert ask(connection, b"x") == b"x"
        proxies.disturb("a", "mute", 0.2)
        with pytest.raises(ConnectionResetError):
            assert ask(connection, b"question") == b"not even this"
    with connect(port) as again:
        assert ask(again, b"y") == b"y"

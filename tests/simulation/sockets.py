"""`socket` and `selectors`, simulated: byte streams that dawdle, arrive in pieces and break.

As on Linux where the product can tell: a wait with SO_RCVTIMEO ends in BlockingIOError, what
came before the end of a stream can still be read, and closing a socket while another thread
waits in it neither wakes that thread nor ends the connection; only `shutdown` does.
"""

from __future__ import annotations

import socket as real
import struct
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Self

from .calls import Server
from .kernel import Process, kernel
from .network import DEAD_PEER_S, Network
from .threads import WaitingRoom, process

EVENT_READ = 1
_TIMEVAL = struct.Struct("@ll")


class Pipe:
    """One direction of a connection, as its receiver sees it."""

    def __init__(self) -> None:
        self.arrived = bytearray()
        self.in_flight = 0
        self.last_arrival = 0.0
        self.ended = False  # no more will come
        self.error: type[OSError] | None = None
        self.writable = WaitingRoom()  # its sender
        self.readable = WaitingRoom()  # its receiver, and selectors


class Socket:
    """socket.socket."""

    def __init__(self, family: int = real.AF_INET, type: int = 0, proto: int = 0) -> None:  # noqa: A002
        self.family = family
        self.owner: Process = process()
        self.host = self.owner.host
        self.peer_host = ""
        self.closed = False
        self._blocking = True
        self._timeouts = {real.SO_RCVTIMEO: 0.0, real.SO_SNDTIMEO: 0.0}
        self._in: Pipe | None = None
        self._out: Pipe | None = None
        self._peer: Socket | None = None
        self._address: Any = ()
        self._backlog: list[Socket] | None = None  # of a listener
        self._pending = WaitingRoom()  # selectors that wait for a listener
        self._waiting = 0  # threads inside a call
        self._shut = False
        self._released = False
        self.owner.at_kill.append(self._die)

    # -- names -------------------------------------------------------------------------------

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        self._check_open()
        if option in self._timeouts and isinstance(value, bytes):
            seconds, microseconds = _TIMEVAL.unpack(value)
            self._timeouts[option] = seconds + microseconds / 1e6

    def setblocking(self, flag: bool) -> None:
        self._blocking = flag

    def settimeout(self, value: float | None) -> None:
        self._blocking = value is None

    def bind(self, address: Any) -> None:
        network = _network()
        if self.family == real.AF_UNIX:
            self._address = address.encode()
            network.names[f"{self.host}{address}"] = self
            return
        host, port = address[:2]
        port = port or network.free_port()
        if (host, port) in network.ports:
            raise OSError(98, "Address already in use")
        self._address = (host, port)
        network.ports[host, port] = self

    def listen(self, backlog: int = 0) -> None:
        self._backlog = []

    def getsockname(self) -> Any:
        return self._address

    # -- connecting --------------------------------------------------------------------------

    def connect(self, address: Any) -> None:
        """To a Unix socket, which is there or is not."""
        listener = _network().names.get(f"{self.host}{address}")
        kernel().maybe_yield()
        if listener is None or listener._backlog is None:
            raise ConnectionRefusedError(111, "Connection refused")
        self._join(listener)

    def _join(self, listener: Socket) -> None:
        """Both ends exist from now on, whether or not the listener's process is running."""
        other = Socket.__new__(Socket)
        other.__dict__.update(self.__dict__)
        other.owner, other.host = listener.owner, listener.host
        other._timeouts = dict.fromkeys(self._timeouts, 0.0)
        other._pending, other._backlog = WaitingRoom(), None
        other.owner.at_kill.append(other._die)
        self._pair(other)
        assert listener._backlog is not None
        listener._backlog.append(other)
        listener._pending.notify_all()
        if self.host != other.host:
            _network().streams[self] = None

    def _pair(self, other: Socket) -> None:
        self._in, self._out = Pipe(), Pipe()
        other._in, other._out = self._out, self._in
        self._peer, other._peer = other, self
        self.peer_host, other.peer_host = other.host, self.host

    def accept(self) -> tuple[Socket, Any]:
        self._check_open()
        if not self._backlog:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        other = self._backlog.pop(0)
        return other, (other.peer_host, 0) if self.family != real.AF_UNIX else ""

    # -- data --------------------------------------------------------------------------------

    def sendmsg(
        self, buffers: Sequence[bytes | memoryview], ancillary: Sequence[Any] = (), flags: int = 0
    ) -> int:
        assert not ancillary, "nothing here is large enough for shared memory"
        self._check_open()
        pipe, this = self._out, kernel()
        if pipe is None:
            raise OSError(107, "Transport endpoint is not connected")
        this.maybe_yield()
        room = 0
        while True:
            if self._in is not None and self._in.error is not None and not self._shut:
                raise self._in.error(104, "Connection reset by peer")
            if self._shut or pipe.ended:
                raise BrokenPipeError(32, "Broken pipe")
            capacity = _network().weather.pipe_bytes
            room = capacity - pipe.in_flight - len(pipe.arrived)
            if room > 0:
                break
            if flags & real.MSG_DONTWAIT:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            self._wait(pipe.writable, real.SO_SNDTIMEO)
        data = b"".join(buffers)
        if len(data) > 1 and this.rng.random() < 0.1:
            room = min(room, this.rng.randint(1, len(data)))
        data = data[:room]
        self._transmit(pipe, data)
        return len(data)

    def _transmit(self, pipe: Pipe, data: bytes) -> None:
        this, network = kernel(), _network()
        pipe.in_flight += len(data)
        arrival = this.now + network.delay(self.host, self.peer_host)
        pipe.last_arrival = max(pipe.last_arrival, arrival)
        this.at_moment(
            pipe.last_arrival,
            network.when_joined,
            self.host,
            self.peer_host,
            lambda: self._arrive(pipe, data),
        )

    def _arrive(self, pipe: Pipe, data: bytes) -> None:
        pipe.in_flight -= len(data)
        if not pipe.ended:
            pipe.arrived += data
            pipe.readable.notify_all()

    def recv_into(self, target: memoryview, size: int = 0, flags: int = 0) -> int:
        self._check_open()
        pipe = self._in
        if pipe is None:
            raise OSError(107, "Transport endpoint is not connected")
        kernel().maybe_yield()
        while not pipe.arrived:
            if pipe.error is not None:
                error, pipe.error = pipe.error, None
                raise error(104, "Connection reset by peer")
            if pipe.ended or self._shut:
                return 0
            self._wait(pipe.readable, real.SO_RCVTIMEO)
        count = min(len(target), len(pipe.arrived))
        target[:count] = pipe.arrived[:count]
        del pipe.arrived[:count]
        pipe.writable.notify_all()
        return count

    def recvmsg_into(
        self, targets: Sequence[memoryview], room: int, flags: int
    ) -> tuple[int, list[Any], int, None]:
        return self.recv_into(targets[0]), [], 0, None

    def _wait(self, room: WaitingRoom, option: int) -> None:
        timeout_s = self._timeouts[option] or None
        self._waiting += 1
        try:
            if not room.wait(timeout_s):
                raise BlockingIOError(11, "Resource temporarily unavailable")
        finally:
            self._waiting -= 1
            if self.closed and not self._waiting:
                self._release()

    def readable(self) -> bool:
        if self._backlog is not None:
            return bool(self._backlog)
        pipe = self._in
        return pipe is not None and bool(pipe.arrived or pipe.ended or pipe.error)

    def waiting_room(self) -> WaitingRoom:
        return self._pending if self._in is None else self._in.readable

    # -- the end -----------------------------------------------------------------------------

    def sendall(self, data: bytes) -> None:
        """To a server of gRPC: `tls_socket.probe` asks it for TLS."""
        raise ConnectionResetError(104, "Connection reset by peer")

    def shutdown(self, how: int) -> None:
        if self.closed or self._out is None or self._in is None or self._in.error:
            raise OSError(107, "Transport endpoint is not connected")
        if self._shut:
            return
        self._shut = True
        self._finish()
        self._in.readable.notify_all()
        self._out.writable.notify_all()

    def _finish(self) -> None:
        """Tell the peer that nothing more comes, after what is on its way."""
        pipe, this = self._out, kernel()
        assert pipe is not None

        def end() -> None:
            pipe.ended = True
            pipe.readable.notify_all()

        network = _network()
        arrival = max(pipe.last_arrival, this.now + network.delay(self.host, self.peer_host))
        pipe.last_arrival = arrival
        this.at_moment(arrival, network.when_joined, self.host, self.peer_host, end)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if not self._waiting:
                self._release()

    def _release(self) -> None:
        if self._released or kernel().over:
            return
        self._released = True
        network = _network()
        network.streams.pop(self, None)
        if self._address and self._in is None:
            network.ports.pop(self._address, None)
            if self.family == real.AF_UNIX:
                network.names.pop(f"{self.host}{self._address.decode()}", None)
            for waiting in self._backlog or ():
                waiting.reset()
            self._backlog = None
        if self._out is None or self._in is None:
            return
        if self._in.arrived:  # closed without reading it all: the peer is told so
            kernel().at(network.delay(self.host, self.peer_host), self._break, self._out)
        elif not self._shut:
            self._finish()
        # Whatever the peer sends from now on meets nobody.
        peer_sends = self._in
        kernel().at(network.delay(self.host, self.peer_host), self._refuse, peer_sends)

    def _refuse(self, pipe: Pipe) -> None:
        pipe.ended = True
        pipe.arrived.clear()
        pipe.writable.notify_all()

    def _break(self, pipe: Pipe) -> None:
        pipe.ended = True
        pipe.error = ConnectionResetError
        pipe.readable.notify_all()
        pipe.writable.notify_all()

    def reset(self) -> None:
        """Both ends find the connection broken; what is on its way is lost."""
        _network().streams.pop(self, None)
        for pipe in (self._in, self._out):
            if pipe is not None:
                self._break(pipe)

    def _die(self) -> None:
        """Its process was killed. The host closes it; if the host went too, nobody says so."""
        if self._released:
            return
        if self.owner.vanished and self.peer_host not in ("", self.host):
            kernel().at(DEAD_PEER_S, self.reset)
            self._released = True
            _network().ports.pop(self._address, None)
            return
        self.closed = True
        self._release()

    def _check_open(self) -> None:
        if self.closed:
            raise OSError(9, "Bad file descriptor")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _create_connection(address: tuple[str, int], timeout: float | None = None) -> Socket:
    this, network = kernel(), _network()
    sock = Socket(real.AF_INET)
    give_up = this.now + (timeout or DEAD_PEER_S)
    this.sleep(network.delay(sock.host, address[0]))
    while network.is_cut(sock.host, address[0]):
        if this.now >= give_up:
            raise TimeoutError(110, "Connection timed out")
        this.sleep(min(1.0, give_up - this.now))
        if network.rejects and isinstance(network.ports.get(address), Server):
            raise ConnectionRefusedError(111, "Connection refused")  # by a firewall
    listener = network.ports.get(address)
    if isinstance(listener, Server):  # of gRPC: the caller wants to know whether one listens
        return sock
    if not isinstance(listener, Socket) or listener._backlog is None:
        raise ConnectionRefusedError(111, "Connection refused")
    sock._join(listener)
    this.sleep(network.delay(address[0], sock.host))
    return sock


def _socketpair() -> tuple[Socket, Socket]:
    one, other = Socket(real.AF_UNIX), Socket(real.AF_UNIX)
    one._pair(other)
    return one, other


def _getaddrinfo(host: str, port: int, **_: object) -> list[tuple[Any, ...]]:
    return [(real.AF_INET, real.SOCK_STREAM, 0, "", (host, port))]


class Selector:
    """selectors.DefaultSelector, for reading."""

    def __init__(self) -> None:
        self._sockets: list[Socket] = []

    def register(self, fileobj: Socket, events: int) -> None:
        self._sockets.append(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        this = kernel()
        ready = [s for s in self._sockets if s.readable()]
        if not ready:
            assert this.current is not None
            rooms = [s.waiting_room() for s in self._sockets]
            for room in rooms:
                room.enter(this.current)
            try:
                this.wait(timeout)
            finally:
                for room in rooms:
                    room.leave(this.current)
            ready = [s for s in self._sockets if s.readable()]
        return [(SimpleNamespace(fileobj=s), EVENT_READ) for s in ready]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


def _network() -> Network:
    network = kernel().network
    assert isinstance(network, Network)
    return network


socket = SimpleNamespace(
    **{name: getattr(real, name) for name in dir(real) if name.isupper() and name[0] in "ASMITL"},
    CMSG_SPACE=real.CMSG_SPACE,
    socket=Socket,
    socketpair=_socketpair,
    create_connection=_create_connection,
    getaddrinfo=_getaddrinfo,
    gethostname=lambda: process().host,
)
selectors = SimpleNamespace(DefaultSelector=Selector, EVENT_READ=EVENT_READ)

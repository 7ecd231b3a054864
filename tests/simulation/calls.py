"""gRPC, simulated: channels for clients, an asyncio server for the dispatcher.

A call is a request, and perhaps a reply, each a message of the network. The client sees UNAVAILABLE
when the connection breaks (also by keepalive, when the other process says nothing any more), and
DEADLINE_EXCEEDED; the server's handler is cancelled when its client has gone. A client that has
given up may find its request carried out all the same, late, or twice.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import grpc as real

from .kernel import Process, Violation, kernel
from .network import KEEPALIVE_S, Network
from .threads import WaitingRoom, process

Metadata = tuple[tuple[str, str], ...]


class RpcError(real.RpcError):
    """What a failed call raises."""

    def __init__(self, code: real.StatusCode, details: str, trailing: Metadata = ()) -> None:
        super().__init__(f"{code.name}: {details}")
        self._code, self._details, self._trailing = code, details, trailing

    def code(self) -> real.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailing


class Call:
    """One attempt, and what both sides know of it."""

    def __init__(self, client: Process, address: str, method: str, request: bytes) -> None:
        self.client = client
        self.address = address
        self.host = address.rpartition(":")[0]
        self.method = method
        self.request = request
        self.room = WaitingRoom()
        self.reply: bytes | None = None
        self.error: RpcError | None = None
        self.over = False  # for the client
        self.handlers: list[asyncio.Task[None]] = []
        self.server: Server | None = None

    def finish(self, reply: bytes | None, error: RpcError | None) -> None:
        if not self.over:
            self.over = True
            self.reply, self.error = reply, error
            self.room.notify_all()

    def fail(self, code: real.StatusCode, details: str) -> None:
        self.finish(None, RpcError(code, details))


class Channel:
    """grpc.Channel, for unary calls."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._calls: dict[Call, None] = {}
        self._closed = False

    def unary_unary(self, method: str, _: None, __: None) -> Callable[..., bytes]:
        def call(request: bytes, timeout: float, metadata: object = ()) -> bytes:
            if self._closed:
                raise ValueError("Cannot invoke RPC on closed channel!")
            attempt = Call(process(), self._address, method, request)
            self._calls[attempt] = None
            try:
                return _attempt(attempt, timeout)
            finally:
                self._calls.pop(attempt, None)

        return call

    def close(self) -> None:
        self._closed = True
        for attempt in list(self._calls):
            attempt.fail(real.StatusCode.CANCELLED, "Channel closed!")


def _attempt(call: Call, timeout_s: float) -> bytes:
    this, network = kernel(), _network()
    weather, here = network.weather, call.client.host
    abandon = lambda: _abandon(call)  # noqa: E731
    call.client.at_kill.append(abandon)
    this.maybe_yield()
    cut = network.is_cut(here, call.host)
    if cut or this.rng.random() < weather.lost:
        if this.rng.random() < 0.5:
            this.at(KEEPALIVE_S, call.fail, real.StatusCode.UNAVAILABLE, "keepalive timed out")
        elif cut:  # what was sent is sent again
            network.when_joined(here, call.host, lambda: _deliver(call))
    else:
        this.at(network.delay(here, call.host), _deliver, call)
        if this.rng.random() < weather.doubled:
            this.at(network.delay(here, call.host) * this.rng.uniform(1, 100), _deliver, call)
    if not call.over and not call.room.wait(timeout_s):
        call.fail(real.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    call.client.at_kill.remove(abandon)
    _abandon(call)
    if call.error is not None:
        raise call.error
    assert call.reply is not None
    this.oracle.believed(call)
    return call.reply


def _abandon(call: Call) -> None:
    """The client waits no longer; its server will hear of it."""
    call.over = True
    network = _network()
    if call.handlers and not kernel().over:
        kernel().at(network.delay(call.client.host, call.host), _cancel, call)


def _cancel(call: Call) -> None:
    server = call.server
    if server is not None and server.process.alive:
        for handler in call.handlers:
            if not handler.done():
                server.loop.call_soon_threadsafe(handler.cancel)


def _deliver(call: Call) -> None:
    """The request has arrived at the host."""
    server = _network().ports.get(_split(call.address))
    if not isinstance(server, Server) or not server.process.alive:
        call.fail(real.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
        return
    call.server = server
    server.receive(call)


class Server:
    """grpc.aio.Server. Requests that come before `start` wait for it."""

    def __init__(self) -> None:
        self.process = process()
        self.loop = asyncio.get_running_loop()
        self._handlers: list[Any] = []
        self._address: tuple[str, int] | None = None
        self._state = _State.BOUND
        self._early: list[Call] = []
        self._calls: dict[Call, None] = {}
        self._tasks: dict[asyncio.Task[None], Call] = {}
        self.process.at_kill.append(self._die)

    def add_insecure_port(self, address: str) -> int:
        host, port = _split(address)
        port = port or _network().free_port()
        if (host, port) in _network().ports:
            raise RuntimeError("address in use")
        self._address = (host, port)
        _network().ports[self._address] = self
        return port

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None: ...

    async def start(self) -> None:
        self._state = _State.SERVING
        early, self._early = self._early, []
        for call in early:
            self.receive(call)

    async def stop(self, grace: float | None) -> None:
        """Take no more requests; cancel what runs when `grace` has passed."""
        self._state = _State.STOPPED
        if self._address is not None:
            _network().ports.pop(self._address, None)
        for call in self._early:
            call.fail(real.StatusCode.UNAVAILABLE, "the server was stopped")
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=grace)
        for task, call in list(self._tasks.items()):
            task.cancel()
            call.fail(real.StatusCode.UNAVAILABLE, "the server was stopped")

    def receive(self, call: Call) -> None:
        self._calls[call] = None
        if self.process.paused:
            kernel().at(KEEPALIVE_S, self.ping, call)
        if self._state is _State.BOUND:
            self._early.append(call)
        elif self._state is _State.STOPPED:
            call.fail(real.StatusCode.UNAVAILABLE, "the server was stopped")
        else:
            self.loop.call_soon_threadsafe(self._begin, call)

    def ping(self, call: Call) -> None:
        """The client's keepalive: nobody answers it in a paused process, or over a cut."""
        cut = _network().is_cut(call.client.host, call.host)
        if (self.process.paused or cut) and not call.over:
            call.fail(real.StatusCode.UNAVAILABLE, "keepalive watchdog timeout")

    def silent(self) -> None:
        """This process was paused, or cut off: clients with calls here will find out."""
        for call in list(self._calls):
            kernel().at(KEEPALIVE_S, self.ping, call)

    def _begin(self, call: Call) -> None:
        # Its client may have gone meanwhile. The request was received, so it is carried out.
        task = self.loop.create_task(self._answer(call), name=f"call {call.method}")
        self._tasks[task] = call
        call.handlers.append(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        call = self._tasks.pop(task)
        self._calls.pop(call, None)

    async def _answer(self, call: Call) -> None:
        oracle = self.process.local.get("oracle") or kernel().oracle
        term = oracle.term
        context = Context(call)
        details = SimpleNamespace(method=call.method, invocation_metadata=())
        method = next(filter(None, (h.service(details) for h in self._handlers)), None)
        error = None
        reply = None
        try:
            if method is None:
                error = RpcError(real.StatusCode.UNIMPLEMENTED, f"no method {call.method}")
            else:
                if method.stream_unary is None:  # a standby's
                    reply = await method.unary_unary(call.request, context)
                else:
                    reply = await method.stream_unary(None, context)
                oracle.answered(self.process, call, reply, term)
        except Aborted as aborted:
            error = aborted.error
        except asyncio.CancelledError:
            error = RpcError(real.StatusCode.UNAVAILABLE, "the handler was cancelled")
        except Violation as violation:
            kernel().fail(str(violation))
        except Exception as bug:  # noqa: BLE001 - whatever it is, it is reported
            kernel().crashed(f"{self.process.name}: {call.method}", bug)
        self._reply(call, reply, error)

    def _reply(self, call: Call, reply: bytes | None, error: RpcError | None) -> None:
        this, network = kernel(), _network()
        if this.rng.random() < network.weather.lost:
            if this.rng.random() < 0.5:
                delay = network.delay(call.host, call.client.host)
                this.at(delay, call.fail, real.StatusCode.UNAVAILABLE, "connection reset")
            return
        this.at(
            network.delay(call.host, call.client.host),
            network.when_joined,
            call.host,
            call.client.host,
            lambda: call.finish(reply, error),
        )

    def _die(self) -> None:
        network = _network()
        if self._address is not None and network.ports.get(self._address) is self:
            del network.ports[self._address]
        for call in list(self._calls):
            delay = KEEPALIVE_S if self.process.vanished else network.delay("", call.client.host)
            kernel().at(delay, call.fail, real.StatusCode.UNAVAILABLE, "Socket closed")


class _State(enum.Enum):
    BOUND = enum.auto()
    SERVING = enum.auto()
    STOPPED = enum.auto()


class Aborted(Exception):
    def __init__(self, error: RpcError) -> None:
        self.error = error


class Context:
    """grpc.aio.ServicerContext, as much of it as the product uses."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def peer(self) -> str:
        return self._call.client.host

    async def read(self) -> bytes:
        return self._call.request

    async def abort(
        self, code: real.StatusCode, details: str = "", trailing: Metadata = ()
    ) -> None:
        raise Aborted(RpcError(code, details, trailing))


class PortOnly:
    """grpc.server of a worker, whose stock clients are not simulated: it takes a port."""

    def add_insecure_port(self, address: str) -> int:
        return _split(address)[1] or _network().free_port()

    def start(self) -> None: ...

    def stop(self, grace: float | None) -> Any:
        return SimpleNamespace(wait=lambda: True)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _network() -> Network:
    network = kernel().network
    assert isinstance(network, Network)
    return network


class _Aio:
    def server(self, *_: object, **__: object) -> Server:
        return Server()

    def __getattr__(self, name: str) -> Any:
        return getattr(real.aio, name)


class _Grpc:
    """The module, with what reaches the network replaced."""

    aio = _Aio()

    def insecure_channel(self, target: str, options: object = None) -> Channel:
        return Channel(target)

    def server(self, *_: object, **__: object) -> PortOnly:
        return PortOnly()

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)


grpc = _Grpc()

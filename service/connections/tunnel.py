"""A data connection through gRPC, for where only HTTP/2 passes.

The tunnel is a stream of chunks of bytes in each direction, on the worker's own gRPC server. At
either end a pair of connected sockets stands between the stream and the code for sockets, so
that frames, credit, resumption and refusals are the same ones over every transport.

Nothing is buffered here but a chunk: gRPC takes the next one when HTTP/2's flow control has let
the last one go, and a socket that is full makes its reader wait.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

import grpc

from . import relay
from .grpc_server import connect

_log = logging.getLogger(__name__)

SERVICE = "forebay.v1.Worker"
METHOD = "Transfer"
MAX_TUNNELS = 128
"""To one worker. Each holds a thread of its gRPC server's pool, which must have room for others."""

CHUNK_BYTES = 512 << 10
_FAREWELL_S = 2.0  # for the other side to end its half
_OPEN = (("forebay-tunnel", "open"),)  # the metadata by which a worker answers

_KEEPALIVE: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS = _KEEPALIVE
"""Besides grpc_server's: a consumer whose host has gone is noticed, as over TCP."""

_OPTIONS = [
    *_KEEPALIVE,
    # A connection of its own, so that a tunnel that is not read holds up no other.
    ("grpc.use_local_subchannel_pool", 1),
]

Serve = Callable[[socket.socket, tuple[str, int]], object]
"""Takes a connected socket, and the peer's IP address ("" if that is unknown) and port."""


def handlers(serve: Serve) -> grpc.GenericRpcHandler[Any, Any]:
    """The service of a worker, for a threaded server; each tunnel's socket goes to `serve`."""
    free = threading.Semaphore(MAX_TUNNELS)

    def transfer(chunks: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        if not free.acquire(blocking=False):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"this worker has {MAX_TUNNELS} tunnels already; use tcp or unix, or more workers",
            )
        try:
            yield from _attend(chunks, context, serve)
        finally:
            free.release()

    return grpc.method_handlers_generic_handler(
        SERVICE, {METHOD: grpc.stream_stream_rpc_method_handler(transfer)}
    )


def _attend(
    chunks: Iterator[bytes], context: grpc.ServicerContext, serve: Serve
) -> Iterator[bytes]:
    ours, served = socket.socketpair()
    with ours:
        if not context.add_callback(lambda: _shut(ours)):  # called when the call is over
            served.close()
            return
        context.send_initial_metadata(_OPEN)
        writer = threading.Thread(
            target=_write, args=(chunks, ours.dup()), name="forebay-tunnel", daemon=True
        )
        writer.start()
        serve(served, _address(context.peer()))
        yield from _read(ours)


def open_tunnel(address: str, timeout_s: float) -> socket.socket:
    """A socket that is connected to the worker at "host:port", through its gRPC server.

    Data sent and received on it is the connection's; closing it ends the tunnel. Raises
    OSError if the worker does not answer in time, or this process was forked from one that had
    used gRPC.
    """
    if relay.is_needed():
        raise ConnectionError(
            f"no tunnel through gRPC to {address}: this process was forked from one that had used "
            "gRPC; have it started another way (multiprocessing's spawn or forkserver)"
        )
    ours, theirs = socket.socketpair()
    tunnel = _Tunnel(address, ours)
    end = _ConsumersEnd(theirs, tunnel)
    if failure := tunnel.failure(timeout_s):
        end.close()
        refused = "Connection refused" in failure
        kind = ConnectionRefusedError if refused else ConnectionError
        raise kind(f"no tunnel through gRPC to {address}: {failure}")
    return end


class _ConsumersEnd(socket.socket):
    """Of the pair of sockets. `close` ends the tunnel, with its threads."""

    def __init__(self, end: socket.socket, tunnel: _Tunnel) -> None:
        super().__init__(fileno=end.detach())
        self._tunnel = tunnel

    def close(self) -> None:
        if self.fileno() >= 0:
            _shut(self)
            super().close()
            self._tunnel.join()


class _Tunnel:
    """A consumer's side of the stream. `ours` is its own."""

    def __init__(self, address: str, ours: socket.socket) -> None:
        self._failure = "it does not answer"
        self._answered = threading.Event()
        self._channel = connect(address, _OPTIONS)
        transfer: Any = self._channel.stream_stream(
            f"/{SERVICE}/{METHOD}", request_serializer=None, response_deserializer=None
        )
        self._call = transfer(_read(ours.dup()))
        self._thread = threading.Thread(
            target=self._run, args=(ours,), name="forebay-tunnel", daemon=True
        )
        self._thread.start()

    def failure(self, timeout_s: float) -> str:
        """Why it is not open, after that time at the latest; "" if it is."""
        self._answered.wait(timeout_s)
        return self._failure

    def join(self) -> None:
        """Wait for the end, which closing the other socket of the pair brings about, or force it:
        what was sent before shall arrive, if the worker still takes it."""
        self._thread.join(_FAREWELL_S)
        self._channel.close()
        self._thread.join()

    def _run(self, ours: socket.socket) -> None:
        if set(_OPEN) <= {tuple(item) for item in self._call.initial_metadata()}:
            self._failure = ""
        else:
            self._failure = f"{self._call.code()}: {self._call.details()}"
        self._answered.set()
        _write(self._call, ours)


def _read(sock: socket.socket) -> Iterator[bytes]:
    """What comes through the socket, until its end. Closes it."""
    with sock:
        while True:
            try:
                chunk = sock.recv(CHUNK_BYTES)
            except OSError:  # it was cut
                return
            if not chunk:
                return
            yield chunk


def _write(chunks: Iterator[bytes], sock: socket.socket) -> None:
    """Pass everything on, until the chunks end; what nobody reads is dropped. Closes the socket."""
    with sock:
        try:
            for chunk in chunks:
                try:
                    sock.sendall(chunk)
                except OSError:  # its reader has gone; the other side will have noticed soon
                    continue
        except grpc.RpcError as error:
            _log.info("a tunnel through gRPC ended: %s", error)
        finally:
            _shut(sock)


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is cut
        pass


def _address(peer: str) -> tuple[str, int]:
    """IP address and port of what gRPC calls a peer, such as "ipv4:10.0.0.1:99"."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    try:
        return str(ipaddress.ip_address(host.strip("[]"))), int(port)
    except ValueError:
        return "", 0

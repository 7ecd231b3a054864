"""Tunnels a data connection through gRPC, for networks that pass only HTTP/2.

The tunnel is a stream of byte chunks in each direction, on the worker's own gRPC server. At each
end, a pair of connected sockets links the stream to the socket code. So frames, credit,
resumption and refusals are the same over every transport.

The tunnel buffers only one chunk: gRPC takes the next one when HTTP/2's flow control has sent the
last one. A full socket makes its writer wait, which is the backpressure.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any
from urllib.parse import unquote

import grpc

from ..errors import Unauthenticated
from . import relay
from .admission import Admission, Identity
from .credentials import own_credentials
from .grpc_server import connect, metadata_of
from .proxies import proxy_note
from .tls_socket import TlsError, probe

_log = logging.getLogger(__name__)

SERVICE = "forebay.v1.Worker"
METHOD = "Transfer"
MAX_TUNNELS = 128
"""To one worker. Each holds a thread of its gRPC server's pool; other calls need threads, too."""

CHUNK_BYTES = 512 << 10
"""gRPC delivers whole chunks only."""

_FAREWELL_S = 2.0  # how long the other side may take to end its half
_OPEN = (("forebay-tunnel", "open"),)  # the metadata of a worker's answer

_KEEPALIVE: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS = _KEEPALIVE
"""In addition to grpc_server's: keepalives detect a consumer whose host has gone, as over TCP."""

_OPTIONS = [
    *_KEEPALIVE,
    # Own connection, so that an unread tunnel blocks no other.
    ("grpc.use_local_subchannel_pool", 1),
]

Serve = Callable[[socket.socket, tuple[str, int], Identity | None], object]
"""Takes a connected socket, the peer's IP address ("" if unknown) and port, and who it is."""


def handlers(serve: Serve, admission: Admission | None = None) -> grpc.GenericRpcHandler[Any, Any]:
    """A worker's gRPC service, for a threaded server; `serve` gets each tunnel's socket. Without
    `admission` nobody proves who he is."""
    free = threading.Semaphore(MAX_TUNNELS)

    def transfer(chunks: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        if not free.acquire(blocking=False):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"this worker has {MAX_TUNNELS} tunnels already; use tcp or unix, or more workers",
            )
        try:
            peer = None if admission is None else admission.of_call(context)
            yield from _serve_tunnel(chunks, context, serve, peer)
        finally:
            free.release()

    return grpc.method_handlers_generic_handler(
        SERVICE, {METHOD: grpc.stream_stream_rpc_method_handler(transfer)}
    )


def _serve_tunnel(
    chunks: Iterator[bytes], context: grpc.ServicerContext, serve: Serve, peer: Identity | None
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
        serve(served, _address(context.peer()), peer)
        yield from _read(ours)


def open_tunnel(address: str, timeout_s: float) -> socket.socket:
    """A socket that is connected to the worker at "host:port", through its gRPC server.

    Closing it ends the tunnel. Raises Unauthenticated if the worker does not admit this process;
    OSError if it does not answer in time, or if this process was forked from one that had used
    gRPC.
    """
    if relay.is_needed():
        raise ConnectionError(
            f"no tunnel through gRPC to {address}: this process was forked from one that had used "
            "gRPC; have it started another way (multiprocessing's spawn or forkserver)"
        )
    tunnel = _Tunnel(address)
    if failure := tunnel.failure(timeout_s):
        tunnel.close()
        if failure.startswith("StatusCode.UNAUTHENTICATED"):
            raise Unauthenticated(f"no tunnel through gRPC to {address}: {failure}")
        fault, times = probe(address, own_credentials()) if "UNAVAILABLE" in failure else ("", 0)
        if fault and times:
            raise TlsError(f"no tunnel through gRPC to {address}: {fault}")
        refused = "Connection refused" in failure
        kind = ConnectionRefusedError if refused else ConnectionError
        raise kind(f"no tunnel through gRPC to {address}: {failure}{proxy_note(address)}")
    return tunnel


class _Tunnel(socket.socket):
    """The consumer's end of the socket pair. `close` ends the tunnel and its threads. These do not
    refer to it, so that it ends, too, if it is forgotten."""

    def __init__(self, address: str) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(fileno=theirs.detach())
        self._failure: Future[str] = Future()
        credentials = own_credentials()
        self._channel = connect(address, _OPTIONS, credentials)
        transfer: Any = self._channel.stream_stream(
            f"/{SERVICE}/{METHOD}", request_serializer=None, response_deserializer=None
        )
        call = transfer(_read(ours.dup()), metadata=metadata_of(credentials))
        what = (self._channel, call, ours, self._failure)
        self._thread = threading.Thread(
            target=_receive, args=what, name="forebay-tunnel", daemon=True
        )
        self._thread.start()

    def failure(self, timeout_s: float) -> str:
        """Wait until the tunnel is open, then return ""; else return why it is not open."""
        try:
            return self._failure.result(timeout_s)
        except TimeoutError:
            return "it does not answer"

    def close(self) -> None:
        if self.fileno() >= 0:
            _shut(self)
            super().close()
            self._thread.join(_FAREWELL_S)  # so that sent data can still arrive
            self._channel.close()
            self._thread.join()


def _receive(channel: grpc.Channel, call: Any, ours: socket.socket, failure: Future[str]) -> None:
    """Of a call, whose channel is open as long as somebody has it."""
    is_open = set(_OPEN) <= {tuple(item) for item in call.initial_metadata()}
    failure.set_result("" if is_open else f"{call.code()}: {call.details()}")
    _write(call, ours)


def _read(sock: socket.socket) -> Iterator[bytes]:
    """Yield the socket's data until its end, then close it."""
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
    """Write all chunks to the socket, then close it. Drops them if the reader has gone."""
    with sock:
        try:
            for chunk in chunks:
                try:
                    sock.sendall(chunk)
                except OSError:  # the reader has gone; the other side notices it soon
                    continue
        except grpc.RpcError as error:
            why = getattr(error, "details", lambda: "its call is over")()  # a server's has none
            _log.debug("a tunnel through gRPC ended: %s", why)  # its reader says so
        finally:
            _shut(sock)


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is cut
        pass


def _address(peer: str) -> tuple[str, int]:
    """The IP address and port in gRPC's name of a peer, such as "ipv4:10.0.0.1:99"."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    try:
        return str(ipaddress.ip_address(host.strip("[]"))), int(port)
    except ValueError:
        return "", 0

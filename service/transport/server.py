"""BlockServer: a worker's end of the data connections.

Each connection has two threads: one receives the consumer's messages, and one sends (frames.py says
why). sessions.py decides what to send to whom.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from google.protobuf.message import DecodeError

from ..connections.admission import Admission, Identity
from ..connections.credentials import Credentials
from ..connections.data_keys import KnownKeys, UnfitCredential
from ..connections.tls_socket import ClosedEarly, PlainPeer, TlsError, TlsSocket
from ..delivery import read_requests
from ..errors import AddressInUse, ProtocolError, Unauthenticated
from ..proto import transfer_pb2 as pb
from ..rate_limited_log import RateLimitedLog
from ..shared import Lender
from . import frames, local
from .compression import Packer
from .dial import UCRED, user_of
from .messages import FAREWELL, PONG, VERSION, encode_block, encode_end, encode_refusal
from .sending import Connection, Ended, Farewell, Outgoing, Refusal, Sent
from .sessions import MAX_AWAY_BYTES, Sessions

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
MAX_STRANGERS = 64
"""The most connections of one address that have not said yet who they are."""

LINGER_S = 180.0
"""Longer than the dispatcher's default client_timeout_ms: a worker must not forget a consumer that
is still a member there."""

ENDING_S = 0.2
"""How long to wait for a consumer's process to end after its connection: the kernel closes a
process's files before it counts as ended."""

SILENT_CONSUMER_S = 60.0
"""The server cuts the connection of a remote consumer that sends no byte for so long. Consumers
ping every few seconds and detect silence themselves; this frees memory kept for those that are
gone. A trainer that is paused for longer loses nothing: its LINGER_S starts then."""

_BACKLOG = 128
_HANDSHAKE_S = 10.0
_FAREWELL_S = 1.0  # to send a refusal
_TICK_S = 1.0
_SILENCE_TICK_S = 5.0  # how often a connection's silence is checked
_MAX_HEADER_BYTES = 64 << 10  # consumers send only small messages


class BlockServer:
    """Streams the blocks of a worker's tasks to consumers, over TCP and a Unix socket.

    A faulty consumer, even one that sends garbage or is silent, harms only its own connection.
    Thread-safe.
    """

    def __init__(
        self,
        worker_uid: int,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        linger_s: float = LINGER_S,
        max_away_bytes: int = MAX_AWAY_BYTES,
        is_this_host: Callable[[str], bool] | None = None,
        credentials: Credentials | None = None,
        keys: KnownKeys | None = None,
        checksums: bool = False,
    ) -> None:
        """Listen on `host` and `port` (0: any); serve from `start` on.

        A consumer whose connection ends loses nothing if it reconnects within `linger_s`, unless
        more than `max_away_bytes` are kept for all such consumers. `is_this_host` tells whether an
        IP address belongs to this host; by default, the server asks the system. With `credentials`
        it speaks TLS over TCP, and over the Unix socket with this process's user only. With `keys`
        it checks what the dispatcher signed for a consumer. With `checksums` consumers compare the
        elements of each block with what was sent. Raises AddressInUse.
        """
        self._is_this_host = is_this_host or _is_this_host
        self._tcp = _listen_tcp(host, port)
        self._worker_uid = worker_uid
        self._admission = None if credentials is None else Admission(credentials)
        self._keys = keys
        self._checksums = checksums
        self.sessions = Sessions(linger_s, max_away_bytes)
        self._rate_limited_log = RateLimitedLog(_log)
        self._handlers: set[_Handler] = set()
        self._lock = threading.Lock()  # of _handlers
        self._stopping = threading.Event()
        self._waker, self._wakened = socket.socketpair()
        # An abstract address: no file to leave behind. Consumers check the uid, not the name.
        self._unix = socket.socket(socket.AF_UNIX)
        self._unix.bind(f"\0forebay-{secrets.token_hex(8)}")
        self._unix.listen(_BACKLOG)
        self._tcp.setblocking(False)
        self._unix.setblocking(False)
        self._thread = threading.Thread(
            target=self._accept, name=f"forebay-blocks-{self.port}", daemon=True
        )

    @property
    def port(self) -> int:
        port: int = self._tcp.getsockname()[1]
        return port

    @property
    def addresses(self) -> list[tuple[str, str]]:
        """(protocol, address) pairs for a BlockClient, the best first."""
        host = self._tcp.getsockname()[0]
        name = self._unix.getsockname()[1:].decode()
        host = f"[{host}]" if ":" in host else host
        return [("unix", f"@{name}"), ("tcp", f"{host}:{self.port}")]

    def start(self) -> None:
        """Serve consumers from a new thread, and those in this process."""
        self._thread.start()
        local.running[self._worker_uid] = self.sessions

    def stop(self) -> None:
        """Tell the consumers, close all connections, and join all threads. Idempotent."""
        self._stopping.set()
        self._waker.close()
        if self._thread.ident is not None:
            self._thread.join()
        for closing in (self._tcp, self._unix, self._wakened):
            closing.close()
        with self._lock:
            handlers = list(self._handlers)
        local.running.pop(self._worker_uid, None)
        self.sessions.refuse_all("the worker stops")
        deadline = time.monotonic() + _FAREWELL_S
        for handler in handlers:
            handler.close(deadline)

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            for listener in (self._tcp, self._unix, self._wakened):
                selector.register(listener, selectors.EVENT_READ)
            while not self._stopping.is_set():
                for key, _ in selector.select(_TICK_S):
                    if key.fileobj is not self._wakened:
                        assert isinstance(key.fileobj, socket.socket)
                        self._accept_from(key.fileobj)
                self.sessions.expire(time.monotonic())

    def _accept_from(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except BlockingIOError:  # the connection is gone again
            return
        except OSError as error:  # such as no more file descriptors
            self._rate_limited_log.warn("cannot accept a consumer's connection: %s", error)
            self._stopping.wait(_TICK_S)
            return
        sock.setblocking(True)
        self.serve(sock, address[:2] or None, None, self._admission)

    def serve(
        self,
        sock: socket.socket,
        address: tuple[str, int] | None,
        identity: Identity | None = None,
        admission: Admission | None = None,
    ) -> None:
        """Serve the consumer at the other end of a connected, blocking socket.

        `address` is its IP address ("" if that is unknown) and port, or None over a Unix socket.
        Without `admission` it was admitted, as `identity`. The socket is closed in the end.
        """
        peer = f"consumer at {address[0]}:{address[1]}" if address else "consumer on this host"
        with self._lock:
            if address is not None and self._strangers(address[0]) >= MAX_STRANGERS:
                self._rate_limited_log.warn(
                    "closed a connection of the %s: %d others of that address have not said who "
                    "they are yet", peer, MAX_STRANGERS,
                )  # fmt: skip
                sock.close()
                return
            if len(self._handlers) >= MAX_CONNECTIONS or self._stopping.is_set():
                self._rate_limited_log.warn(
                    "closed a connection of the %s: the worker stops, or has %d already",
                    peer, MAX_CONNECTIONS,
                )  # fmt: skip
                sock.close()
                return
            handler = _Handler(self, sock, peer, address, admission, identity)
            try:
                handler.receiver.start()  # before stop() looks for it
            except RuntimeError as error:  # no more threads: the consumer may retry
                self._rate_limited_log.warn("closed a connection of the %s: %s", peer, error)
                handler.socket.close()
                return
            self._handlers.add(handler)

    def _strangers(self, host: str) -> int:
        return sum(handler.host == host and not handler.is_known for handler in self._handlers)

    def _remove(self, handler: _Handler) -> None:
        with self._lock:
            self._handlers.discard(handler)


class _Handler:
    def __init__(
        self,
        server: BlockServer,
        sock: socket.socket,
        peer: str,
        address: tuple[str, int] | None,
        admission: Admission | None,
        identity: Identity | None,
    ) -> None:
        """`address` is None over a Unix socket. Without `admission`, the consumer was admitted as
        `identity`."""
        self.host = None if address is None else address[0]  # its IP address
        self.is_known = False  # it has said who it is
        self._server = server
        # A Unix socket leads straight to the consumer, so the kernel reports its end; a tunnel's
        # socket leads through gRPC.
        self._is_direct = address is None
        self._far = self.host is not None and not server._is_this_host(self.host)
        self._admission = admission
        self._identity = identity
        self._iteration_id: int | None = None  # whose tasks it may read; None: all
        self._tls: TlsSocket | None = None
        if admission is not None and not self._is_direct:
            sock = self._tls = TlsSocket(sock, admission.credentials, server_name=None, peer=peer)
        self.socket = sock
        self._peer = peer
        self._sessions = server.sessions
        self._reader = frames.FrameReader(
            sock, peer, max_header_bytes=_MAX_HEADER_BYTES, max_payload_bytes=0
        )
        self.receiver = threading.Thread(
            target=self._receive, name="forebay-blocks-receiver", daemon=True
        )
        # Set once greeted: the session's connection, and its sender.
        self._greeted: tuple[Connection, threading.Thread] | None = None
        self._lender: Lender | None = None  # if the consumer shares memory with us
        self._writing = threading.Lock()  # on the socket
        self._process: int | None = None  # a pidfd of the consumer's process, if available
        self._packer: Packer | None = None  # if the consumer can decompress

    def close(self, deadline: float) -> None:
        """Let the sender finish until `deadline`, then cut the connection and join its threads."""
        if self._greeted is not None:
            self._greeted[1].join(max(0.0, deadline - time.monotonic()))
        self._cut()
        self.receiver.join()

    def _cut(self) -> None:
        try:
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes both threads
        except OSError:  # it is cut already
            pass

    def _receive(self) -> None:
        try:
            frames.tune(self.socket)
            connection = self._admitted()
            sender = threading.Thread(
                target=self._send, args=(connection,), name="forebay-blocks-sender", daemon=True
            )
            try:
                # The consumer must hear this after `attach`. Otherwise it could connect again
                # first, and this older connection would then replace the newer one.
                self._write(pb.ToConsumer(welcome=pb.Welcome(version=VERSION)).SerializeToString())
                try:
                    sender.start()
                except RuntimeError as error:  # no more threads
                    raise OSError(str(error)) from error
                self._greeted = connection, sender
                if self._listen(connection):
                    sender.join(_FAREWELL_S)
            except ProtocolError as error:
                self._sessions.refuse(connection, str(error))
                sender.join(_FAREWELL_S)
                raise
            finally:
                # A process that has ended cannot reconnect for its blocks.
                is_gone = self._process is not None and has_ended(self._process)
                self._sessions.detach(connection, None if is_gone else time.monotonic())
                self._cut()
                if self._greeted is not None:
                    sender.join()
        except PlainPeer as error:
            assert self._tls is not None
            self._complain(error)
            with contextlib.suppress(OSError):  # in its own words, which are plain
                plain = b"".join(frames.encode(encode_refusal(f"this worker speaks TLS: {error}")))
                self._tls.send_plain(plain)
        except OSError as error:
            if isinstance(error, TlsError) and not isinstance(error, ClosedEarly):
                self._complain(error)
            elif self.is_known:
                _log.info("the connection of %s ended: %s", self._peer, error)
            else:  # such as of those that only look whether the port is open
                self._server._rate_limited_log.warn(
                    "a connection of the %s ended: %s", self._peer, error, level=logging.INFO
                )
        except ProtocolError as error:
            self._server._rate_limited_log.warn(
                "closed the connection of %s: %s", self._peer, error
            )
        finally:
            if self._lender is not None:
                self._lender.close()  # at once: reference cycles would keep its memory for a while
            if self._process is not None:
                os.close(self._process)
            self.socket.close()
            self._server._remove(self)

    def _complain(self, error: TlsError) -> None:
        self._server._rate_limited_log.warn("refused a connection: %s", error, kind=error.kind)

    def _admitted(self) -> Connection:
        frames.set_timeout(self.socket, socket.SO_RCVTIMEO, _HANDSHAKE_S)
        if self._tls is not None:
            self._tls.handshake(_HANDSHAKE_S)
        self._process = watch_process(self.socket)
        return self._greet()

    def _greet(self) -> Connection:
        message = self._next()
        if message is None:
            raise ConnectionResetError("it closed before it said hello")
        hello, broken, unfit = message.hello, False, False
        if message.WhichOneof("message") != "hello":
            reason = "a connection starts with Hello"
        elif hello.version != VERSION:
            reason = f"version {hello.version} of the protocol is not spoken here, only {VERSION}"
        elif hello.worker_uid != (uid := self._server._worker_uid):
            reason = f"this is worker {uid}, not {hello.worker_uid}"
        elif refused := self._unauthenticated(hello):
            reason, broken, unfit = str(refused), True, isinstance(refused, UnfitCredential)
        else:
            if self._is_direct:
                frames.set_timeout(self.socket, socket.SO_RCVTIMEO, 0)
            else:
                self._reader.watch(_SILENCE_TICK_S, lambda: None, SILENT_CONSUMER_S)
            if hello.shares_memory and self.socket.family == socket.AF_UNIX:
                self._lender = Lender()
            if hello.codecs:
                self._packer = Packer(hello.codecs, far=self._far)
            self.is_known = True
            return self._sessions.attach(hello.consumer_id, self._cut, self._iteration_id)
        self._write(encode_refusal(reason, broken, unfit))
        raise ProtocolError(f"it was refused: {reason}")

    def _unauthenticated(self, hello: pb.Hello) -> Unauthenticated | None:
        """Why the consumer is not admitted, or its credential does not fit; None if it may read."""
        try:
            if self._admission is not None:
                self._identity = self._identify(self._admission, hello)
        except Unauthenticated as error:
            return UnfitCredential(str(error))
        _log.debug("the %s is %s", self._peer, self._identity)
        keys = self._server._keys
        if keys is None or self._identity is None:
            return None
        try:
            self._iteration_id = keys.check(hello.credential, hello.consumer_id, self._identity)
        except Unauthenticated as error:
            return error
        return None

    def _identify(self, admission: Admission, hello: pb.Hello) -> Identity:
        if self._tls is None:
            return admission.of_user(user_of(self.socket))
        return admission.of_token(hello.token) if admission.asks_for_token else self._tls.identity()

    def _listen(self, connection: Connection) -> bool:
        """Handle messages until the connection ends; return whether it ended with a goodbye."""
        welcomed_s = time.monotonic()
        while (message := self._next()) is not None:
            if not connection.round_trip_s:  # the first message answers the welcome
                connection.round_trip_s = time.monotonic() - welcomed_s
            if message.traceparent:
                self._sessions.trace(connection, message.traceparent, message.read.task_id)
            match message.WhichOneof("message"):
                case "read":
                    read = message.read
                    request = read_requests.decode(read)
                    self._sessions.read(
                        connection, read.task_id, read.received, request, read.subscription
                    )
                case "credit":
                    credit = message.credit
                    if self._lender is not None:
                        self._lender.take_back(credit.slabs, credit.abandoned_slabs)
                    elements = credit.elements if credit.HasField("elements") else None
                    self._sessions.give_credit(connection, credit.bytes, credit.positions, elements)
                case "stop":
                    stop = message.stop
                    self._sessions.stop_reading(connection, stop.task_id, stop.subscription)
                case "ping":
                    self._answer_ping()
                case "goodbye":
                    self._sessions.goodbye(connection, message.goodbye.positions)
                    return True
                case other:
                    raise ProtocolError(f"{self._peer} sent {other or 'an empty message'}")
        return False

    def _answer_ping(self) -> None:
        """Send a pong, unless blocks are being sent or fill the socket: those show that the worker
        lives. Never waits for the consumer. Raises OSError.
        """
        if not self._writing.acquire(blocking=False):
            return
        try:
            frames.send_at_once(self.socket, frames.encode(PONG))
        finally:
            self._writing.release()

    def _write(self, header: bytes) -> None:
        frames.send(self.socket, frames.encode(header))

    def _next(self) -> pb.ToWorker | None:
        frame = self._reader.read()
        if frame is None:
            return None
        try:
            return pb.ToWorker.FromString(frame.header)
        except DecodeError as error:
            raise ProtocolError(f"{self._peer} sent what cannot be parsed: {error}") from None

    def _send(self, connection: Connection) -> None:
        try:
            while (batch := self._sessions.next_batch(connection)) is not None:
                self._send_batch(batch)
        except OSError as error:  # the receiver reports the connection's end
            _log.debug("sending to %s failed: %s", self._peer, error)
        finally:
            self._cut()

    def _send_batch(self, batch: list[Outgoing]) -> None:
        buffers: list[frames.Buffer] = []
        descriptors = []
        try:
            for out in batch:
                match out:
                    case Sent(task_id, number, block, _, compression, subscription):
                        pack = None
                        if self._packer is not None:
                            pack = partial(
                                self._packer.pack, compression, encodings=block.encodings
                            )
                        frame, descriptor = encode_block(
                            task_id, number, block, self._lender, pack, subscription,
                            self._server._checksums,
                        )  # fmt: skip
                        buffers += frame
                        if descriptor is not None:
                            descriptors.append(descriptor)
                    case Ended(task_id, end, subscription):
                        buffers += frames.encode(encode_end(task_id, end, subscription))
                    case Refusal(reason, broken):
                        buffers += frames.encode(encode_refusal(reason, broken))
                    case Farewell():
                        buffers += frames.encode(FAREWELL)
            begun = time.perf_counter()
            with self._writing:
                frames.send(self.socket, buffers, descriptors)
            if self._packer is not None:
                self._packer.sent(time.perf_counter() - begun)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _is_this_host(ip: str) -> bool:
    """Whether the address is one of this host: only then can a socket be bound to it."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as trial:
            trial.bind((ip, 0))
    except OSError:
        return False
    return bool(ip)  # any address


def _listen_tcp(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)  # fails if another socket listens there
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise AddressInUse(
            f"cannot listen for consumers on {host}:{port}: {error}; choose another port or host"
        ) from error
    return listener


def watch_process(sock: socket.socket) -> int | None:
    """A descriptor (pidfd) of the process that made a Unix connection; None if it is unknown.

    It is unknown over TCP, on systems other than Linux, and if this process cannot see it, as in
    another container.
    """
    try:
        if sock.family != socket.AF_UNIX:
            return None
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size)
        return os.pidfd_open(UCRED.unpack(credentials)[0])
    except (OSError, AttributeError):
        return None


def has_ended(process: int) -> bool:
    """Whether the process has ended, or ends within ENDING_S. Waits for that long."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(1000 * ENDING_S))

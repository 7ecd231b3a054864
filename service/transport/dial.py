"""Opens a data connection: connects a socket to the worker, at the first of its addresses that
answers, and exchanges Hello and Welcome."""

from __future__ import annotations

import enum
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..connections.credentials import Credentials, own_credentials
from ..connections.protocols import GRPC, TCP, UNIX
from ..connections.tls_socket import TlsSocket
from ..errors import ForebayError, ProtocolError, Unauthenticated
from ..proto import transfer_pb2 as pb
from . import frames
from .messages import parse

OpenTunnel = Callable[[str, float], socket.socket]
"""Takes a worker's gRPC address and a timeout in seconds; returns a connected socket. Raises
OSError, Unauthenticated."""


Opened = TypeVar("Opened")

UCRED = struct.Struct("3i")
"""Process, user and group: Linux's struct ucred."""


class WorkerRefused(ForebayError):
    """The worker refuses this consumer: another process has its address, or it stops."""


class CredentialRefused(ProtocolError):
    """The worker says that it does not know this peer, or that the credential is unfit: none of
    this consumer and peer."""


class ConnectionRefused(enum.Enum):
    """A worker's address refuses connections."""

    ONCE_CONNECTED = enum.auto()  # so its process has ended
    NEVER_CONNECTED = enum.auto()  # a firewall or another host may refuse


class WorkerAddresses:
    """The addresses of one worker, the best first. For one thread at a time."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, str]],
        *,
        with_grpc: bool,
        refused: Callable[[ConnectionRefused | None], None],
    ) -> None:
        """`addresses` are pairs of a protocol and an address; unknown protocols are skipped.

        Calls `refused` when nobody listens at the worker's address, and with None once a process
        listens there again. Raises ValueError if no address is left.
        """
        usable = (UNIX, TCP, GRPC) if with_grpc else (UNIX, TCP)
        self._addresses = [a for a in addresses if a[0] in usable]
        if not self._addresses:
            raise ValueError(f"none of the worker's addresses can be used here: {addresses}")
        self.answered: tuple[str, str] | None = None  # the address where the worker last did
        self.refuse = False  # whether the last attempt to connect was refused
        self._report = refused
        self._reported: ConnectionRefused | None = None

    def connect(self, connect_to: Callable[[str, str], Opened]) -> Opened:
        """What `connect_to(protocol, address)` returns for the first address that answers.

        Raises ConnectionError if all raise OSError.
        """
        errors, refusals = [], []
        for protocol, address in self._addresses:
            try:
                connection = connect_to(protocol, address)
            except OSError as error:
                errors.append(f"{protocol} {address}: {error}")
                refused = isinstance(error, ConnectionRefusedError)
                if refused and (protocol, address) == self.answered:
                    # Report it now: the other addresses may take long to fail.
                    self._report_change(ConnectionRefused.ONCE_CONNECTED)
                if protocol != UNIX or len(self._addresses) == 1:  # Unix names are local to a host
                    refusals.append(refused)
            else:
                self.answered = protocol, address
                self.refuse = False
                self._report_change(None)
                return connection
        self.refuse = refusals[:1] == [True]
        if self.refuse and self.answered is None:
            self._report_change(ConnectionRefused.NEVER_CONNECTED)
        raise ConnectionError("; ".join(errors))

    def _report_change(self, refused: ConnectionRefused | None) -> None:
        if refused != self._reported:
            self._reported = refused
            self._report(refused)


def dial(
    protocol: str, address: str, timeout_s: float, open_tunnel: OpenTunnel | None
) -> socket.socket:
    """Connect a blocking socket, with this process's credentials. "grpc" needs `open_tunnel`.

    Raises OSError, CredentialRefused.
    """
    credentials = own_credentials()
    if protocol == TCP:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        sock = socket.create_connection((host, int(port)), timeout_s)
        if credentials is not None:
            sock = _with_tls(sock, credentials, host, address, timeout_s)
    elif protocol == GRPC:
        assert open_tunnel is not None
        try:
            sock = open_tunnel(address, timeout_s)
        except Unauthenticated as error:
            raise CredentialRefused(str(error)) from None
    else:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(timeout_s)  # a paused worker does not accept
        try:
            sock.connect(address.replace("@", "\0", 1))
            if credentials is not None and user_of(sock) != os.geteuid():
                raise PermissionError(
                    f"user {user_of(sock)} runs the worker, and not {os.geteuid()}, as this process"
                )
        except OSError:
            sock.close()
            raise
    sock.settimeout(None)
    return sock


def _with_tls(
    sock: socket.socket, credentials: Credentials, host: str, address: str, timeout_s: float
) -> TlsSocket:
    frames.set_timeout(sock, socket.SO_RCVTIMEO, timeout_s)
    sock.settimeout(None)
    tls = TlsSocket(sock, credentials, server_name=host, peer=f"worker at {address}")
    try:
        tls.handshake(timeout_s)
    except OSError:
        tls.close()
        raise
    return tls


def user_of(sock: socket.socket) -> int | None:
    """The user of the process at the other end of a Unix socket; None on systems that do not say
    it."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    user: int = UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, option, UCRED.size))[1]
    return user


def greet(sock: socket.socket, reader: frames.FrameReader, hello: pb.Hello) -> None:
    """Send Hello, and wait for Welcome.

    Raises WorkerRefused, CredentialRefused, ProtocolError, OSError.
    """
    frames.send(sock, frames.encode(pb.ToWorker(hello=hello).SerializeToString()))
    frame = reader.read()
    if frame is None:
        raise ConnectionResetError(f"{reader.peer} closed the connection instead of a welcome")
    message = parse(frame, reader.peer)
    if message.HasField("refused"):
        raise refusal(message.refused, reader.peer)
    if not message.HasField("welcome"):
        raise ProtocolError(f"{reader.peer} did not answer Hello with Welcome: {message}")


def refusal(refused: pb.Refused, peer: str) -> ForebayError:
    """The error that a worker's message is."""
    kind: type[ForebayError] = WorkerRefused
    if refused.unfit:
        kind = CredentialRefused
    elif refused.broken:  # a newer credential may be accepted
        kind = ProtocolError
    return kind(f"{peer} refused: {refused.reason}")

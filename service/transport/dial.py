"""Opens a data connection: connects a socket to the worker, and exchanges Hello and Welcome."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable

from ..connections.credentials import Credentials, own_credentials
from ..connections.protocols import GRPC, TCP
from ..connections.tls_socket import TlsSocket
from ..errors import ForebayError, ProtocolError, Unauthenticated
from ..proto import transfer_pb2 as pb
from . import frames
from .messages import parse

OpenTunnel = Callable[[str, float], socket.socket]
"""Takes a worker's gRPC address and a timeout in seconds; returns a connected socket. Raises
OSError, Unauthenticated."""


UCRED = struct.Struct("3i")
"""Process, user and group: Linux's struct ucred."""


class WorkerRefused(ForebayError):
    """The worker refuses this consumer: another process has its address, or it stops."""


class CredentialRefused(ProtocolError):
    """The worker says that it does not know this peer, or that the credential is unfit: none of
    this consumer and peer."""


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

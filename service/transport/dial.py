"""Opens a data connection: connects a socket to the worker, and exchanges Hello and Welcome."""

from __future__ import annotations

import socket
from collections.abc import Callable

from ..connections.protocols import GRPC, TCP
from ..errors import ForebayError, ProtocolError
from ..proto import transfer_pb2 as pb
from . import frames
from .messages import parse

OpenTunnel = Callable[[str, float], socket.socket]
"""Takes a worker's gRPC address and a timeout in seconds; returns a connected socket. Raises
OSError."""


class WorkerRefused(ForebayError):
    """The worker refuses this consumer: another process has its address, or it stops."""


def dial(
    protocol: str, address: str, timeout_s: float, open_tunnel: OpenTunnel | None
) -> socket.socket:
    """Connect a blocking socket. "grpc" needs `open_tunnel`. Raises OSError."""
    if protocol == TCP:
        host, _, port = address.rpartition(":")
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
    elif protocol == GRPC:
        assert open_tunnel is not None
        sock = open_tunnel(address, timeout_s)
    else:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(timeout_s)  # a paused worker does not accept
        try:
            sock.connect(address.replace("@", "\0", 1))
        except OSError:
            sock.close()
            raise
    sock.settimeout(None)
    return sock


def greet(sock: socket.socket, reader: frames.FrameReader, hello: pb.Hello) -> None:
    """Send Hello, and wait for Welcome.

    Raises WorkerRefused, ProtocolError, OSError.
    """
    frames.send(sock, frames.encode(pb.ToWorker(hello=hello).SerializeToString()))
    frame = reader.read()
    if frame is None:
        raise ConnectionResetError(f"{reader.peer} closed the connection instead of a welcome")
    message = parse(frame, reader.peer)
    if message.WhichOneof("message") == "refused":
        raise WorkerRefused(f"{reader.peer} refused: {message.refused.reason}")
    if message.WhichOneof("message") != "welcome":
        raise ProtocolError(f"{reader.peer} did not answer Hello with Welcome: {message}")

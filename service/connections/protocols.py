"""The data transfer protocols between workers and consumers, as users name them."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidArgument

LOCAL, UNIX, TCP, GRPC = "local", "unix", "tcp", "grpc"

PROTOCOLS = (LOCAL, UNIX, TCP, GRPC)
"""Best first: within a process, within a host, between hosts, and where only HTTP/2 passes."""

SERVED = (UNIX, TCP, GRPC)
"""The protocols that reach a worker from other processes."""


def transfer_protocol(name: str | None, known: Sequence[str] = PROTOCOLS) -> str | None:
    """Parse `data_transfer_protocol`: one of `known`, or None for the best available one.

    Case-insensitive. Raises InvalidArgument for an unknown protocol.
    """
    if name is None or str(name).lower() == "auto":
        return None
    if str(name).lower() not in known:
        raise InvalidArgument(
            f"data_transfer_protocol={name!r} is not known; use 'AUTO', "
            f"{', '.join(map(repr, known[:-1]))} or {known[-1]!r}"
        )
    return str(name).lower()

"""The ways by which a worker's blocks reach a consumer, as users name them."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidArgument

LOCAL, UNIX, TCP, GRPC = "local", "unix", "tcp", "grpc"

PROTOCOLS = (LOCAL, UNIX, TCP, GRPC)
"""The best first: within a process, within a host, between hosts, where only HTTP/2 passes."""

SERVED = (UNIX, TCP, GRPC)
"""Those by which a worker can be reached from other processes."""


def transfer_protocol(name: str | None, known: Sequence[str] = PROTOCOLS) -> str | None:
    """What `data_transfer_protocol` says: one of `known`, or None for the best that there is.

    Upper and lower case are the same. Raises InvalidArgument for anything else.
    """
    if name is None or str(name).lower() == "auto":
        return None
    if str(name).lower() not in known:
        raise InvalidArgument(
            f"data_transfer_protocol={name!r} is not known; use 'AUTO', "
            f"{', '.join(map(repr, known[:-1]))} or {known[-1]!r}"
        )
    return str(name).lower()

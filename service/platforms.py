"""What only some systems have. Dispatchers and workers need Linux; a reader needs less."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from .errors import FailedPrecondition


def require(what: str, name: str) -> None:
    """Raises FailedPrecondition, which names it, where `os` and `socket` have no such function."""
    if not (hasattr(os, name) or hasattr(socket, name)):
        raise FailedPrecondition(
            f"{what} needs {name}, which this system lacks: run it on Linux, or in a container"
        )


def at_fork(**hooks: Callable[[], None]) -> None:
    """`os.register_at_fork`, where processes fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**hooks)

"""When gRPC connects through an HTTP proxy, which variables of the environment name.

gRPC would use it for loopback, too. A proxy elsewhere cannot reach this host's loopback, and rarely
the addresses that servers tell. So channels to loopback and to IP addresses use no proxy, unless
the variable USES_PROXY says so.
"""

from __future__ import annotations

import ipaddress
import os
from typing import Any

from .credentials import is_loopback

VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""gRPC takes the first one that is set."""

EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
"""The first one that is set lists ends of hosts' names that are reached directly."""

USES_PROXY = "FOREBAY_USES_PROXY"
"""If it is 1, gRPC's own rule holds for loopback and IP addresses, too."""


def proxy_options(address: str) -> list[tuple[str, Any]]:
    """The options of a channel to HOST:PORT."""
    return [("grpc.enable_http_proxy", 0)] if _is_direct(address) else []


def proxy_variable(address: str) -> str:
    """The variable that has a channel to HOST:PORT go through a proxy; "" if it goes directly."""
    named = next(filter(os.environ.get, VARIABLES), "")
    if not named or _is_direct(address):
        return ""
    host = address.rpartition(":")[0]
    direct = next(filter(None, map(os.environ.get, EXCEPTIONS)), "")
    ends = tuple(end.strip() for end in direct.split(",") if end.strip())
    return "" if host.endswith(ends) else named


def proxy_note(address: str) -> str:
    """What to say of the proxy behind an error of a connection to HOST:PORT; "" without one."""
    if not (variable := proxy_variable(address)):
        return ""
    host = address.rpartition(":")[0]
    return (
        f" (gRPC asks the proxy in this process's variable {variable} for {host}; if it is reached "
        f"without one, set no_proxy={host}, too)"
    )


def _is_direct(address: str) -> bool:
    if os.environ.get(USES_PROXY) == "1":
        return False
    host = address.rpartition(":")[0].strip("[]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return is_loopback(host)
    return True

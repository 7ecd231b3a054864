"""The forms of hosts, addresses and services. Nothing is looked up here."""

from __future__ import annotations

import ipaddress
import re

from .errors import InvalidArgument

MAX_PORT = 65535

HOST_FORMS = "a name (letters, digits, -, _ and .), an IPv4 address, or an IPv6 address in brackets"

_LABEL = r"\w(?:[\w-]{0,61}\w)?"  # underscores are in names of Docker Compose
_ADDRESS = re.compile(
    rf"(?:\[([\w:.%-]+)\]|(?=[^:]{{1,253}}:)({_LABEL}(?:\.{_LABEL})*)\.?):(\d{{1,5}})", re.ASCII
)
_NUMBERS = re.compile(r"\d+(\.\d+){3}")
_ANY_PORT = re.compile(r":%port(_[a-zA-Z0-9_]+)?%$")


def is_address(text: str) -> bool:
    """Whether it is a HOST:PORT to connect to. HOST is a name as DNS and Docker Compose have them,
    an IPv4 address, or an IPv6 address in brackets."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[3]) <= MAX_PORT:
        return False
    try:
        if match[1]:
            ipaddress.IPv6Address(match[1])
        elif _NUMBERS.fullmatch(match[2]):
            ipaddress.IPv4Address(match[2])
    except ValueError:
        return False
    return True


def is_place(text: str) -> bool:
    """Whether it names workers: HOST:PORT, HOST or HOST:%port%."""
    return is_address(text) or is_address(f"{_ANY_PORT.sub('', text)}:1")


def in_brackets(host: str) -> str:
    """The host as an address has it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def is_wildcard(host: str) -> bool:
    """Whether it is a host that a server can listen on, but that no client can connect to."""
    try:
        return not host or ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def checked_host(host: str) -> str:
    """A host that a server may listen on. Raises InvalidArgument."""
    is_host = isinstance(host, str) and is_address(f"{in_brackets(host)}:1")
    if not (is_host or is_wildcard(host)):
        raise InvalidArgument(f"the host {host!r} is not {HOST_FORMS}")
    return host


def checked_address(address: str) -> str:
    """An address that a server may tell its clients; "" is none. Raises InvalidArgument."""
    if address and not is_address(re.sub(":%port%$", ":1", str(address))):
        raise InvalidArgument(
            f"{address!r} is not of the form HOST:PORT; HOST is {HOST_FORMS}; %port% stands for "
            "the port that is listened on"
        )
    return address


def parse_service(service: str | tuple[str, str]) -> list[str]:
    """The dispatcher addresses that `service` names.

    `service` is "grpc://host:port", "host:port", ("grpc", "host:port"), or several of the
    strings, comma-separated. Raises InvalidArgument.
    """
    if isinstance(service, tuple):
        if len(service) != 2 or service[0] != "grpc":
            raise InvalidArgument(
                f'service {service!r} is not a pair ("grpc", "host:port"); Forebay speaks grpc'
            )
        service = service[1]
    if not isinstance(service, str):
        raise InvalidArgument(
            f"`service` must be a string, but `service` was of type {type(service)}. "
            f"service={service}"
        )
    if not service:
        raise InvalidArgument("`service` must not be empty")
    addresses = []
    for part in service.split(","):
        protocol, separator, address = part.strip().rpartition("://")
        if (separator and protocol != "grpc") or not is_address(address):
            raise InvalidArgument(
                f'service address {part.strip()!r} is not of the form "grpc://host:port" or '
                '"host:port"'
            )
        addresses.append(address)
    return addresses

"""Parses a Redis URL: the server, the journal's key prefix, and the durability it asks for.

redis://[[user]:password@]host[:port][/db]
rediss://…                                        the same over TLS
unix://[[user]:password@]/path/of/the/socket[?db=n]
redis+sentinel://[[user]:password@]host[:port][,host[:port]…]/service[/db]

These parameters are ours; all others are redis-py's own (`socket_timeout`, `ssl_ca_certs` …):

prefix          the prefix of all keys                                       forebay
retry_s         how long an append retries an unreachable Redis, seconds     60
wait_replicas   how many replicas must confirm an append                     0
wait_aof        1: an append waits until Redis has synced its AOF            0
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from ..errors import StorageUnusable
from ..parameters import PERCENT, redact, take_seconds

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel")
PARAMETERS = ("prefix", "retry_s", "wait_replicas", "wait_aof")
SENTINEL_PORT = 26379

_PREFIX = re.compile(r"[!-~]{1,200}")
_HINT = f"; {PERCENT}"


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A parsed Redis URL."""

    url: str  # without passwords
    server: str  # the URL for redis-py; with Sentinel, only the user, the db and the parameters
    sentinels: tuple[tuple[str, int], ...]  # (host, port); none without Sentinel
    service: str  # the name by which the Sentinels know it
    prefix: str
    retry_s: float
    wait_replicas: int
    wait_aof: bool


def parse_redis_url(url: str) -> RedisAddress:
    """Parse a Redis URL. Raises StorageUnusable, which names the wrong part."""
    try:
        parts = urlsplit(url)
        sentinels, service, server = _locate(parts)
        rest = dict(parse_qsl(parts.query, keep_blank_values=True))
        prefix = rest.pop("prefix", "forebay")
        if not _PREFIX.fullmatch(prefix):
            raise ValueError(f"prefix={prefix!r} is not 1 to 200 printable ASCII characters")
        retry_s = take_seconds(rest, "retry_s", 60)
        wait_replicas = _integer(rest, "wait_replicas", 100)
        wait_aof = bool(_integer(rest, "wait_aof", 1))
    except ValueError as error:
        raise StorageUnusable(f"storage {redact(url)}: {error}") from None
    server = f"{server}?{urlencode(rest)}"
    return RedisAddress(
        redact(url), server, sentinels, service, prefix, retry_s, wait_replicas, wait_aof
    )


def _locate(parts: SplitResult) -> tuple[tuple[tuple[str, int], ...], str, str]:
    """The Sentinels, their service, and the URL for redis-py without its parameters."""
    userinfo, _, hosts = parts.netloc.rpartition("@")
    server = f"{parts.scheme}://{parts.netloc}{parts.path}"
    path = parts.path.strip("/")
    if parts.scheme == "unix":
        if hosts or not path:
            raise ValueError("names no socket of this host; write unix:///path/of/the/socket")
        return (), "", server
    if parts.scheme != "redis+sentinel":
        if not _host_and_port(hosts) or (not path.isdigit() and path):
            raise ValueError(f"write redis://host:port/db, where db is a number or left out{_HINT}")
        return (), "", server
    service, _, db = path.partition("/")
    sentinels = tuple(filter(None, map(_host_and_port, hosts.split(","))))
    if not service or not (db.isdigit() or not db) or len(sentinels) <= hosts.count(","):
        raise ValueError(f"write redis+sentinel://host:port,host:port/service/db{_HINT}")
    netloc = f"{userinfo}@unknown" if userinfo else "unknown"
    return sentinels, unquote(service), f"redis://{netloc}/{db}"


def _host_and_port(text: str) -> tuple[str, int] | None:
    """Parse HOST[:PORT], else None. No error names the text: it may be part of a password."""
    try:
        parts = urlsplit(f"//{text}")
        port = parts.port
    except ValueError:
        return None
    return (parts.hostname, port or SENTINEL_PORT) if parts.hostname else None


def _integer(values: dict[str, str], name: str, most: int) -> int:
    text = values.pop(name, "0")
    if not text.isdigit() or int(text) > most:
        raise ValueError(f"{name}={text!r} is not a whole number from 0 to {most}")
    return int(text)

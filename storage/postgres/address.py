"""Parses the URL of a PostgreSQL: the server, the database, and the journal's schema.

postgresql://[user[:password]@][host][:port][,…][/database]      (or postgres://)

These parameters are ours; all others are libpq's own (`sslmode`, `sslrootcert`, `host` …), and
what the URL lacks comes from libpq's environment and files (PGPASSWORD, PGPASSFILE …):

prefix          the schema that holds the journal's tables                   forebay
retry_s         how long an append retries an unreachable server, seconds    60
reply_s         how long one reply may take, seconds                         5
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from ..errors import StorageUnusable
from ..parameters import PERCENT, redact, take_seconds

PARAMETERS = ("prefix", "retry_s", "reply_s")

_PREFIX = re.compile(r"(?!pg_)[A-Za-z0-9_-]{1,63}")
_HOSTS = re.compile(r"[\w.,:%\[\]-]*", re.ASCII)
_WRITE = f"write postgresql://user:password@host:port/database; {PERCENT}"
_UNKNOWN = re.compile(r'invalid URI query parameter: "(\w+)"')


@dataclass(frozen=True, slots=True)
class PostgresAddress:
    """A parsed URL."""

    url: str  # without passwords
    options: dict[str, Any]  # libpq's parameters
    prefix: str
    retry_s: float
    reply_s: float

    @property
    def fails_over(self) -> bool:
        """Whether it names several servers, of which one is the primary."""
        return any("," in str(self.options.get(name, "")) for name in ("host", "hostaddr"))


def parse_postgres_url(url: str) -> PostgresAddress:
    """Parse the URL. Raises StorageUnusable, which names the wrong part, but no password."""
    try:
        parts = urlsplit(url)
        user, _, hosts = parts.netloc.rpartition("@")
        database = parts.path.removeprefix("/")
        # libpq's own errors would quote what may be a part of a password.
        if parts.fragment or "@" in user or "@" in database or "/" in database:
            raise ValueError(_WRITE)
        if not _HOSTS.fullmatch(hosts) or not _has_ports(hosts):
            raise ValueError(_WRITE)
        rest = dict(parse_qsl(parts.query, keep_blank_values=True))
        prefix = rest.pop("prefix", "forebay")
        if not _PREFIX.fullmatch(prefix):
            raise ValueError(
                f"prefix={prefix!r} is not 1 to 63 letters, digits, _ and -, or begins with pg_"
            )
        retry_s = take_seconds(rest, "retry_s", 60)
        reply_s = take_seconds(rest, "reply_s", 5)
        if not reply_s:
            raise ValueError("reply_s=0 leaves no time for a reply; give some seconds")
        options = _libpq_options(
            f"postgresql://{parts.netloc}{parts.path}?{urlencode(rest, quote_via=quote)}"
        )
    except ValueError as error:
        raise StorageUnusable(f"storage {redact(url)}: {error}") from None
    return PostgresAddress(redact(url), options, prefix, retry_s, reply_s)


def _has_ports(hosts: str) -> bool:
    """Whether what stands where a port belongs is one."""
    ports = (host.rpartition("]")[2].partition(":")[2] for host in hosts.split(","))
    return all(port.isdigit() or not port for port in ports)


def _libpq_options(uri: str) -> dict[str, Any]:
    try:
        return conninfo_to_dict(uri)
    except ProgrammingError as error:
        if (unknown := _UNKNOWN.search(str(error))) is None:
            raise ValueError(_WRITE) from None
        raise ValueError(
            f"there is no parameter {unknown[1]!r}; there are {', '.join(PARAMETERS)}, and those "
            "of libpq's connections"
        ) from None

"""Sends statements to one PostgreSQL, and translates its failures into storage errors.

Each statement is a transaction of its own, and is sent as a whole. So a process that is paused or
killed never holds a lock of the server's. The caller decides about retries.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg import errors as pg
from psycopg.abc import PQGen
from psycopg.waiting import Ready

from ..errors import REPAIR, Corrupt, StorageUnavailable, StorageUnusable
from ..server_log import JournalPartMissing
from .address import PostgresAddress

CONNECT_TIMEOUT_S = 2  # unless the URL has connect_timeout; libpq's least
CUT_MS = 1500
"""How long sent data may stay unacknowledged by TCP before the network counts as cut. A slow
server does not matter, since its kernel acknowledges."""

_DEFAULTS = {
    "connect_timeout": CONNECT_TIMEOUT_S,
    "tcp_user_timeout": CUT_MS,
    "keepalives_idle": 1,  # seconds, while waiting for a reply
    "keepalives_interval": 1,
    "keepalives_count": 2,
    "application_name": "forebay",
}
_PRIMARY = {"target_session_attrs": "read-write"}
"""Of several servers, libpq would take the first that answers: maybe a standby that lags behind."""
NAME_BYTES = 63  # the server cuts longer names
SCRIPT_S = 3600.0  # a script that moves a whole journal aside
SLOWEST_BYTES_S = 5e6  # at which a server may store a large value
_TICK_S = 0.1  # how often a waiting call looks at the clock

# What a server says while it refuses to connect. There is no error code then, and other languages
# than English make it StorageUnavailable, whose message quotes the server.
_REFUSALS = {
    r"password authentication failed|no password supplied|authentication failed": (
        "give the right user and password in the URL, PGPASSWORD or PGPASSFILE"
    ),
    r'database ".*" does not exist': (
        "create it: CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
    ),
    r'role ".*" does not exist': "create it: CREATE ROLE … LOGIN",
    r"no pg_hba.conf entry|pg_hba.conf rejects": "allow this host, user and database there",
    r"permission denied for database": "GRANT CONNECT ON DATABASE … TO …",
    r"is not permitted to log in": "ALTER ROLE … LOGIN",
    r"root certificate|certificate verify failed|server does not support SSL": (
        "mend the certificates, or sslmode in the URL"
    ),
}
_FULL = "it has no connections left; raise max_connections, or the limit of the user or database"
_GRANT = "GRANT CREATE ON DATABASE … TO …, or let that user own the schema"

T = TypeVar("T")
Row = tuple[Any, ...]


class _TooSlow(psycopg.OperationalError):
    """A reply took too long."""


class _TimedConnection(psycopg.Connection[Row]):
    """A connection that waits for each reply for a limited time: libpq itself has no such limit."""

    reply_s = float(CONNECT_TIMEOUT_S)

    def wait(self, gen: PQGen[T], *args: Any, **options: Any) -> T:
        return super().wait(_limited(gen, self.reply_s), _TICK_S)

    def __del__(self, *_: Any) -> None:
        """It ends with the storage that nobody closed. Psycopg would warn of that."""


def _limited(gen: PQGen[T], reply_s: float) -> PQGen[T]:
    try:
        wait = next(gen)
        moved_s = time.monotonic()  # when data was last sent or received
        while True:
            ready = yield wait
            if ready != Ready.NONE:
                moved_s = time.monotonic()
            elif time.monotonic() > moved_s + reply_s:
                raise _TooSlow(f"it has not answered for {reply_s:.3g} s")
            wait = gen.send(ready)
    except StopIteration as end:
        result: T = end.value
        return result


class PostgresClient:
    """Connections to the server of an address, opened on demand. Thread-safe."""

    def __init__(
        self, address: PostgresAddress, *, timeout_s: float = math.inf, token: str = ""
    ) -> None:
        """Does not connect yet. Waits at most `timeout_s` for each reply. The names of its
        connections (`application_name`) end with the writer's token.
        """
        self._lock = threading.Lock()  # guards the list
        self._idle: list[_TimedConnection] = []
        self._closed = False
        self.address = address
        self.reply_s = min(timeout_s, address.reply_s)
        self.options: dict[str, Any] = {
            **_DEFAULTS,
            **(_PRIMARY if address.fails_over else {}),
            **address.options,
            "client_encoding": "utf8",
        }
        if token:
            name = str(self.options["application_name"])[: NAME_BYTES - 1 - len(token)]
            self.options["application_name"] = f"{name} {token}"

    def close(self) -> None:
        """Drop all connections; those in use are dropped after their call. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def run(self, statement: str, **values: Any) -> list[Row]:
        """Run one statement; return its rows. {s} in it is the schema, %(name)s a value.

        Raises StorageUnusable, including StorageUnavailable and JournalPartMissing, and Corrupt.
        """
        size = sum(len(value) for value in values.values() if isinstance(value, bytes))
        with self._connection(more_s=size / SLOWEST_BYTES_S) as connection:
            cursor = connection.execute(self._query(statement), values, binary=True)
            return cursor.fetchall() if cursor.description else []

    def run_script(self, statements: Sequence[str], *, more_s: float = 0.0) -> None:
        """Run statements without values in one transaction, which may take `more_s` longer."""
        with self._connection(more_s=more_s) as connection:
            connection.execute(self._query("; ".join(statements)))

    def _query(self, statement: str) -> bytes:
        return statement.format(s=f'"{self.address.prefix}"').encode()

    @contextmanager
    def _connection(self, more_s: float) -> Iterator[_TimedConnection]:
        try:
            connection = self._take()
            connection.reply_s = self.reply_s + more_s
            done = False
            try:
                yield connection
                done = True
            finally:
                self._give_back(connection, done)
        except psycopg.Error as error:
            raise self._explain(error) from error

    def _take(self) -> _TimedConnection:
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if not _ended(connection):
                    return connection
                connection.close()
        return _TimedConnection.connect(**self.options, autocommit=True)

    def _give_back(self, connection: _TimedConnection, done: bool) -> None:
        # After an error that the server reported, a connection can be used again.
        idle = connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        with self._lock:
            if (done or idle) and not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _explain(self, error: psycopg.Error) -> Exception:
        url = self.address.url
        said = _one_line(error)
        state = error.sqlstate or ""
        match error:
            case pg.InsufficientPrivilege():
                return StorageUnusable(f"{url}: {said}; {_GRANT}")
            case pg.ReadOnlySqlTransaction():
                return StorageUnavailable(
                    f"{url}: it is read-only; name the primary, or set "
                    "default_transaction_read_only to off"
                )
            case pg.DiskFull():
                return StorageUnavailable(f"{url}: its disk is full ({said}); make room")
            case pg.TooManyConnections():
                return StorageUnavailable(f"{url}: {_FULL}")
            case pg.UndefinedTable() | pg.InvalidSchemaName():
                return JournalPartMissing(f"{url}: {said}; restore it from a backup, {REPAIR}")
            case pg.UndefinedColumn() | pg.DatatypeMismatch() | pg.WrongObjectType():
                return StorageUnusable(
                    f"{url}: {said}: the tables of schema {self.address.prefix!r} are no "
                    "journal's; give the journal a prefix of its own (?prefix=name)"
                )
            case pg.DataCorrupted() | pg.IndexCorrupted():
                return Corrupt(f"{url}: {said}; restore the database from a backup")
        if state[:2] in ("08", "40", "53", "55", "57", "58"):  # may pass by itself
            return StorageUnavailable(f"{url}: {said}")
        if isinstance(error, psycopg.OperationalError) and not state:
            for words, remedy in _REFUSALS.items():
                if re.search(words, said):
                    return StorageUnusable(f"{url}: {said}; {remedy}")
            if "session is read-only" in said:
                return StorageUnavailable(
                    f"{url}: {said}; start the primary, promote a standby, or set "
                    "default_transaction_read_only to off"
                )
            if re.search("too many (clients|connections)|connection slots", said):
                return StorageUnavailable(f"{url}: {_FULL}")
            return StorageUnavailable(
                f"{url}: {said}; is PostgreSQL running, and reachable from here?"
            )
        return StorageUnusable(f"{url}: PostgreSQL answers: {said}")


def _ended(connection: _TimedConnection) -> bool:
    """Whether an idle connection was closed by the server. It may have been without a sign."""
    try:
        connection.pgconn.consume_input()
    except psycopg.OperationalError:
        return True
    return connection.pgconn.status != psycopg.pq.ConnStatus.OK


def _one_line(error: psycopg.Error) -> str:
    text = error.diag.message_primary or str(error)
    lines = [line.strip() for line in text.splitlines()]
    return " ".join(filter(None, lines)).rstrip(".")

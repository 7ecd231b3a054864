"""A storage in PostgreSQL: reading it, opening its writer, cutting it.

tables.py has the tables, statements.py what changes them, and checks.py looks at the server's
settings.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

from psycopg import errors as pg

from ..base import Holdings
from ..errors import Corrupt, Missing, StorageUnusable
from ..server_log import Cut, Entry, JournalNames, Meta, check_newest
from ..server_storage import ServerStorage
from .address import parse_postgres_url
from .checks import find_volatile
from .client import SCRIPT_S, PostgresClient, Row
from .statements import BEGIN
from .tables import MEND, META, REMEDY, TABLES, create, existing_tables, parse_meta, read, read_meta
from .writer import PostgresWriter

_FETCH = (
    f"SELECT {META}, l.last, l.batch FROM (SELECT 1) one LEFT JOIN {{s}}.meta m ON true "
    "LEFT JOIN (SELECT last, batch FROM {s}.log WHERE last >= %(sequence)s ORDER BY last "
    "LIMIT %(count)s) l ON true ORDER BY l.last"
)
_END = (
    f"SELECT {META}, l.last, l.batch, (SELECT max(sequence) FROM {{s}}.snapshots), "
    "EXISTS (SELECT FROM {s}.snapshots) OR EXISTS (SELECT FROM {s}.blobs) "
    "FROM (SELECT 1) one LEFT JOIN {s}.meta m ON true "
    "LEFT JOIN (SELECT last, batch FROM {s}.log ORDER BY last DESC LIMIT 1) l ON true"
)
_HOLDINGS = "SELECT * FROM " + ", ".join(
    f"(SELECT count(*), coalesce(sum(octet_length({data})), 0)::bigint FROM {{s}}.{table}) {table}"
    for table, data in (("log", "batch"), ("snapshots", "data"), ("blobs", "data"))
)

_CONNECTED = (
    "SELECT EXISTS (SELECT FROM pg_stat_activity "
    "WHERE application_name LIKE '%% ' || %(token)s::text)"
)
_STILL_MINE = """DO $$ BEGIN IF NOT EXISTS (
  SELECT FROM {s}.meta WHERE term = {term} AND token = '{token}' FOR UPDATE
) THEN RAISE 'fenced'; END IF; END $$"""


class PostgresStorage(ServerStorage):
    """The storage in the PostgreSQL at a URL (address.py)."""

    writer_type = PostgresWriter

    def __init__(self, url: str, *, allow_volatile: bool = False) -> None:
        """Does not connect yet. Raises StorageUnusable."""
        address = parse_postgres_url(url)
        names = JournalNames(
            url=address.url,
            log=f"{address.prefix}.log",
            entry="row {}",
            snapshots=f"{address.prefix}.snapshots",
            blobs=f"{address.prefix}.blobs",
            mend=MEND,
            remedy=REMEDY,
        )
        super().__init__(address, names, partial(PostgresClient, address), allow_volatile)

    # -- reading -----------------------------------------------------------------------------

    def snapshots(self) -> list[int]:
        self._meta(self._client)  # NewerFormat
        rows = read(self._client, "SELECT sequence FROM {s}.snapshots ORDER BY sequence")
        return [sequence for (sequence,) in rows]

    def blobs(self) -> list[str]:
        self._meta(self._client)  # NewerFormat
        return [name for (name,) in read(self._client, "SELECT name FROM {s}.blobs")]

    def holdings(self) -> Holdings:
        ((entries, log_bytes, *others),) = read(self._client, _HOLDINGS) or [(0,) * 6]
        return Holdings(int(entries > 0), log_bytes, 0, *others)

    def _meta(self, client: PostgresClient) -> Meta | None:
        return read_meta(client)

    def _is_connected(self, token: str) -> bool:
        ((connected,),) = self._watcher.run(_CONNECTED, token=token)
        return bool(connected)

    def _get(self, table: str, name: int | str) -> bytes | None:
        key = {"snapshots": "sequence", "blobs": "name"}[table]
        statement = f"SELECT data FROM {{s}}.{table} WHERE {key} = %(name)s"
        data: bytes | None = _only(read(self._client, statement, name=name))
        return data

    def _fetch(self, sequence: int, count: int) -> tuple[Meta | None, list[Entry]]:
        rows = read(self._client, _FETCH, sequence=sequence, count=count)
        if not rows:
            return None, []
        entries = [_entry(*row[-2:]) for row in rows if row[-1] is not None]
        return parse_meta(self._client, rows[0]), entries

    def _check_end(self) -> Meta | None:
        rows = read(self._client, _END)
        if not rows:
            return None
        ((*_, last, batch, ahead, others),) = rows
        if (meta := parse_meta(self._client, rows[0])) is None:
            if last is not None or others:
                where = f"{self.url}: {self._address.prefix}.meta"
                raise Corrupt(f"{where}: has no row, and others have some; {MEND}")
            return None
        newest = None if last is None else _entry(last, batch)
        check_newest(meta, newest, ahead or 0, self._names)
        return meta

    # -- writing -----------------------------------------------------------------------------

    def _find_volatile(self) -> list[str]:
        return find_volatile(self._client)

    def _begin_term(
        self, seen: Meta | None, token: str, owner: str, lease_ms: int, place: str, repair: bool
    ) -> int | None:
        if seen is None:
            create(self._client)
            if (seen := read_meta(self._client)) is None or seen.term:
                return None  # another one has begun meanwhile
        begun: list[Row] = self._client.run(
            BEGIN,
            token=token,
            owner=owner,
            place=place,
            lease_ms=lease_ms,
            seen_term=seen.term,
            seen_token=seen.token,
            seen_beat=seen.beat,
            seen_last=seen.last,
            seen_condemned=seen.condemned,
        )
        return begun[0][0] if begun else None

    def cut(self, after: int, owner: str) -> str:
        tables = existing_tables(self._client)
        if not tables:
            raise Missing(f"{self.url}: there is no log to cut")
        if tables != {*TABLES} or self._meta(self._client) is None:
            create(self._client)  # what is missing
        return super().cut(after, owner)

    def _cut(self, cut: Cut, term: int, token: str, new_term: int) -> str | None:
        aside = f"cut_{self._free_number()}"
        script = [
            _STILL_MINE.format(s="{s}", term=term, token=token),
            f"CREATE TABLE {{s}}.{aside}_meta AS TABLE {{s}}.meta",
        ]
        for table, key in (("log", "last"), ("snapshots", "sequence")):
            behind = f"FROM {{s}}.{table} WHERE {key} > {cut.last}"
            script += [f"CREATE TABLE {{s}}.{aside}_{table} AS SELECT * {behind}"]
            script += [f"DELETE {behind}"]
        values = {"first": cut.first, "last": cut.last, "began": cut.last, "term": new_term}
        changes = ", ".join(f"{name} = {value}" for name, value in values.items())
        script += [
            f"UPDATE {{s}}.meta SET {changes}, cut_term = {new_term}, owner = '', condemned = ''"
        ]
        try:
            self._client.run_script(script, more_s=SCRIPT_S)
        except StorageUnusable as error:
            if isinstance(error.__cause__, pg.RaiseException):
                return None
            raise
        prefix = self._address.prefix
        return f"; all later records and snapshots were moved to the tables {prefix}.{aside}_…"

    def _free_number(self) -> int:
        names = ((n, f'"{self._address.prefix}".cut_{n}_meta') for n in itertools.count(1))
        find = "SELECT to_regclass(%(name)s)"
        return next(n for n, name in names if _only(self._client.run(find, name=name)) is None)


def _entry(last: int, batch: bytes) -> Entry:
    return Entry(f"row {last}", batch)


def _only(rows: list[Row]) -> Any:
    return rows[0][0] if rows else None

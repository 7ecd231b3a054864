"""The tables of a journal in PostgreSQL, in a schema of their own, and the reading of its meta.

meta        one row: the fields of Meta
log         a row a batch: the sequence of its last record, and a frame
snapshots   a frame by sequence
blobs       data by name, which is its SHA-256 and perhaps a mark
cut_<n>_…   tables with what a repair moved aside
"""

from __future__ import annotations

from typing import Any

from ..errors import ACCEPT_LOSS, REPAIR, Corrupt
from ..server_log import FORMAT, JournalPartMissing, Meta, check_format
from .client import PostgresClient, Row
from .statements import CONDEMN

TABLES = ("meta", "log", "snapshots", "blobs")
RESTORE = "restore the database from a backup"
MEND = f"{RESTORE}, {REPAIR}"
REMEDY = f"{RESTORE} that has them, or {ACCEPT_LOSS}"  # for a condemned log

META = ", ".join(
    f"m.{name}"
    for name in (
        *("format", "term", "token", "owner", "place", "lease_ms", "beat", "first", "last"),
        *("began", "cut_term", "condemned"),
    )
)
"""The columns of a Meta, of the table under the name m."""

_CREATE_SCHEMA = "CREATE SCHEMA IF NOT EXISTS {s}"
# The lock: of two that create a table at once, one would fail.
_LOCK = "SELECT pg_advisory_xact_lock(hashtext('forebay'))"
# The term is a key, so that only a change of the term waits for FOR KEY SHARE (statements.py).
# Updates of the meta find room on its page. Batches are not compressed, and stay in the row up to
# a page's size.
_CREATE_TABLES = f"""
CREATE TABLE IF NOT EXISTS {{s}}.meta (
  term bigint PRIMARY KEY, format bigint NOT NULL, token text NOT NULL, owner text NOT NULL,
  place text NOT NULL, lease_ms bigint NOT NULL, beat bigint NOT NULL, first bigint NOT NULL,
  last bigint NOT NULL, began bigint NOT NULL, cut_term bigint NOT NULL, condemned text NOT NULL
) WITH (fillfactor = 10);
CREATE TABLE IF NOT EXISTS {{s}}.log (last bigint PRIMARY KEY, batch bytea NOT NULL)
  WITH (toast_tuple_target = 8160);
CREATE TABLE IF NOT EXISTS {{s}}.snapshots (sequence bigint PRIMARY KEY, data bytea NOT NULL);
CREATE TABLE IF NOT EXISTS {{s}}.blobs (name text PRIMARY KEY, data bytea NOT NULL);
ALTER TABLE {{s}}.log ALTER batch SET STORAGE EXTERNAL;
ALTER TABLE {{s}}.snapshots ALTER data SET STORAGE EXTERNAL;
ALTER TABLE {{s}}.blobs ALTER data SET STORAGE EXTERNAL;
INSERT INTO {{s}}.meta SELECT 0, {FORMAT}, '', '', '', 0, 0, 1, 0, 0, 0, ''
  WHERE NOT EXISTS (SELECT FROM {{s}}.meta)
"""
_TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = %(schema)s"


def read(client: PostgresClient, statement: str, **values: Any) -> list[Row]:
    """Run a statement that only reads; no rows if there is no journal.

    Raises Corrupt if there are some of its tables.
    """
    try:
        return client.run(statement, **values)
    except JournalPartMissing:
        found = existing_tables(client)
        missing = [name for name in TABLES if name not in found]
        if missing == [*TABLES]:
            return []
        if missing:
            where = f"{client.address.url}: {client.address.prefix}.{missing[0]}"
            raise Corrupt(f"{where}: is missing, and others are not; {MEND}") from None
        return client.run(statement, **values)  # somebody has made them meanwhile


def existing_tables(client: PostgresClient) -> set[str]:
    """Those of the journal's tables that exist."""
    return {*TABLES} & {name for (name,) in client.run(_TABLES, schema=client.address.prefix)}


def read_meta(client: PostgresClient) -> Meta | None:
    """The meta; None if there is no journal. Raises Corrupt, NewerFormat."""
    rows = read(client, f"SELECT {META} FROM {{s}}.meta m")
    return parse_meta(client, rows[0]) if rows else None


def create(client: PostgresClient) -> None:
    """Make the tables that are missing, and the meta's row."""
    ((exists,),) = client.run(
        "SELECT count(*) FROM pg_namespace WHERE nspname = %(name)s", name=client.address.prefix
    )
    # CREATE SCHEMA needs a right of its own, even if there is nothing to do.
    client.run_script([_LOCK, *[_CREATE_SCHEMA] * (not exists), _CREATE_TABLES])


def lose(client: PostgresClient, seen: Meta | None, term: int, what: str) -> str:
    """See ServerWriter."""
    reason = f"acknowledged records are missing: {what}"
    if seen is None:
        create(client)
        seen = read_meta(client)
    if seen is None or not client.run(
        CONDEMN,
        reason=reason,
        term=term,
        seen_term=seen.term,
        seen_token=seen.token,
        seen_last=seen.last,
    ):
        return ""
    return reason


def parse_meta(client: PostgresClient, values: Row) -> Meta | None:
    """The meta of a row that begins with META; None if it has none. Raises NewerFormat, Corrupt."""
    if values[0] is None:
        return None
    where = f"{client.address.url}: {client.address.prefix}.meta"
    names = (column.removeprefix("m.") for column in META.split(", "))
    found: dict[str, Any] = dict(zip(names, values, strict=False))
    check_format(found["format"], where)
    meta = Meta(**found)
    if not meta.fits:
        raise Corrupt(
            f"{where}: term {meta.term}, first {meta.first}, last {meta.last} and began "
            f"{meta.began} do not fit; {RESTORE}"
        )
    return meta

"""Checks that a PostgreSQL can keep a journal, and finds settings that can lose acknowledged
records."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import StorageUnusable
from .client import PostgresClient

OLDEST = 12

_SETTINGS = (
    *("server_version", "server_version_num", "server_encoding", "transaction_read_only"),
    "transaction_isolation",
    *("fsync", "full_page_writes", "synchronous_commit", "synchronous_standby_names"),
)
_LOOK = "SELECT pg_is_in_recovery(), current_database(), " + ", ".join(
    f"current_setting('{name}')" for name in _SETTINGS
)


def find_volatile(client: PostgresClient) -> list[str]:
    """Describe how acknowledged records can be lost, each with its remedy.

    Raises StorageUnusable if this PostgreSQL cannot keep a journal at all.
    """
    ((standby, database, *values),) = client.run(_LOOK)
    settings: dict[str, str] = dict(zip(_SETTINGS, values, strict=True))
    _check_usable(client, standby, database, settings)
    return list(_find(client, settings))


def _check_usable(
    client: PostgresClient, standby: bool, database: str, settings: dict[str, str]
) -> None:
    url = client.address.url
    if int(settings["server_version_num"]) // 10_000 < OLDEST:
        raise StorageUnusable(
            f"{url}: this is PostgreSQL {settings['server_version']}; use {OLDEST} or later"
        )
    if standby:
        raise StorageUnusable(f"{url} is a standby, which cannot be written; name the primary")
    if settings["transaction_read_only"] == "on":
        raise StorageUnusable(
            f"{url} is read-only: set default_transaction_read_only to off for this user"
        )
    if settings["transaction_isolation"] != "read committed":  # see statements.py
        raise StorageUnusable(
            f"{url}: default_transaction_isolation is {settings['transaction_isolation']}; set it "
            "to 'read committed' for this user"
        )
    if settings["server_encoding"] != "UTF8":
        raise StorageUnusable(
            f"{url}: the database {database!r} has the encoding {settings['server_encoding']}; "
            "create one for the journal: CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
        )


def _find(client: PostgresClient, settings: dict[str, str]) -> Iterator[str]:
    if settings["fsync"] != "on":
        yield (
            "fsync is off, so a crash of the server's host can lose or damage anything: set it to "
            "on"
        )
    if settings["full_page_writes"] != "on":
        yield (
            "full_page_writes is off, so a crash of the server's host can damage tables: set it "
            "to on"
        )
    commit = settings["synchronous_commit"]
    if commit == "off":
        yield (
            "synchronous_commit is off, so a crash of the server loses about the last half second: "
            "set it to on for this user (ALTER ROLE … SET synchronous_commit = on)"
        )
    if client.address.fails_over:
        if not settings["synchronous_standby_names"]:
            yield (
                "the URL names several servers, and synchronous_standby_names is empty, so a "
                "failover loses what the standby had not received yet: name the standbys there"
            )
        elif commit in ("local", "remote_write"):
            yield (
                f"synchronous_commit is {commit}, so a failover can lose what the standby had not "
                "written yet: set it to on for this user"
            )

"""A PostgreSQL whose primary is lost, and whose standby is promoted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from urllib.parse import urlencode

import pytest

from forebay.chaos.postgres import USER
from forebay.storage import Corrupt, Locked, StorageUnavailable, StorageUnusable, open_storage

from ..postgres_server import PASSWORD, PostgresServer, running_postgres
from ..redis_server import wait_until
from .appends import appending, read_numbers

Pair = tuple[PostgresServer, PostgresServer]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A primary, and its standby, which appends do not wait for."""
    with running_postgres() as primary, running_postgres(primary) as standby:
        streams = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"
        wait_until("it replicates", lambda: primary.execute(streams) == [(1,)])
        yield primary, standby


def url_of(*servers: PostgresServer, **parameters: object) -> str:
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return f"postgresql://{USER}:{PASSWORD}@{hosts}/postgres?{urlencode(parameters)}"


def configure(server: PostgresServer, name: str, value: str) -> None:
    server.execute(f"ALTER SYSTEM SET {name} = '{value}'")
    server.execute("SELECT pg_reload_conf()")
    wait_until("it has it", lambda: server.execute(f"SHOW {name}") == [(value,)])


def test_a_standby_is_refused(pair: Pair) -> None:
    with pytest.raises(StorageUnusable, match="is a standby, which cannot be written; name the pr"):
        open_storage(pair[1].url).open_writer("the test")


@pytest.mark.parametrize("asked", [{}, {"target_session_attrs": "any"}], ids=["", "any"])
def test_a_poll_that_reaches_a_standby_condemns_nothing(pair: Pair, asked: dict[str, str]) -> None:
    """The standby lags behind, and the primary accepts no further connections for a while."""
    primary, standby = pair
    writer = open_storage(primary.url).open_writer("the test")
    writer.append([b"1"])
    wait_until("it has it", lambda: read_numbers(standby.url) == [1])
    standby.execute("SELECT pg_wal_replay_pause()")
    storage = open_storage(url_of(*pair, **asked), allow_volatile=True)
    for number in range(2, 5):
        writer.append([b"%d" % number])
        assert len(list(storage.read())) == number
    assert read_numbers(standby.url) == [1]
    os.kill(primary.pid, signal.SIGSTOP)  # not those that serve the present connections
    try:
        with pytest.raises(
            Locked if asked else StorageUnavailable, match=r"in use|promote a standby"
        ):
            storage.open_writer("the standby", place="here")
    finally:
        os.kill(primary.pid, signal.SIGCONT)
    assert storage.condemned() == ""
    assert writer.append([b"5"]) == 5


def test_a_failover_that_appends_have_waited_for_loses_nothing(pair: Pair) -> None:
    primary, standby = pair
    configure(primary, "synchronous_standby_names", "*")
    with appending(url_of(*pair), read_at=standby.url) as appender:
        appender.wait_for_more()
        primary.kill()
        acknowledged = appender.acknowledged
        standby.execute("SELECT pg_promote()")
        assert read_numbers(standby.url)[:acknowledged] == list(range(1, acknowledged + 1))


def test_an_append_waits_for_its_synchronous_standby(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    primary, standby = pair
    configure(primary, "synchronous_standby_names", "*")
    with appending(url_of(*pair, reply_s=0.5), read_at=primary.url) as appender:
        appender.wait_for_more()
        standby.kill()
        wait_until("it waits", lambda: "waiting for PostgreSQL" in caplog.text)
        standby.start()


def test_a_failover_that_lost_something_is_noticed(pair: Pair) -> None:
    primary, standby = pair
    storage = open_storage(url_of(*pair), allow_volatile=True)
    writer = storage.open_writer("the test")
    writer.append([b"1"])
    wait_until("it has it", lambda: read_numbers(standby.url) == [1])
    configure(standby, "primary_conninfo", "")
    received = "SELECT count(*) FROM pg_stat_wal_receiver"
    wait_until("it hears nothing", lambda: standby.execute(received) == [(0,)])
    writer.append([b"2"])
    primary.kill()
    standby.execute("SELECT pg_promote()")
    with pytest.raises(Corrupt, match="record 2 was acknowledged in term 1, and the log ends at"):
        writer.append([b"3"])
    with pytest.raises(Corrupt, match="acknowledged records are missing"):
        open_storage(standby.url).open_writer("the next", place="here")

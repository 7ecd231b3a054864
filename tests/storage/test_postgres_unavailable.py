"""What may happen to a PostgreSQL alone: test_server_unavailable.py has the rest."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from forebay.chaos.postgres import server_processes
from forebay.storage import Fenced, open_storage

from ..postgres_server import PostgresServer, running_postgres
from ..redis_server import wait_until
from .appends import CONNECTIONS, Appender, appending, fresh, read_numbers


@pytest.fixture(scope="module")
def shared_server() -> Iterator[PostgresServer]:
    """One that these tests disturb."""
    with running_postgres() as server:
        yield server


@pytest.fixture
def server(shared_server: PostgresServer) -> PostgresServer:
    return fresh(shared_server)


def test_its_backends_are_killed_and_it_recovers_by_itself(server: PostgresServer) -> None:
    """kill -9 of the process that serves the appends has all others ended, and the log replayed."""
    find = f"SELECT pid {CONNECTIONS} AND query LIKE '%INSERT INTO%batch%'"
    with appending(server.url) as appender:
        for _ in range(2):
            appender.wait_for_more()
            for (pid,) in server.execute(find):
                os.kill(pid, signal.SIGKILL)


def test_its_connections_are_ended(server: PostgresServer) -> None:
    with appending(server.url) as appender:
        for _ in range(20):
            appender.wait_for_more()
            server.execute(f"SELECT pg_terminate_backend(pid) {CONNECTIONS}")


def test_an_append_whose_server_process_is_paused_changes_nothing_after_a_takeover(
    server: PostgresServer,
) -> None:
    """Its statement arrives at last, from a client that has given up its connection."""
    writer = open_storage(f"{server.url}?reply_s=0.3").open_writer("the test", place="here")
    writer.append([b"1"])
    ((pid,),) = server.execute(f"SELECT pid {CONNECTIONS} AND query LIKE '%INSERT INTO%batch%'")
    os.kill(pid, signal.SIGSTOP)
    appender = Appender(writer)
    try:
        time.sleep(0.1)
        later = open_storage(server.url).open_writer("the next", place="here")
        assert later.append([b"2"]) == 2
        wait_until("its retry is refused", lambda: appender.error)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until("it has ended", lambda: pid not in server_processes(server.pid))
    appender.stop()
    assert isinstance(appender.error, Fenced)
    assert read_numbers(server.url) == [1, 2]


def test_read_only_for_a_while(server: PostgresServer, caplog: pytest.LogCaptureFixture) -> None:
    configure = "ALTER SYSTEM SET default_transaction_read_only = %s"
    with appending(server.url) as appender:
        appender.wait_for_more()
        server.execute(configure % "on")
        server.execute("SELECT pg_reload_conf()")
        wait_until("it is said", lambda: "it is read-only" in caplog.text)
        server.execute(configure % "off")
        server.execute("SELECT pg_reload_conf()")

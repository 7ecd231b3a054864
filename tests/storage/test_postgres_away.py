"""A PostgreSQL that is killed, restarted, hangs or is read-only: appends wait, and none is lost or
done twice."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from forebay.chaos.postgres import USER, server_processes
from forebay.storage import (
    AppendFailed,
    Away,
    Fenced,
    Locked,
    open_storage,
    writer_watch,
)

from ..postgres_server import PASSWORD, PostgresServer, running_postgres
from ..redis_server import wait_until
from .appends import Appender, Proxy, expect_all_once, read_numbers


@pytest.fixture(scope="module")
def shared_server() -> Iterator[PostgresServer]:
    """One that these tests kill."""
    with running_postgres() as server:
        yield server


OURS = "FROM pg_stat_activity WHERE application_name LIKE 'forebay%'"
"""The connections of storages."""


@pytest.fixture
def server(shared_server: PostgresServer) -> PostgresServer:
    """Without a journal, and without what other tests have left connected."""
    shared_server.execute(f"SELECT pg_terminate_backend(pid) {OURS}")
    wait_until("they are gone", lambda: shared_server.execute(f"SELECT {OURS}") == [])
    shared_server.execute("DROP SCHEMA IF EXISTS forebay CASCADE")
    return shared_server


# -- killed --------------------------------------------------------------------------------------


def test_killed_at_random_moments(server: PostgresServer) -> None:
    """kill -9 of all its processes, in the midst of appends."""
    moments = random.Random(2)
    appender = Appender(open_storage(server.url).open_writer("the test"))
    try:
        for _ in range(4):
            appender.wait_for_more()
            time.sleep(moments.uniform(0, 0.1))
            server.kill()
            acknowledged = appender.acknowledged
            time.sleep(moments.uniform(0, 0.1))
            server.start()
            assert read_numbers(server.url)[:acknowledged] == list(range(1, acknowledged + 1))
        appender.wait_for_more()
    finally:
        expect_all_once(server.url, appender)


def test_its_backends_are_killed_and_it_recovers_by_itself(server: PostgresServer) -> None:
    """kill -9 of the process that serves the appends has all others ended, and the log replayed."""
    appender = Appender(open_storage(server.url).open_writer("the test"))
    find = f"SELECT pid {OURS} AND query LIKE '%INSERT INTO%batch%'"
    try:
        for _ in range(2):
            appender.wait_for_more()
            for (pid,) in server.execute(find):
                os.kill(pid, signal.SIGKILL)
            appender.wait_for_more()
    finally:
        expect_all_once(server.url, appender)


def test_its_connections_are_ended(server: PostgresServer) -> None:
    appender = Appender(open_storage(server.url).open_writer("the test"))
    try:
        for _ in range(20):
            appender.wait_for_more()
            server.execute(f"SELECT pg_terminate_backend(pid) {OURS}")
        appender.wait_for_more()
    finally:
        expect_all_once(server.url, appender)


def test_it_is_restarted_in_order(server: PostgresServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    appender = Appender(open_storage(server.url).open_writer("the test"))
    try:
        appender.wait_for_more()
        server.stop()
        wait_until("it is said", lambda: "waiting for PostgreSQL" in caplog.text)
        server.start()
        appender.wait_for_more()
    finally:
        expect_all_once(server.url, appender)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in said] == ["WARNING", "INFO"]
    assert said[0][1].startswith("waiting for PostgreSQL, for up to 60 s: postgresql://")
    assert "nothing was lost" in said[1][1]
    assert PASSWORD not in caplog.text


def test_an_append_is_given_up_in_the_end(server: PostgresServer) -> None:
    writer = open_storage(f"{server.url}?retry_s=0.3").open_writer("the test")
    writer.append([b"1"])
    server.kill()
    with pytest.raises(AppendFailed):
        writer.append([b"2"])
    with pytest.raises(Away, match="is PostgreSQL running, and reachable from here"):
        writer.renew()
    server.start()
    with pytest.raises(AppendFailed, match="an earlier append failed"):
        writer.append([b"3"])
    writer.renew()
    writer.close()
    following = open_storage(server.url).open_writer("the next")
    assert following.append([b"2"]) == 2
    assert read_numbers(server.url) == [1, 2]


def test_closing_ends_the_waiting(server: PostgresServer, caplog: pytest.LogCaptureFixture) -> None:
    writer = open_storage(f"{server.url}?retry_s=100000").open_writer("the test")
    appender = Appender(writer)
    appender.wait_for_more()
    server.kill()
    wait_until("it waits", lambda: "waiting for PostgreSQL, for up to 100000 s" in caplog.text)
    writer.close()
    appender.stop()
    server.start()
    assert isinstance(appender.error, AppendFailed)
    assert "must wait until this one's lease expires" in caplog.text
    with pytest.raises(Fenced):
        writer.append([b"x"])


def test_other_calls_fail_and_the_writer_goes_on(server: PostgresServer) -> None:
    storage = open_storage(f"{server.url}?retry_s=0.1")
    writer = storage.open_writer("the test")
    writer.append([b"1"])
    server.kill()
    calls: list[Callable[[], object]] = [
        writer.renew,
        lambda: writer.write_snapshot(1, b"s"),
        lambda: writer.delete_snapshot(1),
        lambda: writer.delete_blob("b"),
        lambda: writer.trim(1),
        lambda: writer.write_blob(b"b"),
        lambda: writer.condemn("no reason"),
        lambda: list(storage.read()),
        storage.extent,
        storage.holdings,
        lambda: open_storage(server.url).open_writer("another"),
    ]
    for call in calls:
        with pytest.raises(Away):
            call()
    server.start()
    for call in (writer.renew, lambda: writer.write_snapshot(1, b"s"), storage.extent):
        call()
    assert writer.append([b"2"]) == 2


def test_a_writer_is_not_displaced_for_the_time_that_its_server_was_away(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1.0)
    monkeypatch.setattr(writer_watch, "time", SimpleNamespace(monotonic=lambda: clock.now))
    open_storage(server.url).open_writer("the leader", lease_ms=1000)
    standby = open_storage(server.url)
    with pytest.raises(Locked):
        standby.open_writer("the standby")
    server.kill()
    with pytest.raises(Away):
        standby.open_writer("the standby")
    clock.now += 10
    server.start()
    with pytest.raises(Locked):
        standby.open_writer("the standby")
    for _ in range(3):  # a connection from before may notice only now that it has ended
        clock.now += 1
        with contextlib.suppress(Away, Locked):
            standby.open_writer("the standby")
            return
    pytest.fail("the lease has expired, and the standby is not the writer")


# -- hanging, and cut connections ----------------------------------------------------------------


def test_a_server_that_hangs(server: PostgresServer, caplog: pytest.LogCaptureFixture) -> None:
    appender = Appender(open_storage(f"{server.url}?reply_s=0.2").open_writer("the test"))
    try:
        for i in range(3):
            appender.wait_for_more()
            server.pause()
            wait_until("it waits", lambda: caplog.text.count("waiting for Postgr") > i)  # noqa: B023
            server.resume()  # and finds the same append in several connections
        appender.wait_for_more()
    finally:
        expect_all_once(server.url, appender)
    assert "it has not answered for 0.2 s" in caplog.text


@pytest.fixture
def proxy(server: PostgresServer) -> Iterator[Proxy]:
    """A statement is parsed or bound; its answer is a row."""
    proxy = Proxy(
        server.port,
        is_append=lambda request: request[:1] in (b"P", b"B"),
        is_done=lambda reply: b"SELECT 1\x00" in reply,
    )
    yield proxy
    proxy.close()


def url_of(proxy: Proxy) -> str:
    return f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{proxy.port}/postgres"


def test_a_network_that_is_cut_is_not_waited_for_like_a_slow_server(
    server: PostgresServer, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """The server may take an hour to reply; the network has to carry packets all the time."""
    writer = open_storage(f"{url_of(proxy)}?reply_s=3600").open_writer("the test")
    appender = Appender(writer)
    try:
        appender.wait_for_more()
        proxy.cut_off()
        wait_until("it waits", lambda: "waiting for PostgreSQL" in caplog.text)
        proxy.reachable_again()
        appender.wait_for_more()
    finally:
        expect_all_once(server.url, appender)
        writer.close()


def test_an_append_whose_reply_was_lost_is_not_done_twice(
    server: PostgresServer, proxy: Proxy
) -> None:
    writer = open_storage(url_of(proxy)).open_writer("the test")
    for times in (1, 2, 5):
        first = writer.last_sequence + 1
        proxy.lose_replies = times
        assert writer.append([b"%d" % first, b"%d" % (first + 1)]) == first + 1
        proxy.lose_requests = times
        assert writer.append([b"%d" % (first + 2)]) == first + 2
    assert proxy.lost == 16
    assert read_numbers(server.url) == list(range(1, 10))
    proxy.lose_replies = 1
    writer.write_blob(b"b")
    proxy.lose_replies = 1
    with pytest.raises(Away):
        writer.write_snapshot(3, b"s")
    assert open_storage(server.url).snapshots() == [3]
    assert writer.append([b"10"]) == 10


def test_an_append_that_arrives_after_its_retry_and_what_followed_it(
    server: PostgresServer, proxy: Proxy
) -> None:
    """As after a cut: TCP delivers in the end what was sent on a connection given up since."""
    writer = open_storage(f"{url_of(proxy)}?reply_s=0.5").open_writer("the test")
    writer.append([b"1"])
    proxy.delay.set()
    assert writer.append([b"2"]) == 2  # in its second try
    assert writer.append([b"3", b"4"]) == 4
    # Backends end once they have read what their client sent before it hung up.
    count = f"SELECT count(*) {OURS}"
    before = server.execute(count)
    proxy.arrives.set()
    wait_until("it has arrived", lambda: server.execute(count) < before)
    assert writer.append([b"5"]) == 5
    assert read_numbers(server.url) == [1, 2, 3, 4, 5]
    assert open_storage(server.url).condemned() == ""


def test_an_append_that_is_retried_after_a_takeover_is_fenced(
    server: PostgresServer, proxy: Proxy
) -> None:
    writer = open_storage(url_of(proxy)).open_writer("the test", place="here")
    proxy.lose_replies = 10**6
    appender = Appender(writer)
    wait_until("an append is repeated", lambda: proxy.lost > 2)
    later = open_storage(server.url).open_writer("the next", place="here")
    proxy.lose_replies = 0
    wait_until("it is refused", lambda: appender.error)
    appender.stop()
    assert isinstance(appender.error, Fenced)
    assert appender.acknowledged == 0
    assert later.last_sequence == 1  # it was done, and nobody was told
    assert later.append([b"2"]) == 2


def test_an_append_whose_server_process_is_paused_changes_nothing_after_a_takeover(
    server: PostgresServer,
) -> None:
    """Its statement arrives at last, from a client that has given up its connection."""
    writer = open_storage(f"{server.url}?reply_s=0.3").open_writer("the test", place="here")
    writer.append([b"1"])
    ((pid,),) = server.execute(f"SELECT pid {OURS} AND query LIKE '%INSERT INTO%batch%'")
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


# -- read-only -----------------------------------------------------------------------------------


def test_read_only_for_a_while(server: PostgresServer, caplog: pytest.LogCaptureFixture) -> None:
    appender = Appender(open_storage(server.url).open_writer("the test"))
    configure = "ALTER SYSTEM SET default_transaction_read_only = %s"
    try:
        appender.wait_for_more()
        server.execute(configure % "on")
        server.execute("SELECT pg_reload_conf()")
        wait_until("it is said", lambda: "it is read-only" in caplog.text)
        server.execute(configure % "off")
        server.execute("SELECT pg_reload_conf()")
        appender.wait_for_more()
    finally:
        expect_all_once(server.url, appender)

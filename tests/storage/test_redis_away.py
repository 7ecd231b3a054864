"""A Redis that is killed, hangs, is full or read-only: appends wait, and none is lost or done
twice."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.service.processes import free_port
from forebay.storage import (
    AppendFailed,
    Away,
    Fenced,
    Locked,
    open_storage,
    writer_watch,
)
from forebay.storage.redis import client as redis_client

from ..redis_server import RedisServer, running_redis, wait_until
from ..transport.peers import ShortLived
from .appends import Appender, Proxy, expect_all_once, read_numbers


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(tmp_path / "redis") as server:
        yield server


# -- killed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("appendfsync", ["always", "no"])
def test_killed_at_random_moments(server: RedisServer, appendfsync: str) -> None:
    """With everysec Redis answers before it writes, while a sync of its takes long: a kill may
    lose that."""
    server.configure("appendfsync", appendfsync)
    moments = random.Random(2)
    storage = open_storage(server.url, allow_volatile=appendfsync != "always")
    appender = Appender(storage.open_writer("the test"))
    try:
        for _ in range(6):
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


def test_the_log_says_that_an_append_waits_and_that_it_continues(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    appender = Appender(open_storage(server.url).open_writer("the test"))
    try:
        appender.wait_for_more()
        server.kill()
        wait_until("it is said", lambda: "waiting for Redis" in caplog.text)
        server.start()
        appender.wait_for_more()
    finally:
        appender.stop()
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in said] == ["WARNING", "INFO"]
    assert said[0][1].startswith(f"waiting for Redis, for up to 60 s: {server.url}: ")
    assert said[0][1].endswith("is Redis running, and reachable from here?")
    assert "nothing was lost" in said[1][1]


def test_an_append_is_given_up_in_the_end(server: RedisServer) -> None:
    writer = open_storage(f"{server.url}?retry_s=0.3").open_writer("the test")
    writer.append([b"1"])
    server.kill()
    with pytest.raises(AppendFailed, match="is Redis running"):
        writer.append([b"2"])
    server.start()
    with pytest.raises(AppendFailed, match=r"an earlier append failed: .*is Redis running"):
        writer.append([b"3"])
    writer.renew()
    writer.close()
    following = open_storage(server.url).open_writer("the next")
    assert following.append([b"2"]) == 2
    assert read_numbers(server.url) == [1, 2]


def test_closing_ends_the_waiting(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    writer = open_storage(f"{server.url}?retry_s=100000").open_writer("the test")
    appender = Appender(writer)
    appender.wait_for_more()
    server.kill()
    wait_until("it waits", lambda: "waiting for Redis, for up to 100000 s" in caplog.text)
    writer.close()
    appender.stop()
    assert isinstance(appender.error, AppendFailed)
    assert "must wait until this one's lease expires" in caplog.text
    with pytest.raises(Fenced):
        writer.append([b"x"])


def test_other_calls_fail_and_the_writer_goes_on(server: RedisServer) -> None:
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
        with pytest.raises(Away, match="reachable from here"):
            call()
    server.start()
    for call in (writer.renew, lambda: writer.write_snapshot(1, b"s"), storage.extent):
        call()
    assert writer.append([b"2"]) == 2


def test_blobs_wait_as_well(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    writer = open_storage(server.url).open_writer("the test")
    digests: list[str] = []
    server.kill()
    thread = threading.Thread(target=lambda: digests.append(writer.write_blob(b"a graph")))
    thread.start()
    wait_until("it waits", lambda: "waiting for Redis" in caplog.text)
    server.start()
    thread.join(60)
    assert open_storage(server.url).read_blob(digests[0]) == b"a graph"


def test_a_writer_is_not_displaced_for_the_time_that_redis_was_away(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
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
    clock.now += 1
    standby.open_writer("the standby")


# -- hanging, and cut connections ----------------------------------------------------------------


def test_a_redis_that_hangs(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    storage = open_storage(f"{server.url}?socket_timeout=0.2")
    appender = Appender(storage.open_writer("the test"))
    try:
        for i in range(3):
            appender.wait_for_more()
            server.pause()
            wait_until("it waits", lambda: caplog.text.count("waiting for Redis") > i)  # noqa: B023
            server.resume()  # and finds the same append in several connections
        appender.wait_for_more()
    finally:
        expect_all_once(server.url, appender)


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    proxy = Proxy(
        server.port,
        is_append=lambda request: b"EVAL" in request,
        is_done=lambda reply: b"\r\nok\r\n" in reply,
    )
    yield proxy
    proxy.close()


def url_of(proxy: Proxy) -> str:
    return f"redis://127.0.0.1:{proxy.port}"


@pytest.mark.parametrize("already_sent", [False, True])
def test_a_network_that_is_cut_is_not_waited_for_like_a_slow_redis(
    server: RedisServer, proxy: Proxy, caplog: pytest.LogCaptureFixture, already_sent: bool
) -> None:
    """Redis may take an hour to reply; the network has to carry packets all the time."""
    storage = open_storage(f"{url_of(proxy)}?socket_timeout=3600")
    writer = storage.open_writer("the test")
    appender = Appender(writer)
    try:
        appender.wait_for_more()
        if already_sent:
            server.pause()
            time.sleep(0.1)  # for the next append to get there
        proxy.cut_off()
        server.resume()
        wait_until("it waits", lambda: "waiting for Redis" in caplog.text)
        proxy.reachable_again()
        appender.wait_for_more()
    finally:
        expect_all_once(server.url, appender)
        writer.close()
        storage.close()


def test_an_append_whose_reply_was_lost_is_not_done_twice(
    server: RedisServer, proxy: Proxy
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
    assert proxy.lost == 18
    assert writer.append([b"10"]) == 10


def test_an_append_that_arrives_after_its_retry_and_what_followed_it(
    server: RedisServer, proxy: Proxy
) -> None:
    """As after a cut: TCP delivers in the end what was sent on a connection given up since."""
    writer = open_storage(f"{url_of(proxy)}?socket_timeout=0.5").open_writer("the test")
    writer.append([b"1"])
    proxy.delay.set()
    assert writer.append([b"2"]) == 2  # in its second try
    assert writer.append([b"3", b"4"]) == 4
    with server.client() as client:

        def scripts() -> int:
            return int(client.info("commandstats")["cmdstat_evalsha"]["calls"])

        before = scripts()
        proxy.arrives.set()
        wait_until("it has arrived", lambda: scripts() > before)
    assert writer.append([b"5"]) == 5
    assert read_numbers(server.url) == [1, 2, 3, 4, 5]
    assert open_storage(server.url).condemned() == ""


def test_an_append_that_is_retried_after_a_takeover_is_fenced(
    server: RedisServer, proxy: Proxy
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


def test_a_takeover_whose_reply_was_lost(server: RedisServer, proxy: Proxy) -> None:
    proxy.lose_replies = 1
    storage = open_storage(url_of(proxy))
    with pytest.raises(Away):
        storage.open_writer("the test", place="here")
    assert storage.open_writer("the test", place="here").append([b"1"]) == 1


# -- full, read-only, loading --------------------------------------------------------------------


def test_out_of_memory(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    writer = open_storage(server.url).open_writer("the test")
    with server.client() as client:
        server.configure("maxmemory", client.info("memory")["used_memory"] + 200_000)
    appender = Appender(writer, digits=4_000)  # it is full soon, however slow the disk
    try:
        wait_until("it is full", lambda: "it is out of memory; raise maxmemory" in caplog.text)
        server.configure("maxmemory", 0)
        appender.wait_for_more()
    finally:
        expect_all_once(server.url, appender)


def test_demoted_and_promoted(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    appender = Appender(open_storage(server.url).open_writer("the test"))
    try:
        appender.wait_for_more()
        with server.client() as client:
            client.replicaof("127.0.0.1", free_port())
            wait_until("it is read-only", lambda: "a replica, which cannot be" in caplog.text)
            client.replicaof("NO", "ONE")
        appender.wait_for_more()
    finally:
        expect_all_once(server.url, appender)


def test_a_redis_that_cannot_write_its_dump(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    appender = Appender(open_storage(server.url).open_writer("the test"))
    try:
        appender.wait_for_more()
        with server.client() as client:
            pid = client.info("server")["process_id"]
            client.config_set("rdb-key-save-delay", 10_000_000)  # µs
            client.config_set("save", "3600 1000000")
            client.bgsave()
            children = Path(f"/proc/{pid}/task/{pid}/children")
            os.kill(
                int(wait_until("it saves", lambda: children.read_text().split())[0]), signal.SIGKILL
            )
            wait_until("it is said", lambda: "it cannot write to its disk" in caplog.text)
            client.config_set("save", "")
        appender.wait_for_more()
    finally:
        expect_all_once(server.url, appender)


def test_scripts_are_forgotten_by_a_flush(server: RedisServer) -> None:
    writer = open_storage(server.url).open_writer("the test")
    with server.client() as client:
        for number in range(1, 4):
            assert writer.append([b"%d" % number]) == number
            client.script_flush()
    assert read_numbers(server.url) == [1, 2, 3]


# -- replicas ------------------------------------------------------------------------------------


def is_online(replication: dict[str, Any]) -> bool:
    return bool(replication.get("slave0", {}).get("state") == "online")


def test_an_append_waits_for_replicas(
    server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{server.url}?wait_replicas=1"
    with running_redis(tmp_path / "replica", replicaof=f"127.0.0.1 {server.port}") as replica:
        with server.client() as client:
            wait_until("it replicates", lambda: is_online(client.info("replication")))
        appender = Appender(open_storage(url).open_writer("the test"))
        try:
            appender.wait_for_more()
            replica.pause()
            wait_until("it waits", lambda: "0 replicas have confirmed in time" in caplog.text)
            waited = appender.acknowledged
            replica.resume()
            appender.wait_for_more()
            replica.kill()
            wait_until("it waits", lambda: caplog.text.count("waiting for Redis") > 1)
            acknowledged = appender.acknowledged
            assert acknowledged > waited
            replica.start()
            appender.wait_for_more()
        finally:
            expect_all_once(url, appender)
        assert read_numbers(replica.url)[:acknowledged] == list(range(1, acknowledged + 1))


def test_a_silent_connection_does_not_hold_up_the_watcher_of_a_silent_writer(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has seen by then counts for nothing, so that it has to begin anew soon."""
    monkeypatch.setattr(redis_client, "TIMEOUT_S", 1e6)
    proxy = ShortLived(server.port, 14_000, silent=True, endless_from=2)
    leader = open_storage(server.url)
    leader.open_writer("the leader", lease_ms=1000)
    standby = open_storage(f"redis://127.0.0.1:{proxy.port}")
    away = 0
    try:
        while True:
            try:
                standby.open_writer("the standby", lease_ms=1000).close()
                break
            except Away:
                away += 1
            except Locked:
                time.sleep(0.002)
        assert away == proxy.spent == 1
    finally:
        standby.close()
        leader.close()
        proxy.close()

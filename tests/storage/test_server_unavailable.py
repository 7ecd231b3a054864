"""A server that is killed, restarted or hangs, and a network that is cut: appends wait, and none is
lost or done twice."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.storage import AppendFailed, Fenced, Locked, StorageUnavailable, open_storage

from ..postgres_server import PASSWORD, PostgresServer, running_postgres
from ..redis_server import running_redis, wait_until
from .appends import CONNECTIONS, Appender, LossyProxy, appending, fresh, read_numbers


class Redis:
    name, timeout = "Redis", "socket_timeout"

    def __init__(self, running: Any) -> None:
        self.running = running  # a RedisServer or PostgresServer

    def url(self, port: int = 0, /, **parameters: object) -> str:
        """By this port, or the server's own."""
        url: str = self.running.url.replace(str(self.running.port), str(port or self.running.port))
        if not parameters:
            return url
        return f"{url}?{'&'.join(f'{name}={value}' for name, value in parameters.items())}"

    def stop(self) -> None:
        self.running.kill()

    def is_append(self, request: bytes) -> bool:
        return b"EVAL" in request

    def is_done(self, reply: bytes) -> bool:
        return reply.startswith(b":1\r\n")

    def arrived(self) -> Callable[[], bool]:
        """Whether one more request has arrived than at the call."""

        def scripts() -> int:
            with self.running.client() as client:
                return int(client.info("commandstats")["cmdstat_evalsha"]["calls"])

        before = scripts()
        return lambda: scripts() > before


class Postgres(Redis):
    name, timeout = "PostgreSQL", "reply_s"

    def stop(self) -> None:
        """In order, as `systemctl restart` does."""
        self.running.stop()

    def is_append(self, request: bytes) -> bool:
        return request[:1] in (b"P", b"B")  # a statement is parsed or bound

    def is_done(self, reply: bytes) -> bool:
        return b"SELECT 1\x00" in reply  # a row

    def arrived(self) -> Callable[[], bool]:
        # Backends end once they have read what their client sent before it hung up.
        count = f"SELECT count(*) {CONNECTIONS}"
        before = self.running.execute(count)
        return lambda: bool(self.running.execute(count) < before)


@pytest.fixture(scope="module")
def postgres_to_kill() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["redis", "postgres"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Redis]:
    """Without a journal."""
    if request.param == "redis":
        with running_redis(tmp_path / "redis") as running:
            yield Redis(running)
    else:
        yield Postgres(fresh(request.getfixturevalue("postgres_to_kill")))


@pytest.fixture
def proxy(server: Redis) -> Iterator[LossyProxy]:
    proxy = LossyProxy(server.running.port, is_append=server.is_append, is_done=server.is_done)
    yield proxy
    proxy.close()


# -- killed, and restarted -----------------------------------------------------------------------


def test_killed_at_random_moments(server: Redis) -> None:
    """kill -9 of all its processes, in the midst of appends."""
    moments = random.Random(2)
    with appending(server.url()) as appender:
        for _ in range(4):
            appender.wait_for_more()
            time.sleep(moments.uniform(0, 0.1))
            server.running.kill()
            acknowledged = appender.acknowledged
            time.sleep(moments.uniform(0, 0.1))
            server.running.start()
            assert read_numbers(server.url())[:acknowledged] == list(range(1, acknowledged + 1))


def test_the_log_says_that_an_append_waits_and_that_it_continues(
    server: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with appending(server.url()) as appender:
        appender.wait_for_more()
        server.stop()
        wait_until("it is said", lambda: "waiting for" in caplog.text)
        server.running.start()
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in said] == ["WARNING", "INFO"]
    scheme = server.url().partition("://")[0]
    assert said[0][1].startswith(f"waiting for {server.name}, for up to 60 s: {scheme}://")
    assert "nothing was lost" in said[1][1]
    assert PASSWORD not in caplog.text


def test_an_append_is_given_up_in_the_end(server: Redis) -> None:
    writer = open_storage(server.url(retry_s=0.3)).open_writer("the test")
    writer.append([b"1"])
    server.running.kill()
    with pytest.raises(AppendFailed):
        writer.append([b"2"])
    with pytest.raises(
        StorageUnavailable, match=f"is {server.name} running, and reachable from here"
    ):
        writer.renew()
    server.running.start()
    with pytest.raises(AppendFailed, match="an earlier append failed"):
        writer.append([b"3"])
    writer.renew()
    writer.close()
    following = open_storage(server.url()).open_writer("the next")
    assert following.append([b"2"]) == 2
    assert read_numbers(server.url()) == [1, 2]


def test_closing_ends_the_waiting(server: Redis, caplog: pytest.LogCaptureFixture) -> None:
    writer = open_storage(server.url(retry_s=100000)).open_writer("the test")
    appender = Appender(writer)
    appender.wait_for_more()
    server.running.kill()
    wait_until("it waits", lambda: f"waiting for {server.name}, for up to 100000 s" in caplog.text)
    writer.close()
    appender.stop()
    server.running.start()
    assert isinstance(appender.error, AppendFailed)
    assert "must wait until this one's lease expires" in caplog.text
    with pytest.raises(Fenced):
        writer.append([b"x"])


def test_other_calls_fail_and_the_writer_goes_on(server: Redis) -> None:
    storage = open_storage(server.url(retry_s=0.1))
    writer = storage.open_writer("the test")
    writer.append([b"1"])
    server.running.kill()
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
        lambda: open_storage(server.url()).open_writer("another"),
    ]
    for call in calls:
        with pytest.raises(StorageUnavailable):
            call()
    server.running.start()
    for call in (writer.renew, lambda: writer.write_snapshot(1, b"s"), storage.extent):
        call()
    assert writer.append([b"2"]) == 2


def test_blobs_wait_as_well(server: Redis, caplog: pytest.LogCaptureFixture) -> None:
    writer = open_storage(server.url()).open_writer("the test")
    digests: list[str] = []
    server.running.kill()
    thread = threading.Thread(target=lambda: digests.append(writer.write_blob(b"a graph")))
    thread.start()
    wait_until("it waits", lambda: "waiting for" in caplog.text)
    server.running.start()
    thread.join(60)
    assert open_storage(server.url()).read_blob(digests[0]) == b"a graph"


def test_a_writer_is_not_displaced_for_the_time_that_its_server_was_away(
    server: Redis, clock: SimpleNamespace
) -> None:
    open_storage(server.url()).open_writer("the leader", lease_ms=1000)
    standby = open_storage(server.url())
    with pytest.raises(Locked):
        standby.open_writer("the standby")
    server.running.kill()
    with pytest.raises(StorageUnavailable):
        standby.open_writer("the standby")
    clock.now += 10
    server.running.start()
    with pytest.raises(Locked):
        standby.open_writer("the standby")
    for _ in range(3):  # a connection from before may notice only now that it has ended
        clock.now += 1
        with contextlib.suppress(StorageUnavailable, Locked):
            standby.open_writer("the standby")
            return
    pytest.fail("the lease has expired, and the standby is not the writer")


# -- hanging, and cut connections ----------------------------------------------------------------


def test_a_server_that_hangs(server: Redis, caplog: pytest.LogCaptureFixture) -> None:
    storage = open_storage(server.url(**{server.timeout: 0.2}))
    with appending(storage.open_writer("the test"), read_at=server.url()) as appender:
        for i in range(3):
            appender.wait_for_more()
            server.running.pause()
            wait_until("it waits", lambda: caplog.text.count("waiting for") > i)  # noqa: B023
            server.running.resume()  # and finds the same append in several connections


@pytest.mark.parametrize("already_sent", [False, True])
def test_a_network_that_is_cut_is_not_waited_for_like_a_slow_server(
    server: Redis, proxy: LossyProxy, caplog: pytest.LogCaptureFixture, already_sent: bool
) -> None:
    """The server may take an hour to reply; the network has to carry packets all the time."""
    storage = open_storage(server.url(proxy.port, **{server.timeout: 3600}))
    writer = storage.open_writer("the test")
    with appending(writer, read_at=server.url()) as appender:
        appender.wait_for_more()
        if already_sent:
            server.running.pause()
            time.sleep(0.1)  # for the next append to get there
        proxy.cut_off()
        if already_sent:
            server.running.resume()
        wait_until("it waits", lambda: "waiting for" in caplog.text)
        proxy.reachable_again()
    writer.close()
    storage.close()


def test_an_append_whose_reply_was_lost_is_not_done_twice(server: Redis, proxy: LossyProxy) -> None:
    writer = open_storage(server.url(proxy.port)).open_writer("the test")
    for times in (1, 2, 5):
        first = writer.last_sequence + 1
        proxy.lose_replies = times
        assert writer.append([b"%d" % first, b"%d" % (first + 1)]) == first + 1
        proxy.lose_requests = times
        assert writer.append([b"%d" % (first + 2)]) == first + 2
    assert proxy.lost == 16
    assert read_numbers(server.url()) == list(range(1, 10))
    proxy.lose_replies = 1
    writer.write_blob(b"b")
    proxy.lose_replies = 1
    with pytest.raises(StorageUnavailable):
        writer.write_snapshot(3, b"s")
    assert open_storage(server.url()).snapshots() == [3]
    assert writer.append([b"10"]) == 10


def test_an_append_that_arrives_after_its_retry_and_what_followed_it(
    server: Redis, proxy: LossyProxy
) -> None:
    """As after a cut: TCP delivers in the end what was sent on a connection given up since."""
    url = server.url(proxy.port, **{server.timeout: 0.5})
    writer = open_storage(url).open_writer("the test")
    writer.append([b"1"])
    proxy.delay.set()
    assert writer.append([b"2"]) == 2  # in its second try
    assert writer.append([b"3", b"4"]) == 4
    arrived = server.arrived()
    proxy.arrives.set()
    wait_until("it has arrived", arrived)
    assert writer.append([b"5"]) == 5
    assert read_numbers(server.url()) == [1, 2, 3, 4, 5]
    assert open_storage(server.url()).condemned() == ""


def test_an_append_that_is_retried_after_a_takeover_is_fenced(
    server: Redis, proxy: LossyProxy
) -> None:
    writer = open_storage(server.url(proxy.port)).open_writer("the test", place="here")
    proxy.lose_replies = 10**6
    appender = Appender(writer)
    wait_until("an append is repeated", lambda: proxy.lost > 2)
    later = open_storage(server.url()).open_writer("the next", place="here")
    proxy.lose_replies = 0
    wait_until("it is refused", lambda: appender.error)
    appender.stop()
    assert isinstance(appender.error, Fenced)
    assert appender.acknowledged == 0
    assert later.last_sequence == 1  # it was done, and nobody was told
    assert later.append([b"2"]) == 2

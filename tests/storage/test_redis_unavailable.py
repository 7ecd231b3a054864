"""What may happen to a Redis alone: test_server_unavailable.py has the rest."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.service.processes import free_port
from forebay.storage import Locked, StorageUnavailable, open_storage
from forebay.storage.redis import client as redis_client

from ..redis_server import RedisServer, running_redis, wait_until
from ..transport.peers import ShortLived
from .appends import LossyProxy, appending, read_numbers


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(tmp_path / "redis") as server:
        yield server


def test_a_takeover_whose_reply_was_lost(server: RedisServer) -> None:
    proxy = LossyProxy(
        server.port, is_append=lambda _: False, is_done=lambda reply: b"\r\nok\r\n" in reply
    )
    proxy.lose_replies = 1
    storage = open_storage(f"redis://127.0.0.1:{proxy.port}")
    with pytest.raises(StorageUnavailable):
        storage.open_writer("the test", place="here")
    assert storage.open_writer("the test", place="here").append([b"1"]) == 1
    proxy.close()


# -- full, read-only, loading --------------------------------------------------------------------


def test_out_of_memory(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    writer = open_storage(server.url).open_writer("the test")
    with server.client() as client:
        server.configure("maxmemory", client.info("memory")["used_memory"] + 200_000)
    # It is full soon, however slow the disk.
    with appending(writer, read_at=server.url, digits=4_000):
        wait_until("it is full", lambda: "it is out of memory; raise maxmemory" in caplog.text)
        server.configure("maxmemory", 0)


def test_demoted_and_promoted(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    with appending(server.url) as appender:
        appender.wait_for_more()
        with server.client() as client:
            client.replicaof("127.0.0.1", free_port())
            wait_until("it is read-only", lambda: "a replica, which cannot be" in caplog.text)
            client.replicaof("NO", "ONE")


def test_a_redis_that_cannot_write_its_dump(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with appending(server.url) as appender:
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
        with appending(url) as appender:
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
            except StorageUnavailable:
                away += 1
            except Locked:
                time.sleep(0.002)
        assert away == proxy.spent == 1
    finally:
        standby.close()
        leader.close()
        proxy.close()

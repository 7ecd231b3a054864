"""Redis behind a real Sentinel: the writer follows a failover, and sees what one has lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from forebay.service.processes import free_port
from forebay.storage import (
    AppendFailed,
    Corrupt,
    StorageUnavailable,
    StorageUnusable,
    Volatile,
    open_storage,
)

from ..redis_server import RedisServer, running_redis, wait_until
from .appends import appending, read_numbers
from .test_redis_unavailable import is_online


class Replicated:
    """A primary, a replica, and a Sentinel that watches both."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        def run(name: str, *arguments: str, **settings: object) -> RedisServer:
            return stack.enter_context(running_redis(directory / name, *arguments, **settings))

        self.primary = run("primary")
        self.replica = run("replica", replicaof=f"127.0.0.1 {self.primary.port}")
        self.sentinel = RedisServerThatWatches(directory / "sentinel", self.primary.port)
        stack.callback(self.sentinel.kill)
        self.url = f"redis+sentinel://127.0.0.1:{self.sentinel.port}/journal"
        with self.primary.client() as client:
            wait_until("it replicates", lambda: is_online(client.info("replication")))
        wait_until("the Sentinel knows the replica", lambda: self.state()["num-slaves"] == 1)

    def state(self) -> Any:
        with self.sentinel.client() as client:
            return client.sentinel_master("journal")

    def fail_over(self) -> None:
        """Wait until the Sentinel has noticed that the primary was killed, and done its work."""
        with self.sentinel.client() as client:
            client.sentinel_set("journal", "down-after-milliseconds", 300)
        wait_until("the replica is the primary", lambda: self.state()["port"] == self.replica.port)


class RedisServerThatWatches(RedisServer):
    def __init__(self, directory: Path, primary_port: int) -> None:
        directory.mkdir()
        self._lines = (
            f"sentinel monitor journal 127.0.0.1 {primary_port} 1\n"
            "sentinel down-after-milliseconds journal 600000\n"  # until one is to be noticed
            "sentinel failover-timeout journal 2000\n"
        )
        super().__init__(directory, "--sentinel")

    def configuration(self) -> str:
        return f"bind 127.0.0.1\nport {self.port}\ndir {self.directory}\n{self._lines}"


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Replicated]:
    with ExitStack() as stack:
        yield Replicated(tmp_path, stack)


def test_a_failover_that_appends_have_waited_for_loses_nothing(servers: Replicated) -> None:
    url = f"{servers.url}?wait_replicas=1&socket_timeout=1"
    with appending(url) as appender:
        appender.wait_for_more()
        servers.primary.kill()
        servers.fail_over()
        servers.primary.start()  # and the Sentinel makes it a replica
    assert read_numbers(servers.replica.url) == list(range(1, appender.acknowledged + 1))


def test_a_failover_that_loses_records_is_noticed(servers: Replicated) -> None:
    with pytest.raises(Volatile, match=r"a failover by Sentinel loses .*add wait_replicas=1"):
        open_storage(servers.url).open_writer("the test")
    storage = open_storage(f"{servers.url}?socket_timeout=5", allow_volatile=True)
    writer = storage.open_writer("the test", place="here")
    writer.append([b"1"])
    wait_until("it is replicated", lambda: read_numbers(servers.replica.url) == [1])
    servers.replica.pause()
    for _ in range(60):  # more than there is room for in the sockets between them
        writer.append([bytes(1 << 20)])
    servers.primary.kill()
    servers.replica.resume()
    servers.fail_over()
    with pytest.raises(Corrupt, match=r"record 61 was acknowledged in term 1, and the log ends at"):
        writer.append([b"62"])
    with pytest.raises(Corrupt, match="acknowledged records are missing"):
        storage.open_writer("the test", place="here")


def test_too_few_confirmations_for_the_replicas_there_are(
    servers: Replicated, tmp_path: Path
) -> None:
    with running_redis(tmp_path / "second", replicaof=f"127.0.0.1 {servers.primary.port}"):
        wait_until("the Sentinel knows it", lambda: servers.state()["num-slaves"] == 2)
        with pytest.raises(Volatile, match="there are 2 replicas and wait_replicas=1"):
            open_storage(f"{servers.url}?wait_replicas=1").open_writer("the test")


def test_a_service_that_no_sentinel_knows(servers: Replicated) -> None:
    url = servers.url.replace("/journal", "/other")
    with pytest.raises(StorageUnavailable, match="is the service called 'other'"):
        open_storage(url).open_writer("the test")
    with pytest.raises(StorageUnusable):
        list(open_storage(f"redis+sentinel://127.0.0.1:{free_port()}/journal").read())


def test_no_replica_is_left_to_wait_for(servers: Replicated) -> None:
    url = f"{servers.url}?wait_replicas=1&retry_s=3"
    writer = open_storage(url).open_writer("the test")
    servers.replica.kill()
    with pytest.raises(AppendFailed, match="0 replicas have confirmed in time"):
        writer.append([b"1"])

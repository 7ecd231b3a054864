"""What `open_writer` says of a Redis that could lose records, or cannot be written at all."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forebay.service.processes import free_port, redis_program
from forebay.storage import StorageUnavailable, StorageUnusable, Volatile, open_storage
from forebay.storage.parameters import redact
from forebay.storage.redis.address import parse_redis_url
from forebay.storage.redis.checks import _check_usable
from forebay.storage.redis.client import RedisClient
from forebay.storage.redis.storage import RedisStorage

from ..redis_server import RedisServer, running_redis


@pytest.fixture(scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


DURABLE = {
    "appendonly": "yes",
    "appendfsync": "always",
    "no-appendfsync-on-rewrite": "no",
    "maxmemory": "0",
    "maxmemory-policy": "noeviction",
}


@pytest.fixture
def server(one_server: RedisServer) -> Iterator[RedisServer]:
    yield one_server
    with one_server.client() as client:
        client.flushall()
        for name, value in DURABLE.items():
            client.config_set(name, value)


@pytest.mark.parametrize(
    ("settings", "loss", "remedy"),
    [
        ({"appendonly": "no"}, "a restart of Redis loses all", "set appendonly to yes"),
        (
            {"appendfsync": "everysec"},
            "a crash of Redis's host loses about the last second",
            "set appendfsync to always, or, with Redis 7.2 or later, add wait_aof=1",
        ),
        (
            {"appendfsync": "no"},
            "loses all that its kernel had not written yet",
            "set appendfsync to always",
        ),
        (
            {"no-appendfsync-on-rewrite": "yes"},
            "while it rewrites its AOF loses all since the rewrite began",
            "set it to no",
        ),
        (
            {"maxmemory": "1gb", "maxmemory-policy": "allkeys-lru"},
            "maxmemory-policy is allkeys-lru, so Redis throws the journal away when it is full",
            "set it to noeviction",
        ),
    ],
)
def test_settings_that_can_lose_records_are_refused_unless_allowed(
    server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, str],
    loss: str,
    remedy: str,
) -> None:
    open_storage(server.url).open_writer("the test", place="here").append([b"1"])
    with server.client() as client:
        for name, value in settings.items():
            client.config_set(name, value)
    with pytest.raises(Volatile) as error:
        open_storage(server.url).open_writer("the test", place="here")
    message = str(error.value)
    assert message.startswith(f"{server.url} can lose acknowledged records: ")
    assert loss in message
    assert remedy in message
    assert message.endswith("Mend that, or accept it with --allow-volatile")
    assert [record.sequence for record in open_storage(server.url).read()] == [1]  # may be read
    with caplog.at_level(logging.WARNING):
        allowed = open_storage(server.url, allow_volatile=True).open_writer(
            "the test", place="here"
        )
    assert allowed.append([b"2"]) == 2
    (warning,) = caplog.messages
    assert loss in warning
    assert remedy in warning


def test_everything_that_was_found_is_said_at_once(server: RedisServer) -> None:
    with server.client() as client:
        client.config_set("appendfsync", "no")
        client.config_set("no-appendfsync-on-rewrite", "yes")
        client.config_set("maxmemory", "1gb")
        client.config_set("maxmemory-policy", "allkeys-random")
    with pytest.raises(Volatile) as error:
        open_storage(server.url).open_writer("the test")
    for finding in ("appendfsync is no", "no-appendfsync-on-rewrite is yes", "allkeys-random"):
        assert finding in str(error.value)
    with server.client() as client:
        assert client.dbsize() == 0


@pytest.mark.parametrize("policy", ["noeviction", "volatile-lru"])
def test_limits_that_spare_the_journal_are_fine(server: RedisServer, policy: str) -> None:
    with server.client() as client:
        client.config_set("maxmemory", "1gb")
        client.config_set("maxmemory-policy", policy)
    open_storage(server.url).open_writer("the test").append([b"1"])


def test_settings_are_looked_at_before_each_takeover(server: RedisServer) -> None:
    standby = open_storage(server.url)
    standby.open_writer("the test", place="here")
    with server.client() as client:
        client.config_set("appendfsync", "everysec")
    with pytest.raises(Volatile):
        standby.open_writer("the test", place="here")


def test_a_user_that_may_not_ask_for_settings(server: RedisServer) -> None:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "bob", "on", ">secret", "~*", "+@all", "-config")
    url = server.url.replace("//", "//bob:secret@")
    with pytest.raises(Volatile, match="it is not known whether appendfsync is always; if it is"):
        open_storage(url).open_writer("the test")
    writer = open_storage(url, allow_volatile=True).open_writer("the test")
    assert writer.append([b"1"]) == 1


def test_a_user_that_may_not_ask_for_connections(server: RedisServer) -> None:
    """Then a standby waits for the whole lease."""
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "joe", "on", ">secret", "~*", "+@all", "-client")
    storage = RedisStorage(server.url.replace("//", "//joe:secret@"))
    writer = storage.open_writer("the test")
    assert writer.append([b"1"]) == 1
    writer.close()
    assert storage._is_connected("any")


def test_a_user_that_may_not_write(server: RedisServer) -> None:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "eve", "on", ">secret", "~*", "+@read", "+info",
                               "+config", "+select", "+client")  # fmt: skip
    with pytest.raises(StorageUnusable, match=r"allow it in the user's ACL") as error:
        open_storage(server.url.replace("//", "//eve:secret@")).open_writer("the test")
    assert not isinstance(error.value, StorageUnavailable | Volatile)


def test_wait_aof_needs_a_server_that_has_it(server: RedisServer) -> None:
    with server.client() as client:
        client.config_set("appendfsync", "everysec")
        version = tuple(map(int, client.info("server")["redis_version"].split(".")[:2]))
    storage = open_storage(f"{server.url}?wait_aof=1")
    if version >= (7, 2):
        assert storage.open_writer("the test").append([b"1"]) == 1
    else:
        with pytest.raises(StorageUnusable, match=r"wait_aof=1 needs Redis 7\.2"):
            storage.open_writer("the test")


def test_an_append_that_was_not_synced_in_time_is_not_acknowledged() -> None:
    client = RedisClient(parse_redis_url("redis://127.0.0.1?wait_aof=1"))
    client._check_confirmed([[1, 0]])
    with pytest.raises(StorageUnavailable, match="has not synced its AOF in time"):
        client._check_confirmed([[0, 0]])


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"redis_version": "6.0.16", "role": "master"}, "this is Redis 6.0.16; use 6.2 or later"),
        ({"redis_version": "7.4.1", "role": "master", "cluster_enabled": "1"}, "Redis Cluster"),
    ],
)
def test_servers_that_do_not_do(info: dict[str, str], message: str) -> None:
    client = RedisClient(parse_redis_url("redis://127.0.0.1"))
    with pytest.raises(StorageUnusable, match=message):
        _check_usable(client, info)


def test_a_replica_is_refused(server: RedisServer, tmp_path: Path) -> None:
    with (
        running_redis(tmp_path, replicaof=f"127.0.0.1 {server.port}") as replica,
        pytest.raises(StorageUnusable, match=f"is a replica.*; name 127.0.0.1:{server.port}"),
    ):
        open_storage(replica.url).open_writer("the test")


def test_a_cluster_is_refused(tmp_path: Path) -> None:
    with (
        running_redis(tmp_path, cluster_enabled="yes") as node,
        pytest.raises(StorageUnusable, match="is a Redis Cluster; name a Redis that is none"),
    ):
        open_storage(node.url).open_writer("the test")


# -- who and where -----------------------------------------------------------------------------


@contextmanager
def password(server: RedisServer, value: str) -> Iterator[None]:
    with server.client() as client:
        client.config_set("requirepass", value)
        try:
            yield
        finally:
            client.config_set("requirepass", "")


def test_passwords(server: RedisServer) -> None:
    with password(server, "p@ss:word/"):
        encoded = "p%40ss%3Aword%2F"
        storage = open_storage(server.url.replace("//", f"//:{encoded}@"))
        assert storage.url == server.url.replace("//", "//:***@")
        assert storage.open_writer("the test").append([b"1"]) == 1
        for userinfo in ("", ":wrong-secret@", "nobody:wrong-secret@"):
            wrong = open_storage(server.url.replace("//", f"//{userinfo}"))
            with pytest.raises(StorageUnusable, match="refuses the user or the passw") as error:
                wrong.open_writer("the test")
            assert "secret" not in str(error.value)
            assert not isinstance(error.value, StorageUnavailable)
            with pytest.raises(StorageUnusable):
                list(wrong.read())


def test_the_error_of_a_redis_that_does_not_answer() -> None:
    url = f"redis://:secret@127.0.0.1:{free_port()}"
    with pytest.raises(
        StorageUnavailable, match="is Redis running, and reachable from here"
    ) as error:
        open_storage(url).open_writer("the test")
    assert "secret" not in str(error.value)


def test_a_unix_socket_and_another_database(tmp_path: Path) -> None:
    assert redis_program()
    path = tmp_path / "redis.sock"
    with running_redis(tmp_path / "redis", unixsocket=path) as server:
        open_storage(f"unix://{path}?db=3").open_writer("the test").append([b"1"])
        open_storage(f"{server.url}/3?prefix=other").open_writer("the test").append([b"2"])
        assert [record.data for record in open_storage(f"{server.url}/3").read()] == [b"1"]
        assert open_storage(server.url).extent().last == 0
        with server.client(db=3) as client:
            assert {key.split(b":")[0] for key in client.scan_iter()} == {b"forebay", b"other"}


def test_addresses() -> None:
    address = parse_redis_url(
        "rediss://me:secret@host:7000/2?prefix=jobs:a&retry_s=7.5&wait_replicas=2&wait_aof=1"
        "&ssl_ca_certs=ca.pem&ssl_password=hidden"
    )
    assert (address.prefix, address.retry_s) == ("jobs:a", 7.5)
    assert (address.wait_replicas, address.wait_aof) == (2, True)
    assert address.server == (
        "rediss://me:secret@host:7000/2?ssl_ca_certs=ca.pem&ssl_password=hidden"
    )
    assert "secret" not in address.url
    assert "hidden" not in address.url
    plain = parse_redis_url("redis://host")
    assert (plain.prefix, plain.retry_s) == ("forebay", 60)
    assert (plain.wait_replicas, plain.wait_aof) == (0, False)
    sentinel = parse_redis_url("redis+sentinel://:secret@[::1]:7001,b/main/4?socket_timeout=1")
    assert sentinel.sentinels == (("::1", 7001), ("b", 26379))
    assert sentinel.service == "main"
    assert sentinel.server == "redis://:secret@unknown/4?socket_timeout=1"
    assert sentinel.url == "redis+sentinel://:***@[::1]:7001,b/main/4?socket_timeout=1"


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "redis://:secret@",
        "redis://host:secret",
        "redis://me:sec/ret@host",
        "redis://host/secret",
        "redis://host?prefix=",
        "redis://host?prefix=a b",
        "redis://host?retry_s=soon",
        "redis://host?retry_s=-1",
        "redis://host?wait_aof=2",
        "redis://host?wait_replicas=many",
        "redis://host?no_such_parameter=1",
        "redis://host?socket_timeout=long",
        "redis://host?socket_timeout=0",
        "unix://",
        "unix://host/path",
        "redis+sentinel://host",
        "redis+sentinel:///service",
        "redis+sentinel://host:x/service",
        "redis+sentinel://a,,b/service",
        "redis+sentinel://host/service/x",
        "redis+sentinel://me:sec/ret@host/service",
    ],
)
def test_urls_that_make_no_sense(url: str) -> None:
    with pytest.raises(StorageUnusable) as error:
        open_storage(url)
    message = str(error.value)
    assert message.startswith("storage ")
    assert "\n" not in message
    if "sec" in url and "@" in url:
        assert "sec" not in message


@pytest.mark.parametrize(
    ("url", "redacted"),
    [
        ("redis://host:1/0", "redis://host:1/0"),
        ("redis://me@host", "redis://***@host"),
        ("redis://me:a@b:c@host?password=x&prefix=y", "redis://***@host?password=***&prefix=y"),
        ("redis//me:x@host", "redis//***@host"),
        ("redis:me:x@host", "redis:***@host"),
        ("redis://m/e:x@host", "redis://***@host"),
        ("redis://me:a\nb@host", "redis://***@host"),
        ("s3+x://m/e:x@host", "s3+x://***@host"),
        ("://me:x@host", "://***@host"),
        ("me/x@host", "me/***@host"),
        ("x@host", "***@host"),
        ("redis://host/1?password=a@b", "redis://***@"),
        ("redis://me:a?password=b@host", "redis://***@"),
        ("redis://h?sentinel_password=x", "redis://h?sentinel_password=***"),
        ("unix://:x@/path", "unix://:***@/path"),
    ],
)
def test_redacting(url: str, redacted: str) -> None:
    assert redact(url) == redacted

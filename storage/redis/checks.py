"""Checks that a Redis can keep a journal, and finds settings that can lose acknowledged records."""

from __future__ import annotations

from collections.abc import Iterator

from redis.exceptions import RedisError

from ..errors import StorageUnavailable, StorageUnusable
from .client import RedisClient

OLDEST = (6, 2)  # with XTRIM MINID and COPY
OLDEST_WAITAOF = (7, 2)


def find_volatile(client: RedisClient) -> list[str]:
    """Describe how acknowledged records can be lost, each with its remedy.

    Raises StorageUnusable if this Redis cannot keep a journal at all.
    """
    info = _info(client)
    _check_usable(client, info)
    return [*_persistence(client, info), *_eviction(info), *_failover(client)]


def _info(client: RedisClient) -> dict[str, str]:
    lines = client.run("INFO").decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _check_usable(client: RedisClient, info: dict[str, str]) -> None:
    url = client.address.url
    version = info.get("redis_version", "0")
    number = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if number < OLDEST:
        raise StorageUnusable(f"{url}: this is Redis {version}; use 6.2 or later")
    if client.address.wait_aof and number < OLDEST_WAITAOF:
        raise StorageUnusable(
            f"{url}: wait_aof=1 needs Redis 7.2 or later, and this is {version}; leave it out, "
            "and set appendfsync to always"
        )
    if info.get("cluster_enabled") == "1":
        raise StorageUnusable(f"{url} is a Redis Cluster; name a Redis that is none")
    if info.get("role") != "master":
        primary = f"{info.get('master_host')}:{info.get('master_port')}"
        raise StorageUnusable(f"{url} is a replica, which cannot be written; name {primary}")


def _persistence(client: RedisClient, info: dict[str, str]) -> Iterator[str]:
    if info.get("aof_enabled") != "1":
        yield (
            "appendonly is no, so a restart of Redis loses all that came after its last dump, "
            "and everything if there is none: set appendonly to yes"
        )
        return
    appendfsync = _setting(client, "appendfsync")
    on_rewrite = _setting(client, "no-appendfsync-on-rewrite")
    if appendfsync is None or on_rewrite is None:
        yield (
            "CONFIG GET is refused here, so it is not known whether appendfsync is always; if it "
            "is not, a crash of Redis's host loses a second or more: allow CONFIG GET to the user"
        )
        return
    if appendfsync == "no":
        yield (
            "appendfsync is no, so a crash of Redis's host loses all that its kernel had not "
            "written yet, typically half a minute: set appendfsync to always"
        )
    elif appendfsync != "always" and not client.address.wait_aof:
        yield (
            f"appendfsync is {appendfsync}, so a crash of Redis's host loses about the last "
            "second: set appendfsync to always, or, with Redis 7.2 or later, add wait_aof=1 to "
            "the URL"
        )
    if on_rewrite != "no" and not client.address.wait_aof:
        yield (
            "no-appendfsync-on-rewrite is yes, so a crash of Redis's host while it rewrites its "
            "AOF loses all since the rewrite began: set it to no"
        )


def _setting(client: RedisClient, name: str) -> str | None:
    """A setting's value; None if the user may not read it."""
    try:
        reply = client.run("CONFIG", "GET", name)
    except StorageUnavailable:
        raise
    except StorageUnusable:
        return None
    return reply[1].decode() if reply else None


def _eviction(info: dict[str, str]) -> Iterator[str]:
    policy = info.get("maxmemory_policy", "")
    if info.get("maxmemory", "0") != "0" and policy.startswith("allkeys"):
        yield (
            f"maxmemory-policy is {policy}, so Redis throws the journal away when it is full: "
            "set it to noeviction"
        )


def _failover(client: RedisClient) -> Iterator[str]:
    needed = client.address.wait_replicas
    if client.sentinel is None:
        return
    replicas = _replicas(client)
    if not needed:
        yield (
            "a failover by Sentinel loses what the new primary had not received yet, as appends "
            f"wait for no replica: add wait_replicas={max(1, replicas)} to the URL"
        )
    elif needed < replicas:
        yield (
            f"there are {replicas} replicas and wait_replicas={needed}, so a failover to one of "
            f"the others loses what that had not received yet: wait for {replicas}"
        )


def _replicas(client: RedisClient) -> int:
    """The number of replicas that the Sentinels know, up or down."""
    assert client.sentinel is not None
    for sentinel in client.sentinel.sentinels:
        try:
            state = sentinel.execute_command("SENTINEL MASTER", client.address.service)
        except (RedisError, OSError):
            continue
        return int(state["num-slaves"])
    raise StorageUnavailable(f"{client.address.url}: no Sentinel answers; do they run?")

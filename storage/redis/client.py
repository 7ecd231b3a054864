"""Sends commands to one Redis, and translates its failures into storage errors.

It works below redis-py's client: each call writes some commands and reads their replies once, on
one connection. The caller decides about retries.
"""

from __future__ import annotations

import hashlib
import math
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from redis import exceptions as redis_errors
from redis.backoff import NoBackoff
from redis.connection import ConnectionPool, parse_url
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from ..errors import StorageUnavailable, StorageUnusable
from .address import PARAMETERS, RedisAddress

TIMEOUT_S = 5.0  # for one reply, unless the URL has socket_timeout
CONNECT_TIMEOUT_S = 1.0  # unless the URL has socket_connect_timeout
CUT_MS = 1500
"""How long sent data may stay unacknowledged by TCP before the network counts as cut. A slow
Redis does not matter, since its kernel acknowledges. A connection that has outlived a cut stays
silent for as long again, since TCP doubles its pauses."""

CONFIRM_MS = 1000  # how long replicas and the disk may take to confirm a write, before a retry

_PASSING = {  # Redis's error codes for temporary conditions, and their meaning
    "BUSY": "it runs a script that does not end",
    "CLUSTERDOWN": "its cluster is down",
    "LOADING": "it is loading its data",
    "MASTERDOWN": "its primary is away",
    "MISCONF": "it cannot write to its disk; mend that",
    "NOREPLICAS": "it has too few replicas (min-replicas-to-write)",
    "OOM": "it is out of memory; raise maxmemory",
    "READONLY": "it is a replica, which cannot be written; name the primary",
    "TRYAGAIN": "it is moving keys",
}
_PASSING_CODE = re.compile(rf"\b({'|'.join(_PASSING)})\b")


_NOTICE_CUTS: dict[str, Any] = {
    "socket_keepalive": True,
    "socket_keepalive_options": {
        getattr(socket, name): value
        for name, value in {
            "TCP_USER_TIMEOUT": CUT_MS,
            "TCP_KEEPIDLE": 1,  # seconds, while waiting for a reply
            "TCP_KEEPINTVL": 1,
            "TCP_KEEPCNT": 2,
        }.items()
        if hasattr(socket, name)  # Linux has all of them
    },
}


TYPES = {"meta": "hash", "log": "stream", "snapshots": "hash", "blobs": "hash"}
"""The Redis types of a journal's keys, by their names below its prefix."""

RENAME = "rename that key, and then verify the journal: what follows from that is said there"
_OWN_PREFIX = "if it is not this journal's, give the journal a prefix of its own (?prefix=name)"


class Script:
    """A Lua script, which Redis executes atomically."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class RedisClient:
    """Connections to the Redis of an address, opened on demand. Thread-safe."""

    def __init__(
        self, address: RedisAddress, *, timeout_s: float = math.inf, token: str = ""
    ) -> None:
        """Does not connect yet. Waits at most `timeout_s` for each reply. Names its connections
        after the writer's token, if Redis allows it.

        Raises StorageUnusable for unknown parameters.
        """
        self.address = address
        self.sentinel: Sentinel | None = None
        self._closed = False
        try:
            options: dict[str, Any] = {"socket_timeout": TIMEOUT_S} | parse_url(address.server)
            if not options["socket_timeout"] > 0:
                raise ValueError("socket_timeout=0 would wait for ever; give some seconds")
            options["socket_timeout"] = min(options["socket_timeout"], timeout_s)
            # One attempt per call; protocol 2 gives the same replies in each redis-py version.
            options |= {"retry": Retry(NoBackoff(), 0), "protocol": 2, "decode_responses": False}
            connect_timeout_s = min(CONNECT_TIMEOUT_S, options["socket_timeout"])
            options.setdefault("socket_connect_timeout", connect_timeout_s)
            if token:
                options["redis_connect_func"] = lambda connection: _introduce(connection, token)
            if not address.server.startswith("unix:"):
                options |= _NOTICE_CUTS
            self._pool = self._make_pool(options)
            self._pool.make_connection()  # checks the options; does not connect
        except (TypeError, ValueError) as error:
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            what = f"there is no parameter {unknown[1]!r}" if unknown else str(error)
            raise StorageUnusable(
                f"storage {address.url}: {what}; there are {', '.join(PARAMETERS)}, and those of "
                "redis-py's connections"
            ) from None
        # Commands to send after a write on the same connection: they confirm its last write.
        confirm_ms = min(CONFIRM_MS, int(options["socket_timeout"] * 500) or 1)
        self.confirmations: list[tuple[Any, ...]] = []
        if address.wait_replicas:
            self.confirmations.append(("WAIT", address.wait_replicas, confirm_ms))
        if address.wait_aof:
            self.confirmations.append(("WAITAOF", 1, 0, confirm_ms))

    def _make_pool(self, options: dict[str, Any]) -> ConnectionPool:
        if not self.address.sentinels:
            return ConnectionPool(**options)
        del options["host"]
        password = options.pop("sentinel_password", None)
        self.sentinel = Sentinel(
            self.address.sentinels,
            sentinel_kwargs={
                name: value
                for name, value in options.items()
                if name.startswith("socket_") or name in ("retry", "protocol")
            }
            | {"password": password},
            **options,
        )
        pool: ConnectionPool = self.sentinel.master_for(self.address.service).connection_pool
        return pool

    def close(self) -> None:
        """Drop all connections; those in use are dropped after their call. Idempotent."""
        self._closed = True
        self._pool.disconnect(inuse_connections=False)
        if self.sentinel is not None:
            self.sentinel.close()

    def run(self, *command: Any) -> Any:
        """Run one command and return its reply. Raises StorageUnavailable, StorageUnusable."""
        with self.failures():
            return _first(self._exchange([command]))

    def run_together(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Run commands atomically (MULTI/EXEC) and return their replies."""
        with self.failures():
            replies = self._exchange([("MULTI",), *commands, ("EXEC",)])
            for reply in replies:
                _first([reply])
            together: list[Any] = replies[-1]
            return [_first([reply]) for reply in together]

    def run_script(
        self, script: Script, keys: tuple[str, ...], args: tuple[Any, ...], confirm: bool = False
    ) -> Any:
        """Run a script and return its result.

        With `confirm`, also wait for the replicas and the disk sync that the address asks for.
        On a timeout, StorageUnavailable is raised although the script was executed.
        """
        arguments = (len(keys), *keys, *args)
        confirmations = self.confirmations if confirm else []
        with self.failures():
            replies = self._exchange([("EVALSHA", script.sha, *arguments), *confirmations])
            if isinstance(replies[0], redis_errors.NoScriptError):  # new, or restarted
                replies = self._exchange([("EVAL", script.text, *arguments), *confirmations])
            result = _first(replies)
            self._check_confirmed(replies[1:])
            return result

    def _check_confirmed(self, replies: list[Any]) -> None:
        for reply in replies:
            _first([reply])
            if isinstance(reply, list):
                if not reply[0]:
                    raise StorageUnavailable(
                        f"{self.address.url}: Redis has not synced its AOF in time"
                    )
            elif reply < self.address.wait_replicas:
                raise StorageUnavailable(
                    f"{self.address.url}: {reply} replicas have confirmed in time, and "
                    f"wait_replicas={self.address.wait_replicas} are needed"
                )

    def _exchange(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        connection = self._pool.get_connection()
        done = False
        try:
            connection.send_packed_command(connection.pack_commands(commands))
            replies = [_reply(connection.read_response) for _ in commands]
            done = True
            return replies
        finally:
            if not done or self._closed:  # a late reply could be taken for the next command's
                connection.disconnect()
            self._pool.release(connection)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Translate redis-py's errors into storage errors."""
        try:
            yield
        except (redis_errors.RedisError, OSError) as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> StorageUnusable:
        url = self.address.url
        if isinstance(error, redis_errors.AuthenticationError):
            return StorageUnusable(
                f"{url}: Redis refuses the user or the password ({error}); give the right ones: "
                "redis://user:password@host"
            )
        if isinstance(error, redis_errors.NoPermissionError):
            return StorageUnusable(f"{url}: {error}; allow it in the user's ACL")
        if isinstance(error, redis_errors.ReadOnlyError):
            return StorageUnavailable(f"{url}: {_PASSING['READONLY']}")
        if isinstance(error, redis_errors.OutOfMemoryError):
            return StorageUnavailable(f"{url}: {_PASSING['OOM']}")
        if isinstance(error, redis_errors.BusyLoadingError):
            return StorageUnavailable(f"{url}: {_PASSING['LOADING']}")
        if isinstance(error, redis_errors.MovedError | redis_errors.ClusterCrossSlotError):
            return StorageUnusable(f"{url} is a Redis Cluster; name a Redis that is none")
        if isinstance(error, MasterNotFoundError):
            return StorageUnavailable(
                f"{url}: no Sentinel knows a primary that is up; do they run, and is the "
                f"service called {self.address.service!r}?"
            )
        if isinstance(error, redis_errors.ConnectionError | redis_errors.TimeoutError | OSError):
            why = str(error).rstrip(".")
            return StorageUnavailable(f"{url}: {why}; is Redis running, and reachable from here?")
        passing = _PASSING_CODE.search(str(error))
        if passing:
            return StorageUnavailable(f"{url}: {_PASSING[passing[1]]}")
        if str(error).startswith("WRONGTYPE"):
            return StorageUnusable(f"{url}: {self._wrong_type()}; or {_OWN_PREFIX}")
        return StorageUnusable(f"{url}: Redis answers: {error}")

    def _wrong_type(self) -> str:
        for name, wanted in TYPES.items():
            key = f"{self.address.prefix}:{name}"
            found = self.run("TYPE", key).decode()
            if found not in (wanted, "none"):
                return f"{key} holds a {found}, where a {wanted} belongs; {RENAME}"
        return "a key held something else a moment ago; try again"


def connection_name(token: str) -> str:
    """The name of all connections of the writer with this token."""
    return f"forebay-{token}"


def _introduce(connection: Any, token: str) -> None:
    connection.on_connect()
    connection.send_command("CLIENT", "SETNAME", connection_name(token))
    _reply(connection.read_response)  # a user may not be allowed to


def _reply(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except redis_errors.ResponseError as error:
        return error  # of one command; the next command's reply follows


def _first(replies: list[Any]) -> Any:
    if isinstance(replies[0], Exception):
        raise replies[0]
    return replies[0]

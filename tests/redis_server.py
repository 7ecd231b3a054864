"""Real Redis servers for tests: started, killed, paused and started again on the same data.

`shared_server_url` finds one for tests that only need some Redis, in this order:
FOREBAY_TEST_REDIS_URL, a server program on this machine, Docker. Tests that kill or reconfigure
Redis start a `RedisServer` of their own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis

from forebay.service.processes import ChildProcess, free_port, redis_program
from forebay.storage.redis.log import Keys

WAIT_S = 30.0  # for anything that a server does


def wait_until(what: str, condition: Callable[[], Any]) -> Any:
    """Return what `condition` returns when that is true. Raises AssertionError after a while."""
    give_up = time.monotonic() + WAIT_S
    while True:
        result = condition()
        if result:
            return result
        assert time.monotonic() < give_up, f"waited for {WAIT_S} s until {what}"
        time.sleep(0.02)


class RedisServer:
    """A Redis in a directory, on a loopback port that stays the same when it starts again."""

    def __init__(self, directory: Path, *arguments: str, **settings: object) -> None:
        """Start it, with a synced AOF unless `settings` (with _ for -) say otherwise."""
        program = redis_program()
        assert program, (
            "this test needs redis-server or valkey-server on this machine: make test installs it"
        )
        self.directory = directory
        self.settings: dict[str, object] = {
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "repl-diskless-sync-delay": 0,  # no waiting for a second replica
            **{name.replace("_", "-"): value for name, value in settings.items()},
        }
        self.port = 0
        self._program = program
        self._arguments = arguments
        self._process: ChildProcess | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> Any:  # a redis.Redis, whose methods are typed too widely
        return redis.Redis(port=self.port, **options)

    def start(self) -> None:
        """Start it, and return when it has loaded its data."""
        for _ in range(10):  # somebody else may be faster in taking a free port
            self.port = self.port or free_port()
            self._process = self._spawn()
            if wait_until("Redis answers, or has ended", self._answers) is True:
                return
            self.port = 0
        raise AssertionError((self.directory / "output").read_text())

    def _spawn(self) -> ChildProcess:
        path = self.directory / "redis.conf"
        path.write_text(self.configuration())
        command = [self._program, str(path), *self._arguments]
        return ChildProcess(command, self.directory / "output")

    def configuration(self) -> str:
        settings = {
            "bind": "127.0.0.1",
            "port": self.port,
            "dir": str(self.directory),
            **self.settings,
        }
        return "".join(f'{name} "{value}"\n' for name, value in settings.items())

    def _answers(self) -> bool | str:
        assert self._process is not None
        if self._process.poll() is not None:
            return "ended"
        try:
            with self.client() as client:
                client.ping()  # refused while it loads
                # Another server may have been faster in taking the port.
                return bool(client.info("server")["process_id"] == self._process.pid)
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.finish()
            self._process = None

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def configure(self, name: str, value: object) -> None:
        """Change a setting, for now and for later starts."""
        self.settings[name] = value
        with self.client() as client:
            client.config_set(name, str(value))


@contextlib.contextmanager
def running_redis(directory: Path, *arguments: str, **settings: object) -> Iterator[RedisServer]:
    server = RedisServer(directory, *arguments, **settings)
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def shared_server_url() -> Iterator[str]:
    """The URL of a Redis whose appends are durable. Raises if there is none to be had."""
    given = os.environ.get("FOREBAY_TEST_REDIS_URL")
    if given:
        yield given
    elif redis_program():
        with (
            tempfile.TemporaryDirectory(prefix="forebay-redis-") as directory,
            running_redis(Path(directory)) as server,
        ):
            yield server.url
    else:
        with _container() as url:
            yield url


@contextlib.contextmanager
def _container() -> Iterator[str]:
    from testcontainers.core.exceptions import ContainerStartException
    from testcontainers.redis import RedisContainer

    command = "redis-server --appendonly yes --appendfsync always"
    try:
        container = RedisContainer("redis:7-alpine").with_command(command).start()
    except (ContainerStartException, OSError) as error:
        raise RuntimeError(
            "the tests need a Redis, and there is neither a redis-server on this machine nor a "
            f"Docker that runs ({error}): apt-get install redis-server, or set "
            "FOREBAY_TEST_REDIS_URL"
        ) from error
    try:
        host, port = container.get_container_host_ip(), container.get_exposed_port(6379)
        yield f"redis://{host}:{port}"
    finally:
        container.stop()


@contextlib.contextmanager
def opened_keys(url: str) -> Iterator[tuple[Any, Keys]]:
    """A client of the Redis at a storage's URL, and the names of the storage's keys."""
    address, _, prefix = url.partition("prefix=")
    with redis.Redis.from_url(address.partition("?")[0]) as client:
        yield client, Keys.of(prefix)


@contextlib.contextmanager
def new_storage(url: str) -> Iterator[str]:
    """The URL of a new storage in that Redis, which is left as it was."""
    prefix = f"test-{uuid.uuid4().hex}"
    yield f"{url}{'&' if '?' in url else '?'}prefix={prefix}"
    with redis.Redis.from_url(url) as client:
        for key in client.scan_iter(f"{prefix}:*", count=1000):
            client.delete(key)

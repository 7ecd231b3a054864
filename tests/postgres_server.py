"""Real PostgreSQL servers for tests: started, killed, paused and started again on the same data."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg

from forebay.chaos.postgres import (
    USER,
    make_cluster,
    make_directory,
    run_program,
    server_command,
    signal_server,
)
from forebay.service.processes import ChildProcess, free_port, tail

from .redis_server import wait_until

PASSWORD = "geheim"


def copy_cluster(directory: Path, url: str) -> None:
    """Make a standby in `directory` of the server at `url`."""
    make_directory(directory)
    options = ("--write-recovery-conf", "--checkpoint=fast", "--no-sync")
    run_program(directory, "pg_basebackup", "--dbname", url, *options)


class PostgresServer:
    """A PostgreSQL in a directory, on a loopback port that stays the same when it starts again."""

    def __init__(
        self, directory: Path, primary: PostgresServer | None = None, **settings: object
    ) -> None:
        """Start it; as a standby, if it has a primary."""
        directory.chmod(0o711)  # PostgreSQL is not run as root
        self.directory = directory
        self.settings = {"shared_buffers": "32MB", **settings}
        self.port = free_port()
        self._process: ChildProcess | None = None
        if primary is None:
            make_cluster(directory / "data", PASSWORD)
        else:
            copy_cluster(directory / "data", primary.url)
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{self.port}/postgres"

    def client(self, **options: Any) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url, autocommit=True, **options)

    def execute(self, statement: str, **options: Any) -> list[Any]:
        """Run it, and return its rows."""
        with self.client(**options) as client:
            cursor = client.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def start(self) -> None:
        """Start it, and return when it has recovered its data."""
        for _ in range(10):  # somebody else may have the port; killed processes may live yet
            command = server_command(self.directory / "data", self.port, self.settings)
            self._process = ChildProcess(command, self.directory / "output")
            if wait_until("PostgreSQL answers, or has ended", self._answers) is True:
                return
            self._process.finish()  # it has ended
        raise AssertionError(tail(self.directory / "output"))

    def _answers(self) -> bool | str:
        assert self._process is not None
        if self._process.poll() is not None:
            return "ended"
        try:
            self.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """kill -9 of all of its processes."""
        if self._process is not None:
            signal_server(self._process.pid, signal.SIGKILL)
            self._process.finish()
            self._process = None

    def stop(self) -> None:
        """Stop it in order, as `systemctl restart` does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        self._process.finish(60)
        self._process = None

    def pause(self) -> None:
        signal_server(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        signal_server(self.pid, signal.SIGCONT)


@contextlib.contextmanager
def running_postgres(
    primary: PostgresServer | None = None, **settings: object
) -> Iterator[PostgresServer]:
    with tempfile.TemporaryDirectory(prefix="forebay-postgres-") as name:
        server = PostgresServer(Path(name), primary, **settings)
        try:
            yield server
        finally:
            server.kill()


def new_storage(server: PostgresServer) -> str:
    """The URL of a new storage there, and with an own schema."""
    return f"{server.url}?prefix=test-{uuid.uuid4().hex}"


def schema_of(url: str) -> str:
    return urlsplit(url).query.partition("prefix=")[2]

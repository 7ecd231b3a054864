"""The processes of both sides: servers and readers, each one of its own."""

from __future__ import annotations

import functools
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from ..service import processes
from ..service.errors import ForebayError
from .machine import memory_mb

STOP_TIMEOUT_S = 30
ANSWER_TIMEOUT_S = 120
OURS, PEERS = "forebay", "peer"  # where the dispatchers' journals are, in their directory
COLLECT_MS = 1_000


class Child:
    """A Python process that answers on its standard output, a line at a time.

    Being a context manager, it stops at the end of the context. If we end without that, one
    that is `tied` is killed, as it may be waiting for a dispatcher; the others notice that
    their standard input has ended.
    """

    def __init__(self, module: str, *arguments: object, tied: bool = False) -> None:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        self._module = module
        self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            processes.tied(command) if tied else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def answer(self) -> str:
        """Its next line of output. Raises ForebayError, with its error output, if it ends."""
        assert self._process.stdout is not None
        impatience = threading.Timer(ANSWER_TIMEOUT_S, self._process.kill)
        impatience.start()
        line = self._process.stdout.readline().strip()
        impatience.cancel()
        if not line:
            code = self._process.wait(STOP_TIMEOUT_S)
            self._log.seek(0)
            raise ForebayError(
                f"{self._module} did not answer and ended with exit code {code} (-9 after "
                f"{ANSWER_TIMEOUT_S} s):\n{self._log.read()}"
            )
        return line

    def ask(self, question: Mapping[str, Any]) -> None:
        """Send it a line of JSON."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """SIGTERM, or SIGKILL if that does not help."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        for file in (self._process.stdin, self._process.stdout, self._log):
            assert file is not None
            file.close()


class Server(Child):
    """A child that says where it serves on its first line of output."""

    @functools.cached_property
    def address(self) -> str:
        """Where it serves: "host:port". Waits until it does."""
        return self.answer().removeprefix("grpc://")

    def wait_until_serving(self) -> None:
        """Raises ForebayError, with its error output, if it ends instead."""
        assert self.address

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def rss_mb(self) -> float:
        """Its resident memory, in units of 10⁶ bytes."""
        return memory_mb(self.pid, "VmRSS")


def our_dispatcher(directory: pathlib.Path, port: int = 0) -> Server:
    """Forebay's dispatcher. Nobody times out: what members do here may be simulated."""
    return Server(
        "forebay.service.cli",
        "dispatcher",
        "--exit-with-parent",
        *("--storage", directory / OURS),
        *("--port", port),
        *("--worker-timeout-ms", -1),
        *("--client-timeout-ms", -1),
    )


def our_worker(dispatcher: Server) -> Server:
    command = ("worker", "--dispatcher", dispatcher.address)
    return Server("forebay.service.cli", *command, tied=True)


def peer_dispatcher(directory: pathlib.Path, port: int = 0, *, collect: bool = False) -> Server:
    """tf.data service's dispatcher, in fault-tolerant mode.

    `collect`: jobs that nobody reads any more end at once, as ours do, so that the rounds
    before leave no buffers behind.
    """
    collect_ms = COLLECT_MS if collect else 0  # 0: its default, minutes
    return Server("forebay.benchmarks.peer", "dispatcher", port, directory / PEERS, collect_ms)


def peer_worker(dispatcher: Server) -> Server:
    return Server("forebay.benchmarks.peer", "worker", dispatcher.address, tied=True)

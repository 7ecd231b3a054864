"""The servers of both sides, each in a process of its own."""

from __future__ import annotations

import functools
import pathlib
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Self

STOP_TIMEOUT_S = 30
OURS, PEERS = "forebay", "peer"  # where the dispatchers' journals are, in their directory


class Server:
    """A Python process that says where it serves on its first line of output.

    Being a context manager, it stops at the end of the context.
    """

    def __init__(self, module: str, *arguments: object) -> None:
        self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE,  # the server ends when we do, however we end
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    @functools.cached_property
    def address(self) -> str:
        """Where it serves: "host:port". Waits until it does."""
        assert self._process.stdout is not None
        address = self._process.stdout.readline().strip().removeprefix("grpc://")
        if not address:
            code = self._process.wait(STOP_TIMEOUT_S)
            self._log.seek(0)
            raise RuntimeError(f"a server ended with exit code {code}:\n{self._log.read()}")
        return address

    def wait_until_serving(self) -> None:
        """Raises RuntimeError, with its error output, if it ends instead."""
        assert self.address

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def rss_mb(self) -> float:
        """Its resident memory, in units of 10⁶ bytes."""
        status = pathlib.Path(f"/proc/{self._process.pid}/status").read_text()
        kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
        return int(kib) * 1024 / 1e6

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
        """SIGTERM, or SIGKILL if that does not help."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        for file in (self._process.stdin, self._process.stdout, self._log):
            assert file is not None
            file.close()


def our_dispatcher(directory: pathlib.Path, port: int = 0) -> Server:
    """Forebay's dispatcher. Nobody times out: what members do here is simulated."""
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
    return Server("forebay.service.cli", "worker", "--dispatcher", dispatcher.address)


def peer_dispatcher(directory: pathlib.Path, port: int = 0) -> Server:
    """tf.data service's dispatcher, in fault-tolerant mode."""
    return Server("benchmarks.peer", "dispatcher", port, directory / PEERS)


def peer_worker(dispatcher: Server) -> Server:
    return Server("benchmarks.peer", "worker", dispatcher.address)

"""The servers of both sides, each in a process of its own."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Self

STOP_TIMEOUT_S = 30


class Server:
    """A Python process that says where it serves on its first line of output."""

    def __init__(self, module: str, *arguments: object) -> None:
        self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE,  # the server ends when we do, however we end
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip().removeprefix("grpc://")
        if not self.address:
            code = self._end()
            raise RuntimeError(f"{module} ended with exit code {code}:\n{self._log_text()}")

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
        self._end()

    def stop(self) -> None:
        """SIGTERM, or SIGKILL if that does not help. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._end()

    def _end(self) -> int:
        code = self._process.wait(STOP_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return code

    def _log_text(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stop()
        self._log.close()


def our_dispatcher(directory: pathlib.Path, port: int = 0) -> Server:
    """Forebay's dispatcher. Nobody times out: what members do here is simulated."""
    return Server(
        "forebay.service.cli",
        "dispatcher",
        "--exit-with-parent",
        *("--storage", directory / "forebay"),
        *("--port", port),
        *("--worker-timeout-ms", -1),
        *("--client-timeout-ms", -1),
    )


def our_worker(dispatcher: Server) -> Server:
    return Server("forebay.service.cli", "worker", "--dispatcher", dispatcher.address)


def peer_dispatcher(directory: pathlib.Path, port: int = 0) -> Server:
    """tf.data service's dispatcher, in fault-tolerant mode."""
    return Server("benchmarks.peer", "dispatcher", port, directory / "peer")


def peer_worker(dispatcher: Server) -> Server:
    return Server("benchmarks.peer", "worker", dispatcher.address)

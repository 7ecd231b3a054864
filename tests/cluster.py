"""Forebay's servers as processes of their own, to be killed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Self

STOP_TIMEOUT_S = 40


class WorkerProcess:
    """`forebay worker`."""

    def __init__(self, dispatcher: str, **options: object) -> None:
        command = [sys.executable, "-m", "forebay.service.cli", "worker"]
        for name, value in {"dispatcher": dispatcher, **options}.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.address = ""

    def wait_until_registered(self) -> Self:
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        assert self.address, f"the worker ended with {self._process.wait(STOP_TIMEOUT_S)}"
        return self

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """SIGSTOP, and SIGCONT at the end."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._end()

    def stop(self) -> int:
        """SIGTERM, which drains it; the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._end()

    def _end(self) -> int:
        code = self._process.wait(STOP_TIMEOUT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    def __enter__(self) -> Self:
        return self.wait_until_registered()

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.kill()

"""Forebay's servers as processes of their own, to be killed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Self

from .forks import Fork
from .stock import ServerProcess


class WorkerProcess(ServerProcess):
    """`forebay worker`."""

    def __init__(
        self,
        dispatcher: str,
        environment: Mapping[str, str] = MappingProxyType({}),
        /,
        **options: object,
    ) -> None:
        command = ["-m", "forebay.service.cli", "worker"]
        for name, value in {"dispatcher": dispatcher, **options}.items():
            flag = f"--{name.replace('_', '-')}"
            command += [flag] if value is True else [flag, str(value)]
        super().__init__(Fork(command, environment=environment))
        self.address = ""

    def wait_until_registered(self) -> Self:
        self.address = self.first_line()
        return self

    def __enter__(self) -> Self:
        return self.wait_until_registered()

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.kill()

    @contextlib.contextmanager
    def until_told(self) -> Iterator[Self]:
        """It is told to stop at the end, so that a dispatcher that goes on does not wait for it."""
        with self:
            yield self
            self.stop()

"""Members of the cluster: each is a process that is restarted after its end, as by systemd."""

from __future__ import annotations

import pathlib
import signal
import time
from collections.abc import Callable, Mapping

import msgspec

from ..service.processes import DROPPED, ChildProcess, tail
from .hosts import LOOPBACK, Host

TRAINERS = ("trainer", "claimer", "ordered")
"""The roles of trainers."""

RESTART_S = 0.3
"""The delay before the restart of a process, like RestartSec= of a unit."""

STOP_S = 40.0
"""How long a process may take to stop. A worker drains for 20 s at most."""


class Life(msgspec.Struct):
    """One process, from its start to its end. Times are CLOCK_MONOTONIC."""

    name: str  # "worker0.3": the third process of worker 0
    role: str
    number: int
    started_s: float
    killed_s: float | None = None  # SIGKILL
    terminated_s: float | None = None  # SIGTERM
    pauses: list[tuple[float, float]] = []  # SIGSTOP, SIGCONT
    stuck: bool = False  # killed because it did not stop when it was told to
    ended_s: float | None = None
    code: int | None = None
    last_words: str = ""  # the end of its log, if it ended by itself

    @property
    def host(self) -> str:
        """The name of its host, if each member has one."""
        return f"{self.role}{self.number}"

    @property
    def ended_by_itself(self) -> bool:
        """Whether it failed although nobody told it to end."""
        told = self.killed_s is not None or self.terminated_s is not None
        return self.code not in (None, 0) and not told

    @property
    def stopped_badly(self) -> bool:
        """Whether it was told to stop, and did not stop or failed."""
        # DROPPED is no failure here: the audit checks the dropped elements.
        well = {None, 0, -signal.SIGTERM} | ({DROPPED} if self.role == "worker" else set())
        badly = self.code not in well
        return self.stuck or (badly and self.terminated_s is not None and self.killed_s is None)


class Member:
    """Keeps a process running. `command` returns the command for a process name."""

    def __init__(
        self,
        role: str,
        number: int,
        command: Callable[[str], list[str]],
        directory: pathlib.Path,
        host: Host = LOOPBACK,
        environment: Mapping[str, str] = {},
    ) -> None:
        self.role = role
        self.number = number
        self.lives: list[Life] = []
        self.log = directory / f"{role}{number}.log"
        self.retired = False  # never restarted again
        self.held = False  # not restarted for now
        self._command = command
        self._host = host
        self._environment = environment
        self._process: ChildProcess | None = None
        self._resume_at_s = 0.0
        self._restart_at_s = 0.0
        self._log_from = 0  # in bytes, of the present process

    @property
    def said(self) -> str:
        """What the present process has logged."""
        return self.log.read_bytes()[self._log_from :].decode(errors="replace")

    @property
    def life(self) -> Life:
        """The life of the present process, or of the last one."""
        return self.lives[-1]

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def undisturbed(self) -> bool:
        """Whether it runs, is not paused, and nobody has told it to stop."""
        return self.running and self.life.terminated_s is None and not self._resume_at_s

    def start(self) -> None:
        name = f"{self.role}{self.number}.{len(self.lives) + 1}"
        self.lives.append(Life(name, self.role, self.number, time.monotonic()))
        self._log_from = self.log.stat().st_size if self.log.exists() else 0
        with self._host.inside():
            self._process = ChildProcess(
                self._command(name), self.log, environment=self._environment
            )

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        if self._process is not None:
            self.life.killed_s = time.monotonic()
            self.send(signal.SIGKILL)
            self._process.wait()
            self.poll()

    def terminate(self) -> None:
        """SIGTERM."""
        if self._process is not None and self.life.terminated_s is None:
            self.life.terminated_s = time.monotonic()
            self._process.terminate()

    def pause(self, seconds: float) -> None:
        """SIGSTOP; `poll` resumes it in time."""
        if self._process is not None:
            now = time.monotonic()
            self.send(signal.SIGSTOP)
            self._resume_at_s = now + seconds
            self.life.pauses.append((now, self._resume_at_s))

    def resume(self) -> None:
        """SIGCONT, if it is paused."""
        if self._process is not None and self._resume_at_s:
            self.send(signal.SIGCONT)
        self._resume_at_s = 0.0

    def send(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def poll(self) -> None:
        """Do what is due: resume it, note its end, restart it. Poll this often after `start`."""
        now = time.monotonic()
        if self._resume_at_s and now >= self._resume_at_s:
            self.resume()
        if self._process is None:
            if self.lives and not (self.retired or self.held) and now >= self._restart_at_s:
                self.start()
        elif self._process.poll() is not None:
            code, self._process = self._process.finish(), None
            self._resume_at_s = 0.0
            self._restart_at_s = now + RESTART_S
            self.life.ended_s, self.life.code = now, code
            if self.life.ended_by_itself:
                self.life.last_words = tail(self.log, 1)
        elif (told_s := self.life.terminated_s) is not None and now > told_s + STOP_S:
            self.life.stuck = True
            self.kill()

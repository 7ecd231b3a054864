"""The load of a worker's host, as Linux tells it in /proc."""

from __future__ import annotations

import os
from pathlib import Path

from ..proto import forebay_pb2 as pb

LEAST_TICKS = 100
"""Processor time of the host, in ticks, over which a share is taken."""


class HostWatch:
    """For one thread."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._before = (0, 0)  # ticks in all, and idle
        self._permille = 0
        self.load()  # since the host began

    def load(self) -> pb.HostLoad | None:
        """Now, and since an earlier call; None if this host does not tell it."""
        try:
            ticks = [int(text) for text in self._read("stat").split("\n", 1)[0].split()[1:9]]
            lines = (line.split() for line in self._read("meminfo").splitlines())
            memory = {name: 1024 * int(kilobytes) for name, kilobytes, *_ in lines}
            total, available = memory["MemTotal:"], memory["MemAvailable:"]
        except (OSError, ValueError, KeyError):
            return None
        now = sum(ticks), ticks[3] + ticks[4]  # idle, and waiting for disks
        passed, idle = now[0] - self._before[0], now[1] - self._before[1]
        if passed >= LEAST_TICKS:
            self._before, self._permille = now, 1000 * (passed - idle) // passed
        return pb.HostLoad(
            memory_bytes=total,
            memory_used_bytes=total - available,
            busy_permille=self._permille,
            processors=os.cpu_count(),
        )

    def _read(self, name: str) -> str:
        return (self._proc / name).read_text()

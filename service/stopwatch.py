"""Measures how long a thread waits, at no cost where it does not wait."""

from __future__ import annotations

import time


class Stopwatch:
    """The seconds within its `with` block, in which is one thread at a time. Any thread may read,
    also while another one is within."""

    def __init__(self) -> None:
        self._read: tuple[float, float | None] = 0.0, None  # seconds; since when it runs

    def __enter__(self) -> None:
        self._read = self._read[0], time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._read = self.seconds, None

    @property
    def seconds(self) -> float:
        seconds, since_s = self._read
        return seconds if since_s is None else seconds + time.monotonic() - since_s

"""A Python dataset's children: which are idle, and when they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from .child_connections import PythonChild, StoredDataset
from .fork_server import ForkServer

TEARDOWN_MS = 5_000


def _finish(children: Sequence[PythonChild]) -> None:
    """End idle children, all at once. Each runs its function's teardown, for a few seconds at
    most."""
    for child in children:
        child.begin_teardown()
    give_up_s = time.monotonic() + TEARDOWN_MS / 1000
    for child in children:
        child.wait_until_ended(max(0, int(1000 * (give_up_s - time.monotonic()))))
        child.kill()


class Children:
    """The processes of one dataset. Thread-safe."""

    def __init__(self, fork_server: ForkServer, dataset: StoredDataset, most_idle: int) -> None:
        self._fork_server = fork_server
        self._dataset = dataset
        self._most_idle = most_idle
        self._lock = threading.Lock()
        self._idle: list[PythonChild] = []
        self._closed = False

    def take(self) -> PythonChild:
        """An idle child. Raises PipelineError."""
        while True:
            with self._lock:
                found = self._idle.pop() if self._idle else None
            if found is None:
                return PythonChild(self._fork_server, self._dataset)
            if found.lives:
                return found
            found.kill()

    def give_back(self, child: PythonChild) -> None:
        """Return an idle child. One beyond the number to keep ends at once."""
        with self._lock:
            if not self._closed and len(self._idle) < self._most_idle:
                self._idle.append(child)
                return
        _finish([child])

    def close(self) -> None:
        """End idle children, and others when they are given back. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        _finish(idle)

"""How many bytes of files in object stores this process's children have read, for whichever of its
workers: several in one process say the same number."""

from __future__ import annotations

import threading


class Fetched:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.fetched_bytes = self.cached_bytes = 0
        self.held_bytes = 0  # that the cache has now

    def add(self, fetched_bytes: int, cached_bytes: int) -> None:
        with self._lock:
            self.fetched_bytes += fetched_bytes
            self.cached_bytes += cached_bytes


fetched = Fetched()

"""The last errors by which tasks of this worker, or bundles of them, ended."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

from ..errors import cut_error
from ..proto import forebay_pb2 as pb

MOST_ERRORS = 10
"""They go with each heartbeat."""


class ReadErrors:
    """The same error counts once, with how often it came. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[int, str, str], tuple[float, pb.ReadError]] = OrderedDict()

    def add(self, task: pb.Task, code: str, message: str, *, for_good: bool) -> None:
        """`for_good`: the task has ended, too."""
        message = cut_error(message)  # TensorFlow's may name a whole graph
        key = task.job_id, code, message
        with self._lock:
            before = self._found.pop(key, None)
            times = 1 if before is None else before[1].times + 1
            self._found[key] = time.monotonic(), pb.ReadError(
                job_id=task.job_id, task_id=task.task_id, code=code, message=message,
                times=times, for_good=for_good,
            )  # fmt: skip
            if len(self._found) > MOST_ERRORS:
                self._found.popitem(last=False)

    def told(self) -> list[pb.ReadError]:
        """For a heartbeat."""
        now_s = time.monotonic()
        with self._lock:
            for at_s, error in self._found.values():
                error.ago_ms = int(1000 * (now_s - at_s))
            return [error for _, error in self._found.values()]

    def forget(self) -> None:
        """Another journal: its jobs have the ids of others."""
        with self._lock:
            self._found.clear()

"""What the consumers of this process received, and for what they waited."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from typing import Any

from ..blocks import Block
from ..platforms import at_fork
from ..proto import forebay_pb2 as pb

CAUSES = ("workers", "network", "dispatcher", "no_task")
"""For what a consumer waits: for elements of workers to which it is connected; for a connection to
any that has a task; for the dispatcher, which does not answer; or for a worker to get a task, also
once the process of the worker that had it has ended."""


class Meter:
    """What one consumer received, and for what it waited."""

    def __init__(self) -> None:
        self.elements = self.bytes = self.reconnects = 0
        self.waits_s = dict.fromkeys(CAUSES, 0.0)
        self._numbers = itertools.count(1)
        self._began_s = time.monotonic()

    def open(self) -> None:
        """Its consumer counts as open until `close`."""
        with _lock:
            _open.add(self)

    def received(self, block: Block) -> None:
        """The consumer's thread handles a block."""
        self.elements += block.count
        self.bytes += block.values_bytes

    def waited(self, cause: str, seconds: float) -> None:
        """The consumer's thread waited for something new."""
        self.waits_s[cause] += seconds

    def reconnected(self) -> None:
        """Called by any thread."""
        self.reconnects = max(self.reconnects, next(self._numbers))

    def close(self) -> None:
        """Its consumer is closed. Idempotent."""
        with _lock:
            if self in _open:
                _open.discard(self)
                _closed.update(self._amounts())

    def report(self, load: pb.ConsumerLoad) -> None:
        """Tell the dispatcher; any thread may."""
        load.open_ms = int(1000 * (time.monotonic() - self._began_s))
        for cause, name in zip(CAUSES, ("waited", "network", "dispatcher", "no_task"), strict=True):
            setattr(load, f"{name}_ms", int(1000 * self.waits_s[cause]))
        load.elements, load.bytes = self.elements, self.bytes

    def _amounts(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._began_s
        counts = {"elements": self.elements, "bytes": self.bytes, "reconnects": self.reconnects}
        return {**counts, "seconds": seconds, **self.waits_s}


# Guards the two below. Reentrant: garbage collection may close a consumer.
_lock = threading.RLock()
_open: set[Meter] = set()
_closed: Counter[str] = Counter()  # the amounts of closed ones


def _forget() -> None:
    """A fork has none of these consumers, and another thread may have held the lock."""
    global _lock
    _lock = threading.RLock()
    _closed.clear()
    _open.clear()


at_fork(after_in_child=_forget)


def totals() -> dict[str, Any]:
    """Of all consumers of this process, and `open_consumers`: how many are open now."""
    with _lock:
        total, there = _closed.copy(), [*_open]
        for meter in there:
            total.update(meter._amounts())
    counts = {name: total[name] for name in ("elements", "bytes", "reconnects")}
    waits_s = {cause: float(total[cause]) for cause in CAUSES}
    seconds = float(total["seconds"])
    return {
        "open_consumers": len(there), **counts, "seconds": seconds, "wait_seconds": waits_s
    }  # fmt: skip

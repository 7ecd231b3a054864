"""What the consumers of this process received, and for what they waited."""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import Any

from ..blocks import Block
from ..proto import forebay_pb2 as pb

CAUSES = ("workers", "network", "dispatcher", "no_task")
"""For what a consumer waits: for elements of workers to which it is connected; for a connection to
any of its workers; for the dispatcher, which does not answer; or for a worker to get a task, also
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
                _add(_closed, self)

    def report(self, load: pb.ConsumerLoad) -> None:
        """Tell the dispatcher; any thread may."""
        load.open_ms = int(1000 * (time.monotonic() - self._began_s))
        load.waited_ms = int(1000 * self.waits_s["workers"])
        load.network_ms = int(1000 * self.waits_s["network"])
        load.dispatcher_ms = int(1000 * self.waits_s["dispatcher"])
        load.no_task_ms = int(1000 * self.waits_s["no_task"])
        load.elements, load.bytes = self.elements, self.bytes

    def values(self) -> dict[str, Any]:
        return {
            "elements": self.elements,
            "bytes": self.bytes,
            "seconds": time.monotonic() - self._began_s,
            "wait_seconds": {**self.waits_s},
            "reconnects": self.reconnects,
        }


def _zero() -> dict[str, Any]:
    amounts = {"elements": 0, "bytes": 0, "seconds": 0.0}
    return {**amounts, "wait_seconds": dict.fromkeys(CAUSES, 0.0), "reconnects": 0}


def _add(total: dict[str, Any], meter: Meter) -> None:
    for name, value in meter.values().items():
        if name == "wait_seconds":
            for cause, seconds in value.items():
                total[name][cause] += seconds
        else:
            total[name] += value


# Guards the two below. Reentrant: garbage collection may close a consumer.
_lock = threading.RLock()
_open: set[Meter] = set()
_closed = _zero()


def _forget() -> None:
    """A fork has none of these consumers, and another thread may have held the lock."""
    global _lock, _closed
    _lock, _closed = threading.RLock(), _zero()
    _open.clear()


os.register_at_fork(after_in_child=_forget)


def totals() -> dict[str, Any]:
    """Of all consumers of this process, and `open_consumers`: how many are open now."""
    with _lock:
        total = {**_closed, "wait_seconds": {**_closed["wait_seconds"]}}
        there = [*_open]
        for meter in there:
            _add(total, meter)
        return {"open_consumers": len(there), **total}

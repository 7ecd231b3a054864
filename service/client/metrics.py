"""`service.metrics()`: what this process's consumers received, and for what they waited."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..blocks import Block
from ..errors import InvalidArgument
from ..extras import needing
from ..http.families import Family, Measured
from ..platforms import at_fork
from ..proto import forebay_pb2 as pb

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

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


OPEN = Family("forebay_client_open_consumers", "gauge", "Consumers of this process that are open.")
ELEMENTS = Family("forebay_client_elements_total", "counter", "Elements that they received.")
BYTES = Family("forebay_client_bytes_total", "counter", "Bytes of these elements.")
SECONDS = Family("forebay_client_consumer_seconds_total", "counter", "Time that they were open.")
WAITS = Family(
    "forebay_client_wait_seconds_total", "counter",
    "Time of it in which they waited for elements, by cause.", ("cause",),
)  # fmt: skip
RECONNECTS = Family(
    "forebay_client_reconnects_total", "counter",
    "How often they connected to a worker again, after the connection had broken.",
)  # fmt: skip

_exporting = threading.Lock()
_registries: weakref.WeakSet[CollectorRegistry] = weakref.WeakSet()


def metrics(registry: CollectorRegistry | None = None) -> dict[str, Any]:
    """What the consumers of this process received since it began, and for what they waited.

    Args:
      registry: a registry of prometheus-client, such as its REGISTRY, in which these metrics are
        exported from now on (docs/operations.md has their names). Needs the extra `http`.

    Returns a dict:

      - `open_consumers`: how many are open now;
      - `elements`, `bytes`: what they received;
      - `seconds`: how long they were open, all together;
      - `wait_seconds`: how many of these they waited, by cause. `workers`: connected workers sent
        nothing, as their pipelines are slow or have no splits, which the workers' own metrics
        tell apart. `network`: no connection to any of its workers. `dispatcher`: that does not
        answer. `no_task`: no worker has a task of the epoch, or those that had one have ended;
      - `reconnects`: how often they connected to a worker again.

    A process that reads for this one, such as a DataLoader's worker, has metrics of its own.
    Raises InvalidArgument without prometheus-client.
    """
    if registry is not None:
        _export(registry)
    return totals()


def _export(registry: CollectorRegistry) -> None:
    with needing("a registry needs prometheus-client", "http", InvalidArgument):
        from ..http.exposition import collected

    class Exported:
        def collect(self) -> Iterable[Metric]:
            return collected(_measured())

    with _exporting:
        if registry not in _registries:
            registry.register(Exported())
            _registries.add(registry)


def _measured() -> Iterator[Measured]:
    now = totals()
    yield OPEN(now["open_consumers"])
    yield ELEMENTS(now["elements"])
    yield BYTES(now["bytes"])
    yield SECONDS(now["seconds"])
    for cause, seconds in now["wait_seconds"].items():
        yield WAITS(seconds, cause)
    yield RECONNECTS(now["reconnects"])

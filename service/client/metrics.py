"""`service.metrics()`: what this process's consumers received, and for what they waited."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgument
from ..extras import needing
from ..http.families import Family, Measured
from .meters import totals

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

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

"""Metrics of user code: adds up its counters, distributions and gauges.

A metric's key is its namespace, name and kind, whichever step of a dataset counts it. Every sum
keeps only the first MAX_METRICS in name order, so that the kept ones are complete everywhere.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from typing import Any

from .proto import metrics_pb2 as pb

MAX_METRICS = 100

MAX_NAME = 100
"""The most characters of a namespace or a name; longer ones are cut, and end with a digest."""

_LEAST, _MOST = -(2**63), 2**63 - 1


def counter(namespace: str, name: str, value: int) -> pb.Metric:
    return _metric(namespace, name, counter=_bounded(value))


def distribution(namespace: str, name: str, *count_sum_min_max: int) -> pb.Metric:
    values = zip(("count", "sum", "min", "max"), map(_bounded, count_sum_min_max), strict=True)
    return _metric(namespace, name, distribution=pb.Distribution(**dict(values)))


def gauge(namespace: str, name: str, value: int, time_s: float) -> pb.Metric:
    last = pb.Gauge(value=_bounded(value), time_ms=_bounded(int(1000 * time_s)))
    return _metric(namespace, name, gauge=last)


def _metric(namespace: str, name: str, **kind: Any) -> pb.Metric:
    return pb.Metric(namespace=cut_name(namespace), name=cut_name(name), **kind)


def cut_name(name: str) -> str:
    """The name in MAX_NAME characters."""
    name = name.encode(errors="backslashreplace").decode()
    if len(name) <= MAX_NAME:
        return name
    return name[: MAX_NAME - 9] + "…" + hashlib.sha256(name.encode()).hexdigest()[:8]


def _bounded(value: int) -> int:
    return max(_LEAST, min(value, _MOST))


class Totals:
    """Sums of metrics. Thread-safe."""

    def __init__(self, parts: Iterable[pb.Metrics] = ()) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[tuple[str, str, str], pb.Metric] = {}
        self._more = False
        self._splits = 0
        for part in parts:
            self.add(part)

    def add(self, part: pb.Metrics) -> None:
        with self._lock:
            self._more |= part.more
            self._splits += part.splits
            for metric in part.metrics:
                key = (metric.namespace, metric.name, metric.WhichOneof("kind") or "")
                if (total := self._metrics.get(key)) is None:
                    total = self._metrics[key] = pb.Metric()
                    total.CopyFrom(metric)
                else:
                    _add(total, metric)
            if len(self._metrics) > MAX_METRICS:
                self._more = True
                for key in sorted(self._metrics)[MAX_METRICS:]:
                    del self._metrics[key]

    def told(self) -> pb.Metrics:
        """The sums, in name order."""
        with self._lock:
            metrics = [self._metrics[key] for key in sorted(self._metrics)]
            return pb.Metrics(metrics=metrics, more=self._more, splits=self._splits)


def _add(total: pb.Metric, metric: pb.Metric) -> None:
    if metric.HasField("counter"):
        total.counter = _bounded(total.counter + metric.counter)
    elif metric.HasField("distribution"):
        ours, theirs = total.distribution, metric.distribution
        ours.count = _bounded(ours.count + theirs.count)
        ours.sum = _bounded(ours.sum + theirs.sum)
        ours.min, ours.max = min(ours.min, theirs.min), max(ours.max, theirs.max)
    elif metric.gauge.time_ms >= total.gauge.time_ms:
        total.gauge.CopyFrom(metric.gauge)


def shown(metrics: pb.Metrics) -> dict[str, Any]:
    """The metrics as JSON data."""
    return {
        "splits": metrics.splits,
        "more": metrics.more,
        "values": [
            {"namespace": each.namespace, "name": each.name, each.WhichOneof("kind"): _value(each)}
            for each in metrics.metrics
        ],
    }


def _value(metric: pb.Metric) -> Any:
    if metric.HasField("counter"):
        return metric.counter
    if metric.HasField("gauge"):
        return {"value": metric.gauge.value, "time_ms": metric.gauge.time_ms}
    found = metric.distribution
    return {"count": found.count, "sum": found.sum, "min": found.min, "max": found.max}

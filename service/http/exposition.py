"""Samples as text for Prometheus, by prometheus-client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

from prometheus_client import PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from .families import Buckets, Family, Measured

_PROCESS = ProcessCollector(registry=None), PlatformCollector(registry=None)


_KINDS: dict[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def encode(samples: Iterable[Measured], accept: str) -> tuple[bytes, str]:
    """The samples, and those of this process, in the format that the header `Accept` prefers; and
    that format's content type."""
    encoder, content_type = choose_encoder(accept)
    metrics = [*collected(samples), *chain(*(each.collect() for each in _PROCESS))]
    registry: Any = SimpleNamespace(collect=lambda: metrics)
    return encoder(registry), content_type


def collected(samples: Iterable[Measured]) -> Iterator[Metric]:
    """The samples as prometheus-client's own, each family once."""
    metrics: dict[Family, Any] = {}
    for family, value, labels in samples:
        if family not in metrics:
            kind = _KINDS[family.kind]
            metrics[family] = kind(family.name, family.help, labels=family.labels)
        of_value = value if isinstance(value, Buckets) else [value]  # buckets, and their sum
        metrics[family].add_metric(labels, *of_value)
    yield from metrics.values()

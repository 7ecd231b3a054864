"""Samples as text for Prometheus, by prometheus-client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from .families import Buckets, Family, Measured

_PROCESS = ProcessCollector(registry=None), PlatformCollector(registry=None)


def encode(samples: Iterable[Measured], accept: str) -> tuple[bytes, str]:
    """The samples, and those of this process, in the format that the header `Accept` prefers; and
    that format's content type."""
    encoder, content_type = choose_encoder(accept)
    return encoder(_Collected([*collected(samples)])), content_type


def collected(samples: Iterable[Measured]) -> Iterator[Metric]:
    """The samples as prometheus-client's own, each family once."""
    by_family: dict[Family, list[Measured]] = {}
    for sample in samples:
        by_family.setdefault(sample.family, []).append(sample)
    for family, its in by_family.items():
        yield _metric(family, its)


def _metric(family: Family, samples: list[Measured]) -> Metric:
    name, text, labels = family.name, family.help, family.labels
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(name, text, labels=labels)
        for sample in samples:
            assert isinstance(sample.value, Buckets)
            histogram.add_metric(sample.labels, sample.value.cumulative, sample.value.sum)
        return histogram
    plain = (CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily)(
        name, text, labels=labels
    )
    for sample in samples:
        assert not isinstance(sample.value, Buckets)
        plain.add_metric(sample.labels, sample.value)
    return plain


class _Collected(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics
        for collector in _PROCESS:
            yield from collector.collect()

"""What the HTTP port of a server says, and metrics by their names and labels."""

from __future__ import annotations

import contextlib
import http.client

from prometheus_client.parser import text_string_to_metric_families

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def get(address: str | int, path: str) -> tuple[int, str]:
    """The status and the body. Raises OSError and HTTPException."""
    host = address if isinstance(address, str) else f"127.0.0.1:{address}"
    with contextlib.closing(http.client.HTTPConnection(host, timeout=30)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def parsed(text: str) -> Series:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(address: str | int) -> Series:
    code, text = get(address, "/metrics")
    assert code == 200, text
    return parsed(text)


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, tuple(sorted(labels.items()))]

"""Metrics as plain data: what each is called, and what it is now.

A module declares a `Family` for each metric, and makes `Measured`s of it when somebody asks. So the
work is done at a scrape, and only exposition.py needs prometheus-client.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

from ..connections.admission import Denials
from ..user_metrics import cut_name

MOST_LABELLED = 100
"""How many jobs, or workers, have label values of their own."""

OTHER = "other"
"""The label value of all further ones together."""


class Buckets(NamedTuple):
    """The value of a histogram: how many were at most each bound, and their sum."""

    cumulative: list[tuple[str, float]]  # the last bound is "+Inf"
    sum: float


class Measured(NamedTuple):
    family: Family
    value: float | Buckets
    labels: tuple[str, ...]


class Family(NamedTuple):
    """One metric. Units are base units: seconds and bytes. A counter's name ends with _total."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()

    def __call__(self, value: float | Buckets, *labels: object) -> Measured:
        return Measured(self, value, tuple(label_value(str(label)) for label in labels))


DENIED = Family(
    "forebay_denied_calls_total", "counter",
    "Calls that were denied over gRPC: unauthenticated (no known token), or forbidden (by the "
    "access file).",
    ("method", "reason"),
)  # fmt: skip


def denied(denials: Denials | None) -> Iterator[Measured]:
    """What a server has denied; nothing without credentials."""
    for (method, reason), count in (denials.counts() if denials is not None else {}).items():
        yield DENIED(count, method, reason)


def label_value(text: str) -> str:
    """The text, cut to 100 characters and without control characters: users choose names."""
    return cut_name(printable(text))


def printable(text: str) -> str:
    """The text, with escapes for control characters."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


Made = Family | Callable[[float, str], Measured]
"""A Family with one label, or a function that adds others."""


class Tallies:
    """Counts of several kinds for each key, of which MOST_LABELLED are kept apart.

    The key that has been counted the longest ago joins OTHER, so that no sum ever shrinks.
    """

    def __init__(self, most: int = MOST_LABELLED) -> None:
        self._most = most
        self._of: OrderedDict[str, Counter[str]] = OrderedDict()
        self._other: Counter[str] = Counter()

    def add(self, key: str, amounts: Mapping[str, float]) -> None:
        if key == OTHER:
            self._other.update(amounts)
            return
        counts = self._of.setdefault(key, Counter())
        self._of.move_to_end(key)
        counts.update(amounts)
        if len(self._of) > self._most:
            self._other.update(self._of.popitem(last=False)[1])

    def of(self, key: str) -> Mapping[str, float]:
        """Of one key, if it is kept apart."""
        return self._of.get(key, {})

    def measured(self, families: Mapping[str, Made]) -> Iterator[Measured]:
        """Of the kinds in `families`, each made of its value and the key."""
        for key, counts in [*self._of.items(), *([(OTHER, self._other)] if self._other else [])]:
            for kind, family in families.items():
                yield family(counts[kind], key)

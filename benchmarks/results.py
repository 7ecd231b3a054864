"""A benchmark's findings: the figures of both sides in each round, and their requirements."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PEER, OURS = "peer", "forebay"  # in JSON


class Better(enum.Enum):
    """Which figures are the good ones."""

    MORE = "more"
    LESS = "less"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table. Each list has a figure a round; the peer may have none."""

    row: str
    what: str
    unit: str
    better: Better
    ours: list[float]
    peer: list[float] = field(default_factory=list)
    required_ratio: float | None = None  # at least
    required: float | None = None  # at least or at most, in `unit`

    def ratios(self) -> list[float]:
        """How many times better our side is, in each round. Empty without the peer's figures, and
        if a figure of 0 would make it infinite.
        """
        good, bad = (self.ours, self.peer) if self.better is Better.MORE else (self.peer, self.ours)
        if not self.peer or 0 in bad:
            return []
        return [one / other for one, other in zip(good, bad, strict=True)]

    def met(self) -> bool:
        """Whether the medians meet the requirements."""
        if self.required_ratio is not None:
            ratios = self.ratios()
            return bool(ratios) and statistics.median(ratios) >= self.required_ratio
        if self.required is None:
            return True
        ours = statistics.median(self.ours)
        return ours >= self.required if self.better is Better.MORE else ours <= self.required

    def requirement(self) -> str:
        """The requirement, in words; empty without one."""
        if self.required_ratio is not None:
            return f"≥ {self.required_ratio:g} ×"
        if self.required is None:
            return ""
        sign = "≥" if self.better is Better.MORE else "≤"
        return f"{sign} {self.required:,g} {self.unit}"

    def as_json(self) -> dict[str, Any]:
        """All of it, with the medians."""
        ratios = self.ratios()
        return {
            "row": self.row,
            "what": self.what,
            "unit": self.unit,
            "better": self.better.value,
            PEER: self.peer,
            OURS: self.ours,
            "ratios": ratios,
            "median": {
                PEER: statistics.median(self.peer) if self.peer else None,
                OURS: statistics.median(self.ours),
                "ratio": statistics.median(ratios) if ratios else None,
            },
            "required_ratio": self.required_ratio,
            "required": self.requirement(),
            "met": self.met(),
        }


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What readers saw of one side in one round, and what it cost them and the workers.

    Of several readers or workers, all together. Peaks are of whole processes while they read,
    with what they kept of what they did before, in units of 10⁶ bytes.
    """

    elements: float
    bytes: float
    seconds: float
    client_cpu_s: float
    worker_cpu_s: float
    client_peak_mb: float
    worker_peak_mb: float
    first_s: float  # from the begin of reading to the first element; not part of `seconds`
    ended: bool  # whether the dataset ended

    @property
    def elements_per_s(self) -> float:
        return self.elements / self.seconds

    @property
    def mb_per_s(self) -> float:
        return self.bytes / self.seconds / 1e6

    @property
    def client_cpu_s_per_gb(self) -> float:
        return self.client_cpu_s / self.bytes * 1e9

    @property
    def worker_cpu_s_per_gb(self) -> float:
        return self.worker_cpu_s / self.bytes * 1e9

    @property
    def cpu_us_per_element(self) -> float:
        """Of clients and workers."""
        return self.cpu_ms_per_element * 1e3

    @property
    def client_cpu_us_per_element(self) -> float:
        return self.client_cpu_s / self.elements * 1e6

    @property
    def cpu_ms_per_element(self) -> float:
        """Of clients and workers."""
        return (self.client_cpu_s + self.worker_cpu_s) / self.elements * 1e3


def together(readings: Sequence[Reading]) -> Reading:
    """Several readers at the same time, of the same workers, as one: their rates add up."""
    if len(readings) == 1:
        return readings[0]
    seconds = statistics.mean(reading.seconds for reading in readings)
    return Reading(
        elements=sum(reading.elements_per_s for reading in readings) * seconds,
        bytes=sum(reading.mb_per_s for reading in readings) * 1e6 * seconds,
        seconds=seconds,
        client_cpu_s=sum(reading.client_cpu_s for reading in readings),
        worker_cpu_s=statistics.mean(reading.worker_cpu_s for reading in readings),
        client_peak_mb=sum(reading.client_peak_mb for reading in readings),
        worker_peak_mb=max(reading.worker_peak_mb for reading in readings),
        first_s=max(reading.first_s for reading in readings),
        ended=all(reading.ended for reading in readings),
    )


COSTS = (
    "elements_per_s",
    "mb_per_s",
    "worker_cpu_s_per_gb",
    "client_cpu_s_per_gb",
    "worker_peak_mb",
    "client_peak_mb",
)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The cost of elements on one side: a line of the second table."""

    row: str
    what: str
    side: str
    readings: list[Reading]

    def figures(self) -> dict[str, list[float]]:
        """By name, with the unit at its end; round by round."""
        return {name: [getattr(reading, name) for reading in self.readings] for name in COSTS}

    def as_json(self) -> dict[str, Any]:
        """All of it, with the medians."""
        figures = self.figures()
        medians = {name: statistics.median(values) for name, values in figures.items()}
        return {
            "row": self.row,
            "what": self.what,
            "side": self.side,
            **figures,
            "median": medians,
        }


@dataclass(frozen=True, kw_only=True)
class Curve:
    """How a figure grows with the work; a plot of its own, both axes logarithmic."""

    row: str
    what: str
    x: str  # with its unit
    y: str
    lines: dict[str, list[tuple[float, float]]]  # (x, y) by side
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Feeding:
    """The cost of a way to read real files, beside the pipeline alone, in each round."""

    row: str
    what: str
    way: str
    readings: list[Reading]
    bare: list[Reading]  # the pipeline itself
    beside: str = ""  # what the processor time is required to be near
    others: list[Reading] = field(default_factory=list)  # of that
    at_most: float | None = None  # times as much
    at_least: dict[str, tuple[float, list[Reading]]] = field(default_factory=dict)
    # by who else reads it: so many times their rate

    def ratios(self) -> list[float]:
        """How many times the processor time of the pipeline itself."""
        return _cpu_ratios(self.readings, self.bare)

    def excess(self) -> float:
        """The median of the ratios to what it is required to be near."""
        return statistics.median(_cpu_ratios(self.readings, self.others))

    def requirements(self) -> Iterator[tuple[str, float, bool]]:
        """What is required, in words; what was found; and whether that is it."""
        if self.at_most is not None:
            excess = self.excess()
            yield f"≤ {self.at_most:g} × {self.beside}", excess, excess <= self.at_most
        for who, (least, others) in self.at_least.items():
            pairs = zip(self.readings, others, strict=True)
            rate = statistics.median(one.elements_per_s / two.elements_per_s for one, two in pairs)
            yield f"≥ {least:g} × the rate of {who}", rate, rate >= least

    def met(self) -> bool:
        return all(met for _, _, met in self.requirements())

    def figures(self) -> dict[str, list[float]]:
        """By name, with the unit at its end; round by round."""
        names = ("elements_per_s", "mb_per_s", "cpu_us_per_element", "client_cpu_us_per_element")
        figures = {name: [getattr(reading, name) for reading in self.readings] for name in names}
        return {**figures, "cpu_over_bare": self.ratios()}

    def as_json(self) -> dict[str, Any]:
        """All of it, with the medians."""
        figures = self.figures()
        return {
            "row": self.row,
            "what": self.what,
            "way": self.way,
            **figures,
            "median": {name: statistics.median(values) for name, values in figures.items()},
            "required": [
                {"what": what, "found": found, "met": met}
                for what, found, met in self.requirements()
            ],
            "met": self.met(),
        }


def _cpu_ratios(readings: list[Reading], others: list[Reading]) -> list[float]:
    pairs = zip(readings, others, strict=True)
    return [one.cpu_us_per_element / other.cpu_us_per_element for one, other in pairs]


Finding = Result | Costs | Curve | Feeding

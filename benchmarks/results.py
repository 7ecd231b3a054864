"""A benchmark's findings: the figures of both sides in each round, and their requirements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PEER, OURS = "peer", "forebay"  # in JSON


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table. Each list has a figure a round; the peer may have none."""

    row: str
    what: str
    unit: str
    ours: list[float]
    peer: list[float] = field(default_factory=list)
    less: bool = False  # whether small figures are the good ones
    required_ratio: float | None = None  # at least
    required: float | None = None  # at least or at most, in `unit`

    def ratios(self) -> list[float]:
        """How many times better our side is, in each round. Empty without the peer's figures, and
        if a figure of 0 would make it infinite.
        """
        good, bad = (self.peer, self.ours) if self.less else (self.ours, self.peer)
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
        return ours <= self.required if self.less else ours >= self.required

    def requirement(self) -> str:
        """The requirement, in words; empty without one."""
        if self.required_ratio is not None:
            return f"≥ {self.required_ratio:.3g} ×"
        if self.required is None:
            return ""
        return f"{'≤' if self.less else '≥'} {self.required:,g} {self.unit}"

    def as_json(self) -> dict[str, Any]:
        """All of it, with the medians."""
        ratios = self.ratios()
        return {
            "row": self.row,
            "what": self.what,
            "unit": self.unit,
            "better": "less" if self.less else "more",
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
    seconds: float
    client_cpu_s: float
    worker_cpu_s: float
    client_peak_mb: float
    worker_peak_mb: float
    first_s: float  # from the begin of reading to the first element; not part of `seconds`

    @property
    def elements_per_s(self) -> float:
        return self.elements / self.seconds

    @property
    def cpu_us(self) -> float:
        """Of an element, of clients and workers."""
        return (self.client_cpu_s + self.worker_cpu_s) / self.elements * 1e6

    @property
    def client_cpu_us(self) -> float:
        return self.client_cpu_s / self.elements * 1e6


FIGURES = {  # of a reading: unit, and whether less is better
    "elements_per_s": ("elements/s", False),
    "cpu_us": ("CPU µs an element", True),
    "client_cpu_us": ("of it client, µs", True),
    "worker_peak_mb": ("worker's peak, MB", True),
    "client_peak_mb": ("client's peak, MB", True),
}


def compared(
    row: str,
    what: str,
    figure: str,
    ours: Sequence[Reading],
    peer: Sequence[Reading],
    least: float | None = None,
) -> Result:
    """One of FIGURES, with the least ratio that is required."""
    unit, less = FIGURES[figure]
    return Result(
        row=row,
        what=what,
        unit=unit,
        less=less,
        ours=[getattr(reading, figure) for reading in ours],
        peer=[getattr(reading, figure) for reading in peer],
        required_ratio=least,
    )


def together(readings: Sequence[Reading]) -> Reading:
    """Several readers at the same time, of the same workers, as one: their rates add up."""
    if len(readings) == 1:
        return readings[0]
    seconds = statistics.mean(reading.seconds for reading in readings)
    return Reading(
        elements=sum(reading.elements_per_s for reading in readings) * seconds,
        seconds=seconds,
        client_cpu_s=sum(reading.client_cpu_s for reading in readings),
        worker_cpu_s=statistics.mean(reading.worker_cpu_s for reading in readings),
        client_peak_mb=sum(reading.client_peak_mb for reading in readings),
        worker_peak_mb=max(reading.worker_peak_mb for reading in readings),
        first_s=max(reading.first_s for reading in readings),
    )

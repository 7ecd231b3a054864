"""What a benchmark finds: figures of both sides, round by round, and what is required of them."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
    peer: list[float]
    required_ratio: float | None = None  # at least
    required: float | None = None  # at least or at most, in `unit`

    def ratios(self) -> list[float]:
        """By what factor ours is the better one, round by round."""
        pairs = zip(self.peer, self.ours, strict=True) if self.peer else ()
        if self.better is Better.MORE:
            return [ours / peer for peer, ours in pairs]
        return [peer / ours for peer, ours in pairs]

    def met(self) -> bool:
        """Whether the medians are what is required."""
        if self.required_ratio is not None:
            return statistics.median(self.ratios()) >= self.required_ratio
        if self.required is None:
            return True
        ours = statistics.median(self.ours)
        return ours >= self.required if self.better is Better.MORE else ours <= self.required

    def requirement(self) -> str:
        """What is required, in words; empty if nothing is."""
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
            "tf.data service": self.peer,
            "forebay": self.ours,
            "ratios": ratios,
            "median": {
                "tf.data service": statistics.median(self.peer) if self.peer else None,
                "forebay": statistics.median(self.ours),
                "ratio": statistics.median(ratios) if ratios else None,
            },
            "required": self.requirement(),
            "met": self.met(),
        }


def alternate(rounds: int, **sides: Callable[[], float]) -> dict[str, list[float]]:
    """Measure each side once a round; every other round begins at the other end."""
    figures: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else reversed(sides):
            figures[name].append(sides[name]())
    return figures

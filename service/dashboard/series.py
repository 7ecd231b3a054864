"""Series: samples over the whole run in bounded memory, and their plots as SVG. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_POINTS = 360
"""Points of a series. When there are more, neighbours become one, and stand for twice the time."""

WIDTH, HEIGHT = 360, 100  # of a plot

Values = tuple[float | None, ...]


class Series:
    """Points in time, each with a value of each field, or None."""

    def __init__(self, fields: Sequence[str], most: int = MOST_POINTS) -> None:
        self.fields = tuple(fields)
        self.points: list[tuple[float, Values]] = []
        self._most = most
        self._every = 1  # samples a point
        self._waiting: list[tuple[float, Values]] = []

    def add(self, time_s: float, values: Values) -> None:
        """A sample; one comes after the other in time."""
        self._waiting.append((time_s, values))
        if len(self._waiting) < self._every:
            return
        self.points.append(_mean(self._waiting))
        self._waiting = []
        if len(self.points) >= self._most:
            self.points = [_mean(self.points[n : n + 2]) for n in range(0, len(self.points), 2)]
            self._every *= 2

    def of(self, field: str) -> list[tuple[float, float | None]]:
        place = self.fields.index(field)
        return [(time_s, values[place]) for time_s, values in self.points]

    def x(self, time_s: float) -> int | None:
        """Where a time is in a plot; None before the first point. What has just been is at its
        right edge."""
        first, last = (self.points[0][0], self.points[-1][0]) if self.points else (time_s, time_s)
        if time_s < first - 1:
            return None
        return round(WIDTH * min(max(0.0, (time_s - first) / ((last - first) or 1)), 1))

    def last(self, field: str) -> float | None:
        """The newest value."""
        newest = (self._waiting or self.points)[-1:]
        return newest[0][1][self.fields.index(field)] if newest else None


def _mean(points: Sequence[tuple[float, Values]]) -> tuple[float, Values]:
    values = []
    for column in zip(*(values for _, values in points), strict=True):
        known = [value for value in column if value is not None]
        values.append(sum(known) / len(known) if known else None)
    return points[0][0], tuple(values)


def round_up(value: float) -> float:
    """The next of 1, 2, 4, 6, 8, 10, 20 …, so that a scale has short numbers, also halved."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * step for step in (1, 2, 4, 6, 8, 10) if unit * step >= value * (1 - 1e-9))


def line(points: Sequence[tuple[float, float | None]], most: float) -> str:
    """The outline of a line for SVG's `path`, in WIDTH × HEIGHT; it has gaps where nothing is
    known. `most` is at the upper edge."""
    if not points:
        return ""
    first, last = points[0][0], points[-1][0]
    found, gap = [], True
    for time_s, value in points:
        if value is None:
            gap = True
            continue
        x = WIDTH * (time_s - first) / ((last - first) or 1)
        y = HEIGHT * (1 - min(value / (most or 1), 1))
        found.append(f"{'M' if gap else 'L'}{x:.0f} {y:.0f}")
        gap = False
    if len(found) == 1:
        found.append("h1")
    return "".join(found)

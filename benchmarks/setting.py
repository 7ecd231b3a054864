"""A run's setting: how much to measure, where, and in which order of the sides."""

from __future__ import annotations

import functools
import pathlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .machine import calibrate

Figure = TypeVar("Figure")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """`quick` is for trying out whether a benchmark runs: its figures mean nothing."""

    rounds: int
    quick: bool
    path: pathlib.Path  # where journals go; on a disk
    seconds: float  # of each measurement that has no size of its own
    warm_up_s: float  # before that
    calibrations_ms: list[float] = field(default_factory=list)  # one a round, of all rows
    shared: dict[str, Any] = field(default_factory=dict)  # clusters by side

    @functools.cached_property
    def files(self) -> pathlib.Path:
        """The directory of the files that datasets read from."""
        return self.directory("files")

    def directory(self, name: str) -> pathlib.Path:
        """A new directory for the journals and files of one row."""
        return pathlib.Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.path))

    def release(self) -> None:
        """End the processes that rows share."""
        for one in self.shared.values():
            one.close()
        self.shared.clear()

    def alternate(self, **sides: Callable[[], Figure]) -> dict[str, list[Figure]]:
        """Measure each side once a round; every other round begins at the other end."""
        figures: dict[str, list[Figure]] = {name: [] for name in sides}
        for number in range(self.rounds):
            self.calibrations_ms.append(calibrate())
            for name in list(sides) if number % 2 == 0 else reversed(sides):
                figures[name].append(sides[name]())
        return figures

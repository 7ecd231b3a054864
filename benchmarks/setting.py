"""How much to measure, and where."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Setting:
    """`quick` is for trying out whether a benchmark runs: its figures mean nothing."""

    rounds: int
    quick: bool
    path: pathlib.Path  # where journals go; on a disk
    seconds: float  # of each measurement that has no size of its own

    def directory(self, name: str) -> pathlib.Path:
        """A new directory for the journals of one row."""
        directory = self.path / name
        directory.mkdir()
        return directory

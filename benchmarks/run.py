"""The rows there are, a run of some of them, and its record in JSON."""

from __future__ import annotations

import datetime
import functools
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..service.errors import ForebayError, InvalidArgument
from . import ordered
from .contents import FILE_CASES
from .elements import KINDS, element_row, first_element
from .machine import describe, filesystem, require
from .python import python
from .real_files import file_row
from .restart import get_split, restart
from .results import Result
from .setting import Setting

Row = Callable[[Setting], Sequence[Result]]
SHARING: dict[str, Row] = {  # clusters, with one another
    **{row: functools.partial(element_row, row) for row in KINDS},
    "first_element": first_element,
    **{row: functools.partial(file_row, row) for row in FILE_CASES},
}
ORDERED: dict[str, Row] = {
    **{
        case.replace("file", "ordered"): functools.partial(ordered.throughput, case)
        for case in ordered.CASES
    },
    "dead_worker": ordered.dead_worker,
}
ROWS: dict[str, Row] = {
    **SHARING,
    **ORDERED,
    "restart": restart,
    "get_split": get_split,
    "python": python,
}
GROUPS = {"files": tuple(FILE_CASES), "ordered": tuple(ORDERED)}  # rows by one name
ROUNDS = 5
SECONDS = 2.0
QUICK_SECONDS = 0.5
WARM_UP_S = 0.5


@dataclass(kw_only=True)
class BenchmarkReport:
    """All that a run found, as far as it has come."""

    started: str
    quick: bool
    rounds: int
    machine: dict[str, Any]
    calibrations_ms: list[float]
    results: list[Result] = field(default_factory=list)
    took_s: dict[str, float] = field(default_factory=dict)  # by row
    failed: dict[str, str] = field(default_factory=dict)  # why, by row
    interrupted: bool = False  # by Ctrl-C

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "results": [result.as_json() for result in self.results]}


def run(
    rows: Sequence[str],
    *,
    rounds: int | None,
    quick: bool,
    directory: str,
    progress: Callable[[str, int, int], None],
) -> BenchmarkReport:
    """Measure these rows, or all if there are none; `progress` is told which one is measured, how
    many are done, and of how many.

    A row that fails, because something is missing or has ended that should not have, is said to
    have failed; so is one that is interrupted by Ctrl-C, which ends the run. Raises
    InvalidArgument for rows and directories that cannot be measured, ForebayError without
    TensorFlow.
    """
    rows = [row for name in rows for row in GROUPS.get(name, (name,))]
    if unknown := set(rows) - ROWS.keys():
        raise InvalidArgument(
            f"no such row: {', '.join(sorted(unknown))}; there are {', '.join((*ROWS, *GROUPS))}"
        )
    if not os.path.isdir(directory):
        raise InvalidArgument(f"--directory {directory} is no directory; make it first")
    if filesystem(directory) == "tmpfs" and not quick:
        raise InvalidArgument(
            f"{directory} is in memory, where fsync costs nothing; give a --directory on a disk"
        )
    require("tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # for TensorFlow, wherever it is used
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=directory) as name:
        setting = Setting(
            rounds=rounds or (1 if quick else ROUNDS),
            quick=quick,
            path=pathlib.Path(name),
            seconds=QUICK_SECONDS if quick else SECONDS,
            warm_up_s=QUICK_SECONDS if quick else WARM_UP_S,
        )
        report = BenchmarkReport(
            started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            quick=quick,
            rounds=setting.rounds,
            machine=describe(setting.path),
            calibrations_ms=setting.calibrations_ms,
        )
        rows = rows or [*ROWS]
        row = rows[0]
        try:
            for number, row in enumerate(rows):
                progress(row, number, len(rows))
                begun = time.perf_counter()
                try:
                    if row not in SHARING:
                        setting.release()
                    report.results += ROWS[row](setting)
                except (ForebayError, OSError) as error:
                    report.failed[row] = str(error)  # the others' figures are worth having
                    setting.release()
                report.took_s[row] = round(time.perf_counter() - begun, 1)
        except KeyboardInterrupt:
            report.failed[row] = "interrupted, and with it the rest of the run"
            report.interrupted = True
        finally:
            setting.release()
    return report


def write(report: BenchmarkReport, file: pathlib.Path) -> None:
    """Write its JSON. Raises ForebayError if that cannot be."""
    text = json.dumps(report.as_json(), indent=1, ensure_ascii=False) + "\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    except OSError as error:
        raise ForebayError(f"the figures could not be written to {file}: {error}") from None

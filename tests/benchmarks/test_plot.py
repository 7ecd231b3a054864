"""Pictures of a run, and what is said if there can be none."""

from __future__ import annotations

import importlib.util
import json
import pathlib
from typing import Any

import pytest

from forebay.benchmarks import plot
from forebay.benchmarks.results import Better, Curve, Result
from forebay.benchmarks.run import BenchmarkReport
from forebay.service.errors import ForebayError, InvalidArgument

RESULT = Result(
    row="scalars", what="scalars", unit="elements/s", better=Better.MORE,
    ours=[500.0, 400.0], peer=[4.0, 5.0], required_ratio=50,
)  # fmt: skip
CURVE = Curve(
    row="curve", what="seconds for all", x="elements", y="seconds",
    lines={"tf.data service": [], "Forebay": [(10.0, 0.1), (100.0, 0.2)]},
)  # fmt: skip
OLD: dict[str, Any] = {  # as they were before there were curves
    "started": "2026-11-21T10:00:00+00:00",
    "machine": {"cores": 2},
    "results": [
        {"what": "scalars", "ratios": [100.0, 80.0], "required": "≥ 50 ×"},
        {"what": "memory", "ratios": [], "required": ""},
    ],
}


def report(*findings: Any) -> BenchmarkReport:
    return BenchmarkReport(
        started="2026-11-21T10:00:00+00:00", quick=False, rounds=2, machine={"cores": 2},
        calibrations_ms=[30.0], findings=list(findings),
    )  # fmt: skip


def names(paths: list[pathlib.Path]) -> list[str]:
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
    return [path.name for path in paths]


def test_a_report_is_plotted_beside_its_figures(tmp_path: pathlib.Path) -> None:
    record = json.loads(json.dumps(report(RESULT, CURVE).as_json()))
    written = plot.write_plots(record, tmp_path / "today.json")
    assert names(written) == ["today-ratios.png", "today-curves.png"]


def test_an_old_record_is_plotted_as_far_as_it_goes(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "old.json"
    file.write_text(json.dumps(OLD))
    assert names(plot.write_plots(plot.load(file), file)) == ["old-ratios.png"]


def test_nothing_to_plot_is_no_plot(tmp_path: pathlib.Path) -> None:
    record = report(Curve(**{**vars(CURVE), "lines": {"Forebay": []}})).as_json()
    assert plot.write_plots(record, tmp_path / "none.json") == []


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "cannot be read as JSON"), ("[]", 'no list "results"'), ("{}", 'no list "results"')],
)
def test_what_is_no_record_is_refused(tmp_path: pathlib.Path, text: str, why: str) -> None:
    file = tmp_path / "figures.json"
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=why):
        plot.load(file)


def test_a_missing_file_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InvalidArgument, match=r"gone\.json cannot be read"):
        plot.load(tmp_path / "gone.json")


def test_a_directory_that_is_not_there_is_said(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ForebayError, match="could not be written"):
        plot.write_plots(report(RESULT).as_json(), tmp_path / "nowhere" / "today.json")


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ForebayError, match=r"needs matplotlib.*pip install '\.\[bench\]' in a clone"
    ):
        plot.write_plots(report(RESULT).as_json(), tmp_path / "today.json")

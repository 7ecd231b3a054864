"""`forebay bench` runs, and writes what it found. What that is, is for people to look at."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from forebay.benchmarks import run
from forebay.benchmarks.results import Better, Finding, Result
from forebay.benchmarks.setting import Setting
from forebay.service.cli.bench import bench
from forebay.service.errors import ForebayError

from .. import forks
from ..terminals import written_to


def forebay(*arguments: object, timeout_s: int = 60) -> subprocess.CompletedProcess[str]:
    return forks.run(["-m", "forebay.service.cli", "bench", *map(str, arguments)], timeout_s)


@pytest.mark.timeout(200)  # TensorFlow is imported nine times, on whatever else is going on
def test_rows_run(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "figures.json"
    done = forebay(
        *("scalars", "file_tokens", "fleet", "--quick", "--json", file, "--directory", tmp_path),
        timeout_s=195,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    assert [result["row"] for result in record["results"]] == ["scalars", "scalars"]
    for result in record["results"]:
        assert len(result["forebay"]) == len(result["peer"]) == len(result["ratios"]) == 1
    sides = [costs["side"] for costs in record["costs"]]
    assert sides == ["tf.data service", "tf.data service, compression=None", "Forebay"]
    for costs in record["costs"]:
        assert costs["median"]["worker_peak_mb"] > 0
    ways = {feeding["way"]: feeding for feeding in record["feeding"]}
    assert {"bare pipeline, by reduce", "tf.data in process, eager", "Forebay, read"} < ways.keys()
    assert ways["bare pipeline, by reduce"]["cpu_over_bare"] == [1.0]
    for feeding in ways.values():
        assert feeding["median"]["elements_per_s"] > 0
        assert feeding["row"] == "file_tokens"
    required = ways["Forebay, read"]["required"]
    assert required[0]["what"] == "≤ 1.15 × bare"
    required = ways["Forebay, from_dataset_id"]["required"]
    assert "≥ 1.2 × the rate of tf.data service" in [each["what"] for each in required]
    assert [len(curve["lines"]["Forebay"]) for curve in record["curves"]] == [2, 2]
    assert len(record["calibrations_ms"]) == 2
    for plot in ("figures-ratios.png", "figures-curves.png"):
        assert (tmp_path / plot).read_bytes().startswith(b"\x89PNG")
    assert "scalars, batched in-graph" in done.stdout
    assert "how quiet the machine was" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("hopes",), "no such row: hopes; there are scalars, records"),
        (("scalars", "--directory", "/nowhere"), "--directory /nowhere is no directory"),
        (("--rounds", 0), "--rounds"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple[object, ...], said: str) -> None:
    done = forebay(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def measured(_: Setting) -> list[Finding]:
    return [Result(row="row", what="w", unit="u", better=Better.MORE, ours=[2.0], peer=[1.0])]


def broken(_: Setting) -> list[Finding]:
    raise ForebayError("a worker ended\nas its log says")


def run_here(file: pathlib.Path, *rows: str) -> None:
    bench(
        rows=list(rows), rounds=1, quick=True, json_file=str(file), directory=str(file.parent),
        plot="",
    )  # fmt: skip


def test_without_matplotlib_the_figures_are_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name)
    )
    monkeypatch.setitem(run.ROWS, "row", measured)
    file = tmp_path / "figures.json"
    run_here(file, "row")
    assert json.loads(file.read_text())["results"][0]["ratios"] == [2.0]
    assert "no plot: this needs matplotlib, not installed here" in capsys.readouterr().out
    assert list(tmp_path.glob("*.png")) == []


def test_a_row_that_fails_does_not_cost_the_others(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(run.ROWS, "row", measured)
    monkeypatch.setitem(run.ROWS, "broken", broken)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "figures.json"
    master, slave = os.openpty()
    with open(slave, "w") as terminal, monkeypatch.context() as on_terminal:
        on_terminal.setattr(sys, "stderr", terminal)
        with pytest.raises(ForebayError, match="not all was measured: broken failed, see above"):
            run_here(file, "broken", "row")
    shown = written_to(master).decode()
    assert "measuring row" in shown and "1/2" in shown and " to go" in shown
    record = json.loads(file.read_text())
    assert [result["row"] for result in record["results"]] == ["row"]
    assert record["failed"] == {"broken": "a worker ended\nas its log says"}
    assert "as its log says" in capsys.readouterr().out


def test_an_interrupted_run_keeps_what_it_has(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: Setting) -> list[Finding]:
        try:
            raise KeyboardInterrupt
        finally:
            raise ForebayError("a worker ended, as Ctrl-C reached it, too")

    monkeypatch.setitem(run.ROWS, "row", measured)
    monkeypatch.setitem(run.ROWS, "long", interrupted)
    monkeypatch.setitem(run.ROWS, "broken", broken)
    file = tmp_path / "figures.json"
    with pytest.raises(KeyboardInterrupt):  # for which `forebay` exits with 130
        run_here(file, "row", "long", "broken")
    record = json.loads(file.read_text())
    assert [result["row"] for result in record["results"]] == ["row"]
    assert record["failed"].keys() == {"long"}
    assert capsys.readouterr().err == "", "it is no terminal"

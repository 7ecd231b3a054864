"""`forebay bench` runs, and writes what it found. What that is, is for people to look at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.benchmarks import run
from forebay.benchmarks.real_files import PAIRS, WAYS
from forebay.benchmarks.results import Result
from forebay.benchmarks.setting import Setting
from forebay.service.cli.bench import bench
from forebay.service.errors import ForebayError

from .. import forks
from ..terminals import written_to


def forebay(*arguments: object, timeout_s: int = 60) -> subprocess.CompletedProcess[str]:
    return forks.run(["-m", "forebay.service.cli", "bench", *map(str, arguments)], timeout_s)


@pytest.mark.timeout(200)  # TensorFlow is imported eight times, on whatever else is going on
def test_rows_run(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = forebay(
        *("scalars", "file_tokens", "--quick", "--json", file, "--directory", tmp_path),
        timeout_s=195,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    results = record["results"]
    assert [result["row"] for result in results[:5]] == [*["scalars"] * 4, "file_tokens"]
    for result in results:
        assert len(result["forebay"]) == len(result["peer"]) == len(result["ratios"]) == 1
    whats = " ".join(result["what"] for result in results if result["row"] == "file_tokens")
    for way, (_, peer, _, _) in zip(("read", "from_dataset_id"), (PAIRS[0], PAIRS[2]), strict=True):
        assert f"{way}; peer: {WAYS[peer]}" in whats
    assert len(record["calibrations_ms"]) == 2
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


def measured(_: Setting) -> list[Result]:
    return [Result(row="row", what="w", unit="u", ours=[2.0], peer=[1.0])]


def broken(_: Setting) -> list[Result]:
    raise ForebayError("a worker ended\nas its log says")


def run_here(file: Path, *rows: str) -> None:
    bench(list(rows), 1, True, str(file), str(file.parent))


def test_a_row_that_fails_does_not_cost_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    assert "measuring row" in shown and "1/2" in shown and "-:--:--" in shown
    record = json.loads(file.read_text())
    assert [result["row"] for result in record["results"]] == ["row"]
    assert record["failed"] == {"broken": "a worker ended\nas its log says"}
    assert "as its log says" in capsys.readouterr().out


def test_an_interrupted_run_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: Setting) -> list[Result]:
        raise KeyboardInterrupt

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

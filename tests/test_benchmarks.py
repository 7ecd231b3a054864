"""The benchmarks run, and write what they found. What that is, is for people to look at."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_a_row_runs(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "leases", "--quick"]
    command += ["--json", str(file), "--directory", str(tmp_path)]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert run.returncode == 0, run.stderr
    (result,) = json.loads(file.read_text())["results"]
    assert len(result["forebay"]) == len(result["tf.data service"]) == len(result["ratios"]) == 1
    assert "leases" in run.stdout


def test_an_unknown_row_is_refused() -> None:
    command = [sys.executable, "-m", "benchmarks", "hopes"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert "no such row: hopes; there are restart, leases" in run.stderr

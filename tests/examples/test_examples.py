"""Each of the examples runs, and ends in what it has learned."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from .. import forks

EXAMPLES = sorted((pathlib.Path(__file__).resolve().parents[2] / "examples").glob("*.py"))
WITHOUT_TENSORFLOW = [path for path in EXAMPLES if path.stem in {"digits_jax", "digits_pytorch"}]
WITH_TENSORFLOW = [path for path in EXAMPLES if path not in WITHOUT_TENSORFLOW]


@pytest.mark.parametrize("example", WITH_TENSORFLOW, ids=lambda path: path.stem)
def test_an_example_learns(example: pathlib.Path) -> None:
    ended = forks.run([str(example)])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("learned: "), ended.stdout


@pytest.mark.parametrize("example", WITHOUT_TENSORFLOW, ids=lambda path: path.stem)
def test_an_example_learns_without_tensorflow(
    frameworks: pathlib.Path, example: pathlib.Path
) -> None:
    said = subprocess.check_output([frameworks, example], text=True, timeout=100)
    assert said.splitlines()[-1].startswith("learned: "), said

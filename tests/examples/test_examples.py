"""Each of the examples runs, and ends in what it has learned."""

from __future__ import annotations

import pathlib

import pytest

from .. import forks

EXAMPLES = sorted((pathlib.Path(__file__).resolve().parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_learns(example: pathlib.Path) -> None:
    ended = forks.run([str(example)])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("learned: "), ended.stdout

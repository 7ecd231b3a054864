"""Each of the examples runs, and ends in what it has learned."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .. import forks
from ..frameworks.conftest import frameworks

__all__ = ["frameworks"]

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))

TIMEOUT_S = 250
pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)

WITHOUT_TENSORFLOW = {
    *("digits_pytorch", "digits_jax", "digits_lightning", "digits_transformers", "digits_orbax"),
    "digits_torchrun",
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_learns(example: Path, request: pytest.FixtureRequest) -> None:
    if example.stem in WITHOUT_TENSORFLOW:
        python = request.getfixturevalue("frameworks")
        ended = subprocess.run([python, example], capture_output=True, text=True, timeout=TIMEOUT_S)
    else:
        ended = forks.run([str(example)], timeout_s=TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("learned: "), ended.stdout

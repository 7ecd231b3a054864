"""An environment that has PyTorch, JAX and Keras, and no TensorFlow."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from ..trainers.conftest import target

__all__ = ["frameworks", "target"]

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def frameworks() -> pathlib.Path:
    """The Python of .frameworks, which is made if need be."""
    subprocess.run(
        [ROOT / "scripts" / "frameworks"], check=True, env={**os.environ, "PYTHON": sys.executable}
    )
    return ROOT / ".frameworks" / "bin" / "python"

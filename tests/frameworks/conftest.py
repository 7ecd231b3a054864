"""An environment that has PyTorch, JAX, Keras and Grain, and no TensorFlow."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..trainers.conftest import target

__all__ = ["frameworks", "target"]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def frameworks() -> Path:
    """The Python of .frameworks, which `make test-nightly` makes before: it takes minutes."""
    made = ROOT / ".frameworks"
    if not (made / "made-of").exists():
        pytest.fail(f"{made} is not there: run scripts/frameworks, as `make test-nightly` does")
    return made / "bin" / "python"

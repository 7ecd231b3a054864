"""What a worker's process imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys

from forebay.service.worker.task_pipeline import Pipelines

Pipelines(warm=True).load(())
assert "tensorflow" in sys.modules and "keras" not in sys.modules

import tensorflow as tf

assert tf.keras.layers.Dense(1).units == 1
"""


@pytest.mark.long
def test_a_worker_imports_no_keras() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr

"""Keras's `fit`, `evaluate` and `predict` on its JAX and PyTorch backends, fed by the service."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from forebay import service

PROGRAM = Path(__file__).with_name("keras_program.py")

SOURCE = np.random.default_rng(0)
INPUTS = SOURCE.normal(size=(96, 2)).astype(np.float32)
TARGETS = INPUTS @ np.array([[2], [-1]], np.float32)


@pytest.fixture(scope="module")
def datasets(target: str) -> list[str]:
    wrong = np.arange(96) % 3 == 0
    named = {"first": INPUTS[:, :1], "second": INPUTS[:, 1:]}
    weighted = named, np.where(wrong[:, None], 100, TARGETS), np.where(wrong, 0, 1.5)
    pixels = np.ones([40, 4], np.float32), np.arange(40) % 2

    def examples(split: int) -> Iterator[Any]:
        yield from zip(INPUTS[split::4], TARGETS[split::4], strict=True)

    slices = tf.data.Dataset.from_tensor_slices
    return [
        service.register_dataset(target, slices((INPUTS, TARGETS))),
        service.register_dataset(target, examples, splits=range(4)),
        service.register_dataset(target, slices(weighted)),
        service.register_dataset(target, slices(pixels)),
    ]


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_keras(frameworks: Path, target: str, datasets: list[str], backend: str) -> None:
    said = subprocess.check_output(
        [frameworks, PROGRAM, target, *datasets],
        text=True,
        timeout=100,
        env={**os.environ, "KERAS_BACKEND": backend},
    )
    assert said.splitlines()[-1] == f"done on {backend}"

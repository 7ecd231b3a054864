"""A trainer's process that reads through either service, and prints its elements a second.

python -m benchmarks.reader (forebay|tensorflow) CASE DISPATCHER COMPRESSION SECONDS

The two sides differ in one import. The time begins when data has come for a while, and ends
with an element (or, where elements are batched, a batch).
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

SERVICES = {
    "forebay": "forebay.service",
    "tensorflow": "tensorflow.data.experimental.service",
}
COMPRESSIONS = {"AUTO": "AUTO", "none": None}
WARM_UP_S = 1.0
BATCH = 1_000


@dataclass(frozen=True)
class Case:
    """An endless dataset, and how its elements reach the trainer's Python."""

    dataset: Callable[[], Any]
    batch: int  # elements that are batched in-graph after the read; 0: none are


def scalars() -> Any:
    return tf.data.Dataset.range(10**12)


def batches() -> Any:
    """4.8 MB of random pixels, again and again, so that making them costs nothing."""
    pixels = np.random.default_rng(0).integers(0, 256, (32, 224, 224, 3), np.uint8)
    return tf.data.Dataset.from_tensors(pixels).repeat()


CASES = {"scalars": Case(scalars, BATCH), "batches": Case(batches, 0)}


def main(side: str, case_name: str, dispatcher: str, compression: str, seconds: str) -> None:
    service = importlib.import_module(SERVICES[side])
    case = CASES[case_name]
    target = f"grpc://{dispatcher}"
    dataset_id = service.register_dataset(
        target, case.dataset(), compression=COMPRESSIONS[compression]
    )
    dataset = service.from_dataset_id("parallel_epochs", target, dataset_id)
    if case.batch:
        dataset = dataset.batch(case.batch)
    print(elements_per_second(iter(dataset), float(seconds)) * (case.batch or 1))


def elements_per_second(iterator: Any, seconds: float) -> float:
    begun = time.perf_counter()
    while time.perf_counter() < begun + WARM_UP_S:
        next(iterator)
    begun = now = time.perf_counter()
    count = 0
    while now < begun + seconds:
        next(iterator)
        count += 1
        now = time.perf_counter()
    return count / (now - begun)


if __name__ == "__main__":
    main(*sys.argv[1:])

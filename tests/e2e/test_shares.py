"""Trainers that share a job and take their steps together: each gets an even share."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

from forebay import service

from ..stock import DispatcherProcess

BATCH = 8
STEP_S = 1e-3
SIZES = {8: 1_003, 1024: 5_000}
"""How many elements there are of so many bytes."""

Batches = Callable[[], Iterator[int]]
"""Begins to read; yields how many elements each batch has."""


pytestmark = pytest.mark.usefixtures("workers")


def by_read(dispatcher: DispatcherProcess, dataset_id: str, **how: Any) -> Batches:
    def begin() -> Iterator[int]:
        elements = service.read(dispatcher.target, dataset_id, **how)
        while count := sum(1 for _ in itertools.islice(elements, BATCH)):
            yield count

    return begin


def by_tensorflow(dispatcher: DispatcherProcess, dataset_id: str, **how: Any) -> Batches:
    def begin() -> Iterator[int]:
        dataset = service.from_dataset_id(service=dispatcher.target, dataset_id=dataset_id, **how)
        return (int(tf.shape(batch)[0]) for batch in dataset.batch(BATCH))

    return begin


@pytest.mark.parametrize("trainers", [2, 4])
@pytest.mark.parametrize("mode", ["OFF", "DYNAMIC"])
@pytest.mark.parametrize("element_bytes", SIZES)
@pytest.mark.parametrize("face", [by_read, by_tensorflow])
def test_trainers_in_lockstep(
    dispatcher: DispatcherProcess,
    request: pytest.FixtureRequest,
    face: Callable[..., Batches],
    element_bytes: int,
    mode: str,
    trainers: int,
) -> None:
    elements = SIZES[element_bytes]
    dataset = tf.data.Dataset.range(elements)
    if element_bytes > 8:
        dataset = dataset.map(lambda i: tf.fill([element_bytes], tf.cast(i, tf.uint8)))
    dataset_id = service.register_dataset(dispatcher.target, dataset)
    policy = service.ShardingPolicy[mode]
    even = elements * (2 if mode == "OFF" else 1) / trainers

    def uneven(attempt: int) -> str:
        """What was not shared evenly; else nothing."""
        name = f"{request.node.name} {attempt}"
        begin = face(dispatcher, dataset_id, processing_mode=policy, job_name=name)
        taking = [begin() for _ in range(trainers)]
        steps = []
        for counts in itertools.zip_longest(*taking, fillvalue=0):
            steps.append(counts)
            time.sleep(STEP_S)
        totals = [sum(counts) for counts in zip(*steps, strict=True)]
        assert sum(totals) == even * trainers
        starved = sum(0 in step for step in steps)
        if min(totals) < 0.7 * even or max(totals) > 1.3 * even:
            return f"shares of {totals}"
        return f"{starved} of {len(steps)} steps" if starved > max(4, 0.02 * len(steps)) else ""

    # A busy machine may itself hold one trainer up: not in each of three epochs.
    found = list(itertools.takewhile(bool, map(uneven, range(3))))
    assert len(found) < 3, found

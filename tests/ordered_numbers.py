"""The numbers that trainings read in order in tests, and what an undisturbed training gets."""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf

from forebay import service

NUMBER, BATCH = 50, 4
STEPS = 13  # of an epoch of one consumer, the last of 2 elements
ORDER: dict[str, Any] = {"seed": 7, "cycle_length": 3, "bundle_splits": 5}


def register_numbers(target: str) -> str:
    """The id of a dataset of 0 … NUMBER - 1."""
    return service.register_dataset(target, tf.data.Dataset.range(NUMBER))


def epoch_of(target: str, dataset_id: str, number: int) -> list[int]:
    """The elements that one consumer gets in this epoch."""
    start = number * NUMBER
    elements = service.read(target, dataset_id, ordered=True, start_position=start, **ORDER)
    found = [int(x) for x in elements]
    assert sorted(found) == [*range(NUMBER)]
    return found


def batches_of(elements: list[int]) -> list[list[int]]:
    """These elements in batches; the last one may be smaller."""
    return [elements[i : i + BATCH] for i in range(0, len(elements), BATCH)]


def steps_of(target: str, dataset_id: str, epochs: int = 2) -> list[list[int]]:
    """The global batches of an undisturbed training."""
    read = [epoch_of(target, dataset_id, number) for number in range(epochs)]
    return [batch for elements in read for batch in batches_of(elements)]


def in_steps(consumers: list[list[list[int]]]) -> list[list[int]]:
    """What all consumers were given in each step."""
    steps = itertools.zip_longest(*consumers, fillvalue=[])
    return [[*itertools.chain.from_iterable(step)] for step in steps]


def ordered_dataset(target: str, dataset_id: str, **how: Any) -> Any:
    """A tf.data.Dataset that reads in ORDER."""
    return service.from_dataset_id(
        "distributed_epoch", target, dataset_id, ordered=True, **ORDER | how
    )

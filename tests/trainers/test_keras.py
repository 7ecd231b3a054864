"""Keras's own calls, with a dataset of the service where they take one.

Nothing is learned here, so that what Keras computes of an epoch says exactly which elements it had,
in whatever order: it is what it computes of the same dataset without the service.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from forebay import service

RAN_OUT = "ignore:Your input ran out of data"  # said of every dataset whose length is not known
Read = Callable[[Any], Any]
NUMBER, BATCH = 100, 8
STEPS = 13


def examples() -> Any:
    def example(i: Any) -> tuple[Any, Any]:
        return tf.one_hot(i % 10, 10) * tf.cast(i, tf.float32), tf.cast(i % 3 == 0, tf.float32)

    return tf.data.Dataset.range(NUMBER).map(example).batch(BATCH)


def unchanging_model() -> Any:
    dense = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)
    model = keras.Sequential([keras.Input([10]), dense])
    model.compile(keras.optimizers.SGD(0.0), "mae")
    return model


class Steps(keras.callbacks.Callback):  # type: ignore[misc]
    """How many each epoch has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.found.append(0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.found[-1] += 1


@pytest.fixture
def read(request: pytest.FixtureRequest, target: str) -> Read:
    """Makes of a dataset one that comes by the service, in a job with a name, then in one without,
    and so on."""
    names = itertools.chain.from_iterable((f"{request.node.name} {i}", None) for i in range(9))

    def through(dataset: Any) -> Any:
        return dataset.apply(service.distribute("distributed_epoch", target, next(names)))

    return through


def fitted(dataset: Any, **arguments: Any) -> tuple[dict[str, list[float]], list[int]]:
    steps = Steps()
    arguments |= {"epochs": 2, "shuffle": False, "verbose": 0, "callbacks": [steps]}
    history = unchanging_model().fit(dataset, **arguments)
    return history.history, steps.found


def test_steps_that_are_told(read: Read) -> None:
    """Of one iteration that goes on, or of one an epoch if its length is told."""
    _, steps = fitted(read(examples().repeat()), steps_per_epoch=5)
    assert steps == [5, 5]
    told = read(examples()).apply(tf.data.experimental.assert_cardinality(STEPS))
    mine, steps = fitted(told)
    assert steps == [STEPS, STEPS]
    np.testing.assert_allclose(mine["loss"], fitted(examples())[0]["loss"], rtol=1e-4)


@pytest.mark.filterwarnings(RAN_OUT)
def test_steps_behind_the_end(read: Read) -> None:
    """Keras leaves them out, as it does with tf.data service. What its page names does help."""
    told = tf.data.experimental.assert_cardinality(STEPS)
    for _ in range(2):  # a job with a name, and one without
        helps = [(read(examples().repeat()), STEPS), (read(examples()).apply(told), STEPS)]
        for dataset, steps in [*helps, (read(examples()), None)]:
            assert fitted(dataset, steps_per_epoch=steps)[1] == [STEPS, STEPS]
        assert fitted(read(examples()), steps_per_epoch=STEPS)[1] == [STEPS, 0]

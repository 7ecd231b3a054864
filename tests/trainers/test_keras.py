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


def examples(number: int = NUMBER) -> Any:
    def example(i: Any) -> tuple[Any, Any]:
        return tf.one_hot(i % 10, 10) * tf.cast(i, tf.float32), tf.cast(i % 3 == 0, tf.float32)

    return tf.data.Dataset.range(number).map(example).batch(BATCH)


def weighted() -> Any:
    return examples().map(lambda x, y: (x, y, 1 + tf.reduce_sum(x, axis=1)))


def by_name() -> Any:
    return examples().map(lambda x, y: ({"left": x, "right": 2 * x}, {"sum": y, "other": y}))


def model_of(dataset: Any) -> Any:
    """That stays as it is."""
    if isinstance(dataset.element_spec[0], dict):
        inputs = {name: keras.Input([10], name=name) for name in ("left", "right")}
        weights = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)
        found = weights(inputs["left"]) + weights(inputs["right"])
        model = keras.Model(inputs, {"sum": found, "other": -found})
        losses: Any = {"sum": "mae", "other": "mse"}
    else:
        dense = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)
        model, losses = keras.Sequential([keras.Input([10]), dense]), "mae"
    model.compile(keras.optimizers.SGD(0.0), losses, metrics=None, weighted_metrics=[])
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
    history = model_of(dataset).fit(dataset, **arguments)
    return history.history, steps.found


def require_same(mine: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    assert mine.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(mine[name], values, rtol=1e-4)


@pytest.mark.filterwarnings(RAN_OUT)
@pytest.mark.parametrize("dataset", [weighted, by_name])
def test_an_epoch_has_all(read: Read, dataset: Callable[[], Any]) -> None:
    mine, steps = fitted(read(dataset()), validation_data=read(dataset().take(3)))
    # Keras's means of several losses are others where it does not know the length.
    alike = dataset().filter(lambda *_: True)
    expected, _ = fitted(alike, validation_data=alike.take(3))
    require_same(mine, expected)
    assert steps == [STEPS, STEPS]


@pytest.mark.filterwarnings(RAN_OUT)
def test_classes_have_weights(read: Read) -> None:
    weights = {"class_weight": {0: 1.0, 1: 5.0}}
    require_same(fitted(read(examples()), **weights)[0], fitted(examples(), **weights)[0])


def test_steps_that_are_told(read: Read) -> None:
    """Of one iteration that goes on, or of one an epoch if its length is told."""
    _, steps = fitted(read(examples().repeat()), steps_per_epoch=5)
    assert steps == [5, 5]
    told = read(examples()).apply(tf.data.experimental.assert_cardinality(STEPS))
    mine, steps = fitted(told)
    assert steps == [STEPS, STEPS]
    require_same(mine, fitted(examples())[0])


def test_an_epoch_that_ends_early(read: Read) -> None:
    with pytest.warns(UserWarning, match="ran out of data"):
        _, steps = fitted(read(examples()), steps_per_epoch=STEPS + 5)
    assert steps[0] == STEPS


@pytest.mark.filterwarnings(RAN_OUT)
def test_steps_behind_the_end(read: Read) -> None:
    """Keras leaves them out, as it does with tf.data service. What its page names does help."""
    told = tf.data.experimental.assert_cardinality(STEPS)
    for _ in range(2):  # a job with a name, and one without
        helps = [(read(examples().repeat()), STEPS), (read(examples()).apply(told), STEPS)]
        for dataset, steps in [*helps, (read(examples()), None)]:
            assert fitted(dataset, steps_per_epoch=steps)[1] == [STEPS, STEPS]
        assert fitted(read(examples()), steps_per_epoch=STEPS)[1] == [STEPS, 0]


@pytest.mark.filterwarnings(RAN_OUT)
def test_evaluate_and_predict(read: Read) -> None:
    dataset = examples()
    model, validated = model_of(dataset), read(dataset)
    np.testing.assert_allclose(
        model.evaluate(validated, verbose=0), model.evaluate(dataset, verbose=0), rtol=1e-4
    )
    mine = np.sort(model.predict(read(dataset), verbose=0).ravel())
    np.testing.assert_allclose(mine, np.arange(NUMBER), rtol=1e-4)

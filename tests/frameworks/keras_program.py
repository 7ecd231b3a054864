"""What test_keras.py has Keras do, on the backend that KERAS_BACKEND names.

python keras_program.py TARGET EXAMPLES UNSIZED NAMED PARTS

Ids of datasets of 96 examples of y = 2 · x0 - x1, in pairs; the same without a known number; named
inputs with sample weights, 0 for those whose target is wrong; and pixels of 40 classes.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import Any

import keras
import numpy as np

import forebay.keras
from forebay import service

# That of torch imports no JAX, nor the other way round.
ServiceDataset = import_module(f"forebay.{keras.backend.backend()}").ServiceDataset

STEPS = 6  # of 16
EPOCHS = 5


def epochs(target: str, dataset_id: str, size: int = 16, **how: Any) -> forebay.keras.Epochs:
    return forebay.keras.Epochs(ServiceDataset(target, dataset_id, batch_size=size), **how)


class Counted(keras.callbacks.Callback):  # type: ignore[misc]
    """How many steps each epoch has, and what its loss is."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.steps.append(0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps[-1] += 1


class Stops(keras.callbacks.Callback):  # type: ignore[misc]
    """After three steps, as a user's Ctrl-C might."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = batch == 2


def linear() -> Any:
    model = keras.Sequential([keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.3), "mse", weighted_metrics=["mae"])
    return model


def fitted(*how: Any, **options: Any) -> tuple[Any, Counted, Any]:
    model, counted = linear(), Counted()
    history = model.fit(*how, callbacks=[counted], verbose=0, **options)
    return model, counted, history.history


def ran_out(said: list[warnings.WarningMessage]) -> int:
    return sum("ran out of data" in str(each.message) for each in said)


def weights_of(model: Any) -> Any:
    return np.round(keras.ops.convert_to_numpy(model.weights[0])[:, 0], 2).tolist()


def fit(target: str, examples: str, unsized: str) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model, counted, history = fitted(
            epochs(target, examples), validation_data=epochs(target, examples, 40), epochs=EPOCHS
        )
    assert not ran_out(said)  # their number is known
    assert counted.steps == EPOCHS * [STEPS], counted.steps
    assert weights_of(model) == [2, -1], model.weights
    assert len(history["val_loss"]) == EPOCHS and history["val_loss"][-1] < 1e-3

    loss, error = model.evaluate(epochs(target, examples, 40), verbose=0)
    assert loss < 1e-3 and error < 0.05, (loss, error)
    assert model.evaluate(epochs(target, examples), steps=2, verbose=0)[0] < 1e-3
    predicted = model.predict(epochs(target, examples, 40), verbose=0)
    assert predicted.shape == (96, 1)
    wanted = sorted(float(y[0]) for _, y in service.read(target, examples))
    assert np.allclose(np.sort(predicted[:, 0]), wanted, atol=0.1)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model, counted, _ = fitted(epochs(target, unsized), epochs=EPOCHS)
    assert counted.steps == EPOCHS * [STEPS], counted.steps
    assert weights_of(model) == [2, -1]
    assert ran_out(said) == EPOCHS

    # An epoch that ends early; the next one goes on in the same of the service's.
    model, counted, _ = fitted(epochs(target, examples), epochs=3, steps_per_epoch=2)
    assert counted.steps == [2, 2, 2]
    again = epochs(target, examples)
    model.fit(again, epochs=1, callbacks=[Stops()], verbose=0)
    counted = Counted()
    model.fit(again, epochs=2, callbacks=[counted], verbose=0)
    assert counted.steps == [STEPS, STEPS], counted.steps


def weigh(target: str, named: str, classes: str) -> None:
    inputs = {name: keras.Input([1], name=name) for name in ("first", "second")}
    together = keras.layers.Concatenate()([inputs["first"], inputs["second"]])
    model = keras.Model(inputs, keras.layers.Dense(1, use_bias=False)(together))
    model.compile(keras.optimizers.SGD(0.3), "mse", weighted_metrics=["mae"])
    model.fit(epochs(target, named), epochs=8, verbose=0)
    assert weights_of(model) == [2, -1], model.weights  # wrong targets weigh nothing

    model = keras.Sequential([keras.layers.Dense(2, "softmax", kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    ignored = epochs(target, classes, class_weight={0: 0.0, 1: 1.0})
    model.fit(ignored, epochs=3, verbose=0)
    assert (model.predict(np.ones([1, 4]), verbose=0).argmax(axis=1) == 1).all()
    try:
        model.fit(epochs(target, named, class_weight={0: 1.0}), verbose=0)
    except ValueError as error:
        assert "no pair" in str(error)
    else:
        raise AssertionError("sample weights were weighed again")


def main() -> None:
    target, examples, unsized, named, classes = sys.argv[1:]
    fit(target, examples, unsized)
    weigh(target, named, classes)
    assert "tensorflow" not in sys.modules
    print("done on", keras.backend.backend())


if __name__ == "__main__":
    main()

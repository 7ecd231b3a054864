"""A trainer of the demo: reads the shared job, trains a small model, reports in JSON lines."""

from __future__ import annotations

import json
import sys
from typing import Any

import tensorflow as tf
from data import PIXELS

from forebay.service import ShardingPolicy, from_dataset_id


def main(
    trainer: int, service: str, dataset_id: str, epochs: int, batch: int, held_out: int
) -> None:
    """Train for some epochs, each the next epoch of the job "digits"."""
    import keras

    dataset = from_dataset_id(ShardingPolicy.DYNAMIC, service, dataset_id, job_name="digits")
    keras.utils.set_random_seed(trainer)
    model = keras.Sequential(
        [
            keras.Input([PIXELS]),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy")
    for epoch in range(epochs):
        for digits in dataset.batch(batch):
            learn = tf.cast(digits["id"] % held_out != 0, tf.float32)
            model.train_on_batch(digits["pixels"], digits["label"], sample_weight=learn)
            _report(epoch=epoch, ids=digits["id"].numpy().tolist())
    _report(trainer=trainer, accuracy=_accuracy(model, held_out))


def _accuracy(model: Any, held_out: int) -> float:
    from sklearn.datasets import load_digits

    digits = load_digits()
    guesses = model.predict(digits.data[::held_out] / 16, verbose=0).argmax(axis=1)
    return float((guesses == digits.target[::held_out]).mean())


def _report(**values: Any) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], *map(int, sys.argv[4:7]))

"""A trainer of the demo: reads the shared job, trains a small model, reports in JSON lines."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import tensorflow as tf

from .. import ShardingPolicy, from_dataset_id
from .demo_data import PIXELS


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
    waited_s = longest_s = read_s = 0.0
    for epoch in range(epochs):
        begun_s = asked_s = time.monotonic()
        for digits in dataset.batch(batch):
            waited = time.monotonic() - asked_s
            waited_s, longest_s = waited_s + waited, max(longest_s, waited)
            learn = tf.cast(digits["id"] % held_out != 0, tf.float32)
            model.train_on_batch(digits["pixels"], digits["label"], sample_weight=learn)
            _report(trainer=trainer, epoch=epoch, ids=digits["id"].numpy().tolist())
            asked_s = time.monotonic()
        read_s += time.monotonic() - begun_s
    _report(
        trainer=trainer,
        accuracy=_accuracy(model, held_out),
        waited_s=waited_s,
        longest_wait_s=longest_s,
        read_s=read_s,
    )


def _accuracy(model: Any, held_out: int) -> float:
    from sklearn.datasets import load_digits

    digits = load_digits()
    guesses = model.predict(digits.data[::held_out] / 16, verbose=0).argmax(axis=1)
    return float((guesses == digits.target[::held_out]).mean())


def _report(**values: Any) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], *map(int, sys.argv[4:7]))

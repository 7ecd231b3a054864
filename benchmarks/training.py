"""A real pipeline: photographs decoded, resized, augmented; and what a trainer does with them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from .photographs import photographs

PIXELS = 224
BATCH = 32


def photograph_batches(directory: pathlib.Path, _: int) -> Any:
    """Endless batches of augmented photographs with their labels."""
    examples = tf.data.TFRecordDataset([str(photographs(directory))]).repeat()
    return examples.map(_augmented, num_parallel_calls=tf.data.AUTOTUNE).batch(
        BATCH, drop_remainder=True
    )


def _augmented(example: Any) -> Any:
    features = tf.io.parse_single_example(
        example,
        {
            "image": tf.io.FixedLenFeature([], tf.string),
            "label": tf.io.FixedLenFeature([], tf.int64),
        },
    )
    image = tf.io.decode_jpeg(features["image"], channels=3)
    image = tf.image.resize(image, (PIXELS + 32, PIXELS + 32))
    image = tf.image.random_crop(image, (PIXELS, PIXELS, 3))
    image = tf.image.random_flip_left_right(image)
    image = tf.image.random_brightness(image, 32.0)
    return tf.clip_by_value(image, 0.0, 255.0), features["label"]


def keras_step() -> Callable[[Any], None]:
    """A step that trains a small model on a batch; the pipeline is the bottleneck."""
    import keras

    model = keras.Sequential(
        [
            keras.layers.Input((PIXELS, PIXELS, 3)),
            keras.layers.Rescaling(1 / 255),
            keras.layers.AveragePooling2D(8),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(2),
        ]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def step(batch: Any) -> None:
        model.train_on_batch(*batch)

    return step

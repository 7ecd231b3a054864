"""A TFRecord file of JPEG photographs, on which the row `jpeg` trains.

The photographs are the two that scikit-learn comes with; each record is a piece of one of them.
"""

from __future__ import annotations

import pathlib
import random

from ..storage.tfrecord import frame

PIECES = 400
LEAST, MOST = 256, 400  # pixels, the side of a piece
QUALITY = 90


def photographs(directory: pathlib.Path) -> pathlib.Path:
    """Where the TFRecord file of a row is."""
    return directory / "photographs.tfrecord"


def write_photographs(directory: pathlib.Path) -> None:
    """Write pieces of either photograph, with the photograph's number as their label."""
    import tensorflow as tf
    from sklearn.datasets import load_sample_images

    images = load_sample_images().images
    source = random.Random(0)
    with photographs(directory).open("wb") as file:
        for number in range(PIECES):
            label = number % len(images)
            height, width, _ = images[label].shape
            side = source.randint(LEAST, MOST)
            top, left = source.randint(0, height - side), source.randint(0, width - side)
            piece = images[label][top : top + side, left : left + side]
            features = {
                "image": tf.train.Feature(
                    bytes_list=tf.train.BytesList(
                        value=[tf.io.encode_jpeg(piece, quality=QUALITY).numpy()]
                    )
                ),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            file.write(frame(example.SerializeToString()))

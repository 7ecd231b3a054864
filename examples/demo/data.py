"""The demo's data: scikit-learn's digits as TFRecord files, and the pipeline over them.

A separate process writes and registers them, to keep TensorFlow's startup messages out of the
demo's terminal.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

PIXELS = 64


def write_digits(directory: pathlib.Path, files: int) -> tuple[list[str], int]:
    """Write the digits to `files` TFRecord files; return their paths and the number of images."""
    import tensorflow as tf
    from sklearn.datasets import load_digits

    directory.mkdir()
    digits = load_digits()
    paths = [str(directory / f"digits-{n:02}-of-{files}.tfrecord") for n in range(files)]
    writers = [tf.io.TFRecordWriter(path) for path in paths]
    for number, (pixels, label) in enumerate(zip(digits.data, digits.target, strict=True)):
        features = {
            "id": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
            "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
            "pixels": tf.train.Feature(float_list=tf.train.FloatList(value=pixels / 16)),
        }
        example = tf.train.Example(features=tf.train.Features(feature=features))
        writers[number % files].write(example.SerializeToString())
    for writer in writers:
        writer.close()
    return paths, len(digits.target)


def register(service: str, files: list[str]) -> str:
    """Register the digits, augmented, and shuffled in a worker's buffer."""
    import tensorflow as tf

    from forebay.service import register_dataset

    spec = {
        "id": tf.io.FixedLenFeature([], tf.int64),
        "label": tf.io.FixedLenFeature([], tf.int64),
        "pixels": tf.io.FixedLenFeature([PIXELS], tf.float32),
    }

    def parse(record: Any) -> dict[str, Any]:
        digit: dict[str, Any] = tf.io.parse_single_example(record, spec)
        # Like real augmentation, this takes the worker some time.
        image = tf.image.resize(tf.reshape(digit["pixels"], [8, 8, 1]), [128, 128])
        image = tf.image.random_brightness(tf.image.random_contrast(image, 0.8, 1.2), 0.1)
        digit["pixels"] = tf.reshape(tf.image.resize(image, [8, 8], antialias=True), [PIXELS])
        return digit

    dataset = tf.data.Dataset.from_tensor_slices(files)
    dataset = dataset.flat_map(tf.data.TFRecordDataset).map(parse).shuffle(100)
    return register_dataset(service, dataset)


if __name__ == "__main__":
    written, number_of_images = write_digits(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
    registered = register(sys.argv[3], written)
    print(json.dumps({"dataset_id": registered, "images": number_of_images}), flush=True)

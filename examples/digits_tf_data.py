"""Train on handwritten digits, from TFRecord files, which two workers read by a tf.data pipeline.

python examples/digits_tf_data.py
"""

import pathlib
import tempfile

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier

from forebay import service

FILES, EPOCHS, TESTED = 8, 5, 300

FEATURES = {
    "pixels": tf.io.FixedLenFeature([64], tf.float32),
    "label": tf.io.FixedLenFeature([], tf.int64),
}


def write_files(folder: pathlib.Path, pixels: np.ndarray, labels: np.ndarray) -> None:
    for number in range(FILES):
        with tf.io.TFRecordWriter(str(folder / f"{number}.tfrecord")) as file:
            for image, label in zip(pixels[number::FILES], labels[number::FILES], strict=True):
                floats, ints = tf.train.FloatList(value=image), tf.train.Int64List(value=[label])
                features = {
                    "pixels": tf.train.Feature(float_list=floats),
                    "label": tf.train.Feature(int64_list=ints),
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                file.write(example.SerializeToString())


def main() -> None:
    pixels, labels = load_digits(return_X_y=True)
    pixels = (pixels / 16).astype(np.float32)
    with (
        tempfile.TemporaryDirectory() as folder,
        service.DispatchServer() as dispatcher,
        service.WorkerServer(service.WorkerConfig(dispatcher.target)),
        service.WorkerServer(service.WorkerConfig(dispatcher.target)),
    ):
        write_files(pathlib.Path(folder), pixels[TESTED:], labels[TESTED:])
        files = tf.data.Dataset.list_files(f"{folder}/*.tfrecord", seed=1)
        examples = (
            files.interleave(tf.data.TFRecordDataset)
            .map(lambda record: tf.io.parse_single_example(record, FEATURES))
            .shuffle(500)
            .batch(32)
        )
        dataset_id = service.register_dataset(dispatcher.target, examples)
        model = SGDClassifier(random_state=0)
        for _ in range(EPOCHS):
            count = 0
            with service.read(
                dispatcher.target, dataset_id, processing_mode="distributed_epoch"
            ) as batches:
                for batch in batches:
                    model.partial_fit(batch["pixels"], batch["label"], classes=range(10))
                    count += len(batch["label"])
            assert count == len(pixels) - TESTED, f"{count} digits in an epoch"
    accuracy = model.score(pixels[:TESTED], labels[:TESTED])
    assert accuracy > 0.7, accuracy
    print(f"learned: {accuracy:.0%} of {TESTED} digits that it had not seen are right")


if __name__ == "__main__":
    main()

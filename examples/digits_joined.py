"""Join images and labels of handwritten digits by Beam, and train on the result.

The images are in TFRecord files and the labels in text files, in another order. Joining them needs
a shuffle, which is no matter of workers: one of Beam's runners does it, once, and writes the joined
digits to Parquet files, which Forebay then serves to Keras.

python examples/digits_joined.py
"""

import pathlib
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow
from apache_beam.options.pipeline_options import PipelineOptions

from forebay import service

# What only this process needs is imported where it is used: the runner's import this file, too.

FILES, EPOCHS, TESTED = 4, 8, 300


def write_sources(folder: pathlib.Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Images by their number, and lines of number and label."""
    from tensorflow.io import TFRecordWriter

    for at in range(FILES):
        with TFRecordWriter(str(folder / f"{at}.tfrecord")) as file:
            for number in range(at, len(images), FILES):
                file.write(number.to_bytes(4, "little") + images[number].tobytes())
    lines = [f"{number} {label}\n" for number, label in enumerate(labels)]
    np.random.default_rng(0).shuffle(lines)
    for at in range(FILES):
        (folder / f"{at}.txt").write_text("".join(lines[at::FILES]))


def image(record: bytes) -> tuple[int, np.ndarray]:
    return int.from_bytes(record[:4], "little"), np.frombuffer(record[4:], np.uint8)


def label(line: str) -> tuple[int, int]:
    number, value = line.split()
    return int(number), int(value)


def joined(digit: tuple[int, dict[str, Iterable[Any]]]) -> Iterator[dict[str, Any]]:
    """One image and one label, of those that have both."""
    _, found = digit
    for pixels in found["images"]:
        for value in found["labels"]:
            yield {"pixels": (pixels.astype(np.float32) / 16).tolist(), "label": value}


def join(folder: pathlib.Path) -> None:
    options = ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]
    pipeline = beam.Pipeline(runner="FnApiRunner", options=PipelineOptions(options))
    records, lines = (
        [str(path) for path in sorted(folder.glob(pattern))] for pattern in ("*.tfrecord", "*.txt")
    )
    images = (
        pipeline
        | "records" >> beam.Create(records)
        | "read records" >> beam.io.ReadAllFromTFRecord()
        | "images" >> beam.Map(image)
    )
    labels = (
        pipeline
        | "texts" >> beam.Create(lines)
        | "read texts" >> beam.io.ReadAllFromText()
        | "labels" >> beam.Map(label)
    )
    digits = {"images": images, "labels": labels} | beam.CoGroupByKey() | beam.FlatMap(joined)
    schema = pyarrow.schema({"pixels": pyarrow.list_(pyarrow.float32()), "label": pyarrow.int64()})
    _ = digits | beam.io.WriteToParquet(f"{folder}/joined", schema, file_name_suffix=".parquet")
    pipeline.run().wait_until_finish()


def main() -> None:
    import tensorflow as tf
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_sources(folder, images[TESTED:].astype(np.uint8), labels[TESTED:])
        join(folder)
        model = tf.keras.Sequential([tf.keras.Input([64]), tf.keras.layers.Dense(10)])
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
        with (
            service.DispatchServer() as dispatcher,
            service.WorkerServer(service.WorkerConfig(dispatcher.target)),
        ):
            dataset_id = service.register_files(dispatcher.target, f"{folder}/joined*.parquet")
            dataset = service.from_dataset_id(
                "distributed_epoch", dispatcher.target, dataset_id
            ).map(lambda digit: (tf.ensure_shape(digit["pixels"], [64]), digit["label"]))
            model.fit(dataset.batch(32), epochs=EPOCHS, verbose=0)
    unseen = (images[:TESTED] / 16).astype(np.float32)
    _, accuracy = model.evaluate(unseen, labels[:TESTED], verbose=0)
    assert accuracy > 0.7, accuracy
    print(f"learned: {accuracy:.0%} of {TESTED} digits that it had not seen are right")


if __name__ == "__main__":
    main()

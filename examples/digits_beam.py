"""Train on handwritten digits, from Avro files, which two workers read by a Beam pipeline.

python examples/digits_beam.py
"""

import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import fastavro
import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier

from forebay import service

FILES, TESTED = 8, 300

SCHEMA = {
    "type": "record",
    "name": "digit",
    "fields": [{"name": "pixels", "type": "bytes"}, {"name": "label", "type": "long"}],
}


class Parse(beam.DoFn):
    """A record's pixels, and the same one pixel to the left."""

    def process(self, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
        image = np.frombuffer(record["pixels"], np.uint8).reshape(8, 8).astype(np.float32) / 16
        for pixels in (image, np.roll(image, -1, axis=1)):
            yield {"pixels": pixels.ravel(), "label": record["label"]}


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        service.DispatchServer() as dispatcher,
        service.WorkerServer(service.WorkerConfig(dispatcher.target)),
        service.WorkerServer(service.WorkerConfig(dispatcher.target)),
    ):
        for number in range(FILES):
            rows = zip(
                images[TESTED + number :: FILES], labels[TESTED + number :: FILES], strict=True
            )
            with (pathlib.Path(folder) / f"{number}.avro").open("wb") as file:
                digits = [
                    {"pixels": image.astype(np.uint8).tobytes(), "label": int(label)}
                    for image, label in rows
                ]
                fastavro.writer(file, SCHEMA, digits)
        pipeline = beam.Pipeline()  # built, not run
        examples = (
            pipeline
            | beam.io.ReadFromAvro(f"{folder}/*.avro")
            | beam.Filter(lambda record: record["label"] < 5)
            | beam.ParDo(Parse())
        )
        dataset_id = service.register_dataset(dispatcher.target, examples)
        with service.read(
            dispatcher.target, dataset_id, processing_mode="distributed_epoch"
        ) as elements:
            found = [(each["pixels"].copy(), int(each["label"])) for each in elements]
    assert len(found) == 2 * np.count_nonzero(labels[TESTED:] < 5), len(found)
    model = SGDClassifier(random_state=0).fit([p for p, _ in found], [n for _, n in found])
    unseen = labels[:TESTED] < 5
    accuracy = model.score(images[:TESTED][unseen] / 16, labels[:TESTED][unseen])
    assert accuracy > 0.7, accuracy
    print(f"learned: {accuracy:.0%} of {sum(unseen)} digits that it had not seen are right")


if __name__ == "__main__":
    main()

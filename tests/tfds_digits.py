"""A data set of TensorFlow Datasets: handwritten digits, in several files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from sklearn.datasets import load_digits

TRAIN, TEST, FILES = 230, 40, 7


class Digits(tfds.core.GeneratorBasedBuilder):  # type: ignore[misc] # TFDS has no types
    VERSION = tfds.core.Version("1.0.0")
    code_path = None  # TFDS's own needs importlib_resources, which TFDS does not install

    def _info(self) -> Any:
        features = {
            "image": tfds.features.Image(shape=(8, 8, 1)),
            "label": tfds.features.ClassLabel(num_classes=10),
            "row": {"name": tfds.features.Text(), "sums": tfds.features.Sequence(np.int64)},
        }
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, _: Any) -> dict[str, Any]:
        return {
            "train": self._generate_examples(0, TRAIN),
            "test": self._generate_examples(TRAIN, TRAIN + TEST),
        }

    def _generate_examples(self, first: int, last: int) -> Iterator[tuple[int, dict[str, Any]]]:
        pixels, labels = load_digits(return_X_y=True)
        for number in range(first, last):
            image = pixels[number].reshape(8, 8, 1).astype(np.uint8)
            sums = image[..., 0].sum(axis=0, dtype=np.int64)
            row = {"name": f"digit {number}", "sums": sums[: number % 4]}
            yield number, {"image": image, "label": int(labels[number]), "row": row}


class DigitsInOrder(Digits):
    """Its examples keep their order."""

    def _info(self) -> Any:
        info = super()._info()
        return tfds.core.DatasetInfo(builder=self, features=info.features, disable_shuffling=True)


def prepared(folder: Path, kind: type[Digits] = Digits, files: int = FILES) -> Any:
    """A builder whose data set lies in this folder."""
    builder = kind(data_dir=folder)
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=files))
    return builder

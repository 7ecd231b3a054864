"""Tell pieces of two photographs apart, which a Python function cuts out in the workers' processes.

python examples/photographs_python.py
"""

import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.datasets import load_sample_images
from sklearn.linear_model import SGDClassifier

from forebay import service

SIDE, PIECES, TESTED = 32, 100, 400  # pixels; of each split


def pieces(split: tuple[str, int, int]) -> Iterator[dict[str, Any]]:
    """Of a photograph, at places that the split's seed draws."""
    path, label, seed = split
    photograph = np.load(path, mmap_mode="r")
    source = np.random.default_rng(seed)
    height, width, _ = photograph.shape
    for _ in range(PIECES):
        top, left = source.integers(height - SIDE), source.integers(width - SIDE)
        yield {"piece": photograph[top : top + SIDE, left : left + SIDE], "label": label}


def colours(piece: np.ndarray) -> np.ndarray:
    """How much there is of each, in eight steps of red, green and blue."""
    counts = [np.bincount(piece[..., channel].ravel() // 32, minlength=8) for channel in range(3)]
    return np.concatenate(counts) / SIDE**2


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        service.DispatchServer() as dispatcher,
        service.WorkerServer(service.WorkerConfig(dispatcher.target)),
        service.WorkerServer(service.WorkerConfig(dispatcher.target)),
    ):
        splits = []
        for label, photograph in enumerate(load_sample_images().images):
            path = pathlib.Path(folder) / f"{label}.npy"
            np.save(path, photograph)
            splits += [(str(path), label, 2 * seed + label) for seed in range(20)]
        dataset_id = service.register_dataset(dispatcher.target, pieces, splits=splits)
        with service.read(
            dispatcher.target, dataset_id, processing_mode="distributed_epoch"
        ) as elements:
            found = [(colours(each["piece"]), int(each["label"])) for each in elements]
    assert len(found) == len(splits) * PIECES, f"{len(found)} pieces in an epoch"
    np.random.default_rng(0).shuffle(found)
    features, labels = np.array([f for f, _ in found]), np.array([label for _, label in found])
    model = SGDClassifier(random_state=0).fit(features[TESTED:], labels[TESTED:])
    accuracy = model.score(features[:TESTED], labels[:TESTED])
    assert accuracy > 0.8, accuracy
    print(f"learned: {accuracy:.0%} of {TESTED} pieces that it had not seen are right")


if __name__ == "__main__":
    main()

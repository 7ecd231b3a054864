"""Every way of reading real files gives the same elements. How fast is for people to look at."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from forebay import service
from forebay.benchmarks.cases import pipeline
from forebay.benchmarks.contents import FILE_CASES
from forebay.benchmarks.in_process import DRIVERS

from ..stock import OwnDispatcher, stock_workers
from ..trainers.conftest import target

__all__ = ["target"]

SIZE = 3  # elements or batches


def digest(elements: Iterable[Any]) -> list[bytes]:
    """Digests of the elements, of one tensor each, in an order that is not theirs."""
    found = []
    for element in elements:
        value = element.numpy() if hasattr(element, "numpy") else element
        # Only as an object does a string keep trailing zeros.
        array = np.asarray(value, object if isinstance(value, bytes) else None)
        content = array.astype(object).tolist() if array.dtype.kind in "OS" else array.tobytes()
        what = repr((array.shape, array.dtype.kind in "OS" or array.dtype.name, content))
        found.append(hashlib.blake2b(what.encode()).digest())
    return sorted(found)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("files")
    for case in FILE_CASES.values():
        case.content.write(directory, quick=True)
    return directory


@pytest.fixture(scope="module")
def peer_target() -> Iterator[str]:
    """Processes, which are killed: a stop of TensorFlow's servers waits for its jobs' ends."""
    peer = OwnDispatcher()
    with stock_workers(peer.address):
        yield peer.target
    peer.kill()


@pytest.mark.parametrize("row", FILE_CASES)
def test_all_ways_give_the_same(row: str, files: Path, target: str, peer_target: str) -> None:
    dataset = pipeline(FILE_CASES[row], files, SIZE)
    wanted = digest(dataset)
    assert len(wanted) == SIZE
    dataset_id = service.register_dataset(target, dataset)
    assert digest(service.read(target, dataset_id)) == wanted
    assert digest(service.from_dataset_id("parallel_epochs", target, dataset_id)) == wanted
    peer = tf.data.experimental.service
    dataset_id = peer.register_dataset(peer_target, dataset)
    assert digest(peer.from_dataset_id("parallel_epochs", peer_target, dataset_id)) == wanted


@pytest.mark.parametrize("drive", DRIVERS.values())
def test_a_driven_pipeline_makes_all_its_elements(drive: Callable[[Any, Any], Any]) -> None:
    made: list[int] = []

    def make(number: Any) -> Any:
        made.append(int(number))
        return number

    def made_of(number: Any) -> Any:
        return tf.py_function(make, [number], tf.int64)

    elements = tf.data.Dataset.range(100).map(made_of).batch(2)
    assert int(drive(elements, tf.constant(7, tf.int64))) == 7
    assert made[:14] == list(range(14))

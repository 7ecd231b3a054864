"""Every way of reading real files gives the same elements. How fast is for people to look at."""

from __future__ import annotations

import hashlib
import inspect
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from forebay import service
from forebay.benchmarks import loaders
from forebay.benchmarks.cases import pipeline
from forebay.benchmarks.contents import FILE_CASES, FileCase
from forebay.benchmarks.loaders import (
    DRIVERS,
    Numbered,
    eager_elements,
    measure,
    measure_bare,
    numpy_pack,
)
from forebay.benchmarks.machine import descendants
from forebay.benchmarks.real_files import installed

from ..stock import OwnDispatcher, stock_workers
from ..trainers.conftest import target

__all__ = ["target"]

SIZE = 3  # elements or batches


def plain(element: Any) -> Any:
    """An element that is one tensor, of whatever library, as an array, or a string as bytes."""
    element = element.numpy() if hasattr(element, "numpy") else element
    return element if isinstance(element, bytes) else np.asarray(element)


def digest(elements: Iterable[Any]) -> tuple[int, int]:
    """The number of elements, and a digest that does not depend on their order."""
    count = total = 0
    for element in elements:
        array = plain(element)
        if isinstance(array, bytes):
            content = b"bytes" + array
        elif array.dtype.kind in "OS":  # only as an object does a string keep trailing zeros
            content = repr((array.shape, array.astype(object).tolist())).encode()
        else:
            content = repr((array.shape, array.dtype.name)).encode() + array.tobytes()
        total += int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
        count += 1
    return count, total % 2**64


LOADED = f"""
import hashlib, pathlib, sys
from collections.abc import Iterable
from typing import Any
import numpy as np
from forebay.benchmarks import loaders
from forebay.benchmarks.contents import FILE_CASES
{inspect.getsource(plain)}
{inspect.getsource(digest)}
if __name__ == "__main__":
    _, way, directory, size = sys.argv
    for case in FILE_CASES.values():
        print(*digest(loaders.WAYS[way](case, pathlib.Path(directory), int(size))), flush=True)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("files")
    for case in FILE_CASES.values():
        case.content.write(directory, quick=True, forms={"torch", *installed()})
    return directory


@pytest.fixture(scope="module")
def peer_target() -> Iterator[str]:
    """Processes, which are killed: a stop of TensorFlow's servers waits for its jobs' ends."""
    peer = OwnDispatcher()
    with stock_workers(peer.address):
        yield peer.target
    peer.kill()


def expected(case: FileCase, files: pathlib.Path) -> list[Any]:
    """Made of the records themselves."""
    records = Numbered(case, files)
    if not case.batched:
        return [records[number] for number in range(SIZE)]
    packs = np.arange(SIZE * case.pack).reshape(SIZE, case.pack)
    return [numpy_pack(case, [records[int(number)] for number in pack]) for pack in packs]


@pytest.mark.parametrize("row", FILE_CASES)
def test_all_ways_through_tf_data_give_the_records(
    row: str, files: pathlib.Path, target: str, peer_target: str
) -> None:
    case = FILE_CASES[row]
    wanted = digest(expected(case, files))
    assert wanted[0] == SIZE
    assert digest(eager_elements(case, files, SIZE)) == wanted
    dataset = pipeline(case, files, SIZE)
    dataset_id = service.register_dataset(target, dataset)
    assert digest(service.read(target, dataset_id)) == wanted
    assert digest(service.from_dataset_id("parallel_epochs", target, dataset_id)) == wanted
    peer = tf.data.experimental.service
    dataset_id = peer.register_dataset(peer_target, dataset)
    assert digest(peer.from_dataset_id("parallel_epochs", peer_target, dataset_id)) == wanted


@pytest.mark.timeout(400)  # a loader starts two processes a row, on whatever else is going on
@pytest.mark.parametrize(
    "way", sorted(loaders.WAYS.keys() - {"eager"})
)  # in processes of their own: they fork
def test_loaders_give_the_records(way: str, files: pathlib.Path, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "loaded.py"
    script.write_text(LOADED)
    command = [sys.executable, str(script), way, str(files), str(SIZE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=390, check=False)
    if way not in installed():  # torch and grain are big, and no part of the tests' environment
        assert "ModuleNotFoundError: No module named" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    for (row, case), line in zip(FILE_CASES.items(), done.stdout.splitlines(), strict=True):
        count, content = map(int, line.split())
        assert (row, count, content) == (row, *digest(expected(case, files)))


def test_readings_count(files: pathlib.Path) -> None:
    case = FILE_CASES["file_image_batches"]
    for reading in (
        *(measure_bare(drive, case, files, seconds=0.01) for drive in DRIVERS.values()),
        measure(eager_elements, case, files, warm_up_s=0.0, seconds=0.01),
    ):
        assert reading.elements >= 1
        assert reading.client_cpu_s > 0


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


def test_a_digest_knows_content_but_no_order() -> None:
    one, other = np.arange(3), np.arange(3.0)
    assert digest([one, other]) == digest([other, one]) != digest([one, one])
    assert digest([b"a\0"]) != digest([b"a"])
    assert digest([np.array([b"ab", b"c"], object)]) != digest([np.array([b"a", b"bc"], object)])


def test_children_of_children_are_found() -> None:
    grandchild = "import subprocess, sys; subprocess.run(['cat'])"
    parent = subprocess.Popen([sys.executable, "-c", grandchild], stdin=subprocess.PIPE)
    while not descendants(parent.pid):
        assert parent.poll() is None
    assert parent.pid in descendants(os.getpid())
    assert set(descendants(parent.pid)) < set(descendants(os.getpid()))
    parent.communicate()

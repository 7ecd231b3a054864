"""TensorArrays and Optionals as elements, which tf.data has as one variant each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.data.experimental import service as stock

from forebay import service
from forebay.service.errors import Unimplemented
from forebay.service.structure import UnsupportedElement, describe, encode

from ..stock import DispatcherProcess

Optional = tf.experimental.Optional
count = tf.data.Dataset.range


def growing(i: Any) -> Any:
    """A TensorArray of i, 2 i, 3 i."""
    array = tf.TensorArray(tf.int64, 0, dynamic_size=True, element_shape=[], clear_after_read=False)
    for place in range(3):
        array = array.write(place, i * (place + 1))
    return array


ELEMENTS: dict[str, Callable[[Any], Any]] = {
    "TensorArray": growing,
    "Optional": lambda i: Optional.from_value({"a": i, "b": tf.strings.as_string(i)}),
    "empty": lambda i: (i, Optional.empty(tf.TensorSpec([2], tf.float32))),
    "nested": lambda i: {"x": (growing(i), Optional.from_value(tf.fill([i], i))), "y": i},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, workers = tmp_path_factory.mktemp("ours"), ",".join(["localhost:%port%"] * 2)
    with DispatcherProcess(folder, workers=workers) as dispatcher:
        config = service.WorkerConfig(dispatcher.address, "localhost:%port%")
        servers = [service.WorkerServer(config) for _ in range(2)]
        yield dispatcher.target
        for server in servers:
            server.stop()


def plain(element: Any) -> Any:
    """To be compared."""
    match element:
        case tf.TensorArray():
            return element.stack().numpy().tolist()
        case Optional():
            return plain(element.get_value()) if element.has_value() else "nothing"
        case dict():
            return {key: plain(element[key]) for key in sorted(element)}
        case tuple():
            return tuple(map(plain, element))
    return element.numpy().tolist() if element.shape.rank else str(element.numpy())


def elements(dataset: Any, times: int = 1) -> list[str]:
    return sorted(str(plain(element)) for element in dataset for _ in range(times))


@pytest.mark.parametrize("name", ELEMENTS)
def test_they_arrive_as_they_were(target: str, name: str) -> None:
    dataset = count(1, 6).map(ELEMENTS[name])
    modes = service.ShardingPolicy
    for mode, times in ((modes.OFF, 2), (modes.DYNAMIC, 1), (modes.DATA, 1)):
        expected = elements(dataset, times)
        for how in ("AUTO", "SNAPPY"):
            ours = dataset.apply(service.distribute(mode, target, compression=how))
            assert elements(ours) == expected
        for compression in ("AUTO", None):  # TensorFlow's own client
            theirs = stock.distribute(
                stock.ShardingPolicy[mode.name], target, compression=compression
            )
            assert elements(dataset.apply(theirs)) == expected


def test_a_save_keeps_them(target: str, tmp_path: Path) -> None:
    dataset = count(1, 6).map(ELEMENTS["nested"])
    path = tmp_path / "save"
    service.distributed_save(dataset, str(path), target)
    loaded = tf.data.Dataset.load(str(path), wait=True)
    assert elements(loaded) == elements(dataset)


@pytest.mark.parametrize("name", ELEMENTS)
def test_who_cannot_have_them_says_so(target: str, name: str, tmp_path: Path) -> None:
    dataset = count(1, 6).map(ELEMENTS[name])
    dataset_id = service.register_dataset(target, dataset)
    with pytest.raises(UnsupportedElement, match="only TensorFlow reads: use from_data"):
        service.read(target, dataset_id)
    with pytest.raises(Unimplemented, match="of variant, which no file has"):
        service.materialize(target, dataset_id, tmp_path / "files")
    said = describe(encode(dataset.element_spec))
    assert "TensorArray" in said or "Optional" in said

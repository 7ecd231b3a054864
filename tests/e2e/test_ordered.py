"""One global order, whatever the workers, the consumers, and who is killed meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from forebay import service
from forebay.service.client import slices

from ..ordered_reads import TROUBLES, At, Cluster, Got, read, uneven_numbers

SPLITS = 3_000
ORDER: dict[str, Any] = {"seed": 7, "cycle_length": 5, "block_length": 2, "bundle_splits": 100}


def random_texts() -> tf.data.Dataset:
    """Random numbers and a shuffle, within bundles, and up to three elements a split."""

    def texts(x: tf.Tensor) -> tf.data.Dataset:
        drawn = tf.random.uniform([x % 4], 0, 1 << 40, tf.int64)
        return tf.data.Dataset.from_tensor_slices(drawn).map(
            lambda y: tf.strings.join([tf.strings.as_string(x), tf.strings.as_string(y)], " ")
        )

    return tf.data.Dataset.range(SPLITS).flat_map(texts).shuffle(30)


@pytest.fixture(scope="module")
def texts(cluster: Cluster) -> str:
    return service.register_dataset(cluster.target, random_texts())


@pytest.fixture(scope="module")
def alone(cluster: Cluster, texts: str) -> Got:
    """What one consumer got of them."""
    return read(cluster.target, texts, **ORDER)


class TestManyReaders:
    @pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.long)])
    def test_the_order_knows_neither_workers_nor_consumers(
        self, cluster: Cluster, texts: str, alone: Got, workers: int
    ) -> None:
        cluster.resize(workers)
        of_numbers = service.register_dataset(cluster.target, uneven_numbers(SPLITS))
        by_one = read(cluster.target, of_numbers, **ORDER)
        for dataset_id, one in ((of_numbers, by_one), (texts, alone)):
            for consumers, batch_size in ((1, 12), (2, 6), (3, 5), (6, 2), (2, None)):
                group = read(cluster.target, dataset_id, consumers, batch_size=batch_size, **ORDER)
                assert group.digest == one.digest
                assert group.state["position"] == len(one.elements)


@pytest.mark.usefixtures("small_windows")
class TestTrouble:
    @TROUBLES
    def test_nobody_notices(
        self, cluster: Cluster, texts: str, alone: Got, trouble: Callable[[Cluster], At]
    ) -> None:
        cluster.resize(2)
        how = {"batch_size": 20, "at": trouble(cluster), **ORDER}
        assert read(cluster.target, texts, 3, **how).digest == alone.digest

    @pytest.mark.long
    def test_a_worker_that_stays_stopped(
        self, cluster: Cluster, texts: str, alone: Got, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its bundles are read from the other one."""
        monkeypatch.setattr(slices, "SLOW_S", 0.5)
        cluster.resize(2)
        with contextlib.ExitStack() as stack:
            at = {5: lambda: stack.enter_context(cluster.stopped_worker())}
            group = read(cluster.target, texts, 2, batch_size=30, at=at, **ORDER)
        assert group.digest == alone.digest

    def test_a_group_with_another_global_batch_goes_on_at_a_position(
        self, cluster: Cluster, texts: str, alone: Got
    ) -> None:
        got: list[bytes] = []
        for consumers, batch_size, steps in ((2, 7, 9), (3, 11, 11), (1, None, 13), (4, 3, None)):
            got += read(
                cluster.target, texts, consumers, steps=steps, start_position=len(got),
                batch_size=batch_size, **ORDER,
            ).elements  # fmt: skip
        assert got == alone.elements


def write_records(folder: Path) -> list[str]:
    paths = []
    for number in range(12):
        paths.append(str(folder / f"{number}.tfrecord"))
        with tf.io.TFRecordWriter(paths[-1]) as writer:
            for record in range(number * 7 % 11):
                writer.write(f"record {record} of file {number}".encode() * (1 + record))
    return paths


def chosen(x: tf.Tensor) -> tf.data.Dataset:
    """Both ways to choose among datasets, which is refused outside a function."""
    below, above = tf.data.Dataset.range(x % 5), tf.data.Dataset.range(x, x + 3)
    sampled = tf.data.Dataset.sample_from_datasets([below, above], seed=5)
    order = tf.data.Dataset.range(2).repeat(4)
    return tf.data.Dataset.choose_from_datasets([above, sampled], order, False)


def by_kind(kind: str, folder: Path) -> Any:
    """A dataset of this kind."""
    rng = np.random.default_rng(5)
    match kind:
        case "records of files":
            files = tf.data.Dataset.from_tensor_slices(write_records(folder))
            return files.shuffle(100).interleave(tf.data.TFRecordDataset, cycle_length=2)
        case "variable shapes":
            return tf.data.Dataset.range(200).map(
                lambda x: tf.fill(tf.random.uniform([2], 0, 5, tf.int32), x)
            )
        case "ragged":
            return tf.data.Dataset.range(200).map(
                lambda x: tf.RaggedTensor.from_row_lengths(tf.range(x % 7), [x % 7, 0])
            )
        case "choices":
            return tf.data.Dataset.range(40).flat_map(chosen)
        case "packed":
            documents = tf.data.Dataset.range(200).map(lambda x: tf.repeat(x, 1 + x * x % 37))
            return documents.unbatch().batch(32, drop_remainder=True)
        case "pictures":
            pictures = [
                tf.io.encode_jpeg(rng.integers(0, 255, (8 + n % 3, 8 + n % 5, 3), np.uint8)).numpy()
                for n in range(40)
            ]
            return (
                tf.data.Dataset.from_tensor_slices(pictures)
                .map(tf.io.decode_jpeg, num_parallel_calls=4)
                .map(tf.image.random_flip_left_right)
            )
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind",
    [
        "records of files", "pictures",
        *(pytest.param(kind, marks=pytest.mark.long) for kind in
          ("variable shapes", "ragged", "choices", "packed")),
    ],
)  # fmt: skip
def test_any_kind_of_elements(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    dataset_id = service.register_dataset(cluster.target, by_kind(kind, tmp_path))
    order: dict[str, Any] = {
        "seed": 3,
        "cycle_length": 3,
        "bundle_splits": 1 if kind == "records of files" else 9,
    }
    alone = read(cluster.target, dataset_id, **order)
    assert len(alone.elements) > 30
    assert read(cluster.target, dataset_id, 3, batch_size=4, **order).digest == alone.digest
    epochs = read(cluster.target, dataset_id, start_position=len(alone.elements), **order)
    assert len(epochs.elements) == len(alone.elements)
    assert epochs.digest != alone.digest
    if kind not in ("variable shapes", "pictures"):
        assert sorted(epochs.elements) == sorted(alone.elements)


def of_split(split: int) -> Iterator[bytes]:
    """A Python function's elements: none to four, of 1 KB."""
    for number in range(split % 5):
        yield f"{split}.{number}".encode().ljust(1 << 10)


def of_lines(folder: Path) -> Any:
    """The same elements by Beam, which reads a file in splits of two lines."""
    import apache_beam as beam

    path = folder / "splits"
    path.write_text("".join(f"{split:02}\n" for split in range(60)))
    lines = beam.Pipeline() | beam.io.ReadFromText(str(path))
    return lines | beam.FlatMap(lambda line: of_split(int(line)))


@pytest.mark.parametrize(
    ("dataset", "how"),
    [
        pytest.param(lambda _: of_split, {"splits": range(60)}, id="function"),
        pytest.param(of_lines, {"split_bytes": 6}, id="Beam", marks=pytest.mark.long),
    ],
)
def test_functions_of_splits_and_beam_pipelines(
    cluster: Cluster,
    small_windows: None,
    tmp_path: Path,
    dataset: Callable[[Path], Any],
    how: dict[str, Any],
) -> None:
    """Any number of workers, one of which is killed, and of consumers, also from a state on."""
    dataset_id = service.register_dataset(cluster.target, dataset(tmp_path), **how)
    order: dict[str, Any] = {"seed": 3, "cycle_length": 4, "bundle_splits": 3}
    cluster.resize(1)
    alone = read(cluster.target, dataset_id, **order)
    assert sorted(alone.elements) == sorted(e for split in range(60) for e in of_split(split))
    part = read(cluster.target, dataset_id, steps=7, batch_size=6, **order)
    for workers, consumers, state in ((1, 3, None), (2, 1, None), (2, 3, part.state)):
        cluster.resize(workers)
        got = read(
            cluster.target, dataset_id, consumers, batch_size=6 // consumers, state=state,
            at={5: cluster.replace_worker}, **order,
        )  # fmt: skip
        got.elements[:0] = part.elements if state else []
        assert got.digest == alone.digest

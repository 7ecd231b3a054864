"""A small job beside any version of TensorFlow: python job.py FOLDER. Its last line is JSON.

A dispatcher, a worker and a trainer, datasets of each kind, and each way to read, to a checkpoint.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import google.protobuf
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf
from tensorflow.data.experimental import service as stock

from forebay import service
from forebay.service.errors import PipelineError
from forebay.service.pipelines.tf_data.versions import RELEASES

SIZE, BATCH = 64, 4
ORDER: dict[str, Any] = {"ordered": True, "seed": 5, "batch_size": BATCH, "cycle_length": 2}


def element(number: Any) -> Any:
    return {
        "number": number,
        "text": tf.strings.as_string(number),
        "low": tf.cast(number, tf.bfloat16),
        "nothing": None,
        "ragged": tf.RaggedTensor.from_row_lengths(tf.range(number), [number]),
        "sparse": tf.sparse.from_dense([number, 1]),
    }


def numbers(elements: Any) -> list[int]:
    """Their numbers, once each element is as it should be."""
    found = []
    for each in elements:
        number = int(each["number"])
        assert each["text"] == str(number).encode()
        assert float(each["low"]) == number
        assert each["nothing"] is None
        assert len(each["ragged"][0]) == number
        assert sum(each["sparse"].values.numpy()) == number + 1
        found.append(number)
    return found


def steps(batches: Any) -> list[list[int]]:
    return [np.asarray(batch).tolist() for batch in batches]


def ordered(target: str, dataset_id: str, folder: pathlib.Path) -> None:
    """A trainer stops in the middle of an epoch, and another one goes on from its checkpoint."""
    with service.read(target, dataset_id, **ORDER) as batches:
        epoch = steps(batches)
    assert sorted(itertools.chain(*epoch)) == list(range(SIZE))
    left = len(epoch) // 3
    seen = []
    for most in (left, None):
        position = service.OrderedPosition()
        manager = tf.train.CheckpointManager(
            tf.train.Checkpoint(position=position), str(folder / "checkpoints"), max_to_keep=1
        )
        manager.checkpoint.restore(manager.latest_checkpoint)
        dataset = service.from_dataset_id(
            "distributed_epoch", target, dataset_id,
            add_position=True, start_position=position, **ORDER,
        )  # fmt: skip
        for batch, behind in dataset.take(most) if most else dataset:
            seen.append(batch.numpy().tolist())
            position.assign(behind)
        manager.save()
    assert seen == epoch


def squares(split: int) -> Iterator[int]:
    yield from (n * n for n in range(split, SIZE, 4))


def of_numpy(target: str) -> None:
    """NumPy 1 pickles less of a generator, and lets integers wrap around."""
    drawing = np.random.default_rng(1)

    def draws(split: int) -> Iterator[float]:
        yield drawing.random()

    def too_large(split: int) -> Iterator[int]:
        yield 300

    drawn = service.register_dataset(target, draws, splits=range(8))
    first, again, other = (
        list(service.read(target, drawn, ordered=True, seed=seed, shuffle=False))
        for seed in (1, 1, 2)
    )
    assert first == again != other
    byte = tf.TensorSpec([], tf.uint8)
    wrapping = service.register_dataset(target, too_large, splits=range(1), element_spec=byte)
    try:
        list(service.read(target, wrapping, ordered=True))
        raise AssertionError("300 became a byte")
    except PipelineError as error:
        assert "300" in str(error), error


def main(folder: pathlib.Path) -> None:
    with (
        service.DispatchServer(
            service.DispatcherConfig(work_dir=str(folder / "journal"))
        ) as server,
        service.WorkerServer(service.WorkerConfig(server.target)),
    ):
        target, everything = server.target, list(range(SIZE))
        dataset = tf.data.Dataset.range(SIZE).map(element)
        dataset_id = service.register_dataset(target, dataset)
        read = service.from_dataset_id("distributed_epoch", target, dataset_id)
        assert sorted(numbers(read)) == everything
        with service.read(target, dataset_id, processing_mode="distributed_epoch") as elements:
            assert sorted(int(each["number"]) for each in elements) == everything
        for client in (service, stock):
            read = dataset.apply(client.distribute("distributed_epoch", target))
            assert sorted(numbers(read)) == everything
        plain = tf.data.Dataset.range(SIZE).shuffle(8, seed=1)
        ordered(target, service.register_dataset(target, plain), folder)

        of_numpy(target)
        squared = service.register_dataset(target, squares, splits=range(4))
        with service.read(target, squared, processing_mode="distributed_epoch") as elements:
            assert sorted(map(int, elements)) == [n * n for n in everything]
        (folder / "files").mkdir()
        pq.write_table(pa.table({"n": everything}), folder / "files/0.parquet")
        files = service.register_files(target, str(folder / "files/*.parquet"))
        with service.read(target, files, **ORDER) as batches:
            assert (
                sorted(itertools.chain(*(batch["n"].tolist() for batch in batches))) == everything
            )
    assert tf.__version__.startswith(RELEASES[tf.version.GRAPH_DEF_VERSION] + ".")
    print(json.dumps([tf.__version__, google.protobuf.__version__, np.__version__]))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))

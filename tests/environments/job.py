"""A small job beside any version of TensorFlow: python job.py FOLDER. Its last line is JSON.

A dispatcher, a worker and a trainer, datasets of each kind, and each way to read, to a checkpoint.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
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
        found.append(n := int(each["number"]))
        assert (each["text"], float(each["low"]), each["nothing"]) == (str(n).encode(), n, None)
        assert (len(each["ragged"][0]), sum(each["sparse"].values.numpy())) == (n, n + 1)
    return found


def ordered(target: str, dataset_id: str, folder: Path) -> None:
    """A trainer stops in the middle of an epoch, and another one goes on from its checkpoint."""
    epoch = [batch.tolist() for batch in service.read(target, dataset_id, **ORDER)]
    assert sorted(itertools.chain(*epoch)) == list(range(SIZE))
    seen = []
    for most in (len(epoch) // 3, -1):
        position = service.OrderedPosition()
        manager = tf.train.CheckpointManager(
            tf.train.Checkpoint(position=position), str(folder / "checkpoints"), max_to_keep=1
        )
        manager.checkpoint.restore(manager.latest_checkpoint)
        how = {**ORDER, "add_position": True, "start_position": position}
        dataset = service.from_dataset_id("distributed_epoch", target, dataset_id, **how)
        for batch, behind in dataset.take(most):
            seen.append(batch.numpy().tolist())
            position.assign(behind)
        manager.save()
    assert seen == epoch


def of_numpy(target: str) -> None:
    """NumPy 1 pickles less of a generator, and lets integers wrap around."""
    drawing = np.random.default_rng(1)
    drawn = service.register_dataset(target, lambda _: [drawing.random()], splits=range(8))
    first, again, other = (
        list(service.read(target, drawn, ordered=True, seed=seed, shuffle=False))
        for seed in (1, 1, 2)
    )
    assert first == again != other
    byte = tf.TensorSpec([], tf.uint8)
    wraps = service.register_dataset(target, lambda _: [300], splits=range(1), element_spec=byte)
    try:
        raise AssertionError(list(service.read(target, wraps, ordered=True)))
    except PipelineError as error:
        assert "300" in str(error), error


def main(folder: Path) -> None:
    with (
        service.DispatchServer() as server,
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
        (folder / "files").mkdir()
        pq.write_table(pa.table({"n": everything}), folder / "files/0.parquet")
        files = service.register_files(target, f"{folder}/files/*.parquet")
        with service.read(target, files, **ORDER) as batches:
            found = [batch["n"].tolist() for batch in batches]
        assert sorted(itertools.chain(*found)) == everything
    assert tf.__version__.startswith(RELEASES[tf.version.GRAPH_DEF_VERSION] + ".")
    print(json.dumps([tf.__version__, google.protobuf.__version__, np.__version__]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The examples of tf.data service's own documentation, with only the import changed.

They are read from the TensorFlow that is installed: its text is the judge, and no copy of it.
"""

from __future__ import annotations

import doctest
import itertools
import re
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.data.experimental import service as documented

from forebay import service

TF_NAME = "tf.data.experimental.service"
DOCUMENTED = {
    "module": documented,
    "distribute": documented.distribute,
    "from_dataset_id": documented.from_dataset_id,
    "register_dataset": documented.register_dataset,
    "DispatchServer": documented.DispatchServer,
    "WorkerServer": documented.WorkerServer,
}


def text_of(name: str) -> str:
    return (DOCUMENTED[name].__doc__ or "").replace(TF_NAME, "service")


@pytest.mark.parametrize("name", DOCUMENTED)
def test_an_interactive_example(name: str) -> None:
    names = {"tf": tf, "service": service}
    test = doctest.DocTestParser().get_doctest(text_of(name), names, name, None, 0)
    assert test.examples
    said: list[str] = []
    results = doctest.DocTestRunner().run(test, out=said.append, clear_globs=False)
    left = test.globs
    for server in (*left.get("workers", ()), left.get("worker"), left.get("dispatcher")):
        if server is not None:
            server.stop()
    assert results.failed == 0, "".join(said)


def block_with(text: str, name: str = "module") -> str:
    """The fenced block that contains `text`."""
    blocks = re.findall(r"^ *```\n(.*?)^ *```", text_of(name), re.DOTALL | re.MULTILINE)
    found = [block for block in blocks if text in block]
    assert found, f"TensorFlow's documentation of {name} has no example with {text!r} any more"
    return textwrap.dedent(found[0])


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """What the examples assume to be there, with two workers."""
    with service.DispatchServer() as dispatcher:
        workers = [service.WorkerServer(service.WorkerConfig(dispatcher.address)) for _ in range(2)]
        yield {
            "tf": tf,
            "service": service,
            "FLAGS": SimpleNamespace(tf_data_service_address=dispatcher.target),
            "dataset_fn": lambda: tf.data.Dataset.range(10),
        }
        for worker in workers:
            worker.stop()


def run(block: str, names: dict[str, Any]) -> Any:
    """What the example's `dataset` is, then."""
    block = block.replace("dataset = ...", "dataset = tf.data.Dataset.range(10)")
    exec(block, names)
    return names["dataset"]


TWICE = sorted([*range(10)] * 2)


def test_distribute(names: dict[str, Any]) -> None:
    assert sorted(run(block_with("prefetch(1)"), names).as_numpy_iterator()) == TWICE


def test_a_job_of_several_trainers(names: dict[str, Any]) -> None:
    names["workers"] = ["a", "b"]
    run(block_with("per_worker_datasets"), names)
    datasets = names["per_worker_datasets"].values()
    got = [int(x) for dataset in datasets for x in dataset]
    assert sorted(got) == TWICE


def test_dynamic_sharding(names: dict[str, Any], tmp_path: Path) -> None:
    names["filenames"] = [str(tmp_path / f"{number}.tfrecord") for number in range(5)]
    for number, filename in enumerate(names["filenames"]):
        with tf.io.TFRecordWriter(filename) as writer:
            for record in range(4):
                writer.write(f"{number}-{record}".encode())
    names |= {
        "TFRecordDataset": tf.data.TFRecordDataset,
        "preprocess_fn": lambda record: tf.strings.join([record, "!"]),
        "batch_size": 2,
    }
    block = block_with("preprocess_fn").replace("...)", "service=FLAGS.tf_data_service_address)")
    got = [bytes(x) for batch in run(block, names).as_numpy_iterator() for x in batch]
    assert sorted(got) == sorted(f"{n}-{r}!".encode() for n in range(5) for r in range(4))


@pytest.mark.parametrize(
    "what", ["experimental_distribute_dataset", "distribute_datasets_from_function"]
)
def test_tf_distribute(names: dict[str, Any], what: str) -> None:
    names["strategy"] = tf.distribute.OneDeviceStrategy("cpu:0")
    assert sorted(int(x) for x in run(block_with(f"strategy.{what}("), names)) == TWICE


def test_concurrent_trainers(names: dict[str, Any]) -> None:
    """Each of them reads all; numbers by chance show that it was computed once."""
    computed = tf.data.Dataset.range(8).repeat().map(lambda i: (i, tf.random.uniform([])))
    trainers = iter(["a", "b"])
    names |= {
        "data_service_ops": service,
        "expensive_computation": lambda: computed,
        "trainer_id": lambda: next(trainers),
    }
    block = block_with("expensive_computation")
    to_come = set(run(block, names).take(100).as_numpy_iterator())
    assert len(to_come) == 100
    other = run(block, names).as_numpy_iterator()
    while to_come:
        to_come -= set(itertools.islice(other, 100))


CONSUMERS = 2


def test_coordinated_reads_of_sequences_by_their_lengths(names: dict[str, Any]) -> None:
    """Rounds of as many batches of similar lengths as there are consumers, as it is described."""
    for name, said in (
        ("module", "Coordinated reads"),
        ("distribute", "rounds of `num_consumers` consecutive similar-sized batches"),
        ("distribute", "by adding `.repeat()` at the end"),
    ):
        assert said in " ".join(text_of(name).split()), "TensorFlow describes it otherwise now"
    sequences = tf.data.Dataset.range(1, 400).map(lambda x: tf.fill([1 + x * 7 % 30], x))
    batches = sequences.bucket_by_sequence_length(
        lambda sequence: tf.shape(sequence)[0],
        bucket_boundaries=[10, 20],
        bucket_batch_sizes=[4, 4, 4],
        drop_remainder=True,
    )
    rounds = batches.group_by_window(
        lambda batch: bucket(tf.shape(batch)[1]),
        lambda _, window: window,
        window_size=CONSUMERS,
    ).repeat()
    address = names["FLAGS"].tf_data_service_address
    consumers = [
        iter(
            rounds.apply(
                service.distribute(
                    service.ShardingPolicy.OFF,
                    address,
                    job_name="by length",
                    consumer_index=index,
                    num_consumers=CONSUMERS,
                )
            )
        )
        for index in range(CONSUMERS)
    ]
    found = set()
    with ThreadPoolExecutor(CONSUMERS) as pool:
        for _ in range(30):
            step = [batch.numpy() for batch in pool.map(next, consumers)]
            assert len({int(bucket(batch.shape[1])) for batch in step}) == 1, "of one length"
            assert len({batch.tobytes() for batch in step}) == CONSUMERS, "and each its own"
            found.add(int(bucket(step[0].shape[1])))
    assert found == {0, 1, 2}


def bucket(length: Any) -> Any:
    """Of sequences padded to this length, which is that of the longest."""
    return tf.cast(length >= 10, tf.int64) + tf.cast(length >= 20, tf.int64)


def test_one_name_for_a_job(names: dict[str, Any]) -> None:
    """Alone, a trainer gets all of each epoch; the documentation's loop counts to 3."""
    address = names["FLAGS"].tf_data_service_address
    lines: list[list[int]] = []
    names["print"] = lambda elements: lines.append([int(x) for x in elements])
    run(block_with("my_job_name", "distribute").replace('"localhost:5000"', repr(address)), names)
    assert [sorted(line) for line in lines] == [sorted([*range(5)] * 2)] * 3

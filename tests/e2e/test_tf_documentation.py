"""The examples of tf.data service's own documentation, with only the import changed.

They are read from the TensorFlow that is installed: its text is the judge, and no copy of it.
"""

from __future__ import annotations

import doctest
import inspect
import itertools
import json
import re
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.data.experimental import service as documented
from tensorflow.python.data.experimental.ops import data_service_ops

from forebay import service
from forebay.service.processes import free_port

from .. import forks
from ..standbys import wait_until
from ..stock import slow

TF_NAME = "tf.data.experimental.service"
DOCUMENTED = {
    "module": documented,
    "distribute": documented.distribute,
    "from_dataset_id": documented.from_dataset_id,
    "register_dataset": documented.register_dataset,
    "DispatchServer": documented.DispatchServer,
    "WorkerServer": documented.WorkerServer,
    "CrossTrainerCache": data_service_ops.CrossTrainerCache,
}
INTERACTIVE = [name for name in DOCUMENTED if name != "CrossTrainerCache"]


def text_of(name: str) -> str:
    return (DOCUMENTED[name].__doc__ or "").replace(TF_NAME, "service")


@pytest.mark.parametrize("name", INTERACTIVE)
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


def blocks(name: str) -> list[str]:
    """The fenced ones of a docstring."""
    found = re.findall(r"^ *```\w*\n(.*?)^ *```", text_of(name), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for block in found]


TAKEN: list[tuple[str, str]] = []
"""Docstrings' names, and a text of each block of theirs that a test here runs."""


def examples(*which: tuple[str, str]) -> pytest.MarkDecorator:
    """The test is of the blocks that contain these texts: one after the other is its `block`."""
    TAKEN.extend(which)
    return pytest.mark.parametrize("block", which, ids=" ".join, indirect=True)


def block_with(name: str, text: str) -> str:
    found = [block for block in blocks(name) if text in block]
    assert found, f"TensorFlow's documentation of {name} has no example with {text!r} any more"
    return found[0]


@pytest.fixture
def block(request: pytest.FixtureRequest) -> str:
    return block_with(*request.param)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_each_block_has_a_test(name: str) -> None:
    assert {block_with(name, text) for of, text in TAKEN if of == name} == set(blocks(name))


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """The servers that the examples assume, with two workers."""
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
    """The example's `dataset` in this test."""
    block = block.replace("dataset = ...", "dataset = tf.data.Dataset.range(10)")
    exec(block, names)
    return names["dataset"]


TWICE = sorted([*range(10)] * 2)


@examples(("module", "prefetch(1)"))
def test_distribute(block: str, names: dict[str, Any]) -> None:
    assert sorted(run(block, names).as_numpy_iterator()) == TWICE


@examples(("module", "per_worker_datasets"))
def test_a_job_of_several_trainers(block: str, names: dict[str, Any]) -> None:
    names["workers"] = ["a", "b"]
    run(block, names)
    datasets = names["per_worker_datasets"].values()
    got = [int(x) for dataset in datasets for x in dataset]
    assert sorted(got) == TWICE


@examples(("module", "preprocess_fn"))
def test_dynamic_sharding(block: str, names: dict[str, Any], tmp_path: Path) -> None:
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
    block = block.replace("...)", "service=FLAGS.tf_data_service_address)")
    got = [bytes(x) for batch in run(block, names).as_numpy_iterator() for x in batch]
    assert sorted(got) == sorted(f"{n}-{r}!".encode() for n in range(5) for r in range(4))


@examples(
    ("module", "strategy.experimental_distribute_dataset("),
    ("module", "strategy.distribute_datasets_from_function("),
)
def test_tf_distribute(block: str, names: dict[str, Any]) -> None:
    names["strategy"] = tf.distribute.OneDeviceStrategy("cpu:0")
    assert sorted(int(x) for x in run(block, names)) == TWICE


COORDINATOR = """
import json
import os
import sys
from types import SimpleNamespace
import tensorflow as tf
from forebay import service

cluster, target, block = sys.argv[1:]
cluster = json.loads(cluster)
servers = [tf.distribute.Server(cluster, job_name=job, task_index=0) for job in ("worker", "ps")]
strategy = tf.distribute.ParameterServerStrategy(
    tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
)
names = {
    "tf": tf,
    "service": service,
    "FLAGS": SimpleNamespace(tf_data_service_address=target),
    "dataset_fn": lambda: tf.data.Dataset.range(10),
    "coordinator": tf.distribute.coordinator.ClusterCoordinator(strategy),
}
try:
    exec(block, names)
except TypeError as error:
    print(error)
    exec(block.replace("(input_context):", "(input_context=None):"), names)
iterator = iter(names["dataset"])


@tf.function
def step(iterator):
    return next(iterator)


steps = [names["coordinator"].schedule(step, args=(iterator,)) for _ in range(20)]
print(sorted(int(value.fetch()) for value in steps), flush=True)
os._exit(0)  # as TensorFlow cannot take the servers of a cluster down
"""


@examples(("module", "coordinator.create_per_worker_dataset("))
def test_tf_distribute_with_parameter_servers(block: str, names: dict[str, Any]) -> None:
    """TensorFlow calls the example's function without the argument that it takes there, whoever's
    service it is: so it has a default here. And its own `from_dataset_id` wants an `element_spec`.
    """
    cluster = {job: [f"127.0.0.1:{free_port()}"] for job in ("chief", "worker", "ps")}
    target = names["FLAGS"].tf_data_service_address
    done = forks.run(["-c", COORDINATOR, json.dumps(cluster), target, block])
    said = done.stdout.splitlines()
    assert "missing a required argument: 'input_context'" in said[0], done.stderr
    assert said[1:] == [str(TWICE)], done.stderr


@examples(("module", "expensive_computation"), ("CrossTrainerCache", "cross_trainer_cache="))
def test_concurrent_trainers(block: str, names: dict[str, Any]) -> None:
    """Each trainer reads all; equal random elements show that they were computed once."""
    numbers = slow(tf.data.Dataset.range(8).repeat(), 0.001)  # or a worker computes for seconds
    computed = numbers.map(lambda i: (i, tf.random.uniform([])))
    trainers = iter(["a", "b"])
    names |= {
        "data_service_ops": service,
        "expensive_computation": lambda: computed,
        "trainer_id": lambda: next(trainers),
    }
    to_come = set(run(block, names | {"dataset": computed}).take(100).as_numpy_iterator())
    assert len(to_come) == 100
    other = run(block, names | {"dataset": computed}).as_numpy_iterator()
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
        lambda batch: bucket(tf.shape(batch)[1]), lambda _, window: window, window_size=CONSUMERS
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


PRINTED = [("distribute", "[0, 2, 4]"), ("distribute", "[1, 3]")]
"""What two processes print, of one worker."""
TAKEN.extend(PRINTED)


@examples(("distribute", "my_job_name"))
def test_one_name_for_a_job(block: str, names: dict[str, Any]) -> None:
    """Two trainers share the elements of each epoch, as in what is shown; ours has two workers."""
    address = names["FLAGS"].tf_data_service_address
    block = block.replace('"localhost:5000"', repr(address))

    def printed(_: int) -> list[list[int]]:
        lines: list[list[int]] = []
        run(block, names | {"print": lambda elements: lines.append([int(x) for x in elements])})
        return lines

    shown = [[json.loads(line) for line in block_with(*which).splitlines()] for which in PRINTED]
    with ThreadPoolExecutor() as pool:
        got = list(pool.map(printed, range(2)))
    for several, workers in ((shown, 1), (got, 2)):
        together = [sorted(one + other) for one, other in zip(*several, strict=True)]
        assert together == [sorted([*range(5)] * workers)] * 3


@examples(("DispatchServer", "dispatcher.join()"), ("DispatchServer", "fault_tolerant_mode=True"))
def test_a_dispatcher_of_its_own(block: str, tmp_path: Path) -> None:
    port = free_port()
    names: dict[str, Any] = {"service": service}
    block = block.replace("5050", str(port)).replace("gs://my-bucket", str(tmp_path))
    program = threading.Thread(target=exec, args=(block, names))
    program.start()
    wait_until(lambda: "dispatcher" in names)
    with names["dispatcher"] as dispatcher:
        assert dispatcher.target == f"grpc://localhost:{port}"
        program.join(0.1 if "join" in block else None)
        assert program.is_alive() == ("join" in block)
        assert any(tmp_path.rglob("*.tfrecord")) == ("work_dir" in block)
    program.join()


@examples(("WorkerServer", "worker.join()"))
def test_a_worker_of_its_own(block: str) -> None:
    """Its example lacks the configuration, and runs with neither."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'port'"):
        exec(block, {"service": service})
    assert "port" not in inspect.signature(documented.WorkerServer).parameters

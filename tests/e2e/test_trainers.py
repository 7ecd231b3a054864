"""What trainers do with what they read: graphs, functions, NumPy, other libraries, and leaving."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from forebay import service
from forebay.service.errors import NotFound

from .. import forks
from ..pipelines.pipelines import document, masked, plain
from ..stock import DispatcherProcess

OFF, DYNAMIC = service.ShardingPolicy.OFF, service.ShardingPolicy.DYNAMIC
MIB = 1 << 20


@pytest.fixture(scope="module")
def target(dispatcher: DispatcherProcess, worker: None) -> str:
    return f"grpc://{dispatcher.address}"


def test_python_functions_stay_in_their_process(target: str) -> None:
    numbers = tf.data.Dataset.from_generator(
        lambda: iter(range(3)), output_signature=tf.TensorSpec([], tf.int64)
    )
    doubled = tf.data.Dataset.range(3).map(lambda x: tf.numpy_function(lambda n: n, [x], tf.int64))
    for dataset in (numbers, doubled):
        elements = dataset.apply(service.distribute(OFF, target))
        with pytest.raises(tf.errors.OpError, match=r"calls a Python function.*a WorkerServer in"):
            list(elements)
        # Where the function is, it can be called.
        with service.WorkerServer(service.WorkerConfig(target.removeprefix("grpc://"))):
            here = service.distribute(OFF, target, target_workers="LOCAL")
            assert len(list(dataset.apply(here))) == 3


def test_an_eager_loop_leaves_the_options_of_pipelines_alone(target: str) -> None:
    dataset = tf.data.Dataset.range(100).apply(service.distribute(DYNAMIC, target))
    assert sorted(int(x) for x in dataset) == list(range(100))
    doubled = dataset.map(lambda x: 2 * x)
    assert sorted(int(x) for x in doubled) == list(range(0, 200, 2))
    assert dataset.options() == doubled.options() == tf.data.Options()
    mine = tf.data.Options()
    mine.experimental_optimization.inject_prefetch = True
    assert dataset.with_options(mine).options() == mine


@pytest.mark.parametrize("protocol", ["unix", "tcp"])
def test_arrays_are_views_that_other_libraries_share(target: str, protocol: str) -> None:
    image = tf.reshape(tf.range(MIB, dtype=tf.int32), [1024, 1024])
    dataset = tf.data.Dataset.range(20).map(lambda i: (i, image + tf.cast(i, tf.int32)))
    dataset_id = service.register_dataset(target, dataset)
    with service.read(target, dataset_id, data_transfer_protocol=protocol) as elements:
        for number, values in elements:
            assert values.base is not None  # a view of what was received
            assert values.flags.writeable and values.flags.c_contiguous
            assert values.ctypes.data % 64 == 0
            shared = np.from_dlpack(values)  # as torch.from_dlpack and jax.dlpack do
            assert np.shares_memory(shared, values)
            adopted = tf.convert_to_tensor(values)
            assert values[-1, -1] == adopted[-1, -1] == MIB - 1 + number
            values[0, 0] = -1  # it is the trainer's own
            assert shared[0, 0] == -1


def test_numpy_scalars_and_strings_are_what_tensorflow_gives(target: str) -> None:
    dataset = tf.data.Dataset.range(3).map(lambda i: {"n": i, "text": tf.strings.as_string(i)})
    with service.read(target, service.register_dataset(target, dataset)) as elements:
        read = list(elements)
    expected = list(dataset.as_numpy_iterator())
    assert read == expected
    assert [type(e[key]) for e in read for key in e] == [
        type(e[key]) for e in expected for key in e
    ]


@pytest.mark.parametrize("compression", ["AUTO", "SNAPPY"])
def test_extension_types_of_which_workers_know_nothing(target: str, compression: str) -> None:
    batches = tf.data.Dataset.range(5).map(lambda i: (masked(i), document(i)))
    dataset = tf.data.Dataset.zip(batches, tf.data.Dataset.range(6).map(document).batch(2))
    dataset_id = service.register_dataset(target, dataset, compression)
    read = service.from_dataset_id(OFF, target, dataset_id)
    assert read.element_spec == dataset.element_spec
    assert [plain(element) for element in read] == [plain(element) for element in dataset]
    with service.read(target, dataset_id) as elements:
        (first, _), second = next(elements)
    assert type(first).__name__ == "Masked" and first.shape.name == "box"
    assert first.shape.dtype == "int8" and first.shape.shape == (1, None)
    assert second.number.tolist() == [0, 1] and type(second.words).__name__ == "Ragged"


LEAVE = """
import sys
import tensorflow as tf
from forebay import service

kind, target = sys.argv[1:]
datasets = {
    "waits for the next element": tf.data.Dataset.range(3).concatenate(
        tf.data.Dataset.range(10**15).filter(lambda x: x < 0)
    ),
    "has small ones to come": tf.data.Dataset.range(10**12),
    "has large ones to come": tf.data.Dataset.from_tensors(tf.zeros([4 << 20])).repeat(),
}
dataset_id = service.register_dataset(target, datasets[kind])
iterator = iter(service.from_dataset_id("parallel_epochs", target, dataset_id))
elements = service.read(target, dataset_id)
for _ in range(3):
    next(iterator), next(elements)
print("left")
"""


@pytest.mark.parametrize(
    "kind", ["waits for the next element", "has small ones to come", "has large ones to come"]
)
def test_a_program_ends_while_it_still_reads(target: str, kind: str, tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(LEAVE)
    arguments = [str(script), kind, target]
    runs = [forks.run(arguments, timeout_s=60)]
    if kind == "waits for the next element":  # and as a program that imports for itself
        command = [sys.executable, *arguments]
        runs.append(subprocess.run(command, capture_output=True, text=True, timeout=100))
    for run in runs:
        assert (run.returncode, run.stdout) == (0, "left\n"), run.stderr


FORK = """
import os
import sys
import tensorflow as tf
from forebay import service

target = sys.argv[1]
dataset = tf.data.Dataset.range(500).map(lambda i: tf.fill([150_000], i))
elements = service.read(
    target, service.register_dataset(target, dataset), processing_mode="distributed_epoch"
)
for _ in range(100):
    next(elements)
child = os.fork()
if child == 0:
    if sys.argv[2] == "closes":
        elements.close()
    sys.exit(0)
os.waitpid(child, 0)
print(100 + sum(1 for _ in elements))
"""


@pytest.mark.parametrize("how", ["exits", "closes"])
def test_a_fork_leaves_its_parents_reading_alone(target: str, how: str, tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(FORK)
    run = forks.run([str(script), target, how], timeout_s=60)
    assert (run.returncode, run.stdout) == (0, "500\n"), run.stderr


def numbers(dataset: tf.data.Dataset) -> list[int]:
    return sorted(int(x) for x in dataset)


def test_distribute_and_read_in_a_function(
    target: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tf.get_logger(), "propagate", True)

    def total(stop: tf.Tensor) -> tf.Tensor:
        found = tf.constant(0, tf.int64)
        for x in tf.data.Dataset.range(stop).apply(service.distribute(OFF, target)):
            found += x
        return found

    total = tf.function(total)
    assert [int(total(tf.constant(n, tf.int64))) for n in (10, 10, 4)] == [45, 45, 6]
    assert "AutoGraph" not in caplog.text


@pytest.mark.parametrize("how", ["interleave", "flat_map"])
def test_distribute_and_register_in_a_function_of_a_dataset(target: str, how: str) -> None:
    def distributed(x: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.range(10 * x, 10 * x + 2).apply(service.distribute(DYNAMIC, target))

    def registered(x: tf.Tensor) -> tf.data.Dataset:
        part = tf.data.Dataset.range(10 * x, 10 * x + 2)
        dataset_id = service.register_dataset(target, part)
        return service.from_dataset_id(DYNAMIC, target, dataset_id, part.element_spec)

    for part in (distributed, registered):
        assert numbers(getattr(tf.data.Dataset.range(3), how)(part)) == [0, 1, 10, 11, 20, 21]


def test_register_in_a_function(target: str) -> None:
    """As TensorFlow's own client can, with tensors for the address, too."""
    register = tf.function(service.register_dataset)
    where = (tf.constant("grpc"), tf.constant(target.removeprefix("grpc://")))
    dataset_id = register(where, tf.data.Dataset.range(7).map(lambda x: (x, tf.as_string(x))))
    assert dataset_id.dtype == tf.string
    again = service.from_dataset_id(DYNAMIC, target, dataset_id)
    assert sorted((int(x), bytes(y.numpy())) for x, y in again) == [
        (x, str(x).encode()) for x in range(7)
    ]


def test_an_id_that_is_chosen_when_the_function_runs(target: str) -> None:
    ids = [service.register_dataset(target, tf.data.Dataset.range(n)) for n in (3, 5)]
    spec = tf.TensorSpec([], tf.int64)

    def of(dataset_id: tf.Tensor) -> tf.data.Dataset:
        return service.from_dataset_id(OFF, target, dataset_id, spec)

    for how in ("interleave", "flat_map"):
        read = getattr(tf.data.Dataset.from_tensor_slices(ids), how)(of)
        assert [numbers(read) for _ in range(2)] == [[0, 0, 1, 1, 2, 2, 3, 4]] * 2


def epochs_that_runs_read(calls: Any, target: str, job_name: str | None) -> list[list[int]]:
    """By these calls, of one function that makes a dataset, and is run three times."""
    dataset = tf.data.Dataset.range(3)
    dataset_id = calls.register_dataset(target, dataset)

    def elements() -> tf.Tensor:
        mine = calls.from_dataset_id(
            "parallel_epochs", target, dataset_id, dataset.element_spec, job_name
        )
        nothing = tf.zeros([0], tf.int64)
        return mine.reduce(nothing, lambda before, x: tf.concat([before, [x]], 0))

    run = tf.function(elements, autograph=False)
    return [run().numpy().tolist() for _ in range(3)]


def test_each_run_of_a_function_reads_an_epoch(target: str) -> None:
    """The next one of a job with a name: with TensorFlow's own calls it is the first each time,
    which is over."""
    epoch, theirs = [0, 1, 2], tf.data.experimental.service
    for calls, job_name, expected in (
        (service, None, [epoch, epoch, epoch]),
        (service, "ours", [epoch, epoch, epoch]),
        (theirs, None, [epoch, epoch, epoch]),
        (theirs, "theirs", [epoch, [], []]),
    ):
        assert epochs_that_runs_read(calls, target, job_name) == expected, (calls, job_name)


def test_such_an_id_needs_the_element_spec(target: str) -> None:
    def of(dataset_id: tf.Tensor) -> tf.data.Dataset:
        return service.from_dataset_id(OFF, target, dataset_id)

    with pytest.raises(Exception, match="`element_spec` must be given"):  # AutoGraph's own
        tf.data.Dataset.from_tensors("1").flat_map(of)


def test_another_element_spec_is_found_when_it_is_read(target: str) -> None:
    dataset_id = service.register_dataset(target, tf.data.Dataset.range(3))
    wrong = tf.data.Dataset.from_tensors(dataset_id).flat_map(
        lambda i: service.from_dataset_id(OFF, target, i, tf.TensorSpec([], tf.int32))
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not fit the dataset"):
        list(wrong)


def test_errors_are_tensorflows_and_ours(target: str) -> None:
    for kind in (NotFound, tf.errors.NotFoundError):
        with pytest.raises(kind, match="Dataset id nobody's not found"):
            service.from_dataset_id(OFF, target, "nobody's")
    with pytest.raises(NotFound, match="Dataset id nobody's not found"):
        service.read(target, "nobody's")
    service.register_dataset(target, tf.data.Dataset.range(3), dataset_id="numbers")
    for other in (ValueError, tf.errors.InvalidArgumentError, service.ForebayError):
        with pytest.raises(other, match="should have the same structure"):
            service.register_dataset(
                target, tf.data.Dataset.from_tensors("text"), dataset_id="numbers"
            )

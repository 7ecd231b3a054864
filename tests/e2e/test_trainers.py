"""What trainers do with what they read: graphs, NumPy, other libraries, and leaving."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from forebay import service

from .. import forks
from ..pipelines.pipelines import document, masked, plain
from ..stock import DispatcherProcess

OFF, DYNAMIC = service.ShardingPolicy.OFF, service.ShardingPolicy.DYNAMIC
MIB = 1 << 20


@pytest.fixture(scope="module")
def target(dispatcher: DispatcherProcess, worker: None) -> str:
    return f"grpc://{dispatcher.address}"


def test_a_function_that_says_what_it_reads(
    target: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = tf.data.Dataset.range(100)
    dataset_id = service.register_dataset(target, numbers)
    monkeypatch.setattr(tf.get_logger(), "propagate", True)

    @tf.function  # type: ignore[untyped-decorator]
    def total() -> Any:
        result = tf.constant(0, tf.int64)
        for element in service.from_dataset_id(DYNAMIC, target, dataset_id, numbers.element_spec):
            result += element
        return result

    assert total().numpy() == sum(range(100))
    assert "AutoGraph" not in caplog.text


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

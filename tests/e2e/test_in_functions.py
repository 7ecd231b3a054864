"""The client's calls where TensorFlow traces: in tf.functions, and in functions of datasets."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

from forebay import service
from forebay.service.errors import NotFound

OFF, DYNAMIC = service.ShardingPolicy.OFF, service.ShardingPolicy.DYNAMIC


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    with (
        service.DispatchServer() as dispatcher,
        service.WorkerServer(service.WorkerConfig(dispatcher.address)),
    ):
        yield dispatcher.target


@pytest.fixture(autouse=True)
def nobody_is_warned() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def numbers(dataset: tf.data.Dataset) -> list[int]:
    return sorted(int(x) for x in dataset)


def test_distribute_and_read_in_a_function(target: str) -> None:
    def total(stop: tf.Tensor) -> tf.Tensor:
        found = tf.constant(0, tf.int64)
        for x in tf.data.Dataset.range(stop).apply(service.distribute(OFF, target)):
            found += x
        return found

    total = tf.function(total)
    assert [int(total(tf.constant(n, tf.int64))) for n in (10, 10, 4)] == [45, 45, 6]


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

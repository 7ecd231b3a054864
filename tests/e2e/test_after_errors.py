"""Asking for more behind an element that failed: the error again, as in tf.data service.

An end there would look like the epoch's to a loop that catches errors.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.data.experimental import service as stock
from tensorflow.python.data.experimental.ops import data_service_ops

from forebay import service
from forebay.service.client import progress
from forebay.service.errors import FailedPrecondition, PipelineError

from ..stock import DispatcherProcess, OwnDispatcher, stock_workers

count = tf.data.Dataset.range
ASKED = 4
"""Times, behind the first error."""


def three_fails(i: Any) -> Any:
    with tf.control_dependencies([tf.debugging.assert_none_equal(i, tf.constant(3, tf.int64))]):
        return tf.identity(i)


FAILING: dict[str, Callable[[], Any]] = {
    "map": lambda: count(8).map(three_fails),
    "parallel map": lambda: count(8).map(three_fails, num_parallel_calls=2),
    "batch": lambda: count(8).map(three_fails).batch(2),
    "prefetch": lambda: count(8).map(three_fails).prefetch(2),
    "interleave": lambda: count(4).interleave(
        lambda i: count(2 * i, 2 * i + 2).map(three_fails), cycle_length=1, num_parallel_calls=1
    ),
    "repeat": lambda: count(5).map(three_fails).repeat(2),
    "last": lambda: count(4).map(three_fails),
    "first": lambda: count(3, 6).map(three_fails),
    "ragged": lambda: count(8).map(lambda i: tf.range(three_fails(i))),
    "no file": lambda: tf.data.Dataset.from_tensors("/none").flat_map(tf.data.TextLineDataset),
}


@pytest.fixture(scope="module")
def theirs() -> Iterator[str]:
    dispatcher = OwnDispatcher()
    with stock_workers(dispatcher.address):
        yield dispatcher.target
    dispatcher.kill()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with DispatcherProcess(tmp_path_factory.mktemp("ours")) as dispatcher:
        worker = service.WorkerServer(service.WorkerConfig(dispatcher.address, "localhost:%port%"))
        yield dispatcher.target
        worker.stop()


def story(elements: Iterator[Any]) -> list[str]:
    """The elements, and the kinds of errors until so many requests after the first error."""
    told: list[str] = []
    errors = 0
    while errors <= ASKED:
        try:
            told.append(str(next(elements)))
        except StopIteration:
            return [*told, "end"]
        except (tf.errors.OpError, PipelineError) as error:
            told.append(type(error).__name__)
            errors += 1
    return told


@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "distributed_epoch") for name in FAILING), ("map", "parallel_epochs")],
)
def test_an_error_is_repeated_as_by_tensorflows_service(
    theirs: str, ours: str, name: str, mode: str
) -> None:
    dataset = FAILING[name]()
    distributed = data_service_ops._distribute(mode, theirs, task_refresh_interval_hint_ms=20)
    error = story(iter(dataset.apply(distributed)))[-ASKED - 1 :]  # which may overtake elements
    assert error == error[:1] * (ASKED + 1)
    before = [*itertools.takewhile(lambda told: told != error[0], story(iter(dataset)))]
    assert story(iter(dataset.apply(service.distribute(mode, ours)))) == before + error
    # TensorFlow's own client at our worker.
    assert story(iter(dataset.apply(stock.distribute(mode, ours))))[-ASKED - 1 :] == error
    dataset_id = service.register_dataset(ours, dataset)
    named = service.from_dataset_id(mode, ours, dataset_id, job_name=f"{name} {mode}")
    assert story(iter(named)) == before + error
    with service.read(ours, dataset_id, processing_mode=mode) as elements:
        told = story(elements)
    assert told[len(before) :] == ["PipelineError"] * (ASKED + 1)


def test_a_python_function_that_fails_fails_for_good(ours: str) -> None:
    def function(split: int) -> Iterator[int]:
        yield split
        raise ValueError("so it is")

    spec = tf.TensorSpec([], tf.int64)
    dataset_id = service.register_dataset(ours, function, splits=[1], element_spec=spec)
    elements = service.read(ours, dataset_id)
    assert next(elements) == 1
    for _ in range(ASKED):
        with pytest.raises(PipelineError, match="so it is"):
            next(elements)
    elements.close()
    assert [*elements] == []  # who leaves an iteration has its end


def test_an_iteration_that_was_interrupted_has_no_end() -> None:
    def interrupted() -> Iterator[int]:
        yield 1
        raise KeyboardInterrupt

    elements = progress.StaysFailed(interrupted())  # type: ignore[arg-type]
    assert next(elements) == 1
    with pytest.raises(KeyboardInterrupt):
        next(elements)
    for _ in range(ASKED):
        with pytest.raises(FailedPrecondition, match="broken off by a KeyboardInterrupt"):
            next(elements)


def test_a_reader_that_asks_again_and_again_is_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An ignore_errors() behind the service does so; with it tf.data service's client hangs."""
    monkeypatch.setattr(progress, "SLOWED_S", 0)
    elements = progress.failing(PipelineError("UNKNOWN", "no"))
    with caplog.at_level(logging.WARNING, progress.__name__):
        for _ in range(2 * progress.ASKED_OFTEN):
            with pytest.raises(PipelineError, match="UNKNOWN: no"):
                next(elements)
    (said,) = caplog.messages
    assert "ignore_errors() belongs into the dataset that is registered" in said


class OfAUser(Exception):
    """Cannot be copied as exceptions are, by its `args`."""

    def __init__(self, file: str, line: int) -> None:
        super().__init__(f"{file}:{line}")
        self.line = line


def test_errors_of_any_class_repeat() -> None:
    def fails() -> Iterator[Any]:
        yield 1
        raise OfAUser("data.csv", 7)

    elements = progress.StaysFailed(fails())  # type: ignore[arg-type]
    assert next(elements) == 1
    for _ in range(3):
        with pytest.raises(OfAUser, match=r"^data.csv:7$") as raised:
            next(elements)
        assert raised.value.line == 7

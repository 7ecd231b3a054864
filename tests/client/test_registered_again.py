"""One id, or one job, and another dataset: the first one is read, and the log says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

from forebay import service

from .. import forks
from ..stock import DispatcherProcess

count = tf.data.Dataset.range
DYNAMIC = service.ShardingPolicy.DYNAMIC

pytestmark = pytest.mark.usefixtures("worker")


def function(start: int, splits: range, **how: Any) -> Any:
    def numbers(split: int) -> Iterator[int]:
        yield start + split

    return service.python_dataset(splits, **how)(numbers)


CHANGES: dict[str, tuple[Any, Any, str]] = {
    "values": (lambda: count(3), lambda: count(10, 13), "another graph"),
    "a function in it": (
        lambda: count(3).map(lambda i: i * 2),
        lambda: count(3).map(lambda i: i * 3),
        "another graph",
    ),
    "splits": (lambda: function(0, range(3)), lambda: function(0, range(5)), "another splits"),
    "a function": (
        lambda: function(0, range(3)),
        lambda: function(7, range(3)),
        "another function",
    ),
    "what kind it is": (
        lambda: count(3).filter(lambda i: i >= 0),  # of no known length, as a function
        lambda: function(0, range(3)),
        "another kind",
    ),
    "both": (
        lambda: function(0, range(3)),
        lambda: function(7, range(5)),
        "another function and splits",
    ),
    "options": (
        lambda: function(0, range(3)),
        lambda: function(0, range(3), on_error="skip"),
        "another options",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_registering_another_dataset_under_the_same_id_warns(
    dispatcher: DispatcherProcess, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, said = CHANGES[change]

    def register(dataset: Any) -> list[str]:
        caplog.clear()
        assert service.register_dataset(dispatcher.target, dataset, dataset_id=change) == change
        return caplog.messages

    assert register(first()) == register(first()) == []
    for _ in range(2):  # the journal knows as well
        (warned,) = register(second())
        assert f"{change!r} was registered before, with {said}, and that is what is read" in warned
        dispatcher.kill_and_restart()
    expected = {0, 2, 4} if change == "a function in it" else {0, 1, 2}
    read = service.read(dispatcher.target, change, processing_mode=DYNAMIC)
    assert {int(e) for e in read} == expected
    service.remove_dataset(dispatcher.target, change)
    assert register(second()) == []


def test_the_same_dataset_from_another_process_does_not_warn(
    dispatcher: DispatcherProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """TensorFlow generates other names there."""
    program = (
        "import sys, tensorflow as tf; from forebay import service\n"
        "tf.data.Dataset.range(9).map(lambda i: -i)\n"
        "dataset = tf.data.Dataset.range(3).cache().map(lambda i: {'a': i * 2, 'b': -i})\n"
        "service.register_dataset(sys.argv[1], dataset, dataset_id='of two processes')\n"
    )
    ended = forks.run(["-c", program, dispatcher.target])
    assert ended.returncode == 0, ended.stderr
    dataset = count(3).cache().map(lambda i: {"a": i * 2, "b": -i})
    service.register_dataset(dispatcher.target, dataset, dataset_id="of two processes")
    assert not caplog.messages


def test_joining_a_job_of_another_dataset_warns_once(
    dispatcher: DispatcherProcess, caplog: pytest.LogCaptureFixture
) -> None:
    def read(dataset: Any) -> Any:
        return dataset.apply(service.distribute(DYNAMIC, dispatcher.target, "one job"))

    first, second = read(count(3)), read(count(10, 13))
    assert sorted(int(e) for e in first) == [0, 1, 2]
    first.repeat(0)
    assert not caplog.messages
    assert [sorted(int(e) for e in second) for _ in range(3)] == [[], [0, 1, 2], [0, 1, 2]]
    (said,) = [said for said in caplog.messages if "is of dataset" in said]
    assert "the job 'one job' is of dataset" in said and "give the job another name" in said

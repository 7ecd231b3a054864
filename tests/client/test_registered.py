"""Registered datasets: their ids and element_spec, and who registers another one under an id."""

from __future__ import annotations

import json
import logging
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from forebay import service
from forebay.service.blocks import Block, Component, Strings
from forebay.service.client import registration
from forebay.service.client.api import DatasetId
from forebay.service.client.registration import register_dataset
from forebay.service.client.tf_elements import dataset_of_blocks
from forebay.service.errors import FailedPrecondition, InvalidArgument
from forebay.service.pipelines.python import stored
from forebay.service.pipelines.tf_data.element_specs import check_element_spec
from forebay.service.proto.python_pb2 import PythonDataset

from .. import forks
from ..stock import DispatcherProcess

count = tf.data.Dataset.range
DYNAMIC = service.ShardingPolicy.DYNAMIC


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


@pytest.mark.usefixtures("worker")
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


@pytest.mark.usefixtures("worker")
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


def test_an_id_is_a_string_and_has_what_a_tensor_of_one_has() -> None:
    """As callers of tf.data service use it."""
    found = DatasetId("1000")
    assert found == "1000" and json.dumps([found]) == '["1000"]'
    assert type(pickle.loads(pickle.dumps(found))) is str
    assert (found.numpy(), found.dtype, found.shape) == (b"1000", tf.string, tf.TensorShape([]))
    for tensor in (tf.convert_to_tensor(found), tf.function(lambda: found)()):
        assert tensor.numpy() == b"1000"


def test_what_is_no_dataset_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow would not help."""
    with pytest.raises(InvalidArgument, match=r"\[1, 2, 3\] is no dataset"):
        register_dataset("localhost:1", [1, 2, 3])
    monkeypatch.setattr(registration, "has_tensorflow", lambda: False)
    with pytest.raises(FailedPrecondition, match=r"no TensorFlow: pip install 'forebay\[tens"):
        register_dataset("localhost:1", "/a/directory")


@pytest.mark.parametrize(
    ("there", "refused"), [("3.1.2", False), ("3.0.0", False), ("2.9.9", True), (None, True)]
)
def test_another_cloudpickle(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    there: str | None,
    refused: bool,
) -> None:
    monkeypatch.setattr(stored, "package_version", lambda _: there)
    dataset = PythonDataset(splits=b"1", packages={"cloudpickle": "3.1.1"})
    with caplog.at_level(logging.WARNING):
        if refused:
            with pytest.raises(FailedPrecondition, match=f"cloudpickle 3.1.1.* {there or 'none'}:"):
                stored.require_runnable(dataset)
        else:
            stored.require_runnable(dataset)
    assert (str(there) in caplog.text) == (not refused)
    with pytest.raises(FailedPrecondition, match=r"numpy 1\.0"):
        stored.require_runnable(PythonDataset(splits=b"1", packages={"numpy": "1.0"}))


Spec = tf.TensorSpec
Ragged = tf.RaggedTensorSpec
Sparse = tf.SparseTensorSpec
Point = namedtuple("Point", ["x", "y"])
SamePoint = namedtuple("Point", ["x", "y"])  # type: ignore[name-match]
Other = namedtuple("Other", ["x", "y"])
NUMBER = Spec([], tf.int32)


@pytest.mark.parametrize(
    ("registered", "given"),
    [
        (Spec([2, 3], tf.int32), Spec([None, 3], tf.int32)),
        (Spec([2, 3], tf.int32), Spec(None, tf.int32)),
        (Spec([None], tf.int32), Spec([3], tf.int32)),
        (Spec([], tf.int32, name="a"), Spec([], tf.int32, name="b")),
        (Ragged([2, None], tf.int32), Ragged([None, None], tf.int32)),
        (Sparse([None, 3], tf.int32), Sparse([None, None], tf.int32)),
        ({"a": NUMBER, "b": NUMBER}, OrderedDict(b=NUMBER, a=NUMBER)),
        (Point(NUMBER, NUMBER), SamePoint(NUMBER, NUMBER)),
        ((NUMBER, tf.NoneTensorSpec()), (NUMBER, None)),
    ],
)
def test_specs_that_say_less_or_more_of_shapes_fit(registered: Any, given: Any) -> None:
    check_element_spec(given, registered)


@pytest.mark.parametrize(
    ("registered", "given"),
    [
        (Spec([], tf.float32), NUMBER),
        (Spec([], tf.float32), Spec([], tf.bool)),
        (Spec([], tf.int64), Spec([], tf.int8)),
        (Spec([], tf.string), NUMBER),
        (Spec([2, 3], tf.int32), Spec([2, 4], tf.int32)),
        (Spec([2, 3], tf.int32), Spec([None], tf.int32)),
        ({"a": NUMBER}, {"b": NUMBER}),
        ({"a": NUMBER}, {"a": NUMBER, "b": NUMBER}),
        ((NUMBER, NUMBER), (NUMBER,)),
        ((NUMBER, NUMBER), [NUMBER, NUMBER]),
        ((NUMBER,), NUMBER),
        (Point(NUMBER, NUMBER), Other(NUMBER, NUMBER)),
        (NUMBER, tf.NoneTensorSpec()),
        (tf.NoneTensorSpec(), NUMBER),
        (Spec([2, None], tf.int32), Ragged([2, None], tf.int32)),
        (Ragged([2, None], tf.int32), Spec([2, None], tf.int32)),
        (Ragged([2, None, None], tf.int32), Ragged([2, None, None], tf.int32, ragged_rank=1)),
        (Ragged([2, None], tf.int32), Ragged([2, None], tf.int32, row_splits_dtype=tf.int32)),
        (Sparse([2, 3], tf.int32), Sparse([2, 3], tf.int64)),
        (NUMBER, {"a": 3}),
        (NUMBER, tf.int32),
    ],
)
def test_others_are_refused_with_both(registered: Any, given: Any) -> None:
    with pytest.raises(InvalidArgument) as raised:
        check_element_spec(given, registered)
    assert str(given) in str(raised.value) and str(registered) in str(raised.value)


FLOATS = Component(np.array([0.75, 2], np.float32))
PAIRS = Component(np.ones([2, 2], np.int32))
VARYING = Component(np.ones([3], np.int32), np.array([[1], [2]]))
STRINGS = Component(Strings(np.array([1, 0]), np.zeros(1, np.uint8)))


@pytest.mark.parametrize(
    ("components", "spec", "message"),
    [
        ([FLOATS], NUMBER, "int32 instead of float32"),
        ([FLOATS], Spec([], tf.bool), "bool instead of float32"),
        ([FLOATS], Spec([], tf.string), "string instead of float32"),
        ([STRINGS], NUMBER, "int32 instead of string"),
        ([PAIRS], Spec([3], tf.int32), r"\(3,\) instead of \(2,\)"),
        ([PAIRS], Spec([1, 2], tf.int32), r"\(1, 2\) instead of \(2,\)"),
        ([VARYING], Spec([2], tf.int32), r"\(2,\) instead of several shapes"),
        ([STRINGS], Spec([1], tf.string), r"\(1,\) instead of \(\)"),
        ([FLOATS, PAIRS], Spec([], tf.float32), "1 tensors instead of 2"),
    ],
)
def test_elements_of_another_kind_are_an_error(
    components: list[Component], spec: Any, message: str
) -> None:
    """Where nothing is registered to compare with, or shapes say too much."""

    def blocks() -> Generator[Block, None, None]:
        yield Block(2, tuple(components))

    dataset = dataset_of_blocks(blocks, spec)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        list(dataset)

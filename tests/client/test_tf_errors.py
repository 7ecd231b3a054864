"""Errors that are TensorFlow's as well as ours."""

from __future__ import annotations

import copy
import pickle

import pytest
import tensorflow as tf

from forebay import service
from forebay.service.client.tf_errors import raising_tensorflows
from forebay.service.errors import ForebayError, InvalidArgument, NotFound
from forebay.service.pipelines.tf_data.split_sources import NotSplittable


@pytest.mark.parametrize(
    ("kind", "tensorflows"),
    [
        (NotFound, tf.errors.NotFoundError),
        (InvalidArgument, tf.errors.InvalidArgumentError),
        (NotSplittable, tf.errors.UnimplementedError),
    ],
)
def test_they_say_what_was_wrong_in_another_process_too(
    kind: type[ForebayError], tensorflows: type[Exception]
) -> None:
    with pytest.raises(tensorflows) as raised, raising_tensorflows():
        raise kind("no such thing")
    error = raised.value
    for found in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert isinstance(found, kind) and isinstance(found, tensorflows)
        assert str(found) == "no such thing"
        assert repr(found) == f"{kind.__name__}('no such thing')"


def test_arguments_are_no_exception() -> None:
    with pytest.raises(tf.errors.UnimplementedError, match="num_consumers"):
        service.from_dataset_id("parallel_epochs", "h:1", "1", consumer_index=0, num_consumers=2)

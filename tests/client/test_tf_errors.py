"""Errors that are TensorFlow's as well as ours."""

from __future__ import annotations

import copy
import pickle

import pytest
import tensorflow as tf

from forebay.service.client.tf_errors import raising_tensorflows
from forebay.service.errors import ForebayError, InvalidArgument, NotFound


@pytest.mark.parametrize(
    ("kind", "tensorflows"),
    [(NotFound, tf.errors.NotFoundError), (InvalidArgument, tf.errors.InvalidArgumentError)],
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

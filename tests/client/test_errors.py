"""Errors as they leave the process that met them."""

from __future__ import annotations

import copy
import pickle

import pytest
import tensorflow as tf

from forebay.service.client.tf_errors import raising_tensorflows
from forebay.service.errors import AnotherJournal, ForebayError, InvalidArgument, PipelineError


@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize(
    ("raised", "tensorflows"),
    [
        (InvalidArgument("which"), tf.errors.InvalidArgumentError),
        (AnotherJournal("of which"), tf.errors.UnavailableError),
        (PipelineError("DATA_LOSS", "what"), ForebayError),
    ],
)
def test_an_error_is_the_same_in_another_process(
    raised: ForebayError, tensorflows: type[Exception], again: object
) -> None:
    with pytest.raises(tensorflows) as caught, raising_tensorflows():
        raise raised
    assert callable(again)
    other = again(caught.value)
    assert type(other) is caught.type
    assert str(other) == str(raised)
    assert vars(other) == vars(caught.value)

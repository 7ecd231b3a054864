"""Errors as users meet them: ours, TensorFlow's as well, and the same in another process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import tensorflow as tf

from forebay import service
from forebay.service.client.tf_errors import raising_tensorflows
from forebay.service.errors import (
    AnotherJournal,
    ForebayError,
    InvalidArgument,
    NotFound,
    PipelineError,
)
from forebay.service.pipelines.tf_data.split_sources import NotSplittable


@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize(
    ("raised", "tensorflows"),
    [
        (NotFound("which"), tf.errors.NotFoundError),
        (InvalidArgument("which"), tf.errors.InvalidArgumentError),
        (AnotherJournal("of which"), tf.errors.UnavailableError),
        (NotSplittable("why"), tf.errors.UnimplementedError),
        (PipelineError("DATA_LOSS", "what"), ForebayError),
    ],
)
def test_an_error_is_the_same_in_another_process(
    raised: ForebayError,
    tensorflows: type[Exception],
    again: Callable[[BaseException], BaseException],
) -> None:
    with pytest.raises(tensorflows) as caught, raising_tensorflows():
        raise raised
    assert isinstance(caught.value, type(raised))
    other = again(caught.value)
    assert type(other) is caught.type
    assert str(other) == str(raised)
    assert repr(other) == repr(caught.value) and str(raised.args[-1]) in repr(other)
    assert vars(other) == vars(caught.value)


def test_arguments_are_no_exception() -> None:
    for name, index, consumers, message in (
        (None, 0, 2, "`job_name` must be set when setting `num_consumers`"),
        ("j", 2, 2, "consumer_index=2 must be from 0 to 1"),
        ("j", 0, 0, "num_consumers=0 must be a positive integer"),
    ):
        with pytest.raises(ValueError, match=message):
            service.from_dataset_id(
                "parallel_epochs", "h:1", "1",
                job_name=name, consumer_index=index, num_consumers=consumers,
            )  # fmt: skip

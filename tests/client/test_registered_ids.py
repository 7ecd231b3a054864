"""A registered dataset's id, and what cannot be registered."""

from __future__ import annotations

import json
import logging
import pickle

import pytest
import tensorflow as tf

from forebay.service.client import registration
from forebay.service.client.dataset_ids import DatasetId
from forebay.service.client.registration import register_dataset
from forebay.service.errors import FailedPrecondition, InvalidArgument
from forebay.service.pipelines.python import stored
from forebay.service.proto.python_pb2 import PythonDataset


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

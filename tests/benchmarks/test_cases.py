"""The datasets that are read, as they are without any service between."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from forebay.benchmarks.cases import CASES, ENDLESS
from forebay.benchmarks.contents import RECORDS
from forebay.benchmarks.photographs import write_photographs
from forebay.benchmarks.training import BATCH, PIXELS, keras_step
from forebay.storage.tfrecord import read_frames


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("files")
    RECORDS.write(directory, quick=True, forms=set())
    write_photographs(directory)
    return directory


def size_of(batch: Any) -> int:
    return int(tf.nest.flatten(batch)[0].shape[0])


@pytest.mark.parametrize("name", CASES)
def test_a_trainer_gets_as_many_elements_at_once_as_are_counted(
    name: str, files: pathlib.Path
) -> None:
    case = CASES[name]
    dataset = case.dataset(files, 0)
    cardinality = int(dataset.cardinality())
    assert cardinality == tf.data.INFINITE_CARDINALITY or cardinality >= ENDLESS
    if case.gather is None:
        assert case.batch == 1
    else:
        assert size_of(next(iter(case.gather(dataset)))) == case.batch


@pytest.mark.parametrize("name", ["scalars", "splits"])
def test_a_size_makes_an_end(name: str, files: pathlib.Path) -> None:
    assert len(list(CASES[name].dataset(files, 7))) == 7


def test_records_are_whole_and_differ(files: pathlib.Path) -> None:
    with RECORDS.files(files).open("rb") as opened:
        contents = [data for _, data in read_frames(opened.fileno())]
    assert {len(data) for data in contents} == {1024}
    assert len(set(contents)) == RECORDS.quick_count


def test_a_content_has_each_form_that_was_asked_for(tmp_path: pathlib.Path) -> None:
    """Also where another row has written it, in fewer."""
    RECORDS.write(tmp_path, quick=True, forms=set())
    written = RECORDS.files(tmp_path).stat().st_mtime_ns
    assert RECORDS.write(tmp_path, quick=True, forms={"torch"}) == RECORDS.quick_count
    assert RECORDS.files(tmp_path).stat().st_mtime_ns == written
    assert RECORDS.numbered(tmp_path).read_bytes() == b"".join(
        RECORDS.records(np.random.default_rng(0), RECORDS.quick_count)
    )


def test_photographs_train_a_model(files: pathlib.Path) -> None:
    images, labels = batch = next(iter(CASES["jpeg"].dataset(files, 0)))
    assert images.shape == (BATCH, PIXELS, PIXELS, 3)
    assert set(labels.numpy()) == {0, 1}
    assert float(tf.math.reduce_std(images)) > 10  # there is something to be seen
    keras_step()(batch)

"""The datasets that are read, as they are without any service between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from forebay.benchmarks.cases import CASES, ENDLESS
from forebay.benchmarks.contents import AT_LEAST_ONCE, AT_MOST_ONCE, ORDERED, RECORDS
from forebay.benchmarks.ordered import CASES as ROWS
from forebay.storage.tfrecord import read_frames


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("files")
    RECORDS.write(directory, quick=True)
    return directory


def size_of(batch: Any) -> int:
    return int(tf.nest.flatten(batch)[0].shape[0])


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("file_")])
def test_a_trainer_gets_as_many_elements_at_once_as_are_counted(name: str, files: Path) -> None:
    case = CASES[name]
    dataset = case.dataset(files, 0)
    cardinality = int(dataset.cardinality())
    assert cardinality == tf.data.INFINITE_CARDINALITY or cardinality >= ENDLESS
    if case.gather is None:
        assert case.batch == 1
    else:
        assert size_of(next(iter(case.gather(dataset)))) == case.batch


@pytest.mark.parametrize("name", ["scalars", "splits"])
def test_a_size_makes_an_end(name: str, files: Path) -> None:
    assert len(list(CASES[name].dataset(files, 7))) == 7


def test_records_are_whole_and_differ(files: Path) -> None:
    with RECORDS.file(files).open("rb") as opened:
        contents = [data for _, data in read_frames(opened.fileno())]
    assert {len(data) for data in contents} == {1024}
    assert len(set(contents)) == RECORDS.quick_count


def test_all_ways_read_the_same_pipeline() -> None:
    for row in ROWS:
        in_order, once = CASES[row + ORDERED], CASES[row + AT_MOST_ONCE]
        least = CASES[row + AT_LEAST_ONCE]
        assert (least.claimed, least.ordered, least.mode) == (True, False, "OFF")
        assert (in_order.ordered, in_order.mode) == (True, "OFF")
        assert (once.ordered, once.mode) == (False, "DYNAMIC")
        assert in_order.numpy and once.numpy and least.numpy

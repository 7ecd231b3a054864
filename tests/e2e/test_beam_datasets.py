"""Beam pipelines through the service: what Beam reads and computes, in workers' processes."""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pytest
import tensorflow as tf
from apache_beam import pvalue
from apache_beam.metrics import Metrics

from forebay import service
from forebay.service.errors import PipelineError

from .. import forks
from ..stock import DispatcherProcess

OFF, DYNAMIC = service.ShardingPolicy.OFF, service.ShardingPolicy.DYNAMIC
FILES, RECORDS = 4, 250


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("files")
    for at in range(FILES):
        with tf.io.TFRecordWriter(str(folder / f"{at}.tfrecord")) as records:
            for n in range(RECORDS * at, RECORDS * (at + 1)):
                records.write(b"%d" % n)
    return f"{folder}/*.tfrecord"


SEEN = Metrics.counter("parse", "records [/seen]")
NUMBERS = Metrics.distribution("parse", "numbers")


class Parse(beam.DoFn):  # type: ignore[misc]
    """Counts what it sees in a file that its life cycle opens and closes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def setup(self) -> None:
        self._seen = 0

    def process(self, record: bytes) -> Iterator[dict[str, Any]]:
        self._seen += 1
        SEEN.inc()
        number = int(record)
        NUMBERS.update(number)
        yield {"number": number, "pixels": np.full((2, 2), number % 256, np.uint8)}

    def teardown(self) -> None:
        (self._folder / f"{os.getpid()}").write_text(str(self._seen))


def torn_down(folder: Path) -> int:
    """How many records the processes of which this is known have seen."""
    return sum(int(log.read_text() or 0) for log in folder.iterdir())


def status(dispatcher: DispatcherProcess) -> list[str]:
    ended = forks.run(["-m", "forebay.service.cli", "status", dispatcher.target])
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def numbers(elements: Any) -> list[int]:
    return [int(element["number"]) for element in elements]


@pytest.mark.usefixtures("workers")
def test_a_pcollection_is_read_in_every_way(
    dispatcher: DispatcherProcess, files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # of what prints the status
    p = beam.Pipeline()
    limit = p | "limit" >> beam.Create([700])
    examples = (
        p
        | beam.io.ReadFromTFRecord(files)
        | beam.ParDo(Parse(tmp_path))
        | beam.Filter(lambda e, limit: e["number"] < limit, pvalue.AsSingleton(limit))
        | beam.FlatMap(lambda e: [e, e])
    )
    dataset_id = service.register_dataset(dispatcher.target, examples)
    read = service.read(dispatcher.target, dataset_id, processing_mode=DYNAMIC, job_name="all")
    expected = dict.fromkeys(range(700), 2)
    assert collections.Counter(numbers(read)) == expected
    here = int((tmp_path / f"{os.getpid()}").read_text())  # to know what an element is
    while torn_down(tmp_path) < here + FILES * RECORDS:  # for each process, soon
        time.sleep(0.05)
    assert torn_down(tmp_path) == here + FILES * RECORDS
    shown = {
        f"all 0 parse records [/seen] {FILES * RECORDS}",
        "all 0 parse numbers count 1000, sum 499500, min 0, max 999, mean 499.5",
    }
    while not shown <= {" ".join(line.replace("│", " ").split()) for line in status(dispatcher)}:
        time.sleep(0.05)  # the reader has ended, and each task is about to
    dataset = service.from_dataset_id(OFF, dispatcher.target, dataset_id)
    assert dataset.element_spec["pixels"] == tf.TensorSpec([2, 2], tf.uint8)
    assert collections.Counter(numbers(dataset)) == dict.fromkeys(range(700), 4)


@pytest.mark.usefixtures("workers")
def test_an_error_names_split_worker_and_transform(
    dispatcher: DispatcherProcess, files: str
) -> None:
    """Or such splits are skipped, up to a limit. There is one in each file."""
    p = beam.Pipeline()
    wrong = (
        p
        | beam.io.ReadFromTFRecord(files)
        | "Invert" >> beam.Map(lambda r: 1 // (int(r) % RECORDS - 20))
    )
    named = r"(?s)worker 127\.0\.0\.1:\d+: split \d, element 20: ZeroDivisionError.*'Invert'"
    ways: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, named),
        ({"on_error": "skip", "limit": FILES}, ""),
        ({"on_error": "skip", "limit": FILES - 1}, rf"{named}.*no more than 3 splits are skipped"),
    )
    for how, message in ways:
        dataset_id = service.register_dataset(dispatcher.target, wrong, **how)
        reading = service.read(dispatcher.target, dataset_id, processing_mode=DYNAMIC)
        if not message:
            assert len(list(reading)) == FILES * 20
            continue
        with pytest.raises(PipelineError, match=message):
            list(reading)

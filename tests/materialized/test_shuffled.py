"""What a Beam pipeline computes with shuffles, as files that workers serve."""

from __future__ import annotations

import concurrent.futures
import itertools
import pathlib
import threading
from typing import Any

import apache_beam as beam
import numpy as np
import pytest
import tensorflow as tf
from apache_beam.transforms import trigger, window
from apache_beam.transforms.periodicsequence import PeriodicImpulse

from forebay import service
from forebay.service.errors import FailedPrecondition, InvalidArgument, PipelineError
from forebay.service.materialized import files, shuffled
from forebay.service.materialized.registered import opened
from forebay.storage.errors import Corrupt
from forebay.storage.tfrecord import frame

SPEC = {
    "key": tf.TensorSpec([], tf.string),
    "sizes": tf.TensorSpec([None], tf.int64),
    "half": tf.TensorSpec([1, 2], tf.float32),
}


def element(key: str, sizes: list[int]) -> dict[str, Any]:
    half = np.full((1, 2), sum(sizes) / 2, np.float32)
    return {"key": key, "sizes": sorted(sizes), "half": half}


def joined(begin: Any, order: int) -> beam.PCollection:
    """Of two sources, in this order."""
    numbers = [*range(40)][::order]
    names = begin | "names" >> beam.Create([(n % 7, f"{n % 7}") for n in numbers[:7]])
    sizes = begin | "sizes" >> beam.Create([(n % 7, n) for n in numbers])
    both = {"names": names, "sizes": sizes} | beam.CoGroupByKey()
    return both | beam.FlatMap(
        lambda pair: [element(name, list(pair[1]["sizes"])) for name in pair[1]["names"]]
    )


def contents(folder: pathlib.Path) -> list[bytes]:
    """Of its shards."""
    return [path.read_bytes() for path in sorted(folder.glob("shard-*"))]


@pytest.mark.parametrize("format_", ["tfrecord", "arrayrecord", "parquet"])
def test_a_join_is_written_and_equal_runs_write_equal_bytes(
    format_: str, tmp_path: pathlib.Path
) -> None:
    """Whatever the order is in which its elements come; a shard may be empty."""
    expected = {f"{key}": [n for n in range(40) if n % 7 == key] for key in range(7)}
    for order in (1, -1):
        folder = tmp_path / f"{order}"
        done = service.materialize_pcollection(
            joined(beam.Pipeline(), order), folder, element_spec=SPEC, format=format_, shards=20
        )
        assert (done.elements, done.shards, done.written) == (7, 20, 20)
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    assert contents(tmp_path / "1") == contents(tmp_path / "-1")
    there = opened(folder)
    if format_ == "tfrecord":
        assert b"" in contents(tmp_path / "1")
        elements = there.dataset.as_numpy_iterator()
    else:
        elements = itertools.chain.from_iterable(map(there.dataset, there.paths))
    found = {each["key"].decode(): each for each in elements}
    assert {key: each["sizes"].tolist() for key, each in found.items()} == expected
    assert found["3"]["half"].tolist() == [[sum(expected["3"]) / 2] * 2]


def frames(data: bytes) -> list[bytes]:
    """Of records of one byte each."""
    size = len(frame(b"b"))
    return [data[at : at + size] for at in range(0, len(data), size)]


def test_the_first_of_two_attempts_at_a_shard_stays(tmp_path: pathlib.Path) -> None:
    """Equal ones are alike, whatever their order."""
    plan = shuffled._plan(tf.TensorSpec([], tf.int64), "tfrecord", 1)
    write = shuffled._Write(str(tmp_path), plan, "owner")
    write.process((0, {"records": [b"b", b"a", b"b"]}))
    (first,) = contents(tmp_path)
    assert sorted([frame(b"a"), frame(b"b"), frame(b"b")]) == sorted(frames(first))
    with pytest.raises(ValueError, match="shard 0 more than once"):
        write.process((0, {"records": [b"c"]}))
    write.start_bundle()
    write.process((0, {"records": [b"c"]}))
    assert contents(tmp_path) == [first]
    (only,) = tmp_path.iterdir()
    only.unlink()
    write.start_bundle()
    write.process((0, {"records": [b"a", b"b", b"b"]}))
    assert (contents(tmp_path), [*tmp_path.iterdir()]) == ([first], [only])


RUNNERS = ["FnApiRunner", "BundleBasedDirectRunner"]


@pytest.mark.parametrize("runner", RUNNERS)
def test_every_element_of_every_window_is_written(tmp_path: pathlib.Path, runner: str) -> None:
    """Equal ones too; whatever triggers there were."""
    pipeline = beam.Pipeline(runner=runner)
    numbers = pipeline | beam.Create([*range(20), 3, 3])
    timed = numbers | beam.Map(lambda n: window.TimestampedValue(np.int64(n), n))
    windows = timed | beam.WindowInto(
        window.FixedWindows(5),
        trigger=trigger.Repeatedly(trigger.AfterCount(1)),
        accumulation_mode=trigger.AccumulationMode.ACCUMULATING,
    )
    done = write(windows, tmp_path / "out")
    assert done.elements == 22
    assert read(tmp_path / "out") == sorted([*range(20), 3, 3])


def test_one_of_two_runs_into_a_directory_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen that there is nothing in it."""
    make, both = files.make, threading.Barrier(2)

    def make_when_both_do(directory: str) -> None:
        both.wait(60)
        make(directory)

    monkeypatch.setattr(files, "make", make_when_both_do)
    contents = [[1, 2, 3], [10, 20, 30, 40]]

    def run(numbers: list[int]) -> Any:
        created = beam.Pipeline() | beam.Create([*map(np.int64, numbers)])
        try:
            return write(created, tmp_path / "out").elements
        except FailedPrecondition as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        done = [*threads.map(run, contents)]
    (won,) = [at for at, each in enumerate(done) if not isinstance(each, str)]
    assert done[won] == len(contents[won])
    assert "another run writes to" in done[1 - won]
    assert read(tmp_path / "out") == contents[won]


def test_a_pipeline_that_grew_behind_what_was_written_is_written_again(
    tmp_path: pathlib.Path,
) -> None:
    created = beam.Pipeline() | beam.Create([*map(np.int64, range(3))])
    assert write(created, tmp_path / "one").elements == 3
    assert write(created | beam.Map(lambda n: 2 * n), tmp_path / "two").elements == 3
    assert [read(tmp_path / name) for name in ("one", "two")] == [[0, 1, 2], [0, 2, 4]]


def test_the_error_says_what_to_do_with_an_incomplete_directory(tmp_path: pathlib.Path) -> None:
    """No command writes what is missing."""
    created = beam.Pipeline() | beam.Create([*map(np.int64, range(3))])
    write(created, tmp_path)
    advice = "delete the directory, and run the pipeline again"
    index = (tmp_path / "index.json").read_bytes()
    (tmp_path / "index.json").write_bytes(index[:-9])
    with pytest.raises(Corrupt, match=advice):
        opened(tmp_path)
    (tmp_path / "index.json").unlink()
    with pytest.raises(FailedPrecondition, match=advice):
        opened(tmp_path)
    (tmp_path / "index.json").write_bytes(index)
    next(tmp_path.glob("shard-*")).unlink()
    with pytest.raises(Corrupt, match=rf"is missing: {advice}"):
        opened(tmp_path)


def write(elements: beam.PCollection, folder: pathlib.Path) -> Any:
    spec = tf.TensorSpec([], tf.int64)
    return service.materialize_pcollection(elements, folder, element_spec=spec, shards=2)


def read(folder: pathlib.Path) -> list[int]:
    return sorted(int(n) for n in opened(folder).dataset)


def test_elements_that_cannot_be_written_are_refused(tmp_path: pathlib.Path) -> None:
    def numbers() -> beam.PCollection:
        return beam.Pipeline() | beam.Create([1, 2])

    def write(of: Any = None, **how: Any) -> Any:
        how = {"element_spec": tf.TensorSpec([], tf.int64)} | how
        return service.materialize_pcollection(
            numbers() if of is None else of, tmp_path / "out", **how
        )

    with pytest.raises(InvalidArgument, match="is no PCollection"):
        write([1, 2])
    with pytest.raises(InvalidArgument, match="shards=0 must be from 1"):
        write(shards=0)
    with pytest.raises(InvalidArgument, match="format='csv' must be one of"):
        write(format="csv")
    with pytest.raises(InvalidArgument, match="dense tensors of a known rank"):
        write(element_spec=tf.RaggedTensorSpec([None], tf.int64))
    with pytest.raises(InvalidArgument, match="it has no tensor"):
        write(element_spec=())
    with pytest.raises(InvalidArgument, match="unbounded"):
        write(beam.Pipeline() | PeriodicImpulse(0, 3, 1))
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(PipelineError, match=r"nothing is kept.*(?s:.)*element is 1.*string"):
        write(element_spec=tf.TensorSpec([], tf.string))
    with pytest.raises(FailedPrecondition, match=r"there is something in .*out: .* delete"):
        write()

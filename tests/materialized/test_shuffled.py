"""What a Beam pipeline computes with shuffles, as files that workers serve."""

from __future__ import annotations

import pathlib
from typing import Any

import apache_beam as beam
import numpy as np
import pytest
import tensorflow as tf

from forebay import service
from forebay.service.errors import FailedPrecondition, InvalidArgument, PipelineError
from forebay.service.materialized import shuffled
from forebay.service.materialized.registered import opened
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


def test_a_join_is_written_and_equal_runs_write_equal_bytes(tmp_path: pathlib.Path) -> None:
    """Whatever the order is in which its elements come; a shard may be empty."""
    expected = {f"{key}": [n for n in range(40) if n % 7 == key] for key in range(7)}
    for order in (1, -1):
        folder = tmp_path / f"{order}"
        done = service.materialize_pcollection(
            joined(beam.Pipeline(), order), folder, element_spec=SPEC, shards=20
        )
        assert (done.elements, done.shards, done.written) == (7, 20, 20)
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    assert contents(tmp_path / "1") == contents(tmp_path / "-1")
    assert b"" in contents(tmp_path / "1")
    dataset = opened(folder).dataset
    found = {each["key"].numpy().decode(): each for each in dataset}
    assert {key: each["sizes"].numpy().tolist() for key, each in found.items()} == expected
    assert found["3"]["half"].numpy().tolist() == [[sum(expected["3"]) / 2] * 2]


def test_of_two_attempts_at_a_shard_the_first_one_stays(tmp_path: pathlib.Path) -> None:
    """Equal ones are alike, whatever their order."""
    plan = shuffled._plan(tf.TensorSpec([], tf.int64), 1)
    write = shuffled._Write(str(tmp_path), plan, "owner")
    write.process((0, {"records": [b"b", b"a", b"b"]}))
    (first,) = contents(tmp_path)
    assert sorted(data for data in (b"a", b"b", b"b") if frame(data) in first) == [b"a", b"b", b"b"]
    write.process((0, {"records": [b"c"]}))
    assert contents(tmp_path) == [first]
    (only,) = tmp_path.iterdir()
    only.unlink()
    write.process((0, {"records": [b"a", b"b", b"b"]}))
    assert (contents(tmp_path), [*tmp_path.iterdir()]) == ([first], [only])


def test_what_cannot_be_written_is_refused(tmp_path: pathlib.Path) -> None:
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
    with pytest.raises(InvalidArgument, match="dense tensors of a known rank"):
        write(element_spec=tf.RaggedTensorSpec([None], tf.int64))
    with pytest.raises(PipelineError, match=r"nothing is kept.*(?s:.)*element is 1.*string"):
        write(element_spec=tf.TensorSpec([], tf.string))
    with pytest.raises(FailedPrecondition, match=r"there is something in .*out: .* delete"):
        write()

"""A registered dataset into files, and the files in its place."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pytest
import tensorflow as tf

from forebay import service
from forebay.service.client.reader import fetch_dataset
from forebay.service.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PipelineError,
    Unimplemented,
)
from forebay.service.materialized import files, pipeline
from forebay.service.materialized.layout import require_complete
from forebay.service.materialized.registered import opened
from forebay.service.materialized.run import shards_done
from forebay.service.pipelines.tf_data.element_specs import decode_metadata
from forebay.storage.errors import Corrupt

from ..forks import Fork
from ..standbys import wait_until
from ..stock import DispatcherProcess
from . import store

DYNAMIC = service.ShardingPolicy.DYNAMIC


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def lines(folder: Path) -> Any:
    """A dataset of files: of each line its number, its text, its characters, and the text's."""
    paths = []
    for number in range(7):
        path = folder / f"{number}.txt"
        path.write_text("".join(f"{'x' * (line % 3)}{number}{line}\n" for line in range(10)))
        paths.append(str(path))
    dataset = tf.data.Dataset.from_tensor_slices(paths).interleave(
        tf.data.TextLineDataset, num_parallel_calls=2
    )
    return dataset.shuffle(5).map(
        lambda text: {
            "text": text,
            "bytes": tf.io.decode_raw(text, tf.uint8),
            "drawn": tf.random.uniform([2], 0, 1, tf.float64),
            "pair": (tf.strings.bytes_split(text), tf.constant([[True]])),
            "ragged": tf.ragged.constant([[1], [], [2, 3]], tf.int32),
        }
    )


@pytest.mark.usefixtures("worker")
def test_a_dataset_of_files_is_read_from_its_shards(
    dispatcher: DispatcherProcess, tmp_path: Path
) -> None:
    dataset = lines(tmp_path)
    dataset_id = service.register_dataset(dispatcher.target, dataset)
    assert shards_done(tmp_path / "a") is None
    done = service.materialize(dispatcher.target, dataset_id, tmp_path / "a", shards=3)
    assert shards_done(tmp_path / "a") == (3, 3)
    assert (done.elements, done.shards, done.written) == (70, 3, 3)
    cached = service.register_dataset(dispatcher.target, tmp_path / "a")
    found = list(service.from_dataset_id(DYNAMIC, dispatcher.target, cached))
    assert service.from_dataset_id(DYNAMIC, dispatcher.target, cached).element_spec == (
        dataset.element_spec
    )
    wanted = [b"x" * (line % 3) + b"%d%d" % (n, line) for n in range(7) for line in range(10)]
    assert sorted(e["text"].numpy() for e in found) == sorted(wanted)
    definition = fetch_dataset(dispatcher.target, cached).definition
    assert decode_metadata(definition).cardinality == 70
    # A graph of TensorFlow's own, which its own workers can run.
    plain = opened(tmp_path / "a").dataset.as_numpy_iterator()
    assert sorted(e["text"] for e in plain) == sorted(wanted)
    assert all(bytes(e["bytes"].numpy()) == e["text"].numpy() for e in found)
    assert len({tuple(e["drawn"].numpy()) for e in found}) == 70
    assert {str(e["ragged"].to_list()) for e in found} == {"[[1], [], [2, 3]]"}

    again = service.materialize(dispatcher.target, dataset_id, tmp_path / "b", shards=3)
    assert again.written == 3
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert service.materialize(dispatcher.target, dataset_id, tmp_path / "b").written == 0


def numbers_of(dispatcher: DispatcherProcess, dataset_id: str) -> list[int]:
    found = service.read(dispatcher.target, dataset_id, processing_mode=DYNAMIC)
    return [int(element["number"]) for element in found]


@pytest.mark.usefixtures("worker")
def test_a_killed_run_that_is_repeated_writes_only_the_missing_shards(
    dispatcher: DispatcherProcess, tmp_path: Path
) -> None:
    begun, gate = tmp_path / "begun", tmp_path / "gate"
    begun.mkdir()

    def numbers(split: int) -> Iterator[dict[str, Any]]:
        (begun / f"{split}").touch()
        while len(os.listdir(begun)) > 3 and not gate.exists():
            time.sleep(0.01)
        for number in range(20 * split, 20 * (split + 1)):
            yield {"number": number, "drawn": np.random.rand(3), "text": f"{number}"}

    spec = {
        "number": tf.TensorSpec([], tf.int64),
        "drawn": tf.TensorSpec([None], tf.float64),
        "text": tf.TensorSpec([], tf.string),
    }
    dataset_id = service.register_dataset(
        dispatcher.target, numbers, splits=range(8), element_spec=spec
    )
    output = tmp_path / "output"
    command = ["-m", "forebay.service.cli", "materialize", dispatcher.target, dataset_id]
    killed = Fork([*command, "--output", str(output), "--seed=5"])
    wait_until(lambda: output.exists() and len(list(output.glob("shard-*"))) >= 3)
    wait_until(lambda: list(output.glob(".tmp-*")))  # another one is being written
    killed.kill()
    killed.finish()
    with pytest.raises(FailedPrecondition, match=r"lacks 5 of 8 shards, .*run the same"):
        service.register_dataset(dispatcher.target, output)
    gate.touch()
    before = {path.name: path.stat().st_ino for path in output.glob("shard-*")}
    with pytest.raises(FailedPrecondition, match="was begun with seed 5, and 0 is asked for"):
        service.materialize(dispatcher.target, dataset_id, output)
    done = service.materialize(dispatcher.target, dataset_id, output, seed=5)
    assert (done.elements, done.shards, done.written) == (160, 8, 5)
    assert before.items() <= {p.name: p.stat().st_ino for p in output.glob("shard-*")}.items()

    service.materialize(dispatcher.target, dataset_id, tmp_path / "undisturbed", seed=5)
    assert files_of(output) == files_of(tmp_path / "undisturbed")
    cached = service.register_dataset(dispatcher.target, output)
    assert sorted(numbers_of(dispatcher, cached)) == [*range(160)]

    victim, other, *_ = sorted(output.glob("shard-*"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    service.register_dataset(dispatcher.target, output)  # its size is right
    with pytest.raises(Corrupt, match=f"{victim.name} has another size or checksum"):
        service.register_dataset(dispatcher.target, output, verify=True)
    other.write_bytes(other.read_bytes()[:-1])
    with pytest.raises(Corrupt, match=f"{other.name} has another size or checksum"):
        service.register_dataset(dispatcher.target, output)
    done = service.materialize(dispatcher.target, dataset_id, output, seed=5, verify=True)
    assert done.written == 2
    assert files_of(output) == files_of(tmp_path / "undisturbed")


@pytest.mark.usefixtures("worker")
def test_a_store_that_only_beam_knows(
    dispatcher: DispatcherProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run into it and a rerun of what is lost write what a run into a local directory writes."""
    target, folder = dispatcher.target, tmp_path / "store"
    folder.mkdir()
    monkeypatch.setenv(store.FOLDER, str(folder))
    directory = "store://bucket/cache"
    created = beam.Pipeline() | beam.Create(range(30), reshuffle=False)
    numbers = created | beam.Map(lambda n: {"number": n, "nothing": None})
    dataset_id = service.register_dataset(target, numbers)
    done = service.materialize(target, dataset_id, directory, shards=4)
    assert (done.elements, done.shards, done.written) == (30, 4, 4)
    whole = files_of(folder)
    next(folder.glob("*shard-*")).unlink()
    with pytest.raises(FailedPrecondition, match=r"in store://bucket/cache .* lacks 1 of 4 shards"):
        service.register_dataset(target, directory)
    assert service.materialize(target, dataset_id, directory, shards=4).written == 1
    assert files_of(folder) == whole
    assert opened(directory, verify=True).shards.elements == 30
    local = tmp_path / "local"
    service.materialize(target, dataset_id, local, shards=4)
    assert {name.rpartition("|")[2]: data for name, data in whole.items()} == files_of(local)
    cached = service.register_dataset(target, str(local), dataset_id="an id of its own")
    assert cached == "an id of its own"
    found = list(service.read(target, cached, processing_mode=DYNAMIC))
    assert sorted(int(e["number"]) for e in found) == [*range(30)]
    assert {e["nothing"] for e in found} == {None}


def once(n: int) -> Iterator[int]:
    yield {1: 1}[n]


RANGE = tf.data.Dataset.range
ON_ERROR: tuple[dict[str, Any], ...] = ({}, {"on_error": "skip"})
"""A split that fails ends the run."""


@pytest.mark.parametrize(
    ("dataset", "wanted"),
    [
        (lambda: RANGE(9).repeat(), "cannot be materialized: .*Repeat"),
        (lambda: tf.data.Dataset.random(), "cannot be materialized: .*Random"),
        (lambda: RANGE(9).take(3), "cannot be materialized: .*Take.*the first elements of each"),
        (lambda: RANGE(9).batch(2, drop_remainder=True), "it would drop what remains"),
        (
            lambda: RANGE(9).map(lambda x: tf.cast(tf.timestamp(), tf.int64) + x),
            "its elements may be others each time: .*Timestamp",
        ),
    ],
)
def test_a_dataset_that_cannot_be_run_in_parts_is_refused(
    dispatcher: DispatcherProcess, tmp_path: Path, dataset: Callable[[], Any], wanted: str
) -> None:
    dataset_id = service.register_dataset(dispatcher.target, dataset())
    with pytest.raises(Unimplemented, match=wanted):
        service.materialize(dispatcher.target, dataset_id, tmp_path / "output")
    assert not (tmp_path / "output").exists()


def test_errors_say_what_to_do(dispatcher: DispatcherProcess, tmp_path: Path) -> None:
    target, output = dispatcher.target, tmp_path / "output"
    dataset_id = service.register_dataset(target, RANGE(9))
    other_id = service.register_dataset(target, RANGE(10))
    failing, skipping = (
        service.register_dataset(
            target, once, splits=["why", 1], element_spec=tf.TensorSpec([], tf.int64), **how
        )
        for how in ON_ERROR
    )

    def fails(kind: type[Exception], wanted: str, dataset_id: str = dataset_id, **how: Any) -> None:
        with pytest.raises(kind, match=wanted):
            service.materialize(target, dataset_id, how.pop("output", output), **how)

    fails(InvalidArgument, "shards=0 must be from 1", shards=0)
    fails(InvalidArgument, "seed=-1 must be", seed=-1)
    fails(InvalidArgument, "'4' is no option", options=["--direct_num_workers", "4"])
    fails(InvalidArgument, "is no directory", output="")
    fails(InvalidArgument, "NoRunner.*DaskRunner", runner="NoRunner")
    fails(InvalidArgument, "FnApiRunner, knows the option --sed", options=["--sed=5"])
    fails(InvalidArgument, "'/a.so,' has a path that is empty", load_op_library="/a.so,")
    assert not output.exists()
    fails(
        PipelineError,
        "nothing.so' cannot be loaded: .*--load-op-library",
        load_op_library=["/nothing.so"],
        output=tmp_path / "ops",
    )
    fails(NotFound, "nobody", dataset_id="nobody")
    for name, fails_there in (("failing", failing), ("skipping", skipping)):
        fails(
            PipelineError,
            "failed to write shard 0 .*KeyError",
            dataset_id=fails_there,
            output=tmp_path / name,
        )
    (tmp_path / "file").touch()
    fails(FailedPrecondition, "cannot be made: .*--output", output=tmp_path / "file" / "below")
    service.materialize(target, dataset_id, output)
    fails(FailedPrecondition, "was begun with dataset", dataset_id=other_id)
    fails(FailedPrecondition, "begun with shards 9, and 3 is asked for", shards=3)
    with pytest.raises(NotFound, match="there is no materialized dataset in"):
        service.register_dataset(target, tmp_path / "nothing")
    with pytest.raises(InvalidArgument, match=r"\['splits'\] are for functions"):
        service.register_dataset(target, output, splits=[1])
    for dataset in (RANGE(3), beam.Pipeline() | beam.Create([1])):
        with pytest.raises(InvalidArgument, match="verify=True is for the directory of a"):
            service.register_dataset(target, dataset, verify=True)


def elements_in(directory: Path) -> list[int]:
    return sorted(int(element) for element in opened(directory).dataset)


def interrupted(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, action: Callable[[], Any], of: str
) -> None:
    """Before the first call that concerns a file whose name has `of` in it, do this."""
    real, waiting = getattr(owner, name), [action]

    def call(*args: Any, **kwargs: Any) -> Any:
        if waiting and any(isinstance(each, str) and of in each for each in args):
            waiting.pop()()
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("seed", [0, 1])
def test_one_of_two_runs_that_begin_in_a_directory_is_refused(
    dispatcher: DispatcherProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    target, output = dispatcher.target, tmp_path / "output"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    one_id = service.register_dataset(target, RANGE(4))
    other_id = one_id if seed else service.register_dataset(target, RANGE(10, 14))
    interrupted(
        monkeypatch,
        files,
        "write",
        lambda: service.materialize(target, other_id, output, seed=seed),
        "/plan.json",
    )
    with pytest.raises(FailedPrecondition, match=r"was begun with (dataset|seed 1, and 0)"):
        service.materialize(target, one_id, output)
    assert elements_in(output) == [*(range(4) if seed else range(10, 14))]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ  # this process may have to train on a GPU


def test_two_equal_runs_at_once(
    dispatcher: DispatcherProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, output = dispatcher.target, tmp_path / "output"
    dataset_id = service.register_dataset(target, RANGE(4))
    faster = []
    interrupted(
        monkeypatch,
        files.NewFile,
        "publish",
        lambda: faster.append(service.materialize(target, dataset_id, output)),
        "shard-",
    )
    done = service.materialize(target, dataset_id, output)
    assert [done.elements, *(other.elements for other in faster)] == [4, 4]
    assert elements_in(output) == [*range(4)]
    assert not list(output.glob(".tmp-*"))


def drawn(_: int) -> Iterator[int]:
    yield int.from_bytes(os.urandom(7), "big")  # another one each time


def test_of_two_shards_with_one_number_one_is_kept(
    dispatcher: DispatcherProcess, tmp_path: Path
) -> None:
    """A function that yields something else each time gives a range's shard another name."""
    target, output = dispatcher.target, tmp_path / "output"
    dataset_id = service.register_dataset(
        target, drawn, splits=range(3), element_spec=tf.TensorSpec([], tf.int64)
    )

    def again(**how: Any) -> int:
        return service.materialize(target, dataset_id, output, **how).written

    again()
    first, *others = sorted(output.glob("shard-*"))
    prefix, data = first.name.rpartition("-")[0], first.read_bytes()
    for checksum in ("00000000", "ffffffff"):
        (output / f"{prefix}-{checksum}.tfrecord").write_bytes(data)
        assert again() == 0
        assert len(require_complete(str(output))[1].whole) == len([*output.glob("shard-*")]) == 3
    with pytest.raises(Corrupt, match="another size or checksum than"):
        opened(output, verify=True)
    assert again(verify=True) == 1
    assert len(elements_in(output)) == 3
    assert {*others} <= {*output.iterdir()}


def test_a_damaged_dataset_is_found_out_and_written_again(
    dispatcher: DispatcherProcess, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    dataset_id, other_id = (service.register_dataset(dispatcher.target, RANGE(n)) for n in (2, 3))
    service.materialize(dispatcher.target, dataset_id, output)
    service.materialize(dispatcher.target, other_id, tmp_path / "other")
    (file,), (other,) = (folder.glob("dataset*.pb") for folder in (output, tmp_path / "other"))
    whole = file.read_bytes()
    for damaged in (b"\xff\xff", b"", other.read_bytes()):
        file.write_bytes(damaged)
        next(output.glob("shard-*")).unlink()
        with pytest.raises(Corrupt, match=f"{file} is damaged .*again, which mends it"):
            pipeline.WriteShard(str(output)).setup()
        assert service.materialize(dispatcher.target, dataset_id, output).written == 1
        assert file.read_bytes() == whole
    assert elements_in(output) == [0, 1]


def test_an_error_names_the_shard(
    dispatcher: DispatcherProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(pipeline, "elements_of", fail)
    dataset_id = service.register_dataset(dispatcher.target, RANGE(4))
    with pytest.raises(PipelineError, match=r"shard 0 \(splits 0 to 3\): MemoryError"):
        service.materialize(dispatcher.target, dataset_id, tmp_path, shards=1)
    assert not list(tmp_path.glob(".tmp-*"))

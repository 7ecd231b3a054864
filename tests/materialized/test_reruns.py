"""Runs into a directory that has something already: another run's, or what an earlier one left."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from forebay import service
from forebay.service.errors import FailedPrecondition, PipelineError
from forebay.service.materialized import files, pipeline
from forebay.service.materialized.layout import require_complete
from forebay.service.materialized.registered import opened
from forebay.storage.errors import Corrupt

from ..stock import DispatcherProcess

RANGE = tf.data.Dataset.range


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

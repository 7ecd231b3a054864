"""A save is loaded, while it is being written, by a pipeline that is not divided."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from forebay.service.errors import PipelineError
from forebay.service.pipelines.tf_data import save_watchers
from forebay.service.pipelines.tf_data.imports import graph_of
from forebay.service.pipelines.tf_data.pipeline import TfDataPipeline

from .compositions import write_chunk, write_save

NUMBER = tf.TensorSpec([], tf.int64)


def loaded(path: Path) -> Any:
    """One chunk after another; by default, load waits for several of them."""
    in_order = lambda chunks: chunks.flat_map(lambda chunk: chunk)  # noqa: E731
    return tf.data.Dataset.load(str(path), reader_func=in_order)


def elements(blocks: Any) -> list[int]:
    return [int(n) for block in blocks for n in block.components[0].elements()]


def test_each_opening_gets_the_chunks_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "save"
    write_save(path, {"chunk_0_0_2": [0, 1]})
    pipeline = TfDataPipeline(graph_of(loaded(path).repeat(2)), element_spec=NUMBER)
    blocks = pipeline.run(None).blocks()
    first = elements([next(blocks)])
    write_chunk(path, "chunk_0_1_1", [2])
    while len(first) < 3:
        first += elements([next(blocks)])
    assert first == [0, 1, 2]
    write_chunk(path, "chunk_1_0_1", [3])
    (path / "DONE").touch()
    assert elements(blocks) == [3, 0, 1, 2, 3]
    pipeline.close()


def test_openings_have_the_same_chunks_and_what_is_kept_of_them_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_watchers, "MAX_OPENINGS", 2)
    path = tmp_path / "save"
    write_save(path, {"chunk_1_0_1": [0]})
    watch = save_watchers.Watch(str(path))
    assert watch.next_range(0).names == ("chunk_1_0_1",)
    write_chunk(path, "chunk_0_0_1", [1])
    (path / "DONE").touch()
    assert watch.next_range(0).names == ("chunk_0_0_1",)
    for opening in range(1, 9):  # each of which is left before its end
        assert watch.next_range(opening).names == ("chunk_1_0_1", "chunk_0_0_1")
    for opening in (7, 8, 8):
        with pytest.raises(StopIteration):
            watch.next_range(opening)
    assert len(watch.had) == 2


def test_a_run_that_waits_for_chunks_can_be_cancelled(tmp_path: Path) -> None:
    path = tmp_path / "save"
    write_save(path, {"chunk_0_0_1": [0]})
    pipeline = TfDataPipeline(graph_of(loaded(path)), element_spec=NUMBER)
    before = set(threading.enumerate())
    run = pipeline.run(None)
    blocks = run.blocks()
    assert elements([next(blocks)]) == [0]
    (driver,) = (t for t in set(threading.enumerate()) - before if t.name == "forebay-pipeline")
    run.cancel()
    assert elements(blocks) == []
    pipeline.close()
    driver.join(60)
    assert not driver.is_alive()


def test_a_save_that_failed_says_so(tmp_path: Path) -> None:
    path = tmp_path / "save"
    write_save(path, {"chunk_0_0_1": [0]})
    pipeline = TfDataPipeline(graph_of(loaded(path)), element_spec=NUMBER)
    (path / "ERROR").write_text('code: INTERNAL message: "a worker failed"')
    with pytest.raises(PipelineError, match="is not complete: INTERNAL: a worker failed"):
        elements(pipeline.run(None).blocks())
    pipeline.close()


def test_a_chunk_that_has_vanished_is_named(tmp_path: Path) -> None:
    path = tmp_path / "save"
    write_save(path, {"chunk_0_0_1": [0]})
    (path / "chunks" / "chunk_0_1_1").symlink_to(path / "nothing")
    (path / "DONE").touch()
    pipeline = TfDataPipeline(graph_of(loaded(path)), element_spec=NUMBER)
    with pytest.raises(PipelineError, match="chunk_0_1_1") as raised:
        elements(pipeline.run(None).blocks())
    assert raised.value.code == "NOT_FOUND"
    pipeline.close()

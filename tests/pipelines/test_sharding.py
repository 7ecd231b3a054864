"""A shard of a dataset: which elements, and what cannot be sharded."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from forebay.journal.proto import events_pb2 as ev
from forebay.service import SHARD_HINT
from forebay.service.errors import InvalidArgument, PipelineError, Unimplemented
from forebay.service.pipelines import Shard
from forebay.service.pipelines.tf_data.pipeline import TfDataPipeline
from forebay.service.pipelines.tf_data.sharding import open_shard

from .compositions import write_save

SHARDS = 3


def shard(dataset: Any, sharding: ev.Sharding, number: int, of: int = SHARDS) -> list[Any]:
    graph = dataset._as_serialized_graph().numpy()
    pipeline = open_shard(
        graph,
        Shard(sharding, number, of),
        lambda part: TfDataPipeline(part, element_spec=dataset.element_spec),
    )
    blocks = pipeline.run(None).blocks()
    columns = [[c.elements() for c in block.components] for block in blocks]
    elements = [zip(*column, strict=True) for column in columns]
    return [x[0].tolist() if hasattr(x[0], "tolist") else x[0] for x in itertools.chain(*elements)]


def shards(dataset: Any, sharding: ev.Sharding) -> list[list[Any]]:
    return [shard(dataset, sharding, number) for number in range(SHARDS)]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    names = []
    for number in range(4):
        path = tmp_path / f"{number}.txt"
        path.write_text("".join(f"{number}{line}\n" for line in range(4)))
        names.append(str(path))
    return names


def lines(files: list[str]) -> Any:
    return tf.data.Dataset.from_tensor_slices(files).flat_map(tf.data.TextLineDataset)


BY_FILE = [[b"00", b"01", b"02", b"03", b"30", b"31", b"32", b"33"],
           [b"10", b"11", b"12", b"13"], [b"20", b"21", b"22", b"23"]]  # fmt: skip


@pytest.mark.parametrize("sharding", [ev.DATA, ev.FILE_OR_DATA])
def test_elements_take_turns(sharding: ev.Sharding) -> None:
    dataset = tf.data.Dataset.range(8)
    assert shards(dataset, sharding) == [[0, 3, 6], [1, 4, 7], [2, 5]]
    batches = dataset.batch(3).prefetch(1)
    assert shards(batches, sharding) == [[[0, 1, 2]], [[3, 4, 5]], [[6, 7]]]


@pytest.mark.parametrize("sharding", [ev.FILE, ev.FILE_OR_DATA])
def test_files_take_turns(sharding: ev.Sharding, files: list[str]) -> None:
    assert shards(lines(files), sharding) == BY_FILE


@pytest.mark.parametrize("sharding", [ev.FILE, ev.FILE_OR_DATA])
def test_files_take_turns_whatever_is_made_of_what_they_hold(
    sharding: ev.Sharding, files: list[str]
) -> None:
    """AutoShardDataset would divide lines here, as TensorFlow's workers do not."""
    again = lambda line: tf.data.Dataset.from_tensors(line)  # noqa: E731
    for read in (
        lines(files).flat_map(again),
        lines(files).map(tf.identity).interleave(again, cycle_length=1),
        tf.data.TextLineDataset(files).flat_map(again),
    ):
        assert shards(read, sharding) == BY_FILE


def _with_numbers(files: list[str]) -> dict[str, Any]:
    read, numbers = lines(files), tf.data.Dataset.range(7)
    words, readers = numbers.map(tf.as_string), tf.data.TextLineDataset(files)
    sampled = tf.data.Dataset.sample_from_datasets([read, words], seed=1)
    slices = tf.data.Dataset.from_tensor_slices(["x"] * 5)
    made = tf.data.Dataset.from_tensors(tf.range(9)).flat_map(tf.data.Dataset.from_tensor_slices)
    return {
        "concatenate": read.concatenate(words),
        "files last": words.concatenate(read),
        "a reader": readers.concatenate(words),
        "several": read.concatenate(readers.concatenate(readers.batch(2).unbatch())).concatenate(
            slices.shuffle(3, seed=1)
        ),
        "zip": tf.data.Dataset.zip((read, numbers)).map(lambda line, i: line + tf.as_string(i)),
        "zip of zip": tf.data.Dataset.zip(
            (read, tf.data.Dataset.zip((readers, made)).map(lambda a, _: a))
        ).map(lambda a, b: a + b),
        "shuffled": read.shuffle(9, seed=1).repeat(2).cache().concatenate(words),
        "sampled": read.concatenate(sampled),
        "what it does not know": read.concatenate(
            tf.data.experimental.CsvDataset(files, [""]).map(tf.identity)
        ),
        "asserted": read.apply(tf.data.experimental.assert_cardinality(16)).concatenate(words),
    }


@pytest.mark.parametrize("kind", _with_numbers(["no file"]))
def test_files_joined_with_something_else_lose_nothing(files: list[str], kind: str) -> None:
    """TensorFlow's AUTO divides the files here, and then the elements of each part."""
    dataset = _with_numbers(files)[kind]
    by_data = shards(dataset, ev.DATA)
    assert shards(dataset, ev.FILE_OR_DATA) == by_data
    assert sorted(itertools.chain(*by_data)) == sorted(dataset.as_numpy_iterator())
    with pytest.raises(PipelineError, match="NOT_FOUND"):
        shards(dataset, ev.FILE)


def test_joined_files_are_divided_by_file(files: list[str]) -> None:
    joined = lines(files).concatenate(lines(files[:3]))
    assert shards(joined, ev.FILE_OR_DATA) == shards(joined, ev.FILE)
    assert sorted(itertools.chain(*shards(joined, ev.FILE))) == sorted(joined.as_numpy_iterator())
    with pytest.raises(PipelineError, match="not enough for the required 5 shards"):
        shard(joined, ev.FILE_OR_DATA, 0, of=5)


def test_elements_of_files_take_turns(files: list[str]) -> None:
    assert shards(lines(files), ev.DATA)[1] == [b"01", b"10", b"13", b"22", b"31"]


def test_what_comes_to_the_hint_takes_turns(files: list[str]) -> None:
    names = tf.data.Dataset.from_tensor_slices(files)
    hinted = names.shard(SHARD_HINT, SHARD_HINT).flat_map(tf.data.TextLineDataset)
    assert shards(hinted, ev.HINT) == BY_FILE
    hinted = tf.data.Dataset.range(8).shard(SHARD_HINT, 7).map(lambda x: 10 * x)
    assert shards(hinted, ev.HINT) == [[0, 30, 60], [10, 40, 70], [20, 50]]


def test_what_cannot_be_sharded_says_why(files: list[str]) -> None:
    with pytest.raises(PipelineError, match="unshardable source") as failed:
        shard(tf.data.Dataset.range(8), ev.FILE, 0)
    assert failed.value.code == "NOT_FOUND"
    for sharding in (ev.FILE, ev.FILE_OR_DATA):
        with pytest.raises(PipelineError, match=r"not enough for the required 5 shards") as failed:
            shard(lines(files), sharding, 3, of=5)
        assert failed.value.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize("dataset", [
    tf.data.Dataset.range(8),
    tf.data.Dataset.range(8).shard(1, 0),
    tf.data.Dataset.range(2).flat_map(
        lambda x: tf.data.Dataset.range(8).shard(SHARD_HINT, SHARD_HINT)
    ),
], ids=["none", "numbers", "in a function"])  # fmt: skip
def test_hint_without_a_hint_says_so(dataset: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"no hint.*shard\(SHARD_HINT"):
        shard(dataset, ev.HINT, 0)


@pytest.mark.parametrize("sharding", [ev.DATA, ev.FILE_OR_DATA])
def test_a_hint_without_hint_says_so(sharding: ev.Sharding) -> None:
    dataset = tf.data.Dataset.range(8).shard(SHARD_HINT, SHARD_HINT)
    with pytest.raises(PipelineError, match=r"SHARD_HINT.*ShardingPolicy.HINT") as failed:
        shard(dataset, sharding, 0)
    assert failed.value.code == "FAILED_PRECONDITION"
    with pytest.raises(PipelineError, match="SHARD_HINT"):
        list(TfDataPipeline(dataset._as_serialized_graph().numpy()).run(None).blocks())


@pytest.mark.parametrize("sharding", [ev.FILE, ev.DATA, ev.FILE_OR_DATA])
def test_what_is_loaded_from_a_save_is_not_sharded(sharding: ev.Sharding, tmp_path: Path) -> None:
    """Also if the dispatcher has not seen that, of a dataset that cannot be split."""
    write_save(tmp_path / "save", {"chunk_0_0_1": [0]})
    (tmp_path / "save" / "DONE").touch()
    with pytest.raises(Unimplemented, match=r"distributed save at .*/save"):
        shard(tf.data.Dataset.load(str(tmp_path / "save")), sharding, 0)

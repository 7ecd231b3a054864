"""Data sets of TensorFlow Datasets, read in order, beside what TFDS itself gives."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from forebay import service
from forebay.service.client import tfds as module
from forebay.service.errors import FailedPrecondition, InvalidArgument, PipelineError

from ..ordered_reads import Cluster, as_bytes, read
from ..tfds_digits import FILES, TEST, TRAIN, Digits, DigitsInOrder, prepared

# What TFDS does to protobuf, and to tf.data with num_parallel_calls=None.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:.*label\(\) is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The `deterministic` argument has no effect:UserWarning"),
]


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def target(cluster: Cluster) -> str:
    return cluster.target


def config(**options: Any) -> Any:
    return tfds.ReadConfig(add_tfds_id=True, **options)


def tfdss(builder: Any, split: Any, **how: Any) -> list[bytes]:
    """The elements that TFDS gives, as bytes."""
    return [*map(as_bytes, builder.as_dataset(split=split, **how).as_numpy_iterator())]


def ours(target: str, how: dict[str, Any], consumers: int = 1, **others: Any) -> list[bytes]:
    """The elements of an epoch that a group reads, in the global order."""
    order = {name: value for name, value in how.items() if name != "ordered"}
    return read(target, order.pop("dataset_id"), consumers, **order, **others).elements


def same(target: str, builder: Any, split: Any, **how: Any) -> list[bytes]:
    """Compares what both give; returns it."""
    expected = tfdss(builder, split, **how)
    found = ours(target, service.register_tfds(target, builder, split, **how))
    assert found == expected
    return expected


# The order.


@pytest.mark.parametrize(
    ("split", "examples"),
    [
        ("train", TRAIN),
        ("train[67%:84%]", 39),
        ("train[:7]+test[-30%:]", 7 + 12),
        ("train[100:101]", 1),
        ("train[2shard:4shard]", 65),
        ("all", TRAIN + TEST),
        (tfds.core.ReadInstruction("test", from_=10, to=-10, unit="abs"), TEST - 20),
        (tfds.even_splits("train", 3)[1], 77),
        (tfds.Split.TEST, TEST),
    ],
    ids=str,
)
def test_a_part_of_a_split(target: str, builder: Any, split: Any, examples: int) -> None:
    assert len(same(target, builder, split, read_config=config())) == examples


@pytest.mark.parametrize(
    "options",
    [
        {"interleave_cycle_length": 1},
        {"interleave_cycle_length": 2, "interleave_block_length": 1},
        {"interleave_cycle_length": 3, "interleave_block_length": 5},
        {"interleave_cycle_length": FILES, "interleave_block_length": None},
        {"interleave_cycle_length": 64, "interleave_block_length": 1000},
        {"interleave_cycle_length": 4, "num_parallel_calls_for_interleave_files": None},
        {"experimental_interleave_sort_fn": lambda files: files[::-1]},
        {"experimental_interleave_sort_fn": lambda files: [files[3], files[0], files[3]]},
        {"assert_cardinality": False, "override_buffer_size": 100, "skip_prefetch": True},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_a_read_config(target: str, builder: Any, options: dict[str, Any]) -> None:
    same(target, builder, "train[5:-3]", read_config=config(**options))


@pytest.mark.parametrize("reshuffled", [None, True, False])
@pytest.mark.parametrize("seed", [0, 5])
def test_shuffled_files(target: str, builder: Any, seed: int, reshuffled: bool | None) -> None:
    how = {
        "read_config": config(
            shuffle_seed=seed,
            shuffle_reshuffle_each_iteration=reshuffled,
            interleave_cycle_length=2,
        ),
        "shuffle_files": True,
    }
    same(target, builder, "train", **how)


def test_each_iteration_over_a_dataset_of_tfdss(target: str, builder: Any) -> None:
    how = {"read_config": config(shuffle_seed=8), "shuffle_files": True}
    dataset = builder.as_dataset(split="train", **how)
    for epoch in range(3):
        expected = [*map(as_bytes, dataset.as_numpy_iterator())]
        found = service.register_tfds(target, builder, "train", epoch=epoch, **how)
        assert ours(target, found) == expected, epoch


def test_the_global_seed_is_part_of_the_seed(target: str, builder: Any) -> None:
    how = {"read_config": config(shuffle_seed=5), "shuffle_files": True}
    without = tfdss(builder, "train", **how)
    tf.random.set_seed(11)
    try:
        assert same(target, builder, "train", **how) != without
    finally:
        tf.random.set_seed(None)


def test_files_that_are_shuffled_without_a_seed(target: str, builder: Any) -> None:
    """TFDS has no order then. Each epoch has another one, which the read's seed says."""
    how = service.register_tfds(target, builder, "train", read_config=config(), shuffle_files=True)
    epochs = [ours(target, how, seed=3, start_position=n * TRAIN) for n in (0, 1)]
    assert epochs[0] != epochs[1]
    expected = tfdss(builder, "train", read_config=config())
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(expected) != epochs[0]
    assert ours(target, how, seed=3, start_position=TRAIN + 50) == epochs[1][50:]
    assert ours(target, how, seed=4) != epochs[0]


@pytest.mark.parametrize("shuffled", [False, True])
def test_each_input_context_has_its_files(target: str, builder: Any, shuffled: bool) -> None:
    found = []
    for number in range(2):
        context = tf.distribute.InputContext(2, number)
        how = {
            "read_config": config(input_context=context, shuffle_seed=5 if shuffled else None),
            "shuffle_files": shuffled,
        }
        found += same(target, builder, "train", **how)
    assert sorted(found) == sorted(tfdss(builder, "train", read_config=config()))


def test_a_data_set_that_keeps_its_order(target: str, tmp_path: Path) -> None:
    builder = prepared(tmp_path, DigitsInOrder)
    same(target, builder, "train", read_config=config())
    with pytest.raises(InvalidArgument, match="was written in an order"):
        service.register_tfds(target, builder, "train", shuffle_files=True)
    loose = config(interleave_cycle_length=4, enable_ordering_guard=False)
    same(target, builder, "train", read_config=loose)


def test_files_in_several_folders(target: str, tmp_path: Path) -> None:
    """Their ids begin with a part of the path, also where an input pipeline reads one folder."""
    folders = [prepared(tmp_path / name, files=2).data_path for name in ("one", "two")]
    builder = tfds.builder_from_directories(folders)
    assert len({*same(target, builder, "test", read_config=config())}) == 2 * TEST
    context = tf.distribute.InputContext(2, 1)
    same(target, builder, "test+test", read_config=config(input_context=context))
    files = lambda found: sorted(found, key=lambda file: file.basename())  # noqa: E731
    by_name = config(input_context=context, experimental_interleave_sort_fn=files)
    same(target, builder, "test", read_config=by_name)


# The elements.


@pytest.mark.parametrize(
    "how",
    [
        {"as_supervised": True},
        {"decoders": {"image": tfds.decode.SkipDecoding()}},
        {"decoders": tfds.decode.PartialDecoding({"label": True, "row": {"sums"}})},
        {
            "decoders": tfds.decode.PartialDecoding(
                ["image"], decoders={"image": tfds.decode.SkipDecoding()}
            ),
            "read_config": tfds.ReadConfig(add_tfds_id=True, num_parallel_calls_for_decode=1),
        },
        {},
    ],
    ids=["supervised", "skipped", "partial", "partial-skipped", "all"],
)
def test_decoding(target: str, builder: Any, how: dict[str, Any]) -> None:
    same(target, builder, "train", **how)


def test_as_a_dataset(target: str, builder: Any) -> None:
    dataset = builder.as_dataset(split="train[:50%]", read_config=config())
    how = service.register_tfds(target, builder, "train[:50%]", read_config=config())
    found = service.from_dataset_id("distributed_epoch", target, **how)
    assert found.element_spec == dataset.element_spec
    expected = [*map(as_bytes, dataset.as_numpy_iterator())]
    for _ in range(2):  # epochs
        assert [*map(as_bytes, found.as_numpy_iterator())] == expected


def test_a_name(target: str, builder: Any) -> None:
    how = {"read_config": config()}
    named = service.register_tfds(target, "digits", data_dir=builder.data_dir_root, **how)
    assert named == service.register_tfds(target, builder, **how)
    assert json.loads(json.dumps(named)) == named


# Any number of workers and consumers, from any position.


def test_any_number_of_workers_and_consumers(cluster: Cluster, builder: Any) -> None:
    how = {"read_config": config(shuffle_seed=9, interleave_cycle_length=3), "shuffle_files": True}
    expected = tfdss(builder, "train[10%:]", **how)
    order = service.register_tfds(cluster.target, builder, "train[10%:]", **how)
    for workers, consumers in ((3, 1), (3, 2), (1, 3), (2, 2)):
        cluster.resize(workers)
        found = ours(cluster.target, order, consumers, job_name=f"{workers} {consumers}")
        assert found == expected, (workers, consumers)


@pytest.mark.parametrize("cycle_length", [2, 16])
def test_it_goes_on_with_the_very_next_one(
    cluster: Cluster, builder: Any, cycle_length: int
) -> None:
    how = {
        "read_config": config(
            shuffle_seed=2, interleave_cycle_length=cycle_length, interleave_block_length=4
        ),
        "shuffle_files": True,
    }
    expected = tfdss(builder, "train[:97%]", **how)
    order = service.register_tfds(cluster.target, builder, "train[:97%]", **how)
    consumers = itertools.cycle([1, 2, 3])
    for position in (1, 4, 63, 64, 150, len(expected) - 1):
        found = ours(cluster.target, order, next(consumers), start_position=position)
        assert found == expected[position:], position


def test_a_state_is_of_one_order_of_the_files(target: str, builder: Any) -> None:
    how = {"read_config": config(shuffle_seed=2), "shuffle_files": True}
    order = service.register_tfds(target, builder, "train", **how)
    with service.read(target, **order) as elements:
        for _ in range(30):
            next(elements)
        state = elements.state_dict()  # type: ignore[attr-defined]
    again = service.read(target, **service.register_tfds(target, builder, "train", **how))
    again.load_state_dict(state)  # type: ignore[attr-defined]
    assert [as_bytes(element) for element in again] == tfdss(builder, "train", **how)[30:]
    how = {"read_config": config(shuffle_seed=3), "shuffle_files": True}
    other = service.read(target, **service.register_tfds(target, builder, "train", **how))
    with other, pytest.raises(FailedPrecondition, match="another dataset"):
        other.load_state_dict(state)  # type: ignore[attr-defined]


# Faults.


@pytest.mark.parametrize(
    ("split", "how", "said"),
    [
        ("validation", {}, "no split 'validation'.*give one of.*'test', 'train'"),
        ("train[:200%]", {}, r"no split 'train\[:200%\]'"),
        ("train[0:0]", {}, "has no examples"),
        (["train", "test"], {}, "one dataset is registered at a time"),
        ("train", {"read_config": {"repeat_filenames": True}}, "repeat_filenames=True: an endless"),
        (
            "train",
            {"read_config": {"interleave_cycle_length": None}},
            "interleave_cycle_length=None, .* depend on the machine; give numbers",
        ),
        ("train", {"read_config": {"interleave_block_length": 0}}, "interleave_block_length=0"),
        (
            "train",
            {"read_config": {"input_context": tf.distribute.InputContext(8, 0)}},
            "8 input pipelines for 7 files, .* tfds.even_splits",
        ),
        (
            "train",
            {"read_config": {"file_format": "array_record"}},
            "of format array_record, and only TFRecord",
        ),
        ("train[5:3]", {}, r"split 'train\[5:3\]' of data set digits.* has no examples"),
        (
            "train",
            {"read_config": {"experimental_interleave_sort_fn": lambda _: []}},
            r"experimental_interleave_sort_fn returned \[\]: let it return",
        ),
        (
            "train",
            {"decoders": {"row": {"nope": tfds.decode.SkipDecoding()}}},
            r"decoders do not fit data set digits.*\['nope'\]: give them by the names",
        ),
        ("train", {"epoch": -1}, "epoch=-1: count"),
        ("train", {"epoch": 1}, "epoch=1: only files that are shuffled by a seed"),
        ("train", {"data_dir": "/elsewhere"}, "beside a builder, which has its own"),
    ],
)
def test_bad_arguments(
    target: str, builder: Any, split: Any, how: dict[str, Any], said: str
) -> None:
    if options := how.get("read_config"):
        how = {**how, "read_config": tfds.ReadConfig(**options)}
    with pytest.raises(InvalidArgument, match=said):
        service.register_tfds(target, builder, split, **how)


def test_features_that_are_datasets(
    target: str, builder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tfds.features.Dataset({"x": np.int64})
    features = tfds.features.FeaturesDict({"n": np.int64, "row": {"inner": inner}})
    monkeypatch.setattr(builder.info, "_features", features)
    with pytest.raises(InvalidArgument, match=r"\['row/inner'\].*PartialDecoding"):
        service.register_tfds(target, builder)


def test_what_is_no_builder(target: str) -> None:
    with pytest.raises(InvalidArgument, match=r"tfds\.builder does not know 'nonesuch'"):
        service.register_tfds(target, "nonesuch")
    with pytest.raises(InvalidArgument, match="3 is no builder"):
        service.register_tfds(target, 3)


def test_a_data_set_that_is_not_prepared(target: str, tmp_path: Path) -> None:
    builder = Digits(data_dir=tmp_path)
    with pytest.raises(FailedPrecondition, match=r"digits/1\.0\.0 is not prepared.*download_and_p"):
        service.register_tfds(target, builder)


def test_files_that_are_missing(target: str, tmp_path: Path) -> None:
    builder = prepared(tmp_path, files=8)
    paths = sorted(Path(builder.data_path).glob("*train*"))
    for path in paths[1:7]:
        path.unlink()
    said = f"lacks 6 of 8 files: {re.escape(str(paths[1]))}, .*…: prepare it again"
    with pytest.raises(FailedPrecondition, match=said):
        service.register_tfds(target, builder)
    service.register_tfds(target, builder, "train[0shard:1shard]")  # needs none of them


def test_files_that_change_later(target: str, tmp_path: Path) -> None:
    """The error of the reader names the file and its sizes. Registered anew, it is another
    dataset, for which a state of the old one does not hold."""
    builder = prepared(tmp_path, files=3)
    path = sorted(Path(builder.data_path).glob("*train*"))[1]
    registered = service.register_tfds(target, builder)
    dataset_id = registered["dataset_id"]
    bytes_ = path.read_bytes()
    size = len(bytes_)

    def said() -> str:
        with pytest.raises(PipelineError) as caught, service.read(target, **registered) as read:
            list(read)
        return str(caught.value)

    for changed in (bytes_ + b"1", bytes_[:-1], bytes_[: size // 2], b""):
        path.write_bytes(changed)
        assert f"[{path} has {len(changed)} bytes, and had {size} bytes when" in said()
        other = service.register_tfds(target, builder)["dataset_id"]
        assert other != dataset_id
    path.unlink()
    assert f"[{path} is no more, and had {size} bytes when" in said()
    path.write_bytes(bytes_)
    assert ours(target, registered) == tfdss(builder, "train")
    assert service.register_tfds(target, builder) == registered


@pytest.mark.parametrize("group_bytes", [1, 1 << 20])
def test_a_file_with_other_examples(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_bytes: int
) -> None:
    """Than its data set's metadata say, as it was registered. Examples are checked in pairs, or
    together; files have an even number and an odd one."""
    monkeypatch.setattr(module, "GROUP_BYTES", group_bytes)
    builder = prepared(tmp_path, files=3)
    same(target, builder, "train", read_config=config())
    path = sorted(Path(builder.data_path).glob("*train*"))[1]
    records = [*tf.data.TFRecordDataset(str(path)).as_numpy_iterator()]

    def write(records: list[bytes]) -> None:
        with tf.io.TFRecordWriter(str(path)) as file:
            for record in records:
                file.write(record)

    def refused(said: str) -> None:
        named = f"{path} has {said} than {len(records)} examples, which its metadata say: prepare"
        with pytest.raises(PipelineError, match=named):
            ours(target, service.register_tfds(target, builder))

    write(records[:-2])
    refused("fewer")
    loose = config(assert_cardinality=False)
    assert len(same(target, builder, "train", read_config=loose)) == TRAIN - 2
    write(records + records[:1])
    refused("more")
    assert len(same(target, builder, "train", read_config=loose)) == TRAIN + 1


def test_a_folder_with_the_characters_of_patterns(target: str, tmp_path: Path) -> None:
    builder = prepared(tmp_path / "[a]*?{b} %s", files=2)
    same(target, builder, "test", read_config=config())

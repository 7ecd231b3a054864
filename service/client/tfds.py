"""Registers a prepared data set of TensorFlow Datasets, and says how to read it in TFDS's order.

TFDS reads a list of *file instructions* (a file, how many of its examples to skip, how many to
take), and interleaves their examples. Here each of them is a split, and a bundle of an ordered
read, which interleaves bundles as tf.data does (service/order.py). What TFDS does with the list
before it interleaves is done at registration. So workers need no TFDS.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ..errors import FailedPrecondition, InvalidArgument
from ..extras import imported
from ..pipelines.tf_data.element_specs import plain
from .registration import Service, check_compression, definition_of, registered
from .tf_errors import raising_tensorflows

_MANY = 5  # files that an error names

GROUP_BYTES = 1 << 20  # examples that are checked at a time
_BEGIN, _END = np.int64(-1), np.int64(np.iinfo(np.int64).max)


@plain
@raising_tensorflows()
def register_tfds(
    service: Service,
    builder_or_name: Any,
    split: Any = "train",
    *,
    read_config: Any = None,
    shuffle_files: bool = False,
    decoders: Any = None,
    as_supervised: bool = False,
    data_dir: str | os.PathLike[str] | None = None,
    epoch: int = 0,
    compression: str | None = "AUTO",
    dataset_id: str | None = None,
) -> dict[str, Any]:
    """Register a prepared data set of TensorFlow Datasets. Needs `forebay[tfds]`, here only.

    Args:
      service: as in `register_dataset`.
      builder_or_name: a builder, or a name for `tfds.builder`. The data set was prepared, in
        TFRecord files, which workers see under the same paths.
      split: as in `builder.as_dataset`, one split: "train[67%:84%]", "train+test[:100]",
        a `tfds.core.ReadInstruction`, an element of `tfds.even_splits`.
      read_config: a `tfds.ReadConfig`.
      shuffle_files, decoders, as_supervised: as in `builder.as_dataset`.
      data_dir: as in `tfds.builder`, with a name.
      epoch: with a `shuffle_seed`, TFDS gives each iteration over a dataset another order of the
        files. This is the number of the iteration whose order is registered.
      compression, dataset_id: as in `register_dataset`.

    Returns the arguments with which `read`, `from_dataset_id` and the frameworks' datasets give
    the order of `builder.as_dataset`, the dataset's id among them: `read(target, **how)`. They are
    a dict that JSON can express. All epochs of a read have the registered order. With
    `shuffle_files` and no `shuffle_seed`, TFDS has no order of its own: the arguments have
    `shuffle=True` then, and the read's `seed` permutes the files in each epoch.

    Raises InvalidArgument for a split that does not exist and for a ReadConfig without an order,
    FailedPrecondition for a data set that is not prepared or lacks files, and what
    `register_dataset` raises.
    """
    tfds = imported("tensorflow_datasets", "tfds", "register_tfds")
    if epoch < 0:
        raise InvalidArgument(f"epoch={epoch}: count iterations from 0")
    if epoch and not (
        shuffle_files and read_config is not None and read_config.shuffle_seed is not None
    ):
        raise InvalidArgument(
            f"epoch={epoch}: only files that are shuffled by a seed have another order in each "
            "iteration: give shuffle_files=True and a read_config with a shuffle_seed, or leave "
            "epoch out"
        )
    if not tf.executing_eagerly():
        raise FailedPrecondition(
            "register_tfds in a tf.function: register before, and give the function the dataset"
        )
    builder = _builder(tfds, builder_or_name, data_dir)
    config = tfds.ReadConfig() if read_config is None else read_config
    cycle_length, block_length = _interleaving(tfds, builder, config, shuffle_files)
    _require_tfrecords(tfds, builder, config)
    instructions = _instructions(builder, split)
    if config.experimental_interleave_sort_fn is not None:
        instructions = _sorted(instructions, config.experimental_interleave_sort_fn)
    prefixes = _id_prefixes(instructions)
    takes_all = all(instruction.takes_all for instruction in instructions)
    permuted = shuffle_files and config.shuffle_seed is None
    chosen = _chosen(instructions, config, epoch if shuffle_files and not permuted else None)
    paths = [os.fspath(instruction.filename) for instruction in chosen]
    files = tf.data.Dataset.from_tensor_slices(
        {
            "path": paths,
            "pattern": [*map(glob.escape, paths)],
            "size": tf.constant(_sizes(builder, paths), tf.int64),
            "prefix": [prefixes[instruction.filename] for instruction in chosen],
            "skip": tf.constant([instruction.skip for instruction in chosen], tf.int64),
            "take": tf.constant([instruction.take for instruction in chosen], tf.int64),
        }
    )
    examples = files.flat_map(plain(lambda file: _examples_of(file, config, takes_all))).map(
        _decoding(tfds, builder, config, decoders, as_supervised),
        num_parallel_calls=config.num_parallel_calls_for_decode,
    )
    examples = examples.with_options(config.options)

    check_compression(compression)
    request = definition_of(examples, compression)
    if config.assert_cardinality:  # else the files may have other examples than TFDS says
        request.lengths.extend(instruction.take for instruction in chosen)
    return {
        "dataset_id": registered(service, request, dataset_id),
        "ordered": True,
        "shuffle": permuted,
        "bundle_splits": 1,
        "cycle_length": cycle_length,
        "block_length": block_length,
    }


def _builder(tfds: Any, builder_or_name: Any, data_dir: Any) -> Any:
    """Raises InvalidArgument, and FailedPrecondition if the data set is not prepared."""
    if isinstance(builder_or_name, str):
        try:
            builder = tfds.builder(builder_or_name, data_dir=data_dir)
        except (tfds.core.DatasetNotFoundError, ValueError) as error:
            raise InvalidArgument(
                f"tfds.builder does not know {builder_or_name!r}: {error}: give the builder itself"
            ) from error
    elif not isinstance(builder_or_name, tfds.core.DatasetBuilder):
        raise InvalidArgument(
            f"{builder_or_name!r:.100} is no builder: give a tfds.core.DatasetBuilder or its name"
        )
    elif data_dir is not None:
        raise InvalidArgument(f"data_dir={data_dir!r} beside a builder, which has its own: omit it")
    else:
        builder = builder_or_name
    if not builder.info.splits:
        raise FailedPrecondition(
            f"data set {builder.info.full_name} is not prepared, nothing is at "
            f"{builder.data_path}: call download_and_prepare() of its builder before"
        )
    return builder


def _interleaving(tfds: Any, builder: Any, config: Any, shuffle_files: bool) -> tuple[int, int]:
    """The cycle_length and block_length. Raises InvalidArgument if they give no order."""
    if config.repeat_filenames:
        raise InvalidArgument(
            "repeat_filenames=True: an endless dataset cannot be read in order; leave it out, and "
            "read one epoch after the other"
        )
    cycle_length, block_length = config.interleave_cycle_length, config.interleave_block_length
    in_order = builder.info.disable_shuffling
    if cycle_length == tfds.ReadConfig.interleave_cycle_length:  # not given
        cycle_length = 1 if in_order else 16
    if block_length is None:
        block_length = 1
    if cycle_length is None or cycle_length < 1 or block_length < 1:
        raise InvalidArgument(
            f"interleave_cycle_length={cycle_length}, interleave_block_length={block_length}: "
            "the order would depend on the machine; give numbers of 1 or more"
        )
    if in_order and config.enable_ordering_guard and (shuffle_files or cycle_length != 1):
        raise InvalidArgument(
            f"data set {builder.info.full_name} was written in an order, and shuffle_files="
            f"{shuffle_files} with interleave_cycle_length={cycle_length} would not keep it: leave "
            "them out, or give ReadConfig(enable_ordering_guard=False)"
        )
    return int(cycle_length), int(block_length)


def _require_tfrecords(tfds: Any, builder: Any, config: Any) -> None:
    found = tfds.core.FileFormat.from_value(
        config.file_format or builder.info.file_format or "tfrecord"
    )
    if found is not tfds.core.FileFormat.TFRECORD:
        raise InvalidArgument(
            f"data set {builder.info.full_name} is in files of format {found.value}, and only "
            'TFRecord can be read: prepare it with file_format="tfrecord"'
        )


def _instructions(builder: Any, split: Any) -> list[Any]:
    """Raises InvalidArgument."""
    if split is None or isinstance(split, list | tuple | dict):
        raise InvalidArgument(
            f"split={split!r:.100}: one dataset is registered at a time; join splits by +"
        )
    try:
        found = list(builder.info.splits[split].file_instructions)
    except (ValueError, KeyError) as error:
        raise InvalidArgument(
            f"data set {builder.info.full_name} has no split {split!r:.100}: {error}: give one of "
            f"{sorted(builder.info.splits)}, or a part of it"
        ) from error
    if not found or any(instruction.take <= 0 for instruction in found):  # [5:3] takes -2
        raise InvalidArgument(
            f"split {split!r:.100} of data set {builder.info.full_name} has no examples: give one "
            f"that has, of { {name: of.num_examples for name, of in builder.info.splits.items()} }"
        )
    return found


def _sorted(instructions: list[Any], sort: Any) -> list[Any]:
    """Raises InvalidArgument."""
    found = sort(instructions)
    if not isinstance(found, Iterable) or not (found := list(found)):
        raise InvalidArgument(
            f"experimental_interleave_sort_fn returned {found!r:.100}: let it return the list of "
            f"file instructions, of which it was given {len(instructions)}"
        )
    return found


def _chosen(instructions: Sequence[Any], config: Any, epoch: int | None) -> list[Any]:
    """What this input pipeline reads, in this epoch's order, or unshuffled. Raises
    InvalidArgument."""
    numbers = tf.data.Dataset.range(len(instructions))
    if context := config.input_context:
        pipelines = context.num_input_pipelines
        if len(instructions) < pipelines:
            raise InvalidArgument(
                f"input_context has {pipelines} input pipelines for {len(instructions)} files, and "
                "some would have none: divide the split instead, as by tfds.even_splits"
            )
        numbers = numbers.shard(pipelines, context.input_pipeline_id)
    order = list(numbers)
    if epoch is not None:
        shuffled = numbers.shuffle(
            len(instructions),
            seed=config.shuffle_seed,
            reshuffle_each_iteration=config.shuffle_reshuffle_each_iteration,
        )
        for _ in range(epoch + 1):
            order = list(shuffled)
    return [instructions[int(number)] for number in order]


def _sizes(builder: Any, paths: Sequence[str]) -> list[int]:
    """Raises FailedPrecondition if a file is missing."""
    sizes, missing = dict[str, int](), list[str]()
    for path in dict.fromkeys(paths):
        try:
            sizes[path] = tf.io.gfile.stat(path).length
        except tf.errors.NotFoundError:
            missing.append(path)
    if missing:
        raise FailedPrecondition(
            f"data set {builder.info.full_name} lacks {len(missing)} of {len(sizes) + len(missing)}"
            f" files: {', '.join(missing[:_MANY])}{', …' * (len(missing) > _MANY)}: prepare it "
            "again, or bring the files back"
        )
    return [sizes[path] for path in paths]


def _id_prefixes(instructions: Sequence[Any]) -> dict[str, str]:
    """What a tfds_id begins with, by file: its name, and of files in several folders the part of
    the path that tells these apart."""
    folders = {instruction.dirname() for instruction in instructions}
    end = os.path.commonprefix([folder[::-1] for folder in folders])[::-1]  # noqa: RUF071
    prefixes = {}
    for instruction in instructions:
        name = instruction.basename()
        if len(folders) > 1:
            folder = instruction.dirname()
            own = folder[: len(folder) - len(end)].rpartition("/")[2]
            name = f"{own}{end}/{name}"
        prefixes[instruction.filename] = name
    return prefixes


def _examples_of(file: dict[str, Any], config: Any, takes_all: bool) -> tf.data.Dataset:
    """Serialized examples; pairs with their ids if these are wanted."""
    with tf.control_dependencies([_unchanged(file)]):
        path = tf.identity(file["path"])
    examples = tf.data.TFRecordDataset(path, buffer_size=config.override_buffer_size or (8 << 20))
    examples = examples.skip(file["skip"])
    if not takes_all:
        examples = examples.take(file["take"])
    if config.assert_cardinality:
        examples = _exactly(file, examples)
    if not config.add_tfds_id:
        return examples
    ids = tf.data.Dataset.range(file["skip"], tf.int64.max).map(
        lambda number: tf.strings.join([file["prefix"], tf.strings.as_string(number)], "__")
    )
    return tf.data.Dataset.zip(ids, examples)


def _exactly(file: dict[str, Any], examples: tf.data.Dataset) -> tf.data.Dataset:
    """Fails if there are more or fewer than were registered. A reader asks for no example behind
    the last one. So examples are checked in groups, in which something follows the last one: the
    end, or an example too many."""
    path, take = file["path"], file["take"]
    size = tf.clip_by_value(take * GROUP_BYTES // tf.maximum(file["size"], 1), 2, 64)
    begin, end = (tf.data.Dataset.from_tensors((number, b"")) for number in (_BEGIN, _END))
    begin = begin.take(tf.cast(take % size == 0, tf.int64))
    groups = begin.concatenate(examples.enumerate()).concatenate(end).batch(size)

    def checked(numbers: Any, group: Any) -> Any:
        more = tf.reduce_any((numbers >= take) & (numbers < _END))
        fewer = (numbers[-1] == _END) & ~tf.reduce_any(numbers == take - 1)
        said = (
            *(path, tf.where(more, " has more than ", " has fewer than ")),
            *(tf.strings.as_string(take), " examples, which its metadata say: "),
            "prepare the data set again, or give ReadConfig(assert_cardinality=False)",
        )
        as_said = tf.debugging.Assert(~(more | fewer), [tf.strings.join(said)])
        with tf.control_dependencies([as_said]):
            return tf.boolean_mask(group, (numbers > _BEGIN) & (numbers < _END))

    return groups.map(plain(checked)).unbatch()


def _unchanged(file: dict[str, Any]) -> tf.Operation:
    """Fails on a worker if the file is not there, or has not the size that it was registered with.

    TensorFlow has no operation for a file's size. But a dataset of one-byte records with a footer
    says how many bytes lie before the footer, and reads no others.
    """
    path, size, text = file["path"], file["size"], tf.strings.as_string
    advice = " bytes when its data set was registered: bring it back, or register the data set anew"
    there = tf.size(tf.io.matching_files(file["pattern"])) > 0
    gone = tf.strings.join([path, " is no more, and had ", text(size), advice])
    with tf.control_dependencies([tf.debugging.Assert(there, [gone])]):
        opened = tf.identity(path)
    footer = tf.maximum(size - 1, 0)
    before = tf.data.FixedLengthRecordDataset(opened, 1, footer_bytes=footer, buffer_size=1)
    count = before.take(2).reduce(tf.constant(0, tf.int64), plain(lambda sum_, _: sum_ + 1))
    same = tf.equal(count, tf.minimum(size, 1))
    length = plain(lambda: tf.cast(tf.strings.length(tf.io.read_file(opened)), tf.int64))
    now = tf.cond(same, lambda: size, length)  # the whole file is read, but only for the error
    changed = tf.strings.join([path, " has ", text(now), " bytes, and had ", text(size), advice])
    return tf.debugging.Assert(same, [changed])


def _datasets_in(tfds: Any, features: Any, path: str = "") -> Iterator[str]:
    """The names, from outside to inside, of features that are datasets themselves."""
    if isinstance(features, tfds.features.FeaturesDict):
        for name, feature in features.items():
            yield from _datasets_in(tfds, feature, f"{path}/{name}" if path else name)
    elif isinstance(features, tfds.features.Dataset):
        yield path


def _decoding(tfds: Any, builder: Any, config: Any, decoders: Any, as_supervised: bool) -> Any:
    """The function of an example, or of an id and an example. Raises InvalidArgument."""
    features = builder.info.features
    if isinstance(decoders, tfds.decode.PartialDecoding):
        features, decoders = decoders.extract_features(features), decoders.decoders
    keys = builder.info.supervised_keys
    if as_supervised and not keys:
        raise InvalidArgument(
            f"as_supervised=True, and data set {builder.info.full_name} has no supervised_keys: "
            "leave it out"
        )
    if config.add_tfds_id and not isinstance(features, tfds.features.FeaturesDict):
        raise InvalidArgument(
            f"add_tfds_id=True, and the examples of data set {builder.info.full_name} are no dicts:"
            " leave it out"
        )

    if nested := list(_datasets_in(tfds, features)):
        raise InvalidArgument(
            f"features {nested} of data set {builder.info.full_name} are datasets themselves "
            "(tfds.features.Dataset), which cannot be sent: leave them out by "
            "decoders=tfds.decode.PartialDecoding({…}), or prepare them as tfds.features.Sequence"
        )

    def decode(*example: Any) -> Any:
        try:
            decoded = features.deserialize_example(example[-1], decoders=decoders)
        except ValueError as error:
            raise InvalidArgument(
                f"the decoders do not fit data set {builder.info.full_name}: {error}: give them by "
                "the names of its features"
            ) from error
        if config.add_tfds_id:
            decoded["tfds_id"] = example[0]
        if as_supervised:
            return tf.nest.map_structure(lambda key: decoded[key], keys)
        return decoded

    return plain(decode)

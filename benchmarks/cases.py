"""The benchmarks' datasets, and how their elements reach a trainer.

Sources in memory are cheap and equal on both sides: they measure an element's transport, not its
computation. Their pixels and numbers are random, so that compression saves nothing. Pipelines over
real files are as lean as users usually write them.
"""

from __future__ import annotations

import functools
import operator
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from .contents import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    FILE_CASES,
    IMAGES,
    JPEGS,
    ORDERED,
    PIXELS,
    READ,
    RECORD_BYTES,
    RECORDS,
    TOKENS,
    FileCase,
)

BATCH = 1_000
SMALL_BATCH = 100
GATHERED_BATCH = 32
ENDLESS = 10**12
SEQUENCES = 1_000
LONGEST = 512
BUCKETS = [64, 128, 256, 512]
GROUPS = 64
BUCKET_BATCH = 16
TOGETHER = 4  # readers of a coordinated read
FILES = 1_000  # of an epoch: more than are read in a measurement


@dataclass(frozen=True, kw_only=True)
class Case:
    """A dataset, and how its elements reach the trainer's Python."""

    dataset: Callable[[pathlib.Path, int], Any]  # takes the directory of the row's files, a size
    mode: str = "OFF"  # of sharding
    numpy: bool = False  # whether the trainer gets NumPy arrays, not a tf.data.Dataset
    batch: int = 1  # elements that reach Python at once
    gather: Callable[[Any], Any] | None = None  # makes these batches, in-graph, after the read
    coordinated: bool = False  # whether its readers make a coordinated read
    ordered: bool = False  # whether it is an ordered read; Forebay's only
    claimed: bool = False  # whether it is a read at least once; Forebay's only


def _random(shape: tuple[int, ...]) -> Any:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def _again(*shape: int) -> Callable[[pathlib.Path, int], Any]:
    """Repeat one element: no computation, no copy."""
    return lambda _, __: tf.data.Dataset.from_tensors(_random(shape)).repeat()


def _in_turn(tensors: Any) -> Any:
    """Repeat slices: for small elements, cheaper than repeating a single one."""
    return tf.data.Dataset.from_tensor_slices(tensors).repeat()


def _scalars(_: pathlib.Path, size: int) -> Any:
    return tf.data.Dataset.range(size or ENDLESS)


def _record_files(directory: pathlib.Path, _: int) -> Any:
    return tf.data.TFRecordDataset([str(RECORDS.file(directory))]).repeat()


def _images_of(_: pathlib.Path, width: int) -> Any:
    """Images of about 150 KB; each width gives another shape."""
    return _again(150_000 // (width or 224), width or 224)(_, width)


def _big_batches(_: pathlib.Path, __: int) -> Any:
    """Batches made on the worker, so that each has its own memory."""
    image = np.random.default_rng(0).random((224, 224, 3), np.float32)
    return tf.data.Dataset.from_tensors(image).repeat().batch(32, drop_remainder=True)


def _tokens(_: pathlib.Path, __: int) -> Any:
    """Sequences of 1 to 512 tokens, mostly short, like text."""
    random = np.random.default_rng(0)
    lengths = np.minimum(LONGEST, 1 + random.geometric(1 / 100, SEQUENCES))
    flat = random.integers(0, 50_000, lengths.sum(), np.int32)
    rows = _in_turn(tf.RaggedTensor.from_row_lengths(flat, lengths))
    return rows.map(lambda row: tf.ensure_shape(row, [None]))


def _buckets(_: pathlib.Path, __: int) -> Any:
    """Padded batches of such sequences, as many of one length after one another as read together:
    what bucketing leads to."""
    random = np.random.default_rng(0)
    lengths = np.repeat(random.choice(BUCKETS, GROUPS, p=[0.45, 0.3, 0.2, 0.05]), TOGETHER)
    flat = random.integers(0, 50_000, BUCKET_BATCH * lengths.sum(), np.int32)
    rows = tf.RaggedTensor.from_row_lengths(flat, BUCKET_BATCH * lengths)
    return _in_turn(rows).map(lambda row: tf.reshape(row, [BUCKET_BATCH, -1]))


def _dicts(_: pathlib.Path, __: int) -> Any:
    random = np.random.default_rng(0)
    return _in_turn(
        {
            "image": _random((SEQUENCES, 32, 32, 3)),
            "label": np.arange(SEQUENCES),
            "weight": random.random(SEQUENCES, np.float32),
            "meta": {
                "name": [f"example {number}" for number in range(SEQUENCES)],
                "valid": random.random(SEQUENCES) < 0.5,
            },
            "box": tuple(random.random((4, SEQUENCES), np.float32)),
        }
    )


def pipeline(case: FileCase, directory: pathlib.Path, size: int) -> Any:
    """The case's pipeline: infinite, or with `size` elements (batches, if it is batched)."""
    content = case.content
    source = tf.data.TextLineDataset if content.text else tf.data.TFRecordDataset
    records = source([str(content.file(directory))]).repeat()
    if size:
        records = records.take(size * case.batch)
    if content == RECORDS and case.batch > 1:  # all at once, as they have one size
        return records.batch(case.batch, drop_remainder=True).map(
            lambda batch: tf.ensure_shape(
                tf.io.decode_raw(batch, tf.uint8), [case.batch, RECORD_BYTES]
            )
        )
    if content.name in DECODERS:
        parallel = tf.data.AUTOTUNE if content == JPEGS else None
        records = records.map(DECODERS[content.name], num_parallel_calls=parallel)
    if case.batch == 1:
        return records
    batch = records.padded_batch if content == TOKENS else records.batch
    return batch(case.batch, drop_remainder=True)


def epoch(case: FileCase, directory: pathlib.Path, _: int) -> Any:
    """An epoch of FILES files of the case's content, one by one: a split is a file. Its map has no
    `num_parallel_calls`: it runs in several bundles at a time.
    """
    files = tf.data.Dataset.from_tensor_slices([str(case.content.file(directory))] * FILES)
    records = files.flat_map(tf.data.TFRecordDataset)
    decode = DECODERS.get(case.content.name)
    return records if decode is None else records.map(decode)


def _as_image(record: Any) -> Any:
    return tf.reshape(tf.io.decode_raw(record, tf.uint8), [PIXELS, PIXELS, 3])


def _decoded(record: Any) -> Any:
    """Decode by the method that Pillow uses."""
    image = tf.io.decode_jpeg(record, channels=3, dct_method="INTEGER_ACCURATE")
    return tf.ensure_shape(image, [PIXELS, PIXELS, 3])


DECODERS: dict[str, Callable[[Any], Any]] = {  # by a content's name: a record's element
    IMAGES.name: _as_image,
    JPEGS.name: _decoded,
    TOKENS.name: lambda record: tf.io.decode_raw(record, tf.int64),
}


def _gathered(batch: int, method: str = "batch") -> dict[str, Any]:
    return {"batch": batch, "gather": operator.methodcaller(method, batch)}


CASES = {
    "scalars": Case(dataset=_scalars, **_gathered(BATCH)),
    "records": Case(dataset=_record_files, **_gathered(BATCH)),
    "numpy": Case(dataset=_scalars, numpy=True),
    "medium": Case(dataset=_again(16, 1024)),
    "images": Case(dataset=_again(224, 224, 3)),
    "images of a width": Case(dataset=_images_of),
    "batches": Case(dataset=_again(32, 224, 224, 3)),
    "big batches": Case(dataset=_big_batches),
    "tokens": Case(dataset=_tokens, **_gathered(SMALL_BATCH, "ragged_batch")),
    "rounds": Case(dataset=_buckets, coordinated=True),
    "rounds into NumPy": Case(dataset=_buckets, coordinated=True, numpy=True),
    "dicts": Case(dataset=_dicts, **_gathered(SMALL_BATCH)),
    "splits": Case(dataset=_scalars, mode="DYNAMIC", **_gathered(BATCH)),
}
for _name, _case in FILE_CASES.items():
    _whole = functools.partial(pipeline, _case)
    CASES[_name] = Case(dataset=_whole)
    CASES[_name + READ] = Case(dataset=_whole, numpy=True)
    if not (_case.batch > 1 or _case.content.text):
        _epoch: dict[str, Any] = {"dataset": functools.partial(epoch, _case), "numpy": True}
        CASES[_name + AT_MOST_ONCE] = Case(**_epoch, mode="DYNAMIC")
        CASES[_name + ORDERED] = Case(**_epoch, ordered=True)
        CASES[_name + AT_LEAST_ONCE] = Case(**_epoch, claimed=True)
for _how in ("padded", "ragged"):  # of sequences one by one, the trainer makes batches in-graph
    CASES[f"file_tokens, {_how}"] = Case(
        dataset=functools.partial(pipeline, FILE_CASES["file_tokens"]),
        **_gathered(GATHERED_BATCH, f"{_how}_batch"),
    )

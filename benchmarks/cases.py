"""The benchmarks' datasets, and how their elements reach a trainer.

Sources are cheap and equal on both sides: the benchmarks measure an element's transport, not its
computation. Pixels and numbers are random, so that compression saves nothing.
"""

from __future__ import annotations

import enum
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from .contents import RECORDS
from .training import keras_step, photograph_batches

BATCH = 1_000
SMALL_BATCH = 100
ENDLESS = 10**12
SEQUENCES = 1_000
LONGEST = 512
BUCKETS = [64, 128, 256, 512]
GROUPS = 64
BUCKET_BATCH = 16
TOGETHER = 4  # readers of a coordinated read


class Into(enum.Enum):
    """The form in which a trainer gets the elements."""

    TENSORFLOW = "a tf.data.Dataset"
    NUMPY = "NumPy arrays"
    JAX = "global jax.Arrays, over two CPU devices; Forebay's only"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A dataset, and how its elements reach the trainer's Python."""

    dataset: Callable[[pathlib.Path, int], Any]  # takes the directory of the row's files, a size
    mode: str = "OFF"  # of sharding
    into: Into = Into.TENSORFLOW
    batch: int = 1  # elements that reach Python at once
    gather: Callable[[Any], Any] | None = None  # makes these batches, in-graph, after the read
    protocol: str | None = None  # of data transfer; Forebay's name
    step: Callable[[], Callable[[Any], None]] | None = None  # makes the training step
    coordinated: bool = False  # whether its readers make a coordinated read
    ordered: bool = False  # whether it is an ordered read; Forebay's only
    claimed: bool = False  # whether it is a read at least once; Forebay's only


def _random(shape: tuple[int, ...]) -> Any:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def _again(tensors: Any) -> Any:
    """Repeat one element: no computation, no copy."""
    return tf.data.Dataset.from_tensors(tensors).repeat()


def _in_turn(tensors: Any) -> Any:
    """Repeat slices: for small elements, cheaper than repeating a single one."""
    return tf.data.Dataset.from_tensor_slices(tensors).repeat()


def _scalars(_: pathlib.Path, size: int) -> Any:
    return tf.data.Dataset.range(size or ENDLESS)


def _record_files(directory: pathlib.Path, _: int) -> Any:
    return tf.data.TFRecordDataset([str(RECORDS.files(directory))]).repeat()


def _fixed_records(_: pathlib.Path, __: int) -> Any:
    return _in_turn(_random((SEQUENCES, 1024)))


def _images(_: pathlib.Path, __: int) -> Any:
    return _again(_random((224, 224, 3)))


def _images_of(_: pathlib.Path, width: int) -> Any:
    """Images of about 150 KB; each width gives another shape."""
    return _again(_random((150_000 // (width or 224), width or 224)))


def _medium(_: pathlib.Path, __: int) -> Any:
    return _again(_random((16, 1024)))


def _batches(_: pathlib.Path, __: int) -> Any:
    return _again(_random((32, 224, 224, 3)))


def _big_batches(_: pathlib.Path, __: int) -> Any:
    """Batches made on the worker, so that each has its own memory."""
    image = np.random.default_rng(0).random((224, 224, 3), np.float32)
    return _again(image).batch(32, drop_remainder=True)


def _tokens(_: pathlib.Path, __: int) -> Any:
    """Sequences of 1 to 512 tokens, mostly short, like text."""
    random = np.random.default_rng(0)
    lengths = np.minimum(LONGEST, 1 + random.geometric(1 / 100, SEQUENCES))
    flat = random.integers(0, 50_000, lengths.sum(), np.int32)
    return _in_turn(tf.RaggedTensor.from_row_lengths(flat, lengths)).map(_dense)


def _buckets(_: pathlib.Path, __: int) -> Any:
    """Padded batches of such sequences, as many of one length after one another as read together:
    what bucketing leads to."""
    random = np.random.default_rng(0)
    lengths = np.repeat(random.choice(BUCKETS, GROUPS, p=[0.45, 0.3, 0.2, 0.05]), TOGETHER)
    flat = random.integers(0, 50_000, BUCKET_BATCH * lengths.sum(), np.int32)
    rows = tf.RaggedTensor.from_row_lengths(flat, BUCKET_BATCH * lengths)
    return _in_turn(rows).map(lambda row: tf.reshape(row, [BUCKET_BATCH, -1]))


def _dense(row: Any) -> Any:
    return tf.ensure_shape(row, [None])


def _dicts(_: pathlib.Path, __: int) -> Any:
    random = np.random.default_rng(0)
    names = [f"example {number}" for number in range(SEQUENCES)]
    return _in_turn(
        {
            "image": _random((SEQUENCES, 32, 32, 3)),
            "label": np.arange(SEQUENCES),
            "weight": random.random(SEQUENCES, np.float32),
            "meta": {"name": names, "valid": random.random(SEQUENCES) < 0.5},
            "box": tuple(random.random((4, SEQUENCES), np.float32)),
        }
    )


def _batch(dataset: Any) -> Any:
    return dataset.batch(BATCH)


def _small_batch(dataset: Any) -> Any:
    return dataset.batch(SMALL_BATCH)


def _ragged_batch(dataset: Any) -> Any:
    return dataset.ragged_batch(SMALL_BATCH)


CASES = {
    "scalars": Case(dataset=_scalars, batch=BATCH, gather=_batch),
    "records": Case(dataset=_record_files, batch=BATCH, gather=_batch),
    "fixed records": Case(dataset=_fixed_records, batch=BATCH, gather=_batch),
    "numpy": Case(dataset=_scalars, into=Into.NUMPY),
    "medium": Case(dataset=_medium),
    "images": Case(dataset=_images),
    "images of a width": Case(dataset=_images_of),
    "batches": Case(dataset=_batches),
    "batches into NumPy": Case(dataset=_batches, into=Into.NUMPY),
    "batches into JAX": Case(dataset=_batches, into=Into.JAX),
    "scalars over TCP": Case(dataset=_scalars, into=Into.NUMPY, protocol="tcp", batch=1),
    "batches over TCP": Case(dataset=_batches, into=Into.NUMPY, protocol="tcp"),
    "big batches": Case(dataset=_big_batches),
    "tokens": Case(dataset=_tokens, batch=SMALL_BATCH, gather=_ragged_batch),
    "rounds": Case(dataset=_buckets, coordinated=True),
    "rounds into NumPy": Case(dataset=_buckets, coordinated=True, into=Into.NUMPY),
    "dicts": Case(dataset=_dicts, batch=SMALL_BATCH, gather=_small_batch),
    "images, static": Case(dataset=_images, mode="DATA"),
    "jpeg, static": Case(dataset=photograph_batches, step=keras_step, mode="DATA"),
    "photographs": Case(dataset=photograph_batches),
    "jpeg": Case(dataset=photograph_batches, step=keras_step),
    "splits": Case(dataset=_scalars, mode="DYNAMIC", batch=BATCH, gather=_batch),
}

"""tf.data pipelines over real files, as lean as users usually write them."""

from __future__ import annotations

import functools
import operator
import pathlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from .cases import Case, Into
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


def pipeline(case: FileCase, directory: pathlib.Path, size: int) -> Any:
    """The case's pipeline: infinite, or with `size` elements (batches, if it is batched)."""
    content = case.content
    source = tf.data.TextLineDataset if content.text else tf.data.TFRecordDataset
    records = source([str(content.files(directory))]).repeat()
    if size:
        records = records.take(size * case.batch)
    if content == RECORDS and case.batched:  # all at once, as they have one size
        return records.batch(case.pack, drop_remainder=True).map(
            lambda batch: tf.ensure_shape(
                tf.io.decode_raw(batch, tf.uint8), [case.pack, RECORD_BYTES]
            )
        )
    if content.name in DECODERS:
        parallel = tf.data.AUTOTUNE if content == JPEGS else None
        records = records.map(DECODERS[content.name], num_parallel_calls=parallel)
    if not case.batched:
        return records
    batch = records.padded_batch if case.ragged else records.batch
    return batch(case.pack, drop_remainder=True)


def epoch(case: FileCase, directory: pathlib.Path, _: int) -> Any:
    """An epoch of FILES files of the case's content, one by one: a split is a file. Its map has no
    `num_parallel_calls`: it runs in several bundles at a time.
    """
    files = tf.data.Dataset.from_tensor_slices([str(case.content.files(directory))] * FILES)
    records = files.flat_map(tf.data.TFRecordDataset)
    if case.content.name not in DECODERS:
        return records
    return records.map(DECODERS[case.content.name])


def _as_image(record: Any) -> Any:
    return tf.reshape(tf.io.decode_raw(record, tf.uint8), [PIXELS, PIXELS, 3])


def _decoded(record: Any) -> Any:
    """Decode by the method that Pillow uses."""
    image = tf.io.decode_jpeg(record, channels=3, dct_method="INTEGER_ACCURATE")
    return tf.ensure_shape(image, [PIXELS, PIXELS, 3])


def _as_tokens(record: Any) -> Any:
    return tf.io.decode_raw(record, tf.int64)


DECODERS: dict[str, Callable[[Any], Any]] = {
    IMAGES.name: _as_image,
    JPEGS.name: _decoded,
    TOKENS.name: _as_tokens,
}
"""By what a content is called: a record's element."""

FILES = 1_000
"""Of an epoch: more than are read in a measurement."""

GATHERED = {"file_tokens, padded": "padded_batch", "file_tokens, ragged": "ragged_batch"}
"""Of sequences one by one, the trainer makes batches in-graph by this method."""

GATHERED_BATCH = 32

PIPELINES = (
    {
        name + suffix: Case(dataset=functools.partial(pipeline, case), into=into)
        for name, case in FILE_CASES.items()
        for suffix, into in (("", Into.TENSORFLOW), (READ, Into.NUMPY))
    }
    | {
        name + suffix: Case(
            dataset=functools.partial(epoch, case),
            into=Into.NUMPY,
            mode="DYNAMIC" if suffix == AT_MOST_ONCE else "OFF",
            ordered=suffix == ORDERED,
            claimed=suffix == AT_LEAST_ONCE,
        )
        for name, case in FILE_CASES.items()
        if not (case.batched or case.content.text)
        for suffix in (AT_MOST_ONCE, ORDERED, AT_LEAST_ONCE)
    }
    | {
        name: Case(
            dataset=functools.partial(pipeline, FILE_CASES["file_tokens"]),
            batch=GATHERED_BATCH,
            gather=operator.methodcaller(method, GATHERED_BATCH),
        )
        for name, method in GATHERED.items()
    }
)
"""By row, and for what `read` gives, by row and READ, AT_MOST_ONCE, ORDERED or
AT_LEAST_ONCE; and GATHERED."""

"""Pipelines made up at random, as the Python expressions that build them.

All of them yield int64 scalars, so that any can be the input of any step. `build` makes the
dataset that an expression says; a test that fails prints the expression.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf
from google.protobuf import text_format
from tensorflow.core.protobuf import snapshot_pb2
from tensorflow.python.data.experimental.ops import global_shuffle_op
from tensorflow.python.saved_model import nested_structure_coder

Dataset = Any

# `{d}`: the directory of write_files; `{n}`, `{m}`: small numbers.
SOURCES = [
    "count({n})",
    "count({n}, {m})",
    "count({m}, -{n}, -2)",
    "count(-{n}, 3 * {m}, 3)",
    "count({n}, output_type=tf.int32).map(whole)",
    "count(2, 2)",
    "slices(whole(tf.range({n})))",
    "slices((whole(tf.range({n})), ['x'] * {n})).map(lambda i, _: i)",
    "slices({{'a': [[1, 2]] * {n}}}).map(lambda e: whole(e['a'][0]))",
    "slices(tf.ragged.constant([[1]] * {n} + [[2, 3]])).map(lambda r: whole(tf.size(r)))",
    "slices(tf.sparse.eye({n} + 1)).map(lambda s: s.dense_shape[0])",
    "slices([count({n}), count({m})]).flat_map(lambda inner: inner)",
    "once(whole({n}))",
    "once((whole({n}), 'x')).map(lambda i, _: i)",
    "extra.from_list([{n}, {m}, 7]).map(whole)",
    "extra.from_list([(i, 'x') for i in range({n})] + [(0, '')]).map(lambda i, _: whole(i))",
    "list_files('{d}/*.txt', shuffle=False).flat_map(text).map(number)",
    "list_files('{d}/*.txt', shuffle=True).flat_map(text).map(number)",
    "list_files(['{d}/a.t*t', '{d}/b.txt'], seed={n}).interleave(text).map(number)",
    "list_files('{d}/*.rec', seed={n}).interleave(records, cycle_length=2).map(number)",
    "slices(['{d}/a.rec', '{d}/b.rec']).interleave(records, num_parallel_calls=2).map(number)",
    "slices(['{d}/a.bin', '{d}/b.bin']).flat_map(lambda f: fixed(f, 2)).map(number)",
    "once('{d}/a.txt').flat_map(text).map(number)",
    "records(['{d}/a.rec', '{d}/b.rec']).map(number)",
    "records(list_files('{d}/*.rec', shuffle=False), num_parallel_reads=2).map(number)",
    "text(['{d}/a.txt', '{d}/b.txt']).map(number)",
    "text('{d}/a.txt').map(number)",
    "fixed('{d}/a.bin', 2).map(number)",
    "csv('{d}/a.txt', 2, ['a'], header=False, num_epochs=1).unbatch().map(lambda e: whole(e['a']))",
    "loaded('{d}/save')",
    "loaded('{d}/save', reader_func=lambda chunks: chunks.flat_map(lambda chunk: chunk))",
    "zipped((count({n}), slices(whole(tf.range({m}))))).map(paired)",
    "zipped((count({m}).map(lambda i: i + 1), slices(['a', 'b', 'c']))).map(lambda i, _: i)",
    "zipped((count(8).batch({n}).unbatch(), count(8).batch({n}).unbatch())).map(paired)",
    "zipped((count({m}).repeat(2), count(-{m}, 0).repeat(2))).map(paired)",
    "zipped((count({m}).concatenate(count({n})), count({m}).concatenate(count({n})))).map(paired)",
    "zipped((count({m}), once(whole({n})).repeat())).map(paired)",
]

CUT_SOURCES = [
    "data.random(seed={n}).take({m}).map(lambda i: i % 5)",
    "data.counter({n}, 2).take({m})",
]

REFUSED_SOURCES = [
    "extra.CsvDataset('{d}/a.txt', [tf.int64]).map(lambda i: i)",
    "tf.compat.v1.data.Dataset.from_sparse_tensor_slices(tf.sparse.eye({n}))",
    "count({n}).snapshot('{d}/snapshot')",
]

# Whoever reads which splits, the elements of all workers together are the dataset's.
EXACT_STEPS = [
    "map(lambda i: i * 3 + 1)",
    "map(lambda i: i - 1, num_parallel_calls=2)",
    "filter(lambda i: i % 3 != 1)",
    "flat_map(lambda i: count(i % 4))",
    "interleave(lambda i: count(i % 3, 4), cycle_length=2)",
    "interleave(lambda i: once(i), num_parallel_calls=2)",
    "shuffle(4)",
    "shuffle(100, seed={n}, reshuffle_each_iteration=False)",
    "cache()",
    "prefetch(2)",
    "repeat(2)",
    "repeat(1)",
    "batch(3).unbatch()",
    "take(-1)",
    "skip(0)",
    "take_while(lambda i: True)",
    "with_options(unordered)",
    "apply(extra.ignore_errors())",
    "apply(extra.shuffle_and_repeat(3, 2))",
    "window({n}).flat_map(lambda w: w)",
]

# What each worker makes of its splits depends on which these are.
OTHER_STEPS = [
    "take({n})",
    "skip({n})",
    "take(0)",
    "repeat(0)",
    "shard(2, 1)",
    "batch({n}).map(tf.reduce_sum)",
    "batch(2, drop_remainder=True).map(tf.reduce_sum)",
    "batch(4).rebatch(3).map(tf.reduce_sum)",
    "padded_batch(3).map(tf.reduce_sum)",
    "ragged_batch(2).map(lambda b: tf.reduce_sum(b))",
    "enumerate({n}).map(lambda i, e: i + e)",
    "scan(whole(0), lambda s, i: (s + i, s))",
    "take_while(lambda i: i < 5)",
    "unique()",
    "take({n}).cache()",
    "cache().take({n})",
    "shuffle(3).take({n})",
    "group_by_window(lambda i: i % 2, lambda _, w: w.batch(4), 4).map(tf.reduce_sum)",
    "bucket_by_sequence_length(lambda i: 1, [2], [2, 2]).map(tf.reduce_sum)",
    "rejection_resample(lambda i: i % 2, [0.5, 0.5], [0.5, 0.5], seed=1).map(lambda _, i: i)",
]

PARTICULAR_STEPS = [  # which some inputs make fail
    "apply(extra.assert_cardinality({m}))",
    "apply(lambda d: global_shuffle(d, 1))",
]

ENDLESS_STEPS = [
    "repeat()",
    "repeat(-1)",
    "shuffle(3).repeat()",
    "cache().repeat()",
    "repeat().shuffle(3)",
    "repeat().batch(2).unbatch()",
    "repeat().map(lambda i: i + 1, num_parallel_calls=2).prefetch(1)",
    "repeat().interleave(lambda i: count(i % 3), cycle_length=2)",
    "repeat(2).repeat()",
    "repeat().repeat(2)",
    "apply(extra.shuffle_and_repeat(3))",
]

ENDLESS_SOURCES = [
    "data.random(seed={n}).map(lambda i: i % 7)",
    "data.random(seed={n}, rerandomize_each_iteration=True).map(lambda i: i % 7)",
    "data.counter({n})",
    "count({n}, tf.int64.max)",
    "count(0, tf.int64.max, {m})",
    "count(0, tf.int64.min, -{m})",
]

EXACT_JOINS = [
    "{a}.concatenate({b})",
    "{a}.concatenate({b}).concatenate({a})",
    "data.sample_from_datasets([{a}, {b}], [0.5, 0.5], seed={n})",
]

OTHER_JOINS = [
    "zipped(({a}, {b})).map(paired)",
    "zipped({{'x': {a}, 'y': ({b}, {a})}}).map(lambda e: e['x'] - e['y'][0] * e['y'][1])",
    "data.sample_from_datasets([{a}, {b}, {a}], seed={n}, stop_on_empty_dataset=True)",
    "data.sample_from_datasets([{a}, {b}], slices([[0.5, 0.5]] * {n}), seed={m})",
    "data.choose_from_datasets([{a}, {b}], count(2).repeat({n}))",
    "data.choose_from_datasets([{a}, {b}], slices(whole([0, 1] * 4)), stop_on_empty_dataset=False)",
    "extra.choose_from_datasets([{a}, {b}], slices(whole([0, 1, 1])))",
]


class Compositions:
    """Expressions, drawn with the random numbers of a seed."""

    def __init__(self, seed: int, directory: Path) -> None:
        self._random = random.Random(seed)
        self._directory = directory

    def exact(self, depth: int) -> str:
        """A pipeline whose elements are the same whoever reads which splits."""
        return self._composed(depth, SOURCES, EXACT_STEPS, EXACT_JOINS)

    def any(self, depth: int) -> str:
        """A pipeline of whatever there is, up to `depth` steps above each source."""
        return self._composed(
            depth,
            [*SOURCES * 3, *CUT_SOURCES, *ENDLESS_SOURCES, *REFUSED_SOURCES[:1]],
            [*EXACT_STEPS, *OTHER_STEPS, *ENDLESS_STEPS[:4]],
            [*EXACT_JOINS, *OTHER_JOINS],
        )

    def filled(self, template: str, **parts: str) -> str:
        """A template of the above with its numbers and its directory."""
        n, m = self._random.randint(1, 5), self._random.randint(1, 9)
        return template.format(d=self._directory, n=n, m=m, **parts)

    def _composed(self, depth: int, sources: list[str], steps: list[str], joins: list[str]) -> str:
        if depth == 0:
            return self.filled(self._random.choice(sources))
        first, second = (self._composed(depth - 1, sources, steps, joins) for _ in "ab")
        if self._random.random() < 0.3:
            return self.filled(self._random.choice(joins), a=first, b=second)
        return f"{first}.{self.filled(self._random.choice(steps))}"


def write_files(directory: Path) -> None:
    """What the sources read: text, records, and records of two bytes; four numbers each. And a
    distributed save."""
    for i, name in enumerate("ab"):
        numbers = [f"{n:02}" for n in range(10 * i, 10 * i + 4)]
        (directory / f"{name}.txt").write_text("\n".join(numbers))
        (directory / f"{name}.bin").write_text("".join(numbers))
        with tf.io.TFRecordWriter(str(directory / f"{name}.rec")) as writer:
            for each in numbers:
                writer.write(each.encode())
    write_save(directory / "save", {"chunk_0_0_2": [0, 1], "chunk_1_0_1": [2], "chunk_0_1_1": [3]})
    (directory / "save" / "DONE").touch()


def write_save(path: Path, chunks: Mapping[str, list[int]]) -> None:
    """A distributed save's directory, that is not finished."""
    (path / "chunks").mkdir(parents=True)
    spec = nested_structure_coder.encode_structure(tf.TensorSpec([], tf.int64))
    metadata = snapshot_pb2.DistributedSnapshotMetadata(element_spec=spec.SerializeToString())
    (path / "snapshot.metadata").write_text(text_format.MessageToString(metadata))
    for name, numbers in chunks.items():
        write_chunk(path, name, numbers)


def write_chunk(path: Path, name: str, numbers: list[int]) -> None:
    """One more file of a save's."""
    with tf.io.TFRecordWriter(str(path / name)) as writer:
        for each in numbers:
            writer.write(tf.make_tensor_proto(each, tf.int64).SerializeToString())
    (path / name).rename(path / "chunks" / name)


def build(expression: str, **more: Any) -> Dataset:
    """The dataset. `more` are names that the expression has besides those that it may have."""
    unordered = tf.data.Options()
    unordered.deterministic = False
    names = {
        "tf": tf,
        "data": tf.data.Dataset,
        "count": tf.data.Dataset.range,
        "once": tf.data.Dataset.from_tensors,
        "slices": tf.data.Dataset.from_tensor_slices,
        "list_files": tf.data.Dataset.list_files,
        "zipped": tf.data.Dataset.zip,
        "whole": whole,
        "paired": lambda a, b: 100 * a + b,
        "number": number,
        "text": tf.data.TextLineDataset,
        "records": tf.data.TFRecordDataset,
        "fixed": tf.data.FixedLengthRecordDataset,
        "extra": tf.data.experimental,
        "loaded": tf.data.Dataset.load,
        "csv": tf.data.experimental.make_csv_dataset,
        "unordered": unordered,
        "global_shuffle": global_shuffle_op._global_shuffle,
    }
    return eval(expression, {**names, **more})


def whole(value: Any) -> Any:
    """As an int64."""
    return tf.cast(value, tf.int64)


def number(text: Any) -> Any:
    """The int64 that a text says."""
    return tf.strings.to_number(text, tf.int64)

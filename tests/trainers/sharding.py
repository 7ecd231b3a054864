"""The table of auto-sharding in TensorFlow's guide on distributed input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HALVES = [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]
IN_TURN = [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]
EVERYTHING = [[[i, i + 1] for i in range(0, 12, 2)]] * 2
TWO, ONE, UNEQUAL = ["0 to 5", "6 to 11"], ["0 to 11"], ["0 to 5", "6 to 8"]
SHARDING: list[tuple[str, list[str], Any, Any]] = [
    # What each of two workers gets of the files, in batches of 4 for both; and through the service,
    # each for itself. (The guide has FILE end in [4] [5], where TensorFlow 2.21 joins what fits.)
    ("FILE", TWO, HALVES, [True, True]),  # an error, as with TensorFlow's own client
    ("AUTO", TWO, HALVES, IN_TURN),  # which is DATA, as it finds no files
    ("DATA", TWO, IN_TURN, IN_TURN),
    ("DATA", ONE, IN_TURN, IN_TURN),
    ("OFF", ONE, EVERYTHING, EVERYTHING),
    # Steps may be smaller than the global batch.
    ("FILE", UNEQUAL, [HALVES[0], [[6, 7], [8], []]], [True, True]),
]

LINES = """
import tensorflow as tf


def lines(directory, *names):
    "What these files of the directory have, one after another, in batches."
    files = tf.data.Dataset.from_tensor_slices([f"{directory}/{name}" for name in names])
    numbers = files.interleave(tf.data.TextLineDataset, cycle_length=1)
    return numbers.map(lambda line: tf.strings.to_number(line, tf.int64)).batch(4)


def with_policy(dataset, name):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[name]
    return dataset.with_options(options)
"""


def write_files(directory: Path) -> None:
    """Those of the table, a number a line."""
    for first, last in ((0, 5), (6, 11), (0, 11), (6, 8)):
        lines = "".join(f"{i}\n" for i in range(first, last + 1))
        (directory / f"{first} to {last}").write_text(lines)

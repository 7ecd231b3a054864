"""Prints fingerprints of datasets that are made by iterating over sets.

Its argument is the folder of a prepared data set of TensorFlow Datasets.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import apache_beam as beam
import tensorflow as tf

from forebay.service.client import tfds
from forebay.service.pipelines.kinds.beam import beam_dataset
from forebay.service.pipelines.kinds.functions import listed, request_of
from forebay.service.pipelines.tf_data.canonical import fingerprint, sanitize
from forebay.service.pipelines.tf_data.imports import graph_of
from forebay.service.pipelines.tf_data.seeds import KEY, seeded
from forebay.service.proto import graph_pb2 as pb

from ..tfds_digits import prepared

NAMES = frozenset(f"feature{n}" for n in range(6))
CAPTURED = {name: tf.constant([n, 2], tf.int64) for n, name in enumerate(sorted(NAMES))}


def nodes(x: Any) -> Any:
    return {name: tf.strings.length(name) + tf.cast(x, tf.int32) for name in NAMES}


def captures(x: Any) -> Any:
    return {name: x + CAPTURED[name] for name in NAMES}


def parsed(x: Any) -> Any:
    text = tf.strings.as_string(x)
    return {name: tf.strings.to_number(text + name[-1]) for name in NAMES}


def behind(x: Any) -> Any:
    with tf.control_dependencies([tf.strings.length(name) for name in NAMES]):
        return tf.identity(x)


def drawn(x: Any) -> Any:
    return {name: (tf.random.uniform([]), x + len(name)) for name in NAMES}


@tf.function  # type: ignore[untyped-decorator]
def inner(x: Any) -> Any:
    return {name: x * CAPTURED[name] for name in NAMES}


def called(x: Any) -> Any:
    found = inner(x)
    return {name: found[name] - CAPTURED[name] for name in NAMES}


def branches(x: Any) -> Any:
    def other() -> Any:
        return {name: CAPTURED[name] * 3 for name in NAMES}

    return tf.cond(x > 3, lambda: captures(x), other)


def mapped(x: Any) -> Any:
    return tf.map_fn(nodes, tf.range(x), dict.fromkeys(NAMES, tf.int32))


def summed(x: Any) -> Any:
    found = captures(x)
    return sum(found[name] for name in sorted(NAMES))


def looped(x: Any) -> Any:
    def body(i: Any, total: Any) -> Any:
        return i + CAPTURED["feature3"][1], total + summed(i)

    return tf.while_loop(lambda i, _: i < summed(x)[0], body, [x, tf.stack([x, x])])


def grouped(dataset: tf.data.Dataset) -> tf.data.Dataset:
    def pairs(_: Any, window: Any) -> Any:
        return window.map(captures).batch(2)

    return dataset.group_by_window(lambda x: summed(x)[0], pairs, None, lambda x: summed(x)[1])


def spare(x: Any) -> Any:
    """No result needs the sizes of the loops' lists."""
    return {name: tf.map_fn(lambda y: y + int(name[-1]), tf.range(x)) for name in NAMES}  # noqa: B023


def table(x: Any) -> Any:
    return {name: TABLES[name].lookup(x) for name in NAMES}


TABLES = {
    name: tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [n]), n)
    for n, name in enumerate(sorted(NAMES))
}


class Looked(beam.DoFn):  # type: ignore[misc] # Beam has no types
    def __init__(self, names: set[str]) -> None:
        self._names = names

    def process(self, element: int) -> Any:
        yield {"found": str(element) in self._names and element in CODES["b"]}


CODES: dict[str, Any] = {"a": NAMES, "b": {3, "four", b"five"}}


def printed(name: str, dataset: tf.data.Dataset) -> None:
    graph = sanitize(graph_of(dataset))
    random = pb.GraphDef.FromString(seeded(graph))
    random.node.add(name=KEY.partition(":")[0], op="Placeholder")
    print(name, fingerprint(graph), fingerprint(random.SerializeToString()))


if __name__ == "__main__":
    numbers = tf.data.Dataset.range(9)
    for function in (
        nodes,
        captures,
        parsed,
        behind,
        called,
        branches,
        mapped,
        drawn,
        looped,
        spare,
    ):
        printed(function.__name__, numbers.map(function))
    printed("grouped", grouped(numbers))
    with mock.patch.object(tfds, "registered") as sent:
        tfds.register_tfds("localhost:1", prepared(Path(sys.argv[1])))
    print("TFDS", fingerprint(sent.call_args.args[1].graph))
    elements = beam.Pipeline() | beam.Create([1, 2]) | beam.ParDo(Looked(set(NAMES)))
    chain = beam_dataset(elements | beam.Filter(lambda found: found.keys() - NAMES))
    request = request_of(chain, listed(chain.splits))
    print("Beam", hashlib.sha256(request.python).hexdigest())
    printed("table", numbers.map(lambda x: table(tf.cast(x, tf.int32))))

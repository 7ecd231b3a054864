"""Datasets that tests send through pipelines, and how results are compared."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, namedtuple
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Optional

import numpy as np
import tensorflow as tf

from forebay.journal.proto import events_pb2 as ev
from forebay.service.pipelines import SplitRange

Dataset = Any
Point = namedtuple("Point", ["x", "label"])


class Shape(tf.experimental.ExtensionType):  # type: ignore[misc]
    """What is no tensor, and how it can be nested."""

    __name__ = "tests.Shape"
    name: str
    rank: int
    scale: float
    closed: bool
    dtype: tf.DType
    shape: tf.TensorShape
    unknown: tf.TensorShape
    nothing: Optional[tf.Tensor]  # noqa: UP045 - TensorFlow does not know the other form
    pair: tuple[tf.Tensor, str]
    more: Mapping[str, tf.Tensor]


class Masked(tf.experimental.ExtensionType):  # type: ignore[misc]
    __name__ = "tests.Masked"
    values: tf.Tensor
    mask: tf.Tensor
    shape: Shape


class Document(tf.experimental.BatchableExtensionType):  # type: ignore[misc]
    __name__ = "tests.Document"
    number: tf.Tensor
    words: tf.RaggedTensor


def masked(i: Any) -> Any:
    rest = {"pair": (i, "unit"), "more": {"b": [i, i], "a": i}}
    shape = Shape(
        "box", 2, 0.5, True, tf.int8, tf.TensorShape([1, None]), tf.TensorShape(None), None, **rest
    )
    return Masked(tf.range(i), i > 1, shape)


def document(i: Any) -> Any:
    return Document(i, tf.RaggedTensor.from_row_lengths(["a", "b", "c"], [1, 2]))


slices = tf.data.Dataset.from_tensor_slices
count = tf.data.Dataset.range


def steps() -> set[threading.Thread]:
    """That have not ended."""
    return {thread for thread in threading.enumerate() if thread.name == "forebay-pipeline"}


def wait_for_steps(but: Iterable[threading.Thread] = ()) -> None:
    """Of runs that have ended: TensorFlow takes up to a minute to notice that (drivers.py), unless
    it does not tune them. `but` go on."""
    for thread in steps().difference(but):
        thread.join(timeout=90)


def untuned(dataset: Dataset) -> Dataset:
    """Whose steps end with their runs."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def floats(dtype: Any) -> Dataset:
    return slices(tf.cast(tf.constant([0.0, 1.5, -2.0, 448.0]), dtype))


def float8(name: str, dataset: Dataset) -> Dataset:
    options = tf.data.Options()  # TensorFlow's optimizer does not know float8
    options.experimental_optimization.apply_default_optimizations = False
    return dataset.map(lambda x: tf.cast(x, tf.as_dtype(name))).with_options(options)


def integers(dtype: Any) -> Dataset:
    low, high = max(dtype.min, -(2**63)), min(dtype.max, 2**63 - 1)
    return slices(tf.constant(np.array([0, 1, low, high], dtype.as_numpy_dtype)))


def quantized(dtype: Any, bits: Any) -> Dataset:
    return slices(tf.bitcast(tf.constant([0, 1, 77], bits), dtype))


STRINGS = [b"", b"a", b"nul \0 inside\0", "große Straße ✓".encode(), bytes(range(256)), b"x" * 999]

ELEMENTS: dict[str, Callable[[], Dataset]] = {
    **{t.name: partial(integers, t) for t in (tf.int8, tf.uint8, tf.int16, tf.uint16)},
    **{t.name: partial(integers, t) for t in (tf.int32, tf.uint32, tf.int64, tf.uint64)},
    **{t.name: partial(floats, t) for t in (tf.float16, tf.float32, tf.float64, tf.bfloat16)},
    "float8_e5m2": lambda: float8("float8_e5m2", slices([0.0, 1.5, -2])),
    "float8_e4m3fn": lambda: float8("float8_e4m3fn", slices([0.0, 1.5, -2])),
    "int4": lambda: count(-8, 8).map(lambda i: tf.cast(i, tf.as_dtype("int4"))),
    "uint4": lambda: count(16).map(lambda i: tf.cast(i, tf.as_dtype("uint4"))),
    "qint8": lambda: quantized(tf.qint8, tf.int8),
    "quint8": lambda: quantized(tf.quint8, tf.uint8),
    "bool": lambda: slices([True, False, True]),
    "complex64": lambda: slices(tf.constant([1 + 2j, -1j], tf.complex64)),
    "complex128": lambda: slices(tf.constant([1 + 2j, -1j], tf.complex128)),
    "float8 of unknown shape": lambda: float8("float8_e5m2", slices([0.0, 1.5, 2]).batch(2)),
    "many scalars": lambda: count(20_000),
    "vectors": lambda: count(50).map(lambda i: tf.fill([3, 2], i)),
    "strings": lambda: slices(STRINGS),
    "shaped strings": lambda: slices(np.array(STRINGS, object).reshape(3, 2)),
    "varying strings": lambda: slices(STRINGS).batch(4),
    "no strings": lambda: count(3).map(lambda _: tf.zeros([0], tf.string)),
    "pair": lambda: tf.data.Dataset.zip((count(5), slices(STRINGS[:5]))),
    "one-tuple": lambda: count(5).map(lambda i: (i,)),
    "dict": lambda: count(9).map(lambda i: {"b": i, "a": (i, [i, i]), "c": {"d": i}}),
    "named tuple": lambda: count(9).map(lambda i: Point(x=tf.range(i), label={"y": i})),
    "None inside": lambda: count(3).map(lambda i: (i, None, {"n": None})),
    "tokens": lambda: count(100).map(lambda i: tf.range(i % 7)),
    "images": lambda: count(20).map(lambda i: tf.fill([i % 3, 4, i % 2 + 1], i)),
    "equal after all": lambda: count(100).batch(10),
    "ragged": lambda: slices(tf.ragged.constant([[[1], [2, 3]], [], [[4]], [[], [5]]])),
    "ragged twice": lambda: slices(
        tf.ragged.constant([[[[1], []], [[2, 3]]], [], [[[4]]], [[[], [5, 6]]]])
    ),
    "ragged strings": lambda: slices(
        tf.ragged.constant([[["a"], ["", "bc"]], [], [["d" * 50]]], tf.string)
    ),
    "ragged of rows": lambda: slices(
        tf.ragged.constant([[[[1, 2]], [[3, 4], [5, 6]]], [], [[[7, 8]]]], ragged_rank=2)
    ),
    "ragged batch": lambda: count(10).map(lambda i: tf.range(i)).ragged_batch(4),
    "ragged int32 splits": lambda: slices(
        tf.ragged.constant([[[1], [2, 3]], []], row_splits_dtype=tf.int32)
    ),
    "sparse": lambda: slices(tf.sparse.from_dense([[0, 1, 2], [0, 0, 0], [3, 0, 0]])),
    "sparse batch": lambda: slices(tf.sparse.from_dense([[0, 1], [2, 0], [0, 3]])).batch(2),
    "mixed": lambda: tf.data.Dataset.zip(
        {
            "ragged": slices(tf.ragged.constant([[[1.0]], [[2.0, 3.0], []]])),
            "sparse": slices(tf.sparse.from_dense([[0, 1], [2, 0]])),
            "text": slices(["x", "yz"]),
            "shape": count(2).map(lambda i: tf.ones([i, 2])),
        }
    ),
    "extension type": lambda: count(5).map(lambda i: {"m": masked(i), "n": (i, masked(i))}),
    "extension type without a function": lambda: tf.data.Dataset.from_tensors(
        Document(1, tf.ragged.constant([[1], [2, 3]]))
    ).repeat(3),
    "batched extension type": lambda: count(5).map(document).batch(2),
    "unknown rank": lambda: tf.data.Dataset.from_generator(
        lambda: iter([np.ones(()), np.ones(3), np.ones((2, 0)), np.ones((2, 2))]),
        output_signature=tf.TensorSpec(None, tf.float64),
    ),
    "unknown rank strings": lambda: tf.data.Dataset.from_generator(
        lambda: iter([b"a", [b"b", b""], [[b"c"]]]), output_signature=tf.TensorSpec(None, tf.string)
    ),
    "zero-size": lambda: count(5).map(lambda _: tf.zeros([0, 4])),
    "zero-size, varying": lambda: count(5).map(lambda i: tf.zeros([i, 0])),
    "large": lambda: count(4).map(lambda i: tf.fill([300, 4096], tf.cast(i, tf.float32))),
    "sliced": lambda: count(40).map(lambda i: tf.fill([64, 64], tf.cast(i, tf.float32))),
    "large, varying": lambda: count(6).map(lambda i: tf.fill([i * 600_000 + 1], i)),
    "larger than the budget": lambda: count(3).map(lambda i: tf.fill([i + 1, 700_000], i)),
    "large strings": lambda: count(4).map(lambda i: tf.strings.as_string(tf.fill([i, 20_000], i))),
    "empty": lambda: count(0),
    "empty and varying": lambda: count(0).map(lambda i: (tf.range(i), "x")),
    "infinite, cut": lambda: count(3).repeat().take(1000),
}


class OneSource:
    """The rest of a feed whose `next_range` is the point of a test."""

    sources = (ev.SplitSource(count=10),)

    def is_over(self, sources: Iterable[int]) -> bool:
        return False


class Leases:
    """Hands the splits of a graph's sources to several workers, as the dispatcher does."""

    def __init__(self, sources: list[ev.SplitSource], size: int = 1) -> None:
        self.sources = sources
        self._lock = threading.Lock()
        self._ends = [_length(splits) for splits in self.sources]
        for splits in self.sources:
            if splits.HasField("leased_with"):
                first = splits.leased_with
                self._ends[first] = min(self._ends[first], _length(splits))
        self._next = [0] * len(sources)
        self._pass = [0] * len(sources)
        self._size = size
        self.calls = 0

    def next_range(self, source: int, opening: int, endless: bool) -> SplitRange | None:
        with self._lock:
            self.calls += 1
            pass_number = max(opening, self._pass[source]) if endless else opening
            if pass_number < self._pass[source]:
                return None
            if pass_number > self._pass[source]:
                self._pass[source], self._next[source] = pass_number, 0
            first, end = self._next[source], self._ends[source]
            if first >= end:
                self._pass[source], self._next[source] = pass_number + 1, 0
                return None
            self._next[source] = min(end, first + self._size)
            return SplitRange(first, self._next[source] - first, pass_number)

    def is_over(self, sources: Iterable[int]) -> bool:
        return not any(self._ends[self._first(source)] for source in sources)

    def _first(self, source: int) -> int:
        splits = self.sources[source]
        return splits.leased_with if splits.HasField("leased_with") else source


def _length(splits: ev.SplitSource) -> int:
    match splits.WhichOneof("source"):
        case "arithmetic":
            numbers = splits.arithmetic
            return len(range(numbers.start, numbers.stop, numbers.step))
        case "count":
            return splits.count
    return 2**62


def write_records(directory: Path, files: int, records: int) -> list[str]:
    numbers = itertools.count()
    paths = [str(directory / f"{i}.tfrecord") for i in range(files)]
    for path in paths:
        with tf.io.TFRecordWriter(path) as writer:
            for _ in range(records):
                writer.write(str(next(numbers)).encode())
    return paths


def plain(value: Any) -> Any:
    """A value that compares and hashes: of an element of tensors, or of one from NumPy."""
    match value:
        case None:
            return None
        case Mapping():
            return {key: plain(value[key]) for key in sorted(value)}
        case tf.RaggedTensor() | tf.SparseTensor():
            parts = tf.nest.flatten(value, expand_composites=True)
            return (type(value).__name__, *[plain(part) for part in parts])
        case tf.experimental.ExtensionType():
            fields = tf.experimental.extension_type.as_dict(value).values()
            return (type(value).__name__, *[plain(field) for field in fields])
        case tf.DType():
            return plain(value.name)
        case tf.TensorShape():
            return plain(None if value.rank is None else tuple(value))
        case tuple():
            return (type(value).__name__, *[plain(item) for item in value])
    array = value.numpy() if hasattr(value, "numpy") else np.asarray(value)
    if not isinstance(array, np.ndarray | np.generic):
        array = np.array(array, object)
    shown = array.tolist() if array.dtype == object else array.tobytes()
    return (array.shape, str(array.dtype), shown)


def counted(dataset: Dataset) -> Counter[str]:
    return Counter(repr(plain(element)) for element in dataset)

"""Chains of Beam's transforms, run by bundles, beside Beam's own runner; when their DoFns are set
up and torn down, and what they count.
"""

from __future__ import annotations

import bz2
import contextlib
import functools
import gzip
import os
import pickle
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import cloudpickle
import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from apache_beam import pvalue
from apache_beam.io import fileio, iobase
from apache_beam.io.concat_source import ConcatSource
from apache_beam.io.range_trackers import OffsetRangeTracker
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.metrics import Metrics
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.transforms.periodicsequence import PeriodicImpulse
from apache_beam.transforms.userstate import BagStateSpec
from apache_beam.transforms.window import FixedWindows, GlobalWindows

from forebay import service
from forebay.service.errors import FailedPrecondition, InvalidArgument, PipelineError
from forebay.service.pipelines import Pipeline
from forebay.service.pipelines.beam import translation
from forebay.service.pipelines.beam.chain import Chain
from forebay.service.pipelines.beam.translation import Translated, translate, values
from forebay.service.pipelines.kinds.beam import beam_dataset
from forebay.service.pipelines.kinds.functions import (
    first_elements,
    listed,
    python_dataset,
    request_of,
)
from forebay.service.pipelines.python.pipeline import PythonPipeline
from forebay.service.proto import metrics_pb2 as pb
from forebay.service.proto.python_pb2 import PythonDataset
from forebay.service.user_metrics import MAX_METRICS, Totals, counter, distribution, shown

from .contract import SPLITS, Step
from .functions import INT, FunctionContract, numbers, pipeline_of, read, structure_of
from .functions import done as done_in_python

ROW = {"type": "record", "name": "row", "fields": [{"name": "n", "type": "long"}]}

Build = Callable[[beam.Pipeline], beam.PCollection]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of each kind, of 30 records together."""
    folder = tmp_path_factory.mktemp("files")
    for at in range(2):
        numbers = range(15 * at, 15 * at + 15)
        (folder / f"{at}.txt").write_text("".join(f"line {n}\n" for n in numbers))
        table = pa.table({"n": list(numbers), "square": [n * n for n in numbers]})
        pq.write_table(table, folder / f"{at}.parquet", row_group_size=4)
        with (folder / f"{at}.avro").open("wb") as rows:
            fastavro.writer(rows, ROW, [{"n": n} for n in numbers])
        with tf.io.TFRecordWriter(str(folder / f"{at}.tfrecord")) as records:
            for n in numbers:
                records.write(b"%d" % n)
    (folder / "nothing.txt").touch()
    (folder / "text.gz").write_bytes(gzip.compress(b"of\nthis\n"))
    (folder / "text.bz2").write_bytes(bz2.compress(b"of\nthat\n"))
    with tf.io.TFRecordWriter(str(folder / "records.gz"), "GZIP") as records:
        records.write(b"in few bytes")
    return folder


class Halves(beam.RestrictionProvider):  # type: ignore[misc]
    def initial_restriction(self, element: int) -> OffsetRange:
        return OffsetRange(0, element)

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def split(self, element: int, restriction: OffsetRange) -> Iterator[OffsetRange]:
        middle = (restriction.start + restriction.stop) // 2
        yield OffsetRange(restriction.start, middle)
        yield OffsetRange(middle, restriction.stop)

    def restriction_size(self, element: int, restriction: OffsetRange) -> int:
        return int(restriction.size())


HALVES = beam.DoFn.RestrictionParam(Halves())


class Count(beam.DoFn):  # type: ignore[misc]
    """Splittable: counts up to its element."""

    def process(self, element: int, tracker: Any = HALVES) -> Iterator[tuple[int, int]]:
        at = tracker.current_restriction().start
        while tracker.try_claim(at):
            yield element, at
            at += 1


def timed(element: Any, timestamp: Any = beam.DoFn.TimestampParam) -> tuple[Any, float]:
    return element, float(timestamp)


class Stamped(beam.DoFn):  # type: ignore[misc]
    """Splittable, too: and says when its element is."""

    def process(
        self, element: int, time: Any = beam.DoFn.TimestampParam, tracker: Any = HALVES
    ) -> Iterator[Any]:
        for each in Count().process(element, tracker):
            yield each, float(time)


class SignedTwice(beam.DoFn):  # type: ignore[misc]
    def process(self, element: int) -> Iterator[Any]:
        yield element
        yield pvalue.TaggedOutput("negative", -element)


class AtTheEnd(beam.DoFn):  # type: ignore[misc]
    """Gives what came in a bundle at its end."""

    def start_bundle(self) -> None:
        self.seen: list[int] = []

    def process(self, element: int) -> None:
        self.seen.append(element)

    def finish_bundle(self) -> Iterator[Any]:
        for element in self.seen:
            yield beam.transforms.window.GlobalWindows.windowed_value(element)


class OfBundle(AtTheEnd):
    """What a function makes of all that came."""

    def __init__(self, function: Callable[..., Iterator[Any]]) -> None:
        super().__init__()
        self._function = function

    def finish_bundle(self) -> Iterator[Any]:
        for element in self._function(elements=iter(self.seen)):
            yield GlobalWindows.windowed_value(element)


@functools.cache
def split_each() -> Sequence[bytes]:
    """What the contract's pipelines are run with: a number each."""
    return translate(beam.Pipeline() | beam.Create(range(SPLITS))).splits


@functools.cache
def chain_of(steps: Sequence[Step]) -> Chain:
    elements = beam.Pipeline() | beam.Create([0])
    for at, step in enumerate(steps):
        done = functools.partial(done_in_python, step, source=random)  # type: ignore[arg-type]
        if step.kind in ("batch", "shuffle"):
            elements |= f"{at}" >> beam.ParDo(OfBundle(done))
        else:
            elements |= f"{at}" >> beam.FlatMap(lambda x, done=done: done(elements=iter([x])))
    return beam_dataset(elements).function  # type: ignore[return-value]


class TestContract(FunctionContract):
    def make(self, steps: Sequence[Step]) -> Pipeline:
        structure, packages = structure_of(steps), ["apache-beam"]
        return pipeline_of(chain_of((*steps,)), split_each(), structure, packages=packages)


class Counting(iobase.BoundedSource):  # type: ignore[misc]
    """Up to a number, three at a time."""

    def __init__(self, stop: int) -> None:
        self._stop = stop

    def estimate_size(self) -> int:
        return self._stop

    def split(
        self, wished_bytes: int, start: int | None = None, stop: int | None = None
    ) -> Iterator[iobase.SourceBundle]:
        end = self._stop if stop is None else stop
        for at in range(start or 0, end, 3):
            yield iobase.SourceBundle(3, self, at, min(end, at + 3))

    def get_range_tracker(self, start: int | None, stop: int | None) -> OffsetRangeTracker:
        return OffsetRangeTracker(start or 0, self._stop if stop is None else stop)

    def read(self, tracker: OffsetRangeTracker) -> Iterator[int]:
        at = tracker.start_position()
        while tracker.try_claim(at):
            yield at
            at += 1


def signs(p: beam.Pipeline) -> Any:
    return (
        p
        | beam.Create([1, 2, 3])
        | beam.ParDo(SignedTwice()).with_outputs("negative", main="positive")
    )


def looked_up(p: beam.Pipeline) -> beam.PCollection:
    numbers = p | "numbers" >> beam.Create([1, 2, 3])
    words = p | "words" >> beam.Create([(1, "one"), (2, "two")])
    return numbers | beam.Map(
        lambda n, words, all_of_them, least, other: (n, words.get(n), sorted(all_of_them), least),
        pvalue.AsDict(words),
        pvalue.AsList(numbers),
        other=pvalue.AsIter(words),
        least=pvalue.AsSingleton(p | "least" >> beam.Create([7])),
    )


def lines_of(file: fileio.ReadableFile) -> list[bytes]:
    with file.open() as opened:
        return [*opened]


def wrong(n: int) -> int:
    return 1 // n


PIPELINES: dict[str, Callable[[str], Build]] = {
    "tfrecord": lambda d: lambda p: p | beam.io.ReadFromTFRecord(f"{d}/*.tfrecord")
    | beam.Map(int) | beam.Filter(lambda n: n % 3) | beam.FlatMap(lambda n: range(n)),
    "text": lambda d: lambda p: p | beam.io.ReadFromText(f"{d}/*.txt"),
    "avro": lambda d: lambda p: p | beam.io.ReadFromAvro(f"{d}/*.avro"),
    "parquet": lambda d: lambda p: p | beam.io.ReadFromParquet(f"{d}/*.parquet"),
    "all text": lambda d: lambda p: p | beam.Create([f"{d}/0.txt", f"{d}/1.txt"])
    | beam.io.ReadAllFromText() | beam.Map(str.upper),
    "all tfrecord": lambda d: lambda p: p | beam.Create([f"{d}/*.tfrecord"])
    | beam.io.ReadAllFromTFRecord(),
    "all avro": lambda d: lambda p: p | beam.Create([f"{d}/*.avro"]) | beam.io.ReadAllFromAvro(),
    "all parquet": lambda d: lambda p: p | beam.Create([f"{d}/*.parquet"])
    | beam.io.ReadAllFromParquet(),
    "tables": lambda d: lambda p: p | beam.io.ReadFromParquetBatched(f"{d}/*.parquet")
    | beam.FlatMap(lambda table: table.to_pylist()),
    "compressed text": lambda d: lambda p: p | beam.io.ReadFromText(f"{d}/text.*"),
    "all compressed text": lambda d: lambda p: p | beam.Create([f"{d}/text.*"])
    | beam.io.ReadAllFromText(),
    "compressed tfrecord": lambda d: lambda p: p | beam.io.ReadFromTFRecord(f"{d}/records.gz"),
    "some are empty": lambda d: lambda p: p | beam.io.ReadFromText(f"{d}/[1n]*.txt"),
    "own source": lambda d: lambda p: p | beam.io.Read(Counting(10)),
    "sources": lambda d: lambda p: p | beam.io.Read(ConcatSource([Counting(4), Counting(2)])),
    "matched": lambda d: lambda p: p | fileio.MatchFiles(f"{d}/*.txt")
    | fileio.ReadMatches() | beam.FlatMap(lines_of),
    "created": lambda d: lambda p: p | beam.Create(range(5)),
    "one created": lambda d: lambda p: p | beam.Create(["one"]) | beam.Map(len),
    "splittable": lambda d: lambda p: p | beam.Create([3, 4, 0]) | beam.ParDo(Count()),
    "splittable twice": lambda d: lambda p: p | beam.Create([3, 4]) | beam.ParDo(Count())
    | beam.Map(max) | "again" >> beam.ParDo(Count()),
    "flattened": lambda d: lambda p: (
        (p | "text" >> beam.io.ReadFromText(f"{d}/*.txt") | "lines" >> beam.Map(len),
         (p | "made" >> beam.Create([3, 4]) | "reshuffled" >> beam.Reshuffle(),
          p | "records" >> beam.io.ReadFromTFRecord(f"{d}/*.tfrecord") | "ints" >> beam.Map(int))
         | "inner" >> beam.Flatten() | "counted" >> beam.ParDo(Count()) | beam.Map(sum))
        | "outer" >> beam.Flatten() | "behind" >> beam.Map(lambda n: n + 1)
    ),
    "flattened with itself": lambda d: lambda p: (lambda one: (one, one) | beam.Flatten())(
        p | beam.Create([1, 2])
    ),
    "read by two": lambda d: lambda p: (lambda rows: (
        rows | "n" >> beam.Map(lambda row: row["n"]), rows | beam.Filter(lambda row: row["n"] % 2)
    ) | beam.Flatten())(p | beam.io.ReadFromParquet(f"{d}/*.parquet")),
    "all read by two": lambda d: lambda p: (lambda lines: (
        lines | "len" >> beam.Map(len), lines) | beam.Flatten()
    )(p | beam.Create([f"{d}/*.txt"]) | beam.io.ReadAllFromText()),
    "matched by two": lambda d: lambda p: (lambda found: (
        found | "lines" >> beam.FlatMap(lines_of), found | beam.Map(lambda file: file.metadata.path)
    ) | beam.Flatten())(p | fileio.MatchFiles(f"{d}/*.txt") | fileio.ReadMatches()),
    "main output": lambda d: lambda p: signs(p).positive,
    "tagged output": lambda d: lambda p: signs(p).negative | beam.Map(lambda n: n * 10),
    "unnamed outputs": lambda d: lambda p: (
        p | beam.Create([5]) | beam.ParDo(SignedTwice()).with_outputs()
    )["negative"],
    "side inputs": lambda d: looked_up,
    "reshuffled": lambda d: lambda p: p | beam.Create(range(9)) | beam.Reshuffle()
    | beam.Map(str) | "again" >> beam.Reshuffle(num_buckets=2),
    "bundle": lambda d: lambda p: p | beam.Create([1, 2]) | beam.ParDo(AtTheEnd()),
    "dead letters": lambda d: lambda p: (
        p | beam.Create([0, 1, 2]) | beam.Map(wrong).with_exception_handling()
    ).good,
    "partition": lambda d: lambda p: (
        p | beam.Create(range(9)) | beam.Partition(lambda n, parts: n % parts, 3)
    )[1],
    "keys": lambda d: lambda p: p | beam.Create([("a", 1), ("b", 2)])
    | beam.MapTuple(lambda k, v: (v, k)) | beam.Keys(),
    "undeclared outputs": lambda d: lambda p: (
        p | beam.Create([5, 6]) | beam.ParDo(SignedTwice()).with_outputs()
    )[None],
    "outputs dropped": lambda d: lambda p: p | beam.Create([5, 6]) | beam.ParDo(SignedTwice()),
    "timestamps read": lambda d: lambda p: p | beam.Create([3, 4])
    | beam.Map(lambda n: beam.window.TimestampedValue(n, n)) | beam.ParDo(Count())
    | beam.Map(lambda pair: pair[1]) | beam.ParDo(Stamped()) | beam.Map(timed),
    "timestamps divided": lambda d: lambda p: p | beam.Create([3, 4])
    | beam.ParDo(Stamped()) | beam.Map(timed),
    "timestamps": lambda d: lambda p: p | beam.Create([1, 2])
    | beam.Map(lambda n: beam.window.TimestampedValue(n, n)),
}  # fmt: skip


collected: list[tuple[str, Any]] = []


def collect(name: str, element: Any) -> None:
    collected.append((name, element))


def test_the_same_elements_as_beams_own_runner(files: Path) -> None:
    collected.clear()
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        for name, build in PIPELINES.items():
            theirs = pipeline | name >> _Composite(build(str(files)))
            _ = theirs | f"collect {name}" >> beam.Map(functools.partial(collect, name))
    for name, build in PIPELINES.items():
        ours = values(build(str(files))(beam.Pipeline()))
        assert ours, name
        theirs = [element for of, element in collected if of == name]
        assert sorted(map(repr, ours)) == sorted(map(repr, theirs)), name


class _Composite(beam.PTransform):  # type: ignore[misc]
    def __init__(self, build: Build) -> None:
        super().__init__()
        self._build = build

    def expand(self, begin: pvalue.PBegin) -> beam.PCollection:
        return self._build(begin)


def test_batches_are_of_a_bundle() -> None:
    pipeline = beam.Pipeline()
    batches = pipeline | beam.Create([3, 4]) | beam.ParDo(Count()) | beam.BatchElements(2, 2)
    assert sorted(map(len, values(batches))) == [1, 2, 2, 2]  # of 1, 2, 2 and 2 elements
    created = beam.Pipeline() | beam.Create([1, 2, 3, 4]) | beam.BatchElements(2, 2)
    assert [*map(len, values(created))] == [2, 2]


@pytest.mark.parametrize(
    ("count", "splits", "in_bundles"), [(3, 3, 2), (2500, 834, 50), (0, 0, 0), (1, 1, 1)]
)
def test_what_was_created_is_divided(count: int, splits: int, in_bundles: int) -> None:
    """Less, if somebody sees where bundles begin and end."""
    created = beam.Pipeline() | beam.Create([*range(count)])
    doubled = translate(created | beam.Map(lambda n: 2 * n))
    assert len(doubled.splits) == splits
    assert run(doubled) == [*range(0, 2 * count, 2)]
    assert len(translate(created | beam.ParDo(AtTheEnd())).splits) == in_bundles


@pytest.mark.parametrize("name", ["text", "avro", "all text", "all avro", "flattened"])
def test_splits_of_a_wished_size(files: Path, name: str) -> None:
    lines = PIPELINES[name](str(files))(beam.Pipeline())
    translated = translate(lines, split_bytes=40)
    assert len(translated.splits) >= len(translate(lines).splits) + 2
    assert sorted(map(repr, run(translated))) == sorted(map(repr, values(lines)))


def test_splits_that_are_larger_than_the_user_lets_beam_make_them(files: Path) -> None:
    paths = beam.Pipeline() | beam.Create([f"{files}/[01].txt"])
    lines = paths | beam.io.ReadAllFromText(desired_bundle_size=40)
    assert len(translate(lines).splits) > 4
    assert len(translate(lines, split_bytes=400).splits) == 2
    assert len(translate(lines).splits) > 4


def test_split_bytes_that_would_not_be_heeded_are_refused(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and not when all splits have been made."""

    def refused(name: str | beam.PCollection, split_bytes: Any, message: str) -> None:
        made = PIPELINES[name](str(files))(beam.Pipeline()) if isinstance(name, str) else name
        with pytest.raises(InvalidArgument, match=message):
            service.register_dataset("localhost:1", made, split_bytes=split_bytes)

    for name in ("text", "all avro", "created"):
        made = PIPELINES[name](str(files))(beam.Pipeline())
        for wrong in (0, -1, 1.5, True, "a"):
            refused(made, wrong, rf"split_bytes={wrong!r} must be an int, at least 1")
    refused("created", 40, r"split_bytes=40 is for reads of files.*'Create' is divided by its")
    for name in ("matched", "splittable", "side inputs"):
        refused(name, 40, r"split_bytes=40 is for reads of files.*leave it out")
    with (tmp_path / "large.txt").open("wb") as large:
        large.truncate(3 << 30)
    lines = beam.Pipeline() | beam.io.ReadFromText(f"{tmp_path}/large.txt")
    refused(lines, 1000, "has more than 100000 splits of split_bytes=1000, each of which is kept")
    monkeypatch.setattr(translation, "MAX_READ", 3)
    for name in ("own source", "all text"):
        refused(name, 9, "has more than 3 splits of split_bytes=9, each of .* a larger split_bytes")
    with pytest.raises(InvalidArgument, match=r"has more than 3 splits, .* into fewer files"):
        translate(PIPELINES["own source"]("")(beam.Pipeline()))


def test_a_split_names_no_other_file(tmp_path: Path) -> None:
    for at in range(30):
        (tmp_path / f"{at}.txt").write_text("line\n")
    several, one = (
        translate(beam.Pipeline() | beam.io.ReadFromText(f"{tmp_path}/{name}.txt"))
        for name in ("*", "1[7]")
    )
    assert len(several.splits) == 30
    assert not any(split.count(b".txt") > one.splits[0].count(b".txt") for split in several.splits)


def test_equal_pipelines_are_the_same_bytes_whatever_the_order_of_their_sets() -> None:
    """Which is another in each process, if there are strings in them."""

    def registered(*order: int) -> bytes:
        p = beam.Pipeline()
        known, sides = set(order), p | "sides" >> beam.Create([{*order}])
        created = p | beam.Create([frozenset(order), frozenset([1, *order])])
        filtered = created | beam.Filter(lambda e, _: e & known, pvalue.AsList(sides))
        merely = beam_dataset(created), beam_dataset(filtered)
        return b"".join(request_of(each, listed(each.splits)).python for each in merely)

    assert [*{0, 8}] != [*{8, 0}]
    assert registered(0, 8) == registered(8, 0)


@pytest.mark.parametrize(
    "build",
    [
        lambda d, p: p | fileio.MatchFiles(f"{d}/[01].txt") | fileio.ReadMatches()
        | beam.Map(lambda f: f.metadata.path),
        lambda d, p: p | beam.Create([2]) | beam.FlatMap(lambda n: [*range(n)]) | beam.Reshuffle()
        | beam.Map(str) | "again" >> beam.Reshuffle(),
    ],
)  # fmt: skip
def test_without_a_read_files_or_the_first_reshuffle_are_divided(
    files: Path, build: Callable[[str, beam.Pipeline], beam.PCollection]
) -> None:
    translated = translate(build(str(files), beam.Pipeline()))
    assert len(translated.splits) == 2
    assert len(run(translated)) == 2


def run(translated: Translated) -> list[Any]:
    """As a worker does it, of what was pickled."""
    chain, splits = pickle.loads(cloudpickle.dumps(translated))
    found: list[Any] = []
    for split in splits:
        chain.run_bundle(split, found.append)
    chain.teardown()
    return found


def split(*elements: int) -> bytes:
    return pickle.dumps([GlobalWindows.windowed_value(element) for element in elements])


class Stateful(beam.DoFn):  # type: ignore[misc]
    SEEN = beam.DoFn.StateParam(BagStateSpec("seen", beam.coders.VarIntCoder()))

    def process(self, element: Any, seen: Any = SEEN) -> None:
        seen.add(1)


class OfItsOwn(beam.PTransform):  # type: ignore[misc]
    """What no other transforms make up."""

    def expand(self, begin: pvalue.PBegin) -> beam.PCollection:
        return pvalue.PCollection(begin.pipeline)


def pairs(p: beam.Pipeline) -> beam.PCollection:
    return p | beam.Create([("a", 1), ("b", 2)])


def pairs_grouped(p: beam.Pipeline) -> beam.PCollection:
    return p | "other" >> beam.Create([("a", 1)]) | "g" >> beam.GroupByKey()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: pairs(p) | beam.GroupByKey(), "'GroupByKey' groups, .* result to files"),
        (lambda p: pairs(p) | "mine" >> beam.CombinePerKey(sum), "'mine' groups"),
        (lambda p: pairs(p) | "all" >> beam.CombineGlobally(len), "'all' groups"),
        (lambda p: {"x": pairs(p)} | "both" >> beam.CoGroupByKey(), "'both' (groups|flattens)"),
        (lambda p: pairs(p) | beam.ParDo(Stateful()), r"'ParDo\(Stateful\)' keeps state by key"),
        (lambda p: pairs(p) | "w" >> beam.WindowInto(FixedWindows(3)), "'w' has windows"),
        (lambda p: () | "f" >> beam.Flatten(pipeline=p), "'f' flattens nothing"),
        (lambda p: (pairs(p), pairs_grouped(p)) | beam.Flatten(), "'g' groups, which"),
        (lambda p: functools.reduce(
            lambda one, at: (one, one) | f"f{at}" >> beam.Flatten(), range(40), pairs(p)
        ), "more than 1000 branches"),
        (lambda p: p | "i" >> beam.Impulse(), "an Impulse alone"),
        (lambda p: p | "clock" >> PeriodicImpulse(0, 3, 1), "'clock' is unbounded; only bounded"),
        (lambda p: p | "mine" >> OfItsOwn(), r"'mine' is a primitive of its own kind \(OfItsOwn\)"),
        (signs, r"several outputs.*register one"),
        (lambda p: p, "is no PCollection"),
    ],
)  # fmt: skip
def test_what_is_no_chain_is_refused_by_its_label(build: Build, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        translate(build(beam.Pipeline()))


def parts(p: beam.Pipeline) -> Any:
    """Other ones each time that it is run."""
    numbers = p | beam.Create(range(100)) | "draw" >> beam.Map(lambda n: (n, random.random()))
    return numbers | "divide" >> beam.Partition(lambda pair, count: int(pair[1] * count), 2)


def drawn(p: beam.Pipeline) -> beam.PCollection:
    return p | "one" >> beam.Create([None]) | "draw" >> beam.Map(lambda _: random.random())


@pytest.mark.parametrize(
    ("build", "label"),
    [
        (lambda p: parts(p) | beam.Flatten(), "divide"),
        (lambda p: [n | f"{at}" >> beam.Map(str) for at, n in enumerate(parts(p))] | beam.Flatten(),
         "divide"),
        (lambda p: (lambda one: (one, one) | beam.Flatten())(drawn(p)), "draw"),
        (lambda p: (lambda one: (one, one | "s" >> beam.Map(str)) | beam.Flatten())(
            drawn(p) | beam.Reshuffle()), "draw"),
        (lambda p: (lambda lines: (lines | "l" >> beam.Map(len), lines) | beam.Flatten())(
            drawn(p) | beam.Map(str) | "read" >> beam.io.ReadAllFromText()), "Map(str)"),
        (lambda p: (lambda one, two: one | "not in" >> beam.Filter(
            lambda pair, others: pair not in others, pvalue.AsList(two)))(*parts(p)), "divide"),
        (lambda p: p | "one" >> beam.Create([1]) | beam.Map(
            lambda _, *both: both, *map(pvalue.AsList, parts(p))), "divide"),
    ],
    ids=["outputs", "behind", "itself", "reshuffled", "read", "side input", "side inputs"],
)  # fmt: skip
def test_a_step_that_would_run_twice_is_refused_by_its_label(build: Build, label: str) -> None:
    """It may draw something else, and what it counts would count twice."""
    with pytest.raises(InvalidArgument, match=rf"^'{re.escape(label)}' .* once.*one DoFn"):
        translate(build(beam.Pipeline()))


def test_a_chain_is_bound_to_versions_of_beam_and_of_forebay() -> None:
    """As its pickle has no more than names of what is theirs."""
    dataset = beam_dataset(beam.Pipeline() | beam.Create([1]))
    request = request_of(dataset, dataset.splits, INT)
    for name in ("apache-beam", "forebay"):
        stored = PythonDataset.FromString(request.python)
        here, stored.packages[name] = stored.packages[name], "0.0.1"
        both = rf"registered with {name} 0\.0\.1, and this worker has {re.escape(here)}: install"
        with pytest.raises(FailedPrecondition, match=both):
            PythonPipeline(stored.SerializeToString(), request.sources, INT)


def test_a_side_input_is_computed_once() -> None:
    """Whoever asks for it."""
    p = beam.Pipeline()
    side = pvalue.AsSingleton(drawn(p))
    several = [p | f"{n}" >> beam.Create([n]) for n in range(2)]
    found = several | beam.Flatten() | "a" >> beam.Map(lambda _, drawn: [drawn], side)
    of_each = values(found | "b" >> beam.Map(lambda found, drawn: [*found, drawn], side))
    assert len(of_each) == 2 and len({drawn for found in of_each for drawn in found}) == 1


def test_what_only_runners_convert_is_refused(files: Path) -> None:
    rows = beam.io.ReadFromParquet(f"{files}/*.parquet", as_rows=True)
    with pytest.raises(InvalidArgument, match="'rows' takes or yields batches"):
        translate(beam.Pipeline() | "rows" >> rows)


def test_a_side_input_that_needs_a_shuffle() -> None:
    p = beam.Pipeline()
    total = pairs(p) | beam.Values() | "total" >> beam.CombineGlobally(sum).as_singleton_view()
    with pytest.raises(InvalidArgument, match="'total' groups"):
        translate(p | "n" >> beam.Create([1]) | beam.Map(lambda n, m: n / m, total))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(OSError, match="No files found based on the file pattern nowhere"):
        translate(beam.Pipeline() | beam.io.ReadFromText("nowhere/*.txt"))


@pytest.mark.parametrize("count", [0, 1])
def test_a_source_without_splits(count: int) -> None:
    """Has no elements, either: what they would be has to be said."""
    dataset = beam_dataset(beam.Pipeline() | beam.io.Read(Counting(count)))
    chain, splits = dataset.function, dataset.splits
    assert len(splits) == count
    assert read(chain, splits, packages=["apache-beam"]) == [*range(count)]
    request = request_of(python_dataset(splits)(chain), splits)
    if not count:
        with pytest.raises(InvalidArgument, match=r"there are no splits, .* or element_spec"):
            first_elements(request)


def fork_servers_threads_and_rows(file: str) -> Iterator[int]:
    """In a child: threads of Arrow's where it was forked, and what each of its pools reads."""
    for task in Path(f"/proc/{os.getppid()}/task").iterdir():
        if "jemalloc" in (task / "comm").read_text():
            yield -1
    for pool in pa.supported_memory_backends():
        pa.set_memory_pool(getattr(pa, f"{pool}_memory_pool")())
        yield from pq.read_table(file)["n"].to_pylist()


def test_children_of_beams_fork_server_can_use_arrow(files: Path) -> None:
    """Whose allocator would start a thread in the fork server, which no fork has."""
    created = beam.Pipeline() | beam.Create([f"{files}/0.parquet"])
    dataset = beam_dataset(created | beam.FlatMap(fork_servers_threads_and_rows))
    assert read(dataset.function, dataset.splits, packages=["apache-beam"]) == [
        *([*range(15)] * len(pa.supported_memory_backends()))
    ]


log: list[str] = []


class Logged(beam.DoFn):  # type: ignore[misc]
    def setup(self) -> None:
        log.append("setup")

    def start_bundle(self) -> None:
        log.append("start")

    def process(self, element: int) -> Iterator[int]:
        Metrics.counter("test", "elements").inc()
        log.append(str(element))
        if element < 0:
            raise RuntimeError("a negative one")
        yield element

    def finish_bundle(self) -> None:
        log.append("finish")

    def teardown(self) -> None:
        log.append("teardown")


@pytest.fixture
def logged() -> Iterator[Chain]:
    log.clear()
    chain = translate(beam.Pipeline() | beam.Create([1]) | beam.ParDo(Logged())).chain
    yield chain
    chain.teardown()


def test_the_life_cycle_is_beams(logged: Chain) -> None:
    got: list[int] = []
    logged.run_bundle(split(1, 2), got.append)
    logged.run_bundle(split(3), got.append)
    logged.teardown()
    logged.teardown()
    assert " ".join(log) == "setup start 1 2 finish start 3 finish teardown"
    assert got == [1, 2, 3]
    log.clear()
    logged.run_bundle(split(1, 2, 3), got.append)
    logged.teardown()
    ours = [*log]
    log.clear()
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        _ = pipeline | beam.Create([1, 2, 3]) | beam.ParDo(Logged())
    assert log == ours


def test_of_one_branch_at_a_time_the_dofns_are_set_up() -> None:
    """The one that a split is of, in whatever order they come."""
    p = beam.Pipeline()
    several = [
        p | f"{n}" >> beam.Create([n]) | f"logged {n}" >> beam.ParDo(Logged()) for n in (1, 2)
    ]
    translated = translate(several | beam.Flatten())
    chain = pickle.loads(cloudpickle.dumps(translated.chain))
    log.clear()
    got: list[int] = []
    one, two = translated.splits
    for each in (one, one, two, one):
        chain.run_bundle(each, got.append)
    assert got == [1, 1, 2, 1] and log[-1:] != ["teardown"]
    chain.teardown()
    bundles = ["start 1 finish start 1 finish", "start 2 finish", "start 1 finish"]
    assert " ".join(log) == " ".join(f"setup {bundle} teardown" for bundle in bundles)


class Measured(beam.DoFn):  # type: ignore[misc]
    def __init__(self) -> None:
        self._sizes = Metrics.distribution("sizes", "of/all")

    def process(self, element: int) -> Iterator[int]:
        Metrics.counter("test", "elements").inc()
        Metrics.counter(Measured, "elements").inc(2)
        self._sizes.update(element)
        Metrics.gauge("test", "last").set(7)
        Metrics.string_set("test", "no number").add("a")
        yield element

    def finish_bundle(self) -> None:
        Metrics.counter("test", "lost").dec(0)


def measured(begin: Any) -> Any:
    """Of which the last step counts what the first one does, too."""

    def again(element: int) -> int:
        Metrics.counter("test", "elements").dec(3)
        return element

    return begin | beam.Create([*range(-5, 20)]) | beam.ParDo(Measured()) | beam.Map(again)


def test_what_user_code_counts_is_what_beams_runner_counts() -> None:
    pipeline = beam.Pipeline(runner=FnApiRunner())
    measured(pipeline)
    result = pipeline.run()
    result.wait_until_finish()
    counted = result.metrics().query()
    theirs: dict[tuple[str, str], Any] = {}
    for each in counted["counters"]:
        name = (each.key.metric.namespace, each.key.metric.name)
        theirs[name] = theirs.get(name, 0) + each.committed
    for each in counted["distributions"]:
        found = each.committed
        theirs[each.key.metric.namespace, each.key.metric.name] = {
            "count": found.count, "sum": found.sum, "min": found.min, "max": found.max
        }  # fmt: skip
    for each in counted["gauges"]:
        theirs[each.key.metric.namespace, each.key.metric.name] = each.committed.value
    chain, splits = translate(measured(beam.Pipeline()))
    parts = [chain.run_bundle(split, lambda _: None) for split in splits]
    chain.teardown()
    told = shown(Totals(part for part in parts if part is not None).told())
    assert told["splits"] == len(splits) > 1
    ours = {
        (value["namespace"], value["name"]): value.get("counter", value.get("distribution"))
        or value["gauge"]["value"]
        for value in told["values"]
        if value.get("counter") != 0
    }
    assert ours == {name: value for name, value in theirs.items() if value}
    assert ours["test", "elements"] == 25 - 3 * 25


class CountsAndFails(beam.DoFn):  # type: ignore[misc]
    """A split's elements; the first time it raises, or ends its process, behind the third one."""

    def __init__(self, folder: Path, how: str) -> None:
        self._folder, self._how = folder, how

    def process(self, element: int) -> Iterator[int]:
        Metrics.counter("test", "splits").inc()
        for each in range(element):
            Metrics.counter("test", "elements").inc()
            yield each
            if each == 2 and not (self._folder / f"{element}").exists():
                (self._folder / f"{element}").touch()
                if self._how == "raises":
                    raise RuntimeError("the first time")
                if self._how == "dies":
                    os._exit(1)
                if self._how == "waits":
                    time.sleep(0.1)  # while what was made before is sent


@pytest.mark.parametrize("how", ["raises", "dies", "waits"])
def test_what_a_split_counts_counts_once(tmp_path: Path, how: str) -> None:
    """However often it was run, and whether or not it has elements."""
    sizes = [0, 4, 0, 0, 6, 2, 0]
    made = beam.Pipeline() | beam.Create(sizes) | beam.ParDo(CountsAndFails(tmp_path, how))
    dataset = beam_dataset(made, on_error="retry")
    request = request_of(dataset, dataset.splits, INT)
    totals = Totals()
    with contextlib.closing(
        PythonPipeline(request.python, request.sources, INT, totals=totals)
    ) as pipeline:
        assert len(numbers(pipeline.run(None).blocks())) == sum(sizes)
    told = shown(totals.told())
    assert told["splits"] == len(sizes)
    assert {v["name"]: v["counter"] for v in told["values"]} == {"splits": 7, "elements": 12}


def test_of_many_metrics_the_first_ones_are_whole() -> None:
    """Whichever of them a part has, and in which order they are counted."""
    names = [f"{number:04}" for number in range(3 * MAX_METRICS)]
    total = Totals()
    for part in range(6):
        drawn = random.Random(part).sample(names, 2 * MAX_METRICS)
        total.add(Totals([pb.Metrics(metrics=[counter("n", d, 1) for d in drawn])]).told())
        total.add(pb.Metrics(metrics=[counter("n", name, 1) for name in names], splits=1))
    found = shown(total.told())
    assert found["more"] and found["splits"] == 6
    expected = [
        6 + sum(n in random.Random(part).sample(names, 2 * MAX_METRICS) for part in range(6))
        for n in names[:MAX_METRICS]
    ]
    assert [value["name"] for value in found["values"]] == names[:MAX_METRICS]
    assert [value["counter"] for value in found["values"]] == expected


def test_numbers_and_names_that_no_message_holds() -> None:
    """Are cut: the worker's signs of life must not fail for them."""
    huge = [counter("n" * 500, "\udcff", 2**63 - 1), distribution("d", "d", 1, -(2**70), 0, 2**70)]
    told = Totals([pb.Metrics(metrics=huge)] * 2).told()
    (of, many) = sorted(shown(pb.Metrics.FromString(told.SerializeToString()))["values"], key=str)
    assert of["distribution"]["sum"] == -(2**63)
    assert (of["name"], many["name"], len(many["namespace"])) == ("d", "\\udcff", 100)
    assert many["counter"] == 2**63 - 1
    alike = [counter("n", "n" * 200 + end, 1) for end in "ab"]
    assert len(Totals([pb.Metrics(metrics=alike)]).told().metrics) == 2


def test_what_fails_is_torn_down_and_set_up_anew(logged: Chain) -> None:
    with pytest.raises(RuntimeError, match=r"a negative one \[while running 'ParDo\(Logged\)'\]"):
        logged.run_bundle(split(1, -1, 2), lambda _: None)
    logged.run_bundle(split(4), lambda _: None)
    assert " ".join(log) == "setup start 1 -1 teardown setup start 4 finish"


def test_no_users_element_is_asked_for_a_file(logged: Chain) -> None:
    """Here of a field that is called like a file's path."""
    row = np.rec.array([("a", 1), ("b", 2)], dtype=[("path", "U1"), ("n", int)])
    negative = beam.Pipeline() | beam.Create([row]) | beam.Map(lambda row: -len(row))
    chain, splits = translate(negative | beam.ParDo(Logged()))
    with pytest.raises(RuntimeError, match="a negative one"):
        chain.run_bundle(splits[0], lambda _: None)
    assert " ".join(log) == "setup start -2 teardown"


class WithoutOnes(beam.DoFn):  # type: ignore[misc]
    def start_bundle(self) -> None:
        self.seen: list[int] = []

    def process(self, file: fileio.ReadableFile) -> None:
        self.seen.append(int(Path(file.metadata.path).read_text()))
        if self.seen[-1] == 1:
            raise ValueError("a one")

    def finish_bundle(self) -> None:
        if 2 in self.seen:
            raise ValueError("there was a two")


@pytest.mark.parametrize(
    ("contents", "named"), [("0100", ["1"]), ("0002", []), ("2", ["0"])], ids=["1", "any", "only"]
)
def test_the_file_that_was_read_is_named(
    tmp_path: Path, contents: str, named: Sequence[str]
) -> None:
    """Of several in one split; none, if it may be any of them."""
    for name, content in enumerate(contents):
        (tmp_path / str(name)).write_text(content)
    found = beam.Pipeline() | fileio.MatchFiles(f"{tmp_path}/*") | fileio.ReadMatches()
    chain, splits = translate(found | beam.ParDo(WithoutOnes()))
    with pytest.raises(ValueError, match=r"there was|a one") as raised:
        for each in splits:
            chain.run_bundle(each, lambda _: None)
    notes = [f"while a chain read {tmp_path / name}" for name in named]
    assert getattr(raised.value, "__notes__", []) == notes


class Pairs(beam.DoFn):  # type: ignore[misc]
    """Keeps one element back, and cannot be pickled once it has been set up."""

    def __init__(self) -> None:
        self._kept: list[int] = []

    def setup(self) -> None:
        self._lock = threading.Lock()

    def process(self, element: int) -> Iterator[int]:
        self._kept.append(element)
        if element == 3 and len(self._kept) == 1:
            raise RuntimeError("three")
        if len(self._kept) == 2:
            yield from self._kept
            self._kept = []


def test_no_instance_is_used_after_an_error() -> None:
    """Nor is it what is pickled."""
    chain = translate(beam.Pipeline() | beam.Create([1]) | beam.ParDo(Pairs())).chain
    with pytest.raises(RuntimeError, match="three"):
        chain.run_bundle(split(1, 2, 3), lambda _: None)
    got: list[int] = []
    chain.run_bundle(split(5, 6), got.append)
    assert got == [5, 6]
    chain = pickle.loads(cloudpickle.dumps(chain))
    chain.run_bundle(split(7, 8), got.append)
    assert got == [5, 6, 7, 8]


def test_a_dofn_that_cannot_be_pickled() -> None:
    lock = threading.Lock()
    wrong = beam.Pipeline() | beam.Create([1]) | "Locked" >> beam.ParDo(lambda n: [lock, n])
    with pytest.raises(InvalidArgument, match=r"'Locked'.* cannot be pickled"):
        translate(wrong)


class Untidy(Logged):
    def teardown(self) -> None:
        super().teardown()
        raise RuntimeError("torn")


def test_a_teardown_that_raises_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    log.clear()
    twice = beam.Pipeline() | beam.Create([1]) | beam.ParDo(Untidy()) | beam.ParDo(Logged())
    with pytest.raises(RuntimeError, match="a negative one"):
        translate(twice).chain.run_bundle(split(-1), lambda _: None)
    assert log[-2:] == ["teardown", "teardown"]
    assert "the teardown of 'ParDo(Untidy)' raised" in caplog.text


CHANGES: dict[str, Callable[[Path], object]] = {
    "vanished": Path.unlink,
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-3]),
    "broken": lambda file: file.write_bytes(file.read_bytes()[:-6] + b"!!!!!!"),
}


@pytest.mark.parametrize("all_of_them", [False, True], ids=["read", "read all"])
def test_a_file_that_has_gone_or_breaks_is_named(tmp_path: Path, all_of_them: bool) -> None:
    """With the worker; and all elements before came."""
    for how, change in CHANGES.items():
        file = tmp_path / f"{how}.tfrecord"
        with tf.io.TFRecordWriter(str(file)) as records:
            for n in range(3):
                records.write(b"%d" % n)
        p = beam.Pipeline()
        if all_of_them:
            found = p | beam.Create([str(file)]) | beam.io.ReadAllFromTFRecord()
        else:
            found = p | beam.io.ReadFromTFRecord(str(file))
        chain, splits = translate(found | beam.Map(int))
        change(file)
        came: list[int] = []
        with (
            contextlib.closing(pipeline_of(chain, splits, packages=["apache-beam"])) as pipeline,
            pytest.raises(
                PipelineError, match=rf"(?s)worker w:1: split 0, .*{re.escape(str(file))}"
            ),
        ):
            for block in pipeline.run(None).blocks():
                came += numbers(iter([block]))
        assert came == ([] if how == "vanished" else [0, 1])

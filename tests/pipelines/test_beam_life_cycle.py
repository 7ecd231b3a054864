"""Chains of Beam's transforms: when their DoFns are set up and torn down, and what they count."""

from __future__ import annotations

import contextlib
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
import numpy as np
import pytest
import tensorflow as tf
from apache_beam.io import fileio
from apache_beam.metrics import Metrics
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from forebay.service.errors import InvalidArgument, PipelineError
from forebay.service.pipelines.beam.chain import Chain
from forebay.service.pipelines.beam.translation import translate
from forebay.service.pipelines.kinds.beam import beam_dataset
from forebay.service.pipelines.kinds.functions import request_of
from forebay.service.pipelines.python.pipeline import PythonPipeline
from forebay.service.proto import metrics_pb2 as pb
from forebay.service.user_metrics import MAX_METRICS, Totals, counter, distribution, shown

from .functions import INT, numbers, pipeline_of
from .test_beam import split

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

"""Datasets that a function builds, in processes of the worker, which ask it for splits."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from forebay.journal.proto import events_pb2 as ev
from forebay.service.errors import PipelineError
from forebay.service.pipelines import Pipeline, PythonRules, SplitRange, processes_of
from forebay.service.pipelines.definitions import doubts_of
from forebay.service.pipelines.kinds.functions import PythonDataset
from forebay.service.pipelines.kinds.graphs import of_function
from forebay.service.pipelines.python import runs
from forebay.service.pipelines.python.pipeline import PythonPipeline
from forebay.service.pipelines.tf_data.source_walk import NotSplittable
from forebay.service.proto import python_pb2

from ..standbys import wait_until
from .compositions import Compositions, build, write_files
from .contract import (
    FIRST,
    SECOND,
    SEED,
    SPLITS,
    PipelineContract,
    Ranges,
    Step,
    batch,
    drawn,
    elements_of,
    interleave,
    shuffle,
    spread,
    times,
    without,
)
from .functions import by_python, numbers
from .pipelines import OneSource, slices
from .test_bundles import done
from .test_split_compositions import SEED as COMPOSED
from .test_split_compositions import Cluster, counted, in_process

Dataset = Any


def pipeline_built_by(build: Callable[[], Any]) -> PythonPipeline:
    """As a worker has it."""
    request = of_function(build)
    return PythonPipeline(request.python, request.sources, request.structure, where="w:1")


class TestContract(PipelineContract):
    """Each example is a process or two, so there are few."""

    at_once = 2

    def make(self, steps: Sequence[Step]) -> Pipeline:
        def made() -> Dataset:
            dataset = by_python(lambda x: x, tf.data.Dataset.range(SPLITS))
            for step in steps:
                dataset = _done(step, dataset)
            return dataset

        return pipeline_built_by(made)

    def test_a_run_has_all_elements_in_order(self) -> None:
        self.check_a_run([], [])
        steps = [without(3), spread(2), without(5)]
        self.check_a_run(steps, [SplitRange(500, 30, 0), FIRST, SplitRange(0, 1, 0)])

    def test_a_bundle_has_what_a_run_over_its_splits_has(self) -> None:
        self.check_a_bundle([without(3), spread(2), times(5)], SplitRange(500, 30, 0))

    def test_the_same_bundle_has_the_same_elements(self) -> None:
        steps = [spread(3), shuffle(7), interleave(2), drawn(), batch(4)]
        self.check_a_bundle_again(steps, SECOND, 2**40, -(2**63))

    def test_every_start_gives_the_tail(self) -> None:
        self.check_starts([spread(2), shuffle(9), drawn()], 6)


def _done(step: Step, dataset: Dataset) -> Dataset:
    if step.kind != "failing":
        return done(step, dataset)

    def checked(x: int) -> int:
        if x == step.number:
            raise ValueError("no such element")
        return x

    return by_python(checked, dataset)


class BuiltCluster(Cluster):
    """Each task has a process that builds the dataset."""

    def build(self, expression: str) -> Dataset:
        self._opened: list[Pipeline] = []
        self._expression = expression
        return self._build()

    def _build(self) -> Dataset:
        return by_python(lambda x: x, build(self._expression))

    def open(self) -> Pipeline:
        expression = self._expression
        pipeline = pipeline_built_by(lambda: by_python(lambda x: x, build(expression)))
        self._opened.append(pipeline)
        return pipeline

    def read(self, most: int | None = None) -> list[list[int]]:
        try:
            return super().read(most)
        finally:
            for pipeline in self._opened:
                pipeline.close()


def test_several_workers_give_each_element_once(tmp_path: pathlib.Path) -> None:
    """As the registered graph of the same dataset does."""
    write_files(tmp_path)
    made_up = Compositions(COMPOSED, tmp_path)
    of_files = "list_files('{d}/*.txt', shuffle=False).interleave(text).map(number)"
    for expression in (
        "count(40).batch(3).unbatch().shuffle(7)",
        "zipped((count(30), count(100, 130))).map(paired).repeat(2)",
        f"{of_files}.concatenate(loaded('{{d}}/save')).take(-1)".format(d=tmp_path),
        made_up.exact(3),
    ):
        here = in_process(expression)
        assert here
        assert counted(BuiltCluster(expression, 2).read()) == here, expression
    got = counted(BuiltCluster("count(5).repeat()", 2).read(most=200))
    assert set(got) == set(range(5))


def test_one_process_takes_as_many_elements_as_there_are() -> None:
    for expression in ("count(9).take(4)", "count(20).batch(3).map(tf.reduce_sum)"):
        assert counted(BuiltCluster(expression, 1).read()) == in_process(expression)


class Late(OneSource):
    """Gives three splits, and then nothing until it is closed."""

    def __init__(self) -> None:
        self.asked, self.closed = threading.Event(), threading.Event()
        self._left = [SplitRange(0, 3, 0)]

    def next_range(self, source: int, opening: int, endless: bool) -> SplitRange | None:
        if self._left:
            return self._left.pop()
        self.asked.set()
        assert self.closed.wait(60)
        return None


def test_who_waits_for_splits_is_ended() -> None:
    pipeline, feed = pipeline_built_by(lambda: tf.data.Dataset.range(10)), Late()
    run = pipeline.run(feed)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: numbers(run.blocks()))
        assert feed.asked.wait(60)
        run.cancel()
        assert reading.result(60) == [0, 1, 2][: len(reading.result())]
    pipeline.close()
    feed.closed.set()


def test_what_is_not_what_was_registered_is_refused_with_both() -> None:
    """But as a whole it is read as it is."""
    here = os.getpid()

    def differs() -> Dataset:
        return tf.data.Dataset.range(5 if os.getpid() == here else 6)

    pipeline = pipeline_built_by(differs)
    with pytest.raises(PipelineError) as raised:
        list(pipeline.run(Ranges([FIRST])).blocks())
    assert raised.value.code == "FAILED_PRECONDITION"
    said = r"of sources of range(0, 6, 1) here, and of sources of range(0, 5, 1) where it was"
    assert said in raised.value.message
    assert numbers(pipeline.run(None).blocks()) == [*range(6)]
    pipeline.close()


def test_other_contents_in_the_same_number_are_refused() -> None:
    """As of files that glob gives in another order on another host."""
    here = os.getpid()

    def ordered() -> Dataset:
        return slices([1, 2, 3] if os.getpid() == here else [3, 1, 2])

    pipeline = pipeline_built_by(ordered)
    with pytest.raises(PipelineError, match="of other values, or in another order: sort what"):
        list(pipeline.run(Ranges([FIRST])).blocks())
    assert numbers(pipeline.run(None).blocks()) == [3, 1, 2]
    pipeline.close()


def test_what_cannot_be_divided_is_registered_with_the_reason() -> None:
    def generated() -> Dataset:
        return tf.data.Dataset.from_generator(
            lambda: iter(range(9)), output_signature=tf.TensorSpec([], tf.int64)
        )

    request = of_function(generated)
    assert [source.count for source in request.sources] == [1]  # as in tf.data service
    assert list(python_pb2.PythonDataset.FromString(request.python).sources) == list(
        request.sources
    )
    python = ev.DatasetDefinition(python_function=ev.PythonFunction())
    assert processes_of(python, request.python, PythonRules(processes=4)) == 1
    of_splits = python_pb2.PythonDataset(splits=b"some").SerializeToString()
    assert processes_of(python, of_splits, PythonRules(processes=4)) == 4
    request = of_function(lambda: tf.data.Dataset.range(9).snapshot("nowhere"))
    assert "Splitting is not implemented for snapshot datasets" in request.unsplittable
    assert not request.sources


def test_names_of_splits_come_in_parts(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That fit into a message each."""
    write_files(tmp_path)
    monkeypatch.setattr(runs, "MAX_NAMES", 1)
    path = str(tmp_path / "save")
    names = sorted(each.name for each in (tmp_path / "save" / "chunks").iterdir())
    pipeline = pipeline_built_by(lambda: tf.data.Dataset.load(path))
    given = Ranges([SplitRange(0, len(names), 0, tuple(names))])
    assert sorted(numbers(pipeline.run(given).blocks())) == [0, 1, 2, 3]
    pipeline.close()


def test_a_process_that_ends_is_said_with_its_element() -> None:
    def ends(x: int) -> int:
        if x == 7:
            os._exit(3)
        return x

    pipeline = pipeline_built_by(lambda: by_python(ends, tf.data.Dataset.range(SPLITS)).batch(2))
    blocks = pipeline.run(Ranges([FIRST])).blocks()
    with pytest.raises(PipelineError, match=r"w:1: element \d: the process .* exit code 3"):
        elements_of(blocks)
    pipeline.close()


def test_the_function_is_called_once_in_a_process() -> None:
    """Whatever its Python functions are called there, one trace serves all epochs."""
    called: list[int] = []

    def built() -> Dataset:
        called.append(0)
        here = np.array([len(called), os.getpid()])
        return by_python(lambda x: here[x], tf.data.Dataset.range(2))

    pipeline = pipeline_built_by(built)
    epochs = [numbers(pipeline.run(None).blocks()) for _ in range(3)]
    assert epochs[0][0] == 1
    assert epochs[1:] == epochs[:1] * 2
    given = Ranges([SplitRange(0, 2, 0)])
    given.sources = of_function(built).sources
    assert numbers(pipeline.run(given).blocks()) == epochs[0]
    pipeline.close()


def test_batches_are_of_a_processs_own_splits() -> None:
    pipeline = TestContract().make([batch(3)])
    ranges = [SplitRange(0, 2, 0), SplitRange(10, 2, 0)]
    assert elements_of(pipeline.run(Ranges(ranges)).blocks()) == [(0, 1, 10), (11,)]
    pipeline.close()


class TestBundles:
    def test_one_process_builds_once_and_runs_all(self) -> None:
        """Those that are read at the same time, too, and after one was cancelled."""
        called: list[int] = []

        def built() -> Dataset:
            called.append(0)
            return by_python(lambda _: os.getpid() + len(called), tf.data.Dataset.range(SPLITS))

        pipeline = pipeline_built_by(built)
        unread = pipeline.bundle(FIRST, number=0, seed=SEED).blocks()
        found = {*numbers(iter([next(unread)]))}
        cancelled = pipeline.bundle(FIRST, number=1, seed=SEED)
        next(cancelled.blocks())
        cancelled.cancel()
        for number in range(2, 5):
            found |= {*numbers(pipeline.bundle(FIRST, number=number, seed=SEED).blocks())}
        assert found == {*numbers(unread)} and len(found) == 1
        pipeline.close()

    def test_a_bundle_that_makes_nothing_ends_when_it_is_cancelled(
        self, tmp_path: pathlib.Path
    ) -> None:
        """Its process sees that nobody reads it, and goes on with others."""
        log = tmp_path / "seen"

        def seen(x: int) -> int:
            if x >= 20:
                with log.open("a") as file:
                    print(x, file=file)
                time.sleep(0.01)
            return x

        def built() -> Dataset:
            dataset = by_python(seen, tf.data.Dataset.range(100_000))
            return dataset.filter(lambda x: x < 20)

        pipeline = pipeline_built_by(built)
        run = pipeline.bundle(SplitRange(20, 90_000, 0), number=0, seed=SEED)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(lambda: list(run.blocks()))
            wait_until(log.exists)
            run.cancel()
            assert reading.result(60) == []

        def is_quiet() -> bool:
            before = log.stat().st_size
            time.sleep(0.2)
            return log.stat().st_size == before

        wait_until(is_quiet)
        assert numbers(pipeline.bundle(FIRST, number=1, seed=SEED).blocks()) == [*range(20)]
        pipeline.close()

    def test_a_process_that_ends_is_told_to_all_of_them(self) -> None:
        """And the next bundle has another one."""

        def ends(x: int) -> int:
            if x == 7:
                os._exit(3)
            return x

        pipeline = pipeline_built_by(lambda: by_python(ends, tf.data.Dataset.range(SPLITS)))
        other = pipeline.bundle(SECOND, number=1, seed=SEED).blocks()
        next(other)
        with pytest.raises(PipelineError, match=r"w:1: element \d+: the process .* exit code 3"):
            list(pipeline.bundle(FIRST, number=0, seed=SEED).blocks())
        with contextlib.suppress(PipelineError):  # unless all of it had been sent
            list(other)
        assert numbers(pipeline.bundle(SECOND, number=1, seed=SEED).blocks()) == [*range(100, 130)]
        pipeline.close()

    def test_an_element_that_takes_too_long(self) -> None:
        """What a bundle makes and drops before its start is no element."""

        def late(x: int) -> int:
            # Until it is killed, which is what is tested; before the start, together over 1 s.
            time.sleep(3600 if x == 27 else 0.06 if x < 20 else 0)
            return x

        pipeline = pipeline_built_by(
            PythonDataset(lambda: by_python(late, tf.data.Dataset.range(SPLITS)), None, timeout_s=1)
        )
        found: list[int] = []
        with pytest.raises(PipelineError, match=r"element 2\d: it has taken longer than 1 s"):
            run = pipeline.bundle(SplitRange(0, 40, 0), number=0, seed=SEED, start=20)
            for block in run.blocks():
                found += numbers(iter([block]))
        assert found == [*range(20, 20 + len(found))] != []
        assert numbers(pipeline.bundle(SECOND, number=1, seed=SEED).blocks()) == [*range(100, 130)]
        pipeline.close()

    def test_what_is_not_what_was_registered_is_refused(self) -> None:
        here = os.getpid()
        pipeline = pipeline_built_by(lambda: slices([1, 2, 3 if os.getpid() == here else 4]))
        for number in range(2):
            with pytest.raises(PipelineError, match="of other values, or in another order"):
                list(pipeline.bundle(SplitRange(0, 3, 0), number=number, seed=SEED).blocks())
        pipeline.close()

    def test_a_function_that_cannot_be_loaded_or_called(self) -> None:
        """All bundles say why."""
        here = os.getpid()

        class Broken:
            def setup(self) -> None:
                if os.getpid() != here:
                    raise ValueError("no model")

            def __call__(self) -> Dataset:
                return tf.data.Dataset.range(SPLITS)

        def raises() -> Dataset:
            if os.getpid() != here:
                raise ValueError("no data")
            return tf.data.Dataset.range(SPLITS)

        broken = (Broken(), "set up, on the worker.*no model"), (raises, "no data")
        for function, says in broken:
            pipeline = pipeline_built_by(function)
            for number in range(2):
                with pytest.raises(PipelineError, match=re.compile(says, re.DOTALL)):
                    list(pipeline.bundle(FIRST, number=number, seed=SEED).blocks())
            pipeline.close()

    def test_what_readers_should_know_is_registered(self) -> None:
        """The same for a function that is registered again."""

        def clocked() -> Dataset:
            dataset = by_python(lambda x: x, tf.data.Dataset.range(9))
            return dataset.filter(lambda x: tf.timestamp() > 0).take(3)

        request = of_function(clocked)
        assert of_function(clocked).python == request.python
        definition = ev.DatasetDefinition(python_function=ev.PythonFunction())
        with pytest.raises(NotSplittable, match=r"TakeDataset.*first elements of each part"):
            doubts_of(definition, request.python, ordered=True)
        doubts = doubts_of(definition, request.python, ordered=True, within_bundles=True)
        clock = r"Timestamp\) in function 'Dataset_filter"
        for says in (r"\(PyFunc\)", clock, "TakeDataset.*each part"):
            assert sum(bool(re.search(says, doubt)) for doubt in doubts) == 1, (says, doubts)

        def repeated() -> Dataset:
            return by_python(lambda x: x, tf.data.Dataset.range(9)).repeat(2)

        with pytest.raises(NotSplittable, match=r"RepeatDataset.*Repeat where you read") as raised:
            doubts_of(definition, of_function(repeated).python, ordered=True)
        pipeline = pipeline_built_by(repeated)  # as if an older version had registered it
        with pytest.raises(PipelineError) as refused:
            list(pipeline.bundle(SplitRange(0, 9, 0), number=0, seed=SEED).blocks())
        assert str(raised.value) in refused.value.message
        assert refused.value.code == "UNIMPLEMENTED"
        pipeline.close()

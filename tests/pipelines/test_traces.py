"""Runs that share a trace share nothing else, and leave nothing behind."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tensorflow as tf

from forebay.journal.proto import events_pb2 as ev
from forebay.service.blocks import Strings
from forebay.service.errors import PipelineError
from forebay.service.pipelines import SplitRange
from forebay.service.pipelines.tf_data import drivers
from forebay.service.pipelines.tf_data import pipeline as tf_data
from forebay.service.pipelines.tf_data import traces as trace_module
from forebay.service.pipelines.tf_data.imports import graph_of
from forebay.service.pipelines.tf_data.pipeline import TfDataPipeline
from forebay.service.pipelines.tf_data.queues import OwnedQueue, QueueSpec
from forebay.service.pipelines.tf_data.run import TfDataRun
from forebay.service.pipelines.tf_data.traces import BundleTrace, RunTrace, Traces

from .pipelines import Dataset, OneSource, count, slices, steps, untuned, wait_for_steps

made: list[weakref.ref[RunTrace]] = []


@pytest.fixture(autouse=True)
def traces(monkeypatch: pytest.MonkeyPatch) -> Traces:
    """New ones for each test, and a list of all that were made."""

    class Counted(RunTrace):
        def __init__(self, *arguments: Any) -> None:
            made.append(weakref.ref(self))
            super().__init__(*arguments)

    made.clear()
    kept = Traces(most_with_drivers=0)
    monkeypatch.setattr(tf_data, "RunTrace", Counted)
    monkeypatch.setattr(tf_data, "TRACES", kept)
    return kept


class Splits(OneSource):
    """These, and no others."""

    def __init__(self, first: int, size: int = 5) -> None:
        self._ranges = [SplitRange(first, size, 0)]

    def next_range(self, source: int, opening: int, endless: bool) -> SplitRange | None:
        return self._ranges.pop() if self._ranges else None


def values(executor: TfDataRun) -> list[int]:
    read = []
    for block in executor.blocks():
        column = block.components[0].values
        assert not isinstance(column, Strings)
        read += column.ravel().tolist()
    return read


def runs_of(dataset: Dataset) -> Callable[..., TfDataRun]:
    graph, spec = graph_of(dataset), dataset.element_spec
    return lambda feed=None: TfDataPipeline(graph, element_spec=spec).run(feed)


def without_optimizations(dataset: Dataset) -> Dataset:
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    return dataset.with_options(options)


def test_repeats_without_an_end_ask_their_own_run() -> None:
    class Over(Splits):
        def is_over(self, sources: Iterable[int]) -> bool:
            return not self._ranges

    run = runs_of(count(100).repeat())
    both = run(Over(0)), run(Over(50))
    assert [values(one) for one in both] == [[*range(5)], [*range(50, 55)]]
    assert len(made) == 1


def test_a_trace_is_made_once_by_runs_that_begin_together() -> None:
    run = runs_of(count(9).map(lambda i: i + 1))
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(lambda: values(run())) for _ in range(4)]
        assert [future.result(timeout=60) for future in futures] == [[*range(1, 10)]] * 4
    assert len(made) == 1


def test_bundle_drivers_are_kept_for_the_next_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few datasets with small graphs; the others' end."""
    kept = Traces(most_with_drivers=1)
    monkeypatch.setattr(tf_data, "TRACES", kept)
    monkeypatch.setattr(drivers, "MAX_IDLE", 2)
    graphs = [graph_of(untuned(count(100).map(lambda i, by=by: i * by))) for by in (1, 2)]
    wait_for_steps()

    def task(by: int) -> set[threading.Thread]:
        """A task of three bundles at a time; the steps that are left."""
        sources = [ev.SplitSource(count=100)]
        spec = tf.TensorSpec([], tf.int64)
        pipeline = TfDataPipeline(graphs[by - 1], sources, element_spec=spec)
        for first in (0, 30):
            runs = [
                pipeline.bundle(SplitRange(n, 9, 0), number=n, seed=0)
                for n in range(first, first + 30, 10)
            ]
            under_way = [run.blocks() for run in runs]
            heads = [next(blocks) for blocks in under_way]  # all have begun
            for n, (head, blocks) in enumerate(zip(heads, under_way, strict=True)):
                got = [int(v) for b in (head, *blocks) for v in b.components[0].elements()]
                assert got == [by * (first + 10 * n + i) for i in range(9)]
        pipeline.close()
        return steps()

    try:
        once = task(1)
        assert len(once) == 2
        assert task(1) & once == once
        assert len(task(2) - once) == 2
        monkeypatch.setattr(trace_module, "KEPT_WITH_DRIVERS_BYTES", len(graphs[0]) - 1)
        ended = task(1)
        wait_for_steps(but=ended)
        assert not steps()
    finally:
        kept.forget_idle()
        wait_for_steps()
    assert not kept._entries


def test_an_idle_driver_that_has_failed_drives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Traces()
    monkeypatch.setattr(tf_data, "TRACES", kept)
    dataset = untuned(count(100).map(lambda i: i + 1))
    sources = [ev.SplitSource(count=100)]
    pipeline = TfDataPipeline(graph_of(dataset), sources, element_spec=dataset.element_spec)
    before = steps()
    assert values(pipeline.bundle(SplitRange(0, 2, 0), number=0, seed=0)) == [1, 2]
    (driver,) = steps() - before
    (entry,) = kept._entries.values()
    assert isinstance(entry.kept, drivers.BundleDrivers)
    entry.kept._idle[0].stop.close()
    driver.join(60)
    assert values(pipeline.bundle(SplitRange(5, 2, 0), number=5, seed=0)) == [6, 7]
    pipeline.close()
    kept.forget_idle()
    wait_for_steps(before)


def test_what_is_not_the_same_has_a_trace_of_its_own() -> None:
    dataset = count(100).map(lambda i: i * 10)
    run = runs_of(dataset)
    assert values(run()) == [*range(0, 1000, 10)]
    assert values(run(Splits(3))) == [30, 40, 50, 60, 70]
    TfDataPipeline(graph_of(dataset)).run(None).blocks()
    assert len(made) == 3
    wider = TfDataPipeline(graph_of(dataset), element_spec=tf.TensorSpec(None, tf.int64)).run(None)
    assert sum(block.count for block in wider.blocks()) == 100
    assert len(made) == 4


def test_a_run_that_fails_or_is_cancelled_leaves_nothing_to_the_next() -> None:
    class Broken(OneSource):
        def next_range(self, source: int, opening: int, endless: bool) -> SplitRange | None:
            raise OSError("the dispatcher is away")

    run = runs_of(count(100).map(lambda i: i * 10))
    with pytest.raises(PipelineError, match="the dispatcher is away"):
        values(run(Broken()))
    cancelled = run(Splits(10, 50))
    cancelled.cancel()
    assert values(cancelled) == []
    left = run(Splits(60, 30)).blocks()
    next(left)
    left.close()
    ended = run(Splits(7))
    assert values(ended) == [70, 80, 90, 100, 110]
    following = run(Splits(0))
    ended.cancel()  # too late, and no concern of the next run's, whose queue has the same name
    assert values(following) == [0, 10, 20, 30, 40]
    assert len(made) == 1


def test_a_run_ends_with_its_pipeline_though_its_step_lasts(
    monkeypatch: pytest.MonkeyPatch, traces: Traces
) -> None:
    """TensorFlow may take a minute to end a step whose pipeline has ended: Driver says why."""
    let_end = threading.Event()
    drive = RunTrace.drive

    def drive_and_last(self: RunTrace, *inputs: Any) -> None:
        drive(self, *inputs)
        assert let_end.wait(timeout=90)

    monkeypatch.setattr(RunTrace, "drive", drive_and_last)
    run = runs_of(count(100).map(lambda i: i * 10))

    def users() -> list[int]:
        return [entry.users for entry in traces._entries.values()]

    with ThreadPoolExecutor(1) as pool:
        try:
            for _ in range(2):
                assert pool.submit(values, run()).result(timeout=30) == [*range(0, 1000, 10)]
            assert users() == [2]  # nothing that the steps may use is freed
        finally:
            let_end.set()
    wait_for_steps()
    assert users() == [0]


@pytest.mark.parametrize("kind", ["run", "bundle"])
def test_a_cancelled_run_ends_though_its_step_lasts(
    kind: str, monkeypatch: pytest.MonkeyPatch, traces: Traces
) -> None:
    """What the step may use meanwhile is neither freed nor, by its name, another run's."""
    let_end = threading.Event()
    trace = RunTrace if kind == "run" else BundleTrace
    drive = trace.drive

    def drive_and_last(self: Any, *inputs: Any) -> None:
        try:
            drive(self, *inputs)
        finally:
            assert let_end.wait(timeout=90)

    freed: list[RunTrace | BundleTrace] = []
    monkeypatch.setattr(trace, "drive", drive_and_last)
    monkeypatch.setattr(trace, "close", lambda trace: freed.append(trace))
    monkeypatch.setattr(drivers, "UNWIND_S", 0)
    dataset = count(1 << 40).map(lambda i: i * 10)
    sources = [ev.SplitSource(count=1 << 40)]
    pipeline = TfDataPipeline(graph_of(dataset), sources, element_spec=dataset.element_spec)

    def cancelled() -> set[str]:
        whole = SplitRange(0, 1 << 40, 0)
        bundle = kind == "bundle"
        run = pipeline.bundle(whole, number=0, seed=0) if bundle else pipeline.run(None)
        blocks = run.blocks()
        next(blocks)
        blocks.close()
        return {queue._name for queue in run._queues}

    with ThreadPoolExecutor(1) as pool:
        try:
            first, second = (pool.submit(cancelled).result(timeout=30) for _ in range(2))
            assert not first & second
            pool.submit(pipeline.close).result(timeout=30)
            traces.forget_idle()
            assert not freed
        finally:
            let_end.set()
    wait_for_steps()
    traces.forget_idle()
    assert len(freed) == 1


def test_a_run_ends_after_what_its_pipeline_has_open() -> None:
    """So that nobody asks a feed any more, for one."""
    ended_before = []

    def numbers() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:  # once TensorFlow has dropped its iterator
            ended_before.append(executor._queue.is_closed())

    signature = tf.TensorSpec([], tf.int64)
    endless = tf.data.Dataset.from_generator(numbers, output_signature=signature).prefetch(9)
    for dataset in endless.take(5), tf.data.Dataset.zip(endless, count(5)).map(lambda i, _: i):
        executor = runs_of(dataset)()
        assert values(executor) == [*range(5)]
    assert ended_before == [False, False]


@pytest.mark.parametrize("optimized", [True, False])
def test_state_is_new_for_each_run(optimized: bool) -> None:
    """A second run reshuffles, fills its cache anew, and begins the numbers of a seed again."""

    def twice(dataset: Dataset) -> tuple[list[int], list[int]]:
        run = runs_of(dataset if optimized else without_optimizations(dataset))
        return values(run()), values(run())

    def drawn(seed: int | None) -> Dataset:
        uniform = tf.random.uniform
        return count(40).map(lambda _: uniform([], maxval=1 << 30, dtype=tf.int32, seed=seed))

    numbers = count(200).shuffle(200)
    for fresh in numbers, numbers.repeat(2), drawn(None), drawn(None).cache():
        first, second = twice(fresh)
        assert first != second
    for same in drawn(3), count(200).shuffle(200, seed=3), drawn(4).cache().repeat(2):
        first, second = twice(same)
        assert first == second
    first, second = twice(drawn(None).cache().repeat(2))
    assert (first[:40], second[:40]) == (first[40:], second[40:])


@pytest.mark.parametrize("optimized", [True, False])
def test_runs_at_once_draw_the_numbers_of_a_seed_each_for_itself(optimized: bool) -> None:
    def draw(_: Any) -> Any:
        return tf.random.uniform([2000], maxval=1 << 30, dtype=tf.int32, seed=3)

    dataset = count(300).map(draw)
    run = runs_of(dataset if optimized else without_optimizations(dataset))
    alone = values(run())
    both = [run(), run()]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(values, both)) == [alone, alone]
    assert len(made) == (1 if optimized else 3)


def test_tables_are_each_runs_own() -> None:
    keys = tf.constant([1, 2], tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, keys * 7), -1)
    run = runs_of(slices(tf.constant([1, 2, 3], tf.int64)).map(table.lookup))
    one, two = run(), run()
    assert values(one) == [7, 14, -1]
    assert values(two) == [7, 14, -1]
    assert len(made) == 2


@pytest.mark.parametrize("bound", [{"most": 1}, {"most_bytes": 100}])
def test_dropped_traces_are_freed_and_made_again(
    bound: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tf_data, "TRACES", Traces(**bound))
    run = runs_of(untuned(count(9).map(lambda i: i + 1)))
    other = runs_of(untuned(count(9).map(lambda i: i + 2)))

    def released(executor: TfDataRun) -> list[int]:
        read = values(executor)
        wait_for_steps()
        return read

    assert released(run(Splits(0))) == [1, 2, 3, 4, 5]
    in_use = run(Splits(0))
    assert released(other()) == [*range(2, 11)]
    assert released(other()) == [*range(2, 11)]
    assert released(in_use) == [1, 2, 3, 4, 5]  # though the other came later
    assert released(other()) == [*range(2, 11)]
    before = len(made)
    assert released(run(Splits(2))) == [3, 4, 5, 6, 7]
    assert len(made) == before + 1
    del in_use
    gc.collect()
    assert sum(trace() is not None for trace in made) <= 1


def test_what_cannot_be_traced_is_not_kept(traces: Traces) -> None:
    graph = graph_of(count(3)).replace(b"RangeDataset", b"StrangeDaset")
    for _ in range(2):
        with pytest.raises(PipelineError, match="StrangeDaset"):
            TfDataPipeline(graph, element_spec=tf.TensorSpec([], tf.int64)).run(None)
    assert not traces._entries


def test_closing_a_queue_late_does_not_close_the_next_of_its_name() -> None:
    spec = QueueSpec(3, (tf.int32,), ((),))
    queue = OwnedQueue(spec)
    name = queue._name
    queue.release()
    again = OwnedQueue(spec)
    assert again._name == name
    queue.close(cancel=True)
    again.enqueue([7])
    assert [int(v) for v in again.dequeue()] == [7]
    again.release()

"""The union over leases equals the plain dataset, whatever the pipeline."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.data.experimental.ops.global_shuffle_op import _global_shuffle
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.eager import context

from forebay.service.blocks import Array, Block, Strings
from forebay.service.client.tf_elements import dataset_of_blocks
from forebay.service.errors import PipelineError
from forebay.service.pipelines import SplitRange
from forebay.service.pipelines.tf_data import pipeline as tf_data
from forebay.service.pipelines.tf_data.evaluate import evaluate
from forebay.service.pipelines.tf_data.feeds import TracedGraph
from forebay.service.pipelines.tf_data.imports import graph_of
from forebay.service.pipelines.tf_data.pipeline import TfDataPipeline
from forebay.service.pipelines.tf_data.run import TfDataRun
from forebay.service.pipelines.tf_data.source_walk import NotSplittable
from forebay.service.pipelines.tf_data.split_sources import require_splittable, split_sources
from forebay.service.pipelines.tf_data.traces import Traces

from .pipelines import Dataset, Leases, OneSource, count, counted, plain, slices, wait_for_steps


def vocabulary() -> Any:
    keys = tf.constant(["a", "b"])
    values = tf.constant([7, 8], tf.int64)
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), -1)


def lookup() -> Dataset:
    table = vocabulary()
    return slices(["a", "b", "c", "a"]).map(table.lookup)


def concatenated(number: int) -> Dataset:
    dataset = count(0)
    for i in range(number):
        dataset = dataset.concatenate(count(i, i + 2))
    return dataset


def nested() -> Dataset:
    return slices([count(3), count(10, 12), count(0)]).flat_map(lambda inner: inner)


zipped = tf.data.Dataset.zip
again = tf.data.Dataset.from_tensors

# What is zipped stays together, whoever gets it.
ZIPPED: dict[str, Callable[[], Dataset]] = {
    "zip of unequal lengths": lambda: zipped((count(40), count(100, 150))),
    "zip in zip": lambda: zipped((zipped((count(40), count(40))), count(40))),
    "zip of mapped": lambda: zipped((count(40).map(lambda i: -i), count(40).prefetch(9))),
    "zip of the same": lambda: (lambda d: zipped({"a": d, "b": d.map(lambda i: i * 2)}))(count(40)),
    "zip of files": lambda: zipped((
        count(9).interleave(lambda i: count(i, i + 3), cycle_length=1),
        count(9).interleave(lambda i: count(-i, 3 - i), cycle_length=1),
    )),
    "zip of concatenated": lambda: zipped((
        count(9).concatenate(count(10, 30)), count(9).concatenate(count(-30, -10)),
    )),
    "zip of batches": lambda: zipped((
        count(40).batch(4).unbatch(), count(40).batch(4, num_parallel_calls=2).unbatch(),
    )),
    "zip with a cache": lambda: zipped((count(40).cache(), count(40).map(lambda i: -i))),
    "zip with a constant": lambda: zipped((count(40), again("label").repeat())),
    "enumerated zip": lambda: zipped((count(40), count(40))).batch(1),
    "zip with numbers": lambda: zipped((slices(tf.range(40) // 3), count(7, tf.int64.max, 2))),
}  # fmt: skip

# What is done before the zip would pair what does not belong together.
MISPAIRED: dict[str, Callable[[], Dataset]] = {
    "neighbours": lambda: (lambda d: zipped((d, d.skip(1))))(count(40)),
    "batches and elements": lambda: zipped((count(40).batch(2), count(20))),
    "batches of two sizes": lambda: zipped((count(40).batch(2), count(40).batch(3))),
    "batches of unequally many": lambda: zipped((count(40).batch(2), count(39).batch(2))),
    "filtered and not": lambda: zipped((count(40).filter(lambda i: i % 2 == 0), count(40))),
    "shards": lambda: (lambda d: zipped((d.shard(2, 0), d.shard(2, 1))))(count(40)),
    "shorter and repeated": lambda: zipped((count(40), count(7).repeat())),
    "repeated, unequally long": lambda: zipped((count(40).repeat(), count(7).repeat())),
    "cached and not": lambda: zipped((count(40).cache(), count(40))).repeat(2),
    "concatenated and not": lambda: zipped((count(20).concatenate(count(20)), count(40))),
    "filtered in two ways": lambda: zipped(
        (count(40).filter(lambda i: i % 2 == 0), count(40).filter(lambda i: i % 10 > 4))
    ),
    "made unique": lambda: zipped(
        (slices(tf.range(40) // 2).unique(), slices(tf.range(40) // 3).unique())
    ),
    "remainders dropped and not, repeated": lambda: zipped(
        (count(40).batch(8, drop_remainder=True).repeat(2), count(40).batch(8).repeat(2))
    ),
    "interleaved in two ways": lambda: zipped(
        (
            count(9).interleave(lambda i: count(i, i + 3), cycle_length=1),
            count(9).interleave(lambda i: count(-i, 3 - i), cycle_length=3),
        )
    ),
    "cached and not, repeated behind": lambda: (
        zipped((count(40).cache(), count(40))).map(lambda a, b: (a, b)).repeat()
    ),
    "counted": lambda: zipped((count(40), tf.data.Dataset.counter())),
    "a tensor so many times": lambda: zipped((count(40), again("label").repeat(40))),
    "concatenated with what is read whole": lambda: zipped(
        (
            count(3).concatenate(tf.data.Dataset.random(seed=1).take(5)),
            count(3).concatenate(count(5).take(5)),
        )
    ),
    "sampled": lambda: zipped(
        (tf.data.Dataset.sample_from_datasets([count(20), count(20)]), count(40))
    ),
}

PIPELINES: dict[str, Callable[[], Dataset]] = {
    "range": lambda: count(100),
    "range with a step": lambda: count(50, 3, -7, output_type=tf.int32),
    "float range": lambda: count(2, 20, 3, output_type=tf.float32),
    "slices": lambda: slices({"x": tf.range(20), "y": tf.reshape(tf.range(40), [20, 2])}),
    "ragged slices": lambda: slices(tf.ragged.constant([[1], [], [2, 3], [4, 5, 6]])),
    "sparse slices": lambda: slices(tf.sparse.eye(5)),
    "dataset of datasets": nested,
    "dataset of one dataset": lambda: slices([count(3)]).flat_map(lambda inner: inner),
    "dataset of one dataset in one": lambda: slices([[count(3)]]).flat_map(
        lambda inner: slices(inner).flat_map(lambda innermost: innermost)
    ),
    "tensor": lambda: tf.data.Dataset.from_tensors(tf.range(3)),
    "tensor, repeated": lambda: tf.data.Dataset.from_tensors(1).repeat(3),
    "list": lambda: tf.data.experimental.from_list([(1, "a"), (2, "b"), (3, "c")]),
    "map": lambda: count(30).map(lambda i: i * 2),
    "parallel map": lambda: count(30).map(
        lambda i: tf.cast(i, tf.float32) / 2, num_parallel_calls=tf.data.AUTOTUNE
    ),
    "filter": lambda: count(30).filter(lambda i: i % 3 == 0),
    "flat_map": lambda: count(6).flat_map(lambda i: count(i)),
    "interleave": lambda: count(6).interleave(lambda i: count(i, i + 3), cycle_length=2),
    "shuffle": lambda: count(40).shuffle(10),
    "cache": lambda: count(20).cache(),
    "cache and repeat": lambda: count(20).cache().repeat(2),
    "repeat": lambda: count(20).repeat(2),
    "repeat below a batch": lambda: count(20).repeat(2).batch(1),
    "concatenate": lambda: count(5).concatenate(count(10, 20)),
    "concatenate, repeated": lambda: count(5).concatenate(count(10, 20)).repeat(2),
    "prefetch": lambda: count(20).prefetch(4),
    "unbatch": lambda: slices(tf.reshape(tf.range(12), [4, 3])).unbatch(),
    "lookup table": lookup,
    "scan": lambda: count(20).scan(tf.constant(0, tf.int64), lambda state, i: (state, i)),
    "options": lambda: count(20).with_options(tf.data.Options()),
    "variable read": lambda: count(9).map(lambda i: i + tf.constant(1, tf.int64)),
    **ZIPPED,
}

# What a worker makes of its splits depends on which these are: one worker must get it all.
ALONE: dict[str, Callable[[], Dataset]] = {
    "batch": lambda: count(25).batch(4),
    "padded batch": lambda: count(10).map(lambda i: tf.range(i)).padded_batch(3),
    "window": lambda: count(10).window(3).flat_map(lambda w: w.batch(3)),
    "zip": lambda: tf.data.Dataset.zip((count(7), slices(list("abcdefghi")))),
    "zip with itself": lambda: (lambda d: tf.data.Dataset.zip((d, d)))(count(7)),
    "enumerate": lambda: slices(list("abcdef")).enumerate(5),
    "sample": lambda: tf.data.Dataset.sample_from_datasets([count(5), count(10, 15)], seed=1),
    "choose": lambda: tf.data.Dataset.choose_from_datasets(
        [count(3), count(10, 13)], slices(tf.constant([0, 1, 0, 1, 1, 0], tf.int64))
    ),
    "random": lambda: tf.data.Dataset.random(seed=3).take(5),
    "take": lambda: count(50).take(7),
    "skip and take": lambda: count(50).skip(3).take(7),
    "endless": lambda: count(3).repeat().take(100),
    **PIPELINES,
}


def executor_of(dataset: Dataset, leases: Leases) -> TfDataRun:
    return TfDataPipeline(graph_of(dataset), element_spec=dataset.element_spec).run(leases)


def column(block: Block) -> Array:
    values = block.components[0].values
    assert not isinstance(values, Strings)
    return values


def work_together(workers: int, work: Callable[[], Counter[str]]) -> list[Counter[str]]:
    """What each of them came to."""
    with ThreadPoolExecutor(workers) as pool:
        return [f.result(timeout=90) for f in [pool.submit(work) for _ in range(workers)]]


def read(dataset: Dataset, executor: TfDataRun) -> Dataset:
    return dataset_of_blocks(executor.blocks, dataset.element_spec)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", ALONE)
def test_one_worker_gives_the_dataset_in_order(name: str, size: int) -> None:
    dataset = ALONE[name]()
    leases = Leases(split_sources(graph_of(dataset), evaluate), size)
    got = [plain(e) for e in read(dataset, executor_of(dataset, leases))]
    if name == "shuffle":
        assert sorted(got) == sorted(plain(e) for e in dataset)
    else:
        assert got == [plain(e) for e in dataset]


@pytest.mark.parametrize("name", [name for name in PIPELINES if "repeat" not in name])
def test_three_workers_give_each_element_once(name: str) -> None:
    dataset = PIPELINES[name]()
    leases = Leases(split_sources(graph_of(dataset), evaluate), 2)
    outcomes = work_together(3, lambda: counted(read(dataset, executor_of(dataset, leases))))
    assert sum(outcomes, Counter()) == counted(dataset)


@pytest.mark.parametrize("name", MISPAIRED)
def test_what_would_be_paired_wrongly_is_refused(name: str) -> None:
    dataset = MISPAIRED[name]()
    leases = Leases(split_sources(graph_of(dataset), evaluate))
    with pytest.raises(NotSplittable, match="zip"):
        executor_of(dataset, leases)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: count(9).cache("elements").map(lambda i: i), "CacheDataset.*only a part.*memory"),
        (lambda: zipped((count(9), count(9).cache(tf.strings.join(["a", "b"])))), "CacheDataset"),
        (lambda: _global_shuffle(count(9)), r"GlobalShuffleDataset.*shuffle\(…\)"),
    ],
)
def test_what_no_worker_can_do_with_a_part_is_refused(
    build: Callable[[], Dataset], reason: str
) -> None:
    sources = split_sources(graph_of(build()), evaluate)
    with pytest.raises(NotSplittable, match=reason):
        require_splittable(sources)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("a tensor so many times", "without a count"),
        ("counted", r"Dataset\.range\(start, tf\.int64\.max, step\)"),
        ("batches and elements", "do after the zip what is done before"),
    ],
)
def test_what_is_refused_says_what_to_write_instead(name: str, advice: str) -> None:
    with pytest.raises(NotSplittable, match=advice):
        require_splittable(split_sources(graph_of(MISPAIRED[name]()), evaluate))


def test_a_zip_that_was_registered_before_its_sources_were_leased_together_is_refused() -> None:
    dataset = zipped((count(40), count(40)))
    leases = Leases(split_sources(graph_of(dataset), evaluate))
    leases.sources[1].ClearField("leased_with")
    with pytest.raises(NotSplittable, match="register it again"):
        executor_of(dataset, leases)


NOTHING: dict[str, Callable[[], Dataset]] = {
    "repeat": lambda: count(0).repeat(),
    "one of two": lambda: zipped((count(0), count(10))).repeat(),
    "sampled": lambda: tf.data.Dataset.sample_from_datasets(
        [count(0).repeat(), count(3).repeat()], seed=1
    ).take(20),
    "cached": lambda: count(0).cache().repeat(),
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_repeat_of_nothing_ends(name: str) -> None:
    dataset = NOTHING[name]()
    leases = Leases(split_sources(graph_of(dataset), evaluate))
    got = [plain(e) for e in read(dataset, executor_of(dataset, leases))]
    assert got == [plain(e) for e in dataset]


def test_a_repeated_cache_ends_for_a_worker_whose_share_is_empty() -> None:
    """It has nothing to repeat, and leases nothing again."""
    dataset = count(4).cache().repeat()
    leases = Leases(split_sources(graph_of(dataset), evaluate))
    while leases.next_range(0, 0, False) is not None:
        pass
    assert list(executor_of(dataset, leases).blocks()) == []


def test_a_repeat_without_an_end_ends_when_its_splits_are_over() -> None:
    """As when a worker drains: what is buffered behind the repeat gets out."""
    dataset = count(5).repeat().shuffle(1000)
    leases = Leases(split_sources(graph_of(dataset), evaluate))
    over = threading.Event()

    class Draining(OneSource):
        def next_range(self, source: int, opening: int, endless: bool) -> SplitRange | None:
            assert endless
            if opening == 3:
                over.set()
            return None if over.is_set() else leases.next_range(source, opening, endless)

        def is_over(self, sources: Iterable[int]) -> bool:
            return over.is_set()

    executor = TfDataPipeline(graph_of(dataset), element_spec=dataset.element_spec).run(Draining())
    values = [int(v) for block in executor.blocks() for v in column(block)]
    assert sorted(values) == sorted([*range(5)] * 3)


def test_options_hold_behind_a_repeat_without_an_end() -> None:
    """Though it is replaced by a flat_map over something else."""
    below, above = tf.data.Options(), tf.data.Options()
    below.deterministic = above.autotune.enabled = False
    below.threading.private_threadpool_size, above.threading.private_threadpool_size = 2, 3
    dataset = count(5).with_options(below).repeat().with_options(above).prefetch(1)
    leases = Leases(split_sources(graph_of(dataset), evaluate))
    traced = TracedGraph(graph_of(dataset), leases.sources)
    with contextlib.closing(traced), contextlib.closing(traced.load(leases)) as loaded:
        variant = dataset_ops._VariantDataset(loaded.variant, dataset.element_spec)
        assert variant.options() == dataset.options()


def test_many_concatenated_datasets() -> None:
    dataset = concatenated(1000)
    assert len(split_sources(graph_of(dataset), evaluate)) == 1001
    dataset = concatenated(60)
    leases = Leases(split_sources(graph_of(dataset), evaluate))
    got = [plain(e) for e in read(dataset, executor_of(dataset, leases))]
    assert got == [plain(e) for e in dataset]


def test_python_is_asked_once_a_lease() -> None:
    dataset = count(100_000)
    leases = Leases(split_sources(graph_of(dataset)), 10_000)
    assert sum(block.count for block in executor_of(dataset, leases).blocks()) == 100_000
    assert leases.calls == 11


def test_two_graphs_with_the_same_names_do_not_meet() -> None:
    """Clients number their functions and tables alike: a worker must keep them apart."""

    def table(value: int) -> bytes:
        keys = tf.constant([0, 1], tf.int64)
        values = tf.constant([value, value], tf.int64)
        found = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), -1)
        return graph_of(count(2).map(found.lookup))

    from forebay.service.pipelines.tf_data.graphs import Graph

    first, second = table(5), Graph(table(6))
    names = [f.signature.name for f in Graph(first).proto.library.function]
    others = [f.signature.name for f in second.proto.library.function]
    renamed = second.proto.SerializeToString()
    for old, new in zip(others, names, strict=True):
        pad = new.ljust(len(old), "_")[: len(old)]
        renamed = renamed.replace(old.encode(), pad.encode())
    spec = tf.TensorSpec([], tf.int64)
    running = [TfDataPipeline(graph, element_spec=spec).run(None) for graph in (first, renamed)]
    values = [[int(v) for block in run.blocks() for v in column(block)] for run in running]
    assert values == [[5, 5], [6, 6]]


def test_a_source_whose_leases_fail_has_ended_though_errors_are_ignored() -> None:
    asked = []

    class Broken(OneSource):
        def next_range(self, source: int, opening: int, endless: bool) -> SplitRange | None:
            asked.append(source)
            raise RuntimeError("the dispatcher is away")

    dataset = count(10).ignore_errors()
    executor = TfDataPipeline(graph_of(dataset), element_spec=dataset.element_spec).run(Broken())
    assert list(executor.blocks()) == []
    assert asked == [0]


def test_an_error_that_is_no_text_is_an_error() -> None:
    dataset = slices([b"1", b"\xff"]).map(tf.strings.to_number)
    executor = TfDataPipeline(graph_of(dataset), element_spec=dataset.element_spec).run(None)
    with pytest.raises(PipelineError):
        list(executor.blocks())


def test_nothing_of_a_graph_stays_in_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf_data, "TRACES", Traces(most=0))
    dataset = count(4).map(lambda i: i + 1).filter(lambda i: i > 2)
    graph = graph_of(dataset)

    def run() -> int:
        list(TfDataPipeline(graph, element_spec=dataset.element_spec).run(None).blocks())
        wait_for_steps()
        gc.collect()
        return len(context.context().list_function_names())

    run()
    assert run() == run()

"""tf.data's pipelines keep the contract; what else TensorFlow's bundles are, and cannot be."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import op_def_pb2
from tensorflow.python.client import pywrap_tf_session as c_api

from forebay.service.pipelines import Pipeline, SplitRange
from forebay.service.pipelines.definitions import nondeterministic, require_bundles
from forebay.service.pipelines.tf_data import pipeline as tf_data
from forebay.service.pipelines.tf_data.bundles import run_in_calling_thread
from forebay.service.pipelines.tf_data.graphs import Graph, all_nodes
from forebay.service.pipelines.tf_data.imports import graph_of
from forebay.service.pipelines.tf_data.pipeline import BUNDLE_BLOCK_BYTES, TfDataPipeline
from forebay.service.pipelines.tf_data.source_walk import NotSplittable, kind_of
from forebay.service.pipelines.tf_data.split_sources import begun_anew, split_sources
from forebay.service.pipelines.tf_data.traces import QUEUE_BLOCKS, Traces
from forebay.service.proto import graph_pb2

from .contract import SPLITS, PipelineContract, Step, elements_of
from .pipelines import Dataset, count, plain, slices

zipped = tf.data.Dataset.zip


def done(step: Step, dataset: Dataset) -> Dataset:
    kind, n = step
    match kind:
        case "times":
            return dataset.map(lambda x: n * x)
        case "without":
            return dataset.filter(lambda x: x % n != 0)
        case "spread":
            return dataset.flat_map(lambda x: count(n * x, n * (x + 1)))
        case "batch":
            return dataset.batch(n)
        case "shuffle":
            return dataset.shuffle(n)
        case "interleave":
            return dataset.interleave(
                lambda x: count(x, x + 2), cycle_length=n, num_parallel_calls=n, deterministic=False
            )
        case "drawn":
            return dataset.map(
                lambda x: x + 10**6 * tf.random.uniform([], 0, 1000, tf.int64),
                num_parallel_calls=2,
                deterministic=False,
            )
        case "wide":
            return dataset.map(lambda x: tf.fill([n], x))
        case "failing":

            def checked(x: Any) -> Any:
                wrong = tf.constant(n, tf.int64)
                fine = tf.debugging.assert_none_equal(x, wrong, message="no such element")
                with tf.control_dependencies([fine]):
                    return tf.identity(x)

            return dataset.map(checked)
    raise ValueError(kind)


class TestTfData(PipelineContract):
    def make(self, steps: Sequence[Step]) -> Pipeline:
        dataset = count(SPLITS)
        for step in steps:
            dataset = done(step, dataset)
        return pipeline_of(dataset)


def pipeline_of(dataset: Dataset) -> TfDataPipeline:
    return TfDataPipeline(graph_of(dataset), element_spec=dataset.element_spec)


def read(pipeline: TfDataPipeline, first: int = 0, size: int = 10, number: int = 0) -> list[str]:
    blocks = pipeline.bundle(SplitRange(first, size, 0), number=number, seed=5).blocks()
    return [
        repr([plain(v) for v in element])
        for block in blocks
        for element in zip(*(c.elements() for c in block.components), strict=True)
    ]


@tf.function  # type: ignore[untyped-decorator]
def augmented(x: Any) -> Any:
    def flipped() -> Any:
        return tf.random.uniform([2], maxval=10**6, dtype=tf.int64)

    return tf.cond(tf.random.normal([]) > 0, flipped, lambda: tf.stack([x, x]))


def float_of(x: Any) -> Any:
    return tf.cast(x, tf.float32)


RANDOM: dict[str, Callable[[], Dataset]] = {
    "uniform": lambda: count(99).map(lambda x: float_of(x) + tf.random.uniform([])),
    "normal": lambda: count(99).map(lambda x: float_of(x) + tf.random.normal([3])),
    "truncated": lambda: count(99).map(lambda x: float_of(x) + tf.random.truncated_normal([3])),
    "integers": lambda: count(99).map(lambda x: tf.random.uniform([x], 0, 999, tf.int32)),
    "categorical": lambda: count(99).map(lambda x: tf.random.categorical([[1.0] * 9], 5)),
    "seeded": lambda: count(99).map(lambda x: float_of(x) + tf.random.uniform([], seed=3)),
    "in functions": lambda: count(99).map(augmented, num_parallel_calls=4),
    "augmented images": lambda: count(99).map(
        lambda x: tf.image.random_brightness(
            tf.image.random_flip_left_right(tf.fill([4, 4, 3], float_of(x))), 0.5
        ),
        num_parallel_calls=tf.data.AUTOTUNE,
    ),
    "in an interleave": lambda: count(99).interleave(
        lambda x: count(x, x + 3).shuffle(3).map(lambda y: float_of(y) + tf.random.uniform([])),
        num_parallel_calls=2,
    ),
    "in a zip": lambda: zipped((
        count(99).map(lambda x: float_of(x) + tf.random.uniform([])), count(99).map(lambda x: -x),
    )),
    "in a scan": lambda: count(99).scan(
        0.0, lambda state, x: (state + 1, state + float_of(x) + tf.random.uniform([]))
    ),
    "in a map that batches": lambda: count(99).apply(
        tf.data.experimental.map_and_batch(lambda x: float_of(x) + tf.random.uniform([]), 1)
    ),
    "in a map_fn": lambda: count(99).map(
        lambda x: tf.map_fn(lambda y: float_of(x) + y + tf.random.uniform([]), tf.zeros([3])),
        num_parallel_calls=2,
    ),
    "in loops": lambda: count(99).map(
        lambda x: tf.while_loop(
            lambda i, y: y < 50 * tf.random.uniform([]),
            lambda i, y: (i + 1, y + tf.reduce_sum(
                tf.map_fn(lambda z: z + tf.random.uniform([]), tf.zeros([2]))
            )),
            [x, float_of(x) / 1000],
        )[1] + tf.random.uniform([])
    ),
    "shuffled by a seed": lambda: count(99).shuffle(20, seed=3),
    "shuffled in batches": lambda: count(99).batch(2).shuffle(20).unbatch(),
}  # fmt: skip


@pytest.mark.parametrize("case", RANDOM)
def test_random_numbers_are_the_bundles(case: str) -> None:
    pipeline = pipeline_of(RANDOM[case]())
    first, other = (read(pipeline, number=number) for number in (0, 1))
    assert read(pipeline, number=0) == first
    assert first != other
    if case not in ("shuffled by a seed", "shuffled in batches"):
        assert len(set(first)) == len(first)  # each element draws its own
    pipeline.close()
    assert nondeterministic(graph_of(RANDOM[case]())) == []


def test_iterations_of_a_loop_draw_other_numbers() -> None:
    def five(_: Any) -> Any:
        return tf.map_fn(lambda zero: zero + tf.random.uniform([]), tf.zeros([5]))

    pipeline = pipeline_of(count(9).map(five).unbatch())
    drawn = read(pipeline, size=9)
    pipeline.close()
    assert len(set(drawn)) == len(drawn) == 45


def test_shuffles_of_one_seed_keep_pairs() -> None:
    images, labels = (count(99).shuffle(30, seed=4) for _ in range(2))
    pipeline = pipeline_of(zipped((images, labels)))
    pairs = [
        (int(a), int(b))
        for block in pipeline.bundle(SplitRange(0, 30, 0), number=3, seed=1).blocks()
        for a, b in zip(*(c.elements() for c in block.components), strict=True)
    ]
    assert all(a == b for a, b in pairs) and pairs != sorted(pairs)
    pipeline.close()


def test_a_shuffle_that_is_fixed_stays_so() -> None:
    pipeline = pipeline_of(count(99).shuffle(30, seed=4, reshuffle_each_iteration=False))
    assert read(pipeline, number=0) == read(pipeline, number=1)
    pipeline.close()


def test_a_table_serves_all_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until their trace is dropped, here with the pipeline."""
    monkeypatch.setattr(tf_data, "TRACES", Traces(most=0))
    keys = tf.constant([1, 2], tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, keys * 7), -1)
    pipeline = pipeline_of(slices(tf.constant([1, 2, 3], tf.int64)).map(table.lookup))
    for _ in range(2):
        blocks = pipeline.bundle(SplitRange(0, 3, 0), number=0, seed=0).blocks()
        assert elements_of(blocks) == [(7,), (14,), (-1,)]
    pipeline.close()


def test_a_bundle_makes_a_few_blocks_ahead_of_small_elements_whose_sizes_vary() -> None:
    text = "x" * 1000
    pipeline = pipeline_of(count(99_000).map(lambda x: tf.strings.substr(text, 0, 1000)))
    run = pipeline.bundle(SplitRange(0, 99_000, 0), number=0, seed=0)
    blocks = run.blocks()
    next(blocks)
    (queue, _), sizes = run._queues, [0, -1]
    while sizes[-1] != sizes[-2] or not sizes[-1]:  # until it is full
        time.sleep(0.5)
        sizes.append(queue.size())
    assert sizes[-1] * 1000 <= QUEUE_BLOCKS * BUNDLE_BLOCK_BYTES
    blocks.close()
    pipeline.close()


_TABLE_KEYS = np.arange(99)


@tf.function  # type: ignore[untyped-decorator]
def doubled(x: Any) -> Any:
    return 2 * x


@tf.function  # type: ignore[untyped-decorator]
def smaller_half(x: Any) -> Any:
    return x if x % 2 == 0 else x // 2


IN_THREAD: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda x: (3 * x, -x),
    "strings": lambda x: tf.strings.regex_replace(tf.strings.as_string(x), "1", "b"),
    "a function that it calls": doubled,
    "a table": lambda x: tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(_TABLE_KEYS, 7 * _TABLE_KEYS), -1
    ).lookup(x),
    "a dataset": lambda x: tf.data.Dataset.range(x).reduce(np.int64(0), lambda a, b: a + b),
    "Python": lambda x: tf.numpy_function(lambda y: y + 1, [x], tf.int64),
    "pfor": lambda x: tf.vectorized_map(lambda y: y * x, tf.range(3, dtype=tf.int64)),
}  # fmt: skip
IN_POOL: dict[str, Callable[[Any], Any]] = {
    "cond": lambda x: tf.cond(x % 2 == 0, lambda: x, lambda: 10 * x),
    "cond in a function that it calls": smaller_half,
    "switch_case": lambda x: tf.switch_case(
        tf.cast(x % 3, tf.int32), [lambda: x, lambda: 2 * x, lambda: 3 * x]
    ),
    "while_loop": lambda x: tf.while_loop(lambda y: y < 50, lambda y: [2 * y + 1], [x]),
    "map_fn": lambda x: tf.map_fn(lambda y: y + x, tf.range(4, dtype=tf.int64)),
    "an assertion": lambda x: (tf.debugging.assert_less(x, np.int64(99)), x)[1],
    "image operations": lambda x: tf.image.stateless_random_flip_left_right(
        tf.image.resize(tf.fill([8, 8, 3], tf.cast(x, tf.uint8)), [4, 4]), [1, x]
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", IN_THREAD | IN_POOL)
@pytest.mark.parametrize("nested", [False, True])
def test_functions_of_maps_give_what_they_give_in_tf_data(case: str, nested: bool) -> None:
    """Those with control flow TensorFlow cannot run in the calling thread."""
    function = (IN_THREAD | IN_POOL)[case]
    dataset = count(99).map(function)
    if nested:
        dataset = count(99).flat_map(lambda x: count(x, x + 1).map(function))
    pipeline = pipeline_of(dataset)
    expected = [tf.nest.flatten(element, expand_composites=True) for element in dataset.take(10)]
    found = [
        element
        for block in pipeline.bundle(SplitRange(0, 10, 0), number=0, seed=5).blocks()
        for element in zip(*(c.elements() for c in block.components), strict=True)
    ]
    pipeline.close()
    assert repr([[np.asarray(value).tolist() for value in element] for element in found]) == repr(
        [[np.asarray(value.numpy()).tolist() for value in element] for element in expected]
    )
    proto = graph_pb2.GraphDef.FromString(graph_of(dataset))
    run_in_calling_thread(proto)
    where = {
        node.attr["use_inter_op_parallelism"].b
        for node in all_nodes(proto)
        if node.op == "MapDataset"
    }
    assert where == {case in IN_POOL}


REFUSED: dict[str, tuple[Callable[[], Dataset], str]] = {
    "repeat": (lambda: count(9).repeat(2), "RepeatDataset"),
    "endless repeat": (lambda: count(9).map(lambda x: x).repeat().batch(2), "RepeatDataset"),
    "shuffle and repeat": (
        lambda: count(9).apply(tf.data.experimental.shuffle_and_repeat(3, 2)),
        "ShuffleAndRepeat",
    ),
    "two sources": (lambda: count(9).concatenate(count(9)), "RangeDataset.*is another source"),
    "a sample": (
        lambda: tf.data.Dataset.sample_from_datasets([count(9), count(9)]),
        "DirectedInterleaveDataset",
    ),
    "a constant": (
        lambda: zipped((count(9), tf.data.Dataset.from_tensors(1).repeat())), "RepeatDataset"
    ),
    "random numbers": (
        lambda: zipped((count(9), tf.data.Dataset.random(seed=1))), "RandomDataset.*all of it"
    ),
    "a cache in a file": (lambda: count(9).cache("elements").map(lambda x: x), "CacheDataset"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_means_nothing_in_a_bundle_is_refused_by_its_node(case: str) -> None:
    """By a worker, and where it is registered, without TensorFlow."""
    dataset, node = REFUSED[case]
    with pytest.raises(NotSplittable, match=node):
        pipeline_of(dataset()).bundle(SplitRange(0, 3, 0), number=0, seed=0)
    with pytest.raises(NotSplittable, match=node):
        require_bundles(graph_of(dataset()), [])


ACROSS: dict[str, Callable[[], Dataset]] = {
    "TakeDataset": lambda: count(9).take(3),
    "SkipDataset": lambda: count(9).skip(3).map(lambda x: -x),
    "ScanDataset": lambda: count(9).scan(np.int64(0), lambda old, x: (old + x, old + x)),
    "UniqueDataset": lambda: count(9).map(lambda x: x % 3).unique(),
    "TakeWhile": lambda: count(9).take_while(lambda x: x < 3),
    "WindowDataset": lambda: count(9).window(2).flat_map(lambda one: one),
    "GroupByWindow": lambda: count(9).group_by_window(
        lambda x: x % 2, lambda _, own: own.batch(2), window_size=2
    ),
    "Rebatch": lambda: count(9).batch(4).rebatch(3),
    "BatchDataset.*drop what remains": lambda: count(9).batch(4, drop_remainder=True),
    "ParallelBatch": lambda: count(9).batch(4, True, num_parallel_calls=2),
    "PaddedBatch": lambda: count(9).padded_batch(4, drop_remainder=True),
}


@pytest.mark.parametrize("node", ACROSS)
def test_what_goes_from_element_to_element_makes_no_parts(node: str) -> None:
    graph = graph_of(ACROSS[node]())
    with pytest.raises(NotSplittable, match=node):
        require_bundles(graph, [], as_parts=True)
    require_bundles(graph, [])  # an iterator of its own may


KINDS = {
    "counts": "AssertCardinality AutoShard Scan Shard Skip SlidingWindow Take TakeWhile "
    "Unique Window",
    "groups": "Batch DenseToSparseBatch GroupByReducer GroupByWindow MapAndBatch PaddedBatch "
    "Rebatch",
    "one source, read whole, or by its splits": "CSV FixedLengthRecord Generator LMDB List "
    "ListSnapshotChunks MatchingFiles Random Range SparseTensorSlice Sql TFRecord Tensor "
    "TensorSlice TextLine DataService Load SnapshotChunk Snapshot",
    "several, repeated or chosen": "ChooseFastest ChooseFastestBranch Concatenate "
    "DirectedInterleave GlobalShuffle IndexFlatMap Repeat ShuffleAndRepeat WeightedFlatMap Zip",
    "by element, or in another order within a bundle": "AssertNext AssertPrev BytesProducedStats "
    "Cache Filter FilterByLastComponent Finalize FlatMap IgnoreErrors Interleave LatencyStats Map "
    "MaxIntraOpParallelism Model NonSerializable Optimize Options ParseExample Prefetch "
    "PrivateThreadPool Rewrite Sampling SetStatsAggregator Shuffle Sleep ThreadPool Unbatch",
    "no step of a pipeline": "DatasetFromGraph Save SnapshotDatasetReader "
    "SnapshotNestedDatasetReader UnwrapDatasetVariant WrapDatasetVariant",
}
"""What each of TensorFlow's dataset nodes does to a bundle."""


def test_each_of_tensorflows_nodes_has_its_kind() -> None:
    """A new version's nodes must be looked at."""
    library = op_def_pb2.OpList.FromString(c_api.TF_GetBuffer(c_api.TF_GetAllOpList()))
    datasets = {
        kind_of(graph_pb2.NodeDef(op=op.name))
        for op in library.op
        if "Dataset" in op.name and [output.type for output in op.output_arg] == [21]
    }
    known = [kind for kinds in KINDS.values() for kind in kinds.split()]
    assert sorted(datasets) == sorted(known)
    for kind in datasets:
        node = graph_pb2.NodeDef(name="node", op=f"{kind}Dataset")
        result = graph_pb2.NodeDef(name="result", op="_Retval", input=["node"])
        graph = Graph(graph_pb2.GraphDef(node=[node, result]).SerializeToString())
        counts = [counts for counts, _ in begun_anew(graph)]
        assert counts in ([kind in KINDS["counts"].split()], []), kind
        assert counts or kind not in KINDS["counts"].split()


@pytest.mark.parametrize("size", [2, 4])
def test_batches_and_what_is_within_functions_make_parts(size: int) -> None:
    dataset = count(9).flat_map(lambda x: tf.data.Dataset.range(9).take(x))
    require_bundles(graph_of(dataset.batch(size).prefetch(1)), [], as_parts=True)
    require_bundles(graph_of(dataset.padded_batch(size)), [], as_parts=True)


@pytest.mark.parametrize(
    "dataset",
    [
        lambda: count(9).repeat(1),
        lambda: count(9).cache(),
        lambda: count(9).flat_map(lambda x: tf.data.Dataset.from_tensors(x).repeat(3)),
        lambda: zipped((count(9), count(9).map(lambda x: -x))),
    ],
)
def test_what_means_something_is_not_refused(dataset: Callable[[], Dataset]) -> None:
    pipeline = pipeline_of(dataset())
    first = read(pipeline, 2, 3)
    assert first and read(pipeline, 2, 3) == first != read(pipeline, 5, 3)
    pipeline.close()


def test_a_registration_that_cannot_be_divided_is_refused() -> None:
    dataset = zipped((count(40).filter(lambda x: x > 3), count(40)))
    graph = graph_of(dataset)
    sources = split_sources(graph)
    with pytest.raises(NotSplittable, match="zips"):
        TfDataPipeline(graph, sources).bundle(SplitRange(0, 3, 0), number=0, seed=0)


@pytest.mark.parametrize("splits", [SplitRange(8, 5, 0), SplitRange(-1, 2, 0)])
def test_splits_that_the_source_does_not_have_are_refused(splits: SplitRange) -> None:
    dataset = count(10)
    sources = split_sources(graph_of(dataset))
    pipeline = TfDataPipeline(graph_of(dataset), sources, element_spec=dataset.element_spec)
    with pytest.raises(ValueError, match="no bundle of 10 splits"):
        pipeline.bundle(splits, number=0, seed=0)
    assert [
        block.count for block in pipeline.bundle(SplitRange(5, 5, 0), number=1, seed=0).blocks()
    ]
    pipeline.close()


def test_a_start_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        pipeline_of(count(9)).bundle(SplitRange(0, 3, 0), number=0, seed=0, start=-1)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: tf.random.gamma([], float_of(x) + 1), "RandomGamma.*draws random numbers"),
        (lambda x: tf.random.shuffle(tf.range(x)), "RandomShuffle.*draws random numbers"),
        (
            lambda x: tf.random.fixed_unigram_candidate_sampler(
                [[x]], 1, 2, False, 5, unigrams=[1.0] * 5
            )[0],
            "FixedUnigram.*draws random numbers",
        ),
        (
            lambda x: tf.random.all_candidate_sampler([[x]], 1, 2, False)[0],
            "AllCandidate.*draws random numbers",
        ),
        (lambda x: tf.numpy_function(lambda y: y, [x], tf.int64), "PyFunc.*Python"),
        (lambda x: tf.timestamp() + float(1), "Timestamp.*clock"),
        (
            lambda x: tf.while_loop(
                lambda i: i < x,
                lambda i: i + tf.cast(tf.random.gamma([], 2.0), tf.int64) + 1,
                [x - x],
            ),
            "RandomGamma.*draws random numbers",
        ),
    ],
)
def test_what_may_differ_each_time_is_named(function: Any, reason: str) -> None:
    named = nondeterministic(graph_of(count(9).map(function)))
    assert len(named) == 1 and re.search(reason, named[0]), named


@pytest.mark.parametrize(("seed", "named"), [(None, ["RandomDataset"]), (0, []), (7, [])])
def test_a_choice_without_a_seed_is_named(seed: int | None, named: list[str]) -> None:
    def chosen(_: Any) -> Dataset:
        return tf.data.Dataset.sample_from_datasets([count(5), count(7)], seed=seed)

    found = nondeterministic(graph_of(count(3).flat_map(chosen)))
    assert [re.search(r"\((Random\w+)\)", one)[1] for one in found] == named  # type: ignore[index]


def order_of(x: Any) -> Any:
    """A number that tells the order of a shuffle."""
    return count(9).shuffle(9).reduce(x - x, ten_times)


def ten_times(order: Any, y: Any) -> Any:
    return 10 * order + y


@pytest.mark.parametrize(
    "dataset",
    [
        lambda: count(9).filter(lambda x: order_of(x) % 2 == 0),
        lambda: count(9).group_by_window(
            lambda x: x % 2, lambda _, window: window.shuffle(4), window_size=4
        ),
    ],
)
def test_a_shuffle_that_no_key_reaches_is_named(dataset: Callable[[], Dataset]) -> None:
    named = nondeterministic(graph_of(dataset()))
    assert len(named) == 1, named
    assert re.search("ShuffleDataset.*in function.*by seeds that the graph does not", named[0])

"""The same scenarios for each pair of a client and its workers, TensorFlow's own and Forebay's.

Forebay's client reads from Forebay's workers only.
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.data.experimental import service as stock

from forebay import service

from ..stock import DispatcherProcess, call, stock_workers

WORKERS = 2
count = tf.data.Dataset.range


class Pair(NamedTuple):
    """A client, and a dispatcher with workers of one kind."""

    client: Any
    dispatcher: DispatcherProcess

    def distributed(self, dataset: Any, policy: str = "DYNAMIC", **options: Any) -> Any:
        mode = self.client.ShardingPolicy[policy]
        return dataset.apply(self.client.distribute(mode, self.dispatcher.target, **options))

    def register(self, dataset: Any, **options: Any) -> str:
        return name_of(self.client.register_dataset(self.dispatcher.target, dataset, **options))

    def from_id(self, dataset_id: str, **options: Any) -> Any:
        mode = self.client.ShardingPolicy.DYNAMIC
        return self.client.from_dataset_id(mode, self.dispatcher.target, dataset_id, **options)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DispatcherProcess]:
    with (
        DispatcherProcess(tmp_path_factory.mktemp("journal")) as dispatcher,
        stock_workers(dispatcher, WORKERS, heartbeat_interval_ms=500),
    ):
        yield dispatcher


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DispatcherProcess]:
    with DispatcherProcess(tmp_path_factory.mktemp("journal")) as dispatcher:
        config = service.WorkerConfig(dispatcher.address)
        workers = [service.WorkerServer(config) for _ in range(WORKERS)]
        yield dispatcher
        for worker in workers:
            worker.stop()


PAIRS = {
    "stock client, stock workers": (stock, "theirs"),
    "stock client": (stock, "ours"),
    "neither stock": (service, "ours"),
}


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Pair:
    client, dispatcher = PAIRS[request.param]
    return Pair(client, request.getfixturevalue(dispatcher))


def name_of(dataset_id: Any) -> str:
    return dataset_id if isinstance(dataset_id, str) else str(dataset_id.numpy().decode())


def numbers(dataset: Any) -> list[int]:
    return [int(x) for x in dataset]


def test_without_sharding_every_worker_gives_everything(pair: Pair) -> None:
    got = numbers(pair.distributed(count(50), "OFF"))
    assert collections.Counter(got) == dict.fromkeys(range(50), WORKERS)


def test_each_epoch_of_the_client_is_an_iteration(pair: Pair) -> None:
    got = numbers(pair.distributed(count(30)).repeat(2))
    assert sorted(got) == sorted([*range(30)] * 2)


def test_a_repeat_before_the_service_asks_for_repetitions(pair: Pair) -> None:
    assert sorted(numbers(pair.distributed(count(20).repeat(3)))) == sorted([*range(20)] * 3)


def test_a_named_job_is_shared(pair: Pair) -> None:
    dataset_id = pair.register(count(200))
    # Bounded, so that none can have taken all of it.
    how = {"job_name": "shared", "max_outstanding_requests": WORKERS}
    first, second = (iter(pair.from_id(dataset_id, **how)) for _ in range(2))
    got = [int(next(first)), int(next(second))]
    assert sorted(got + numbers(first) + numbers(second)) == list(range(200))


def test_an_anonymous_job_is_not_shared(pair: Pair) -> None:
    dataset = pair.distributed(count(40))
    first, second = iter(dataset), iter(dataset)
    assert sorted(numbers(first)) == sorted(numbers(second)) == list(range(40))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: count(20, 3, -4), [20, 16, 12, 8, 4]),
        (lambda: tf.data.Dataset.from_tensor_slices([5, 7, 9]), [5, 7, 9]),
        (lambda: count(4).concatenate(count(9, 11)), [0, 1, 2, 3, 9, 10]),
        (lambda: tf.data.Dataset.from_tensors(3), [3]),
    ],
)
def test_sources(pair: Pair, build: Callable[[], Any], expected: list[int]) -> None:
    assert sorted(numbers(pair.distributed(build()))) == sorted(expected)


@pytest.mark.parametrize(
    "build",
    [
        lambda: count(5).repeat().map(lambda x: x),
        lambda: count(5).interleave(tf.data.Dataset.from_tensors).repeat(),
        lambda: tf.data.Dataset.random(seed=1).map(lambda x: x % 5),
    ],
)
def test_endless_sources(pair: Pair, build: Callable[[], Any]) -> None:
    got = numbers(pair.distributed(build()).take(100))
    assert len(got) == 100
    assert set(got) == set(range(5))


def test_a_registered_dataset_is_read_by_its_id(pair: Pair) -> None:
    dataset = count(10).map(lambda x: (x, tf.ones([2], tf.bfloat16)))
    name = pair.client.__name__  # each compresses in its own way, so that ids are not shared
    assert [pair.register(dataset, dataset_id=name) for _ in range(2)] == [name] * 2
    read = pair.from_id(name)  # the element_spec comes from the dispatcher
    assert read.element_spec == dataset.element_spec
    assert sorted(int(x) for x, _ in read) == list(range(10))


def test_a_size_that_must_be_evaluated(pair: Pair, tmp_path: pathlib.Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"{name}1\n{name}2\n")
    files = tf.data.Dataset.list_files(str(tmp_path / "*.txt"), shuffle=False)
    got = pair.distributed(files.flat_map(tf.data.TextLineDataset)).as_numpy_iterator()
    assert sorted(got) == [b"a1", b"a2", b"b1", b"b2", b"c1", b"c2"]


def test_an_error_of_the_pipeline_reaches_the_trainer(pair: Pair) -> None:
    dataset = count(3).map(lambda x: tf.debugging.check_numerics(1 / x, "no"))
    with pytest.raises(tf.errors.InvalidArgumentError, match="no"):
        list(pair.distributed(dataset))
    with pytest.raises(tf.errors.NotFoundError, match=r"/none; No such file"):
        list(pair.distributed(tf.data.Dataset.from_tensors("/none").map(tf.io.read_file)))


def test_static_sharding_without_a_list_of_workers(pair: Pair) -> None:
    with pytest.raises(tf.errors.NotFoundError, match="not in the workers list"):
        list(pair.distributed(count(9), "DATA"))


def test_tables_variables_and_generators_are_registered_as_they_are(pair: Pair) -> None:
    keys = tf.constant([0, 1], tf.int64)
    fixed = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, keys + 10), -1)
    mutable = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
    mutable.insert(keys, keys + 20)
    variable = tf.Variable(30, dtype=tf.int64)
    generator = tf.random.Generator.from_seed(1)

    def looked_up(x: Any) -> Any:
        drawn = generator.uniform([], 40, 1 << 40, tf.int64)
        return tf.stack([fixed.lookup(x), mutable.lookup(x), x + variable, drawn])

    got = [x.numpy().tolist() for x in pair.distributed(count(3).map(looked_up))]
    known = [x[:3] for x in sorted(got, key=lambda x: x[2])]
    assert known == [[10, 20, 30], [11, 21, 31], [-1, -1, 32]]
    first = tf.random.Generator.from_seed(1).uniform([], 40, 1 << 40, tf.int64)
    assert int(first) in [x[3] for x in got]


def test_a_source_that_cannot_be_split(pair: Pair, tmp_path: pathlib.Path) -> None:
    dataset = count(3).snapshot(str(tmp_path))
    with pytest.raises(tf.errors.UnimplementedError, match=r"SnapshotDatasetV2.*OFF"):
        list(pair.distributed(dataset))
    assert set(numbers(pair.distributed(dataset, "OFF"))) == {0, 1, 2}


@pytest.mark.parametrize("registrar", [stock, service], ids=["stock", "ours"])
@pytest.mark.parametrize(
    ("compression", "disabled"),
    [("AUTO", False), ("AUTO", True), ("SNAPPY", False), ("SNAPPY", True), (None, False)],
)
def test_compression(
    theirs: DispatcherProcess,
    ours: DispatcherProcess,
    registrar: Any,
    compression: str | None,
    disabled: bool,
) -> None:
    """Whoever registered it, and whether it was then disabled at run time; and elements of every
    kind, with both clients."""
    dataset = count(6).map(
        lambda x: {
            "ragged": tf.ragged.range(tf.stack([x % 3, x % 5])),
            "sparse": tf.sparse.from_dense(tf.one_hot(x % 4, 4)),
            "text": tf.strings.as_string(x),
            "half": tf.cast(tf.fill([x % 2], x), tf.bfloat16),
        }
    )
    for client, dispatcher in PAIRS.values():
        pair = Pair(client, {"theirs": theirs, "ours": ours}[dispatcher])
        dataset_id = Pair(registrar, pair.dispatcher).register(
            dataset, compression=compression, dataset_id=f"{registrar} {compression} {disabled}"
        )
        if disabled:  # by the first client that would rather not
            fields = {"dataset_id": dataset_id, "disable_compression_at_runtime": True}
            answer = call(pair.dispatcher, "DisableCompressionAtRuntime", fields)
            assert answer.compression_disabled_at_runtime or (registrar, compression) == (
                service, "AUTO",  # which compresses on the way, and no elements
            )  # fmt: skip
        assert_same(pair.from_id(dataset_id), dataset)


def assert_same(got: Any, expected: Any) -> None:
    assert got.element_spec == expected.element_spec

    def plain(element: Any) -> Any:
        leaves = tf.nest.flatten(element, expand_composites=True)
        return [np.asarray(leaf).tolist() for leaf in leaves]

    assert sorted(map(plain, got), key=str) == sorted(map(plain, expected), key=str)

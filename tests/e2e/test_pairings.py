"""The same scenarios for each pair of a client and its workers, TensorFlow's own and Forebay's.

Forebay's client reads from Forebay's workers only.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.data.experimental import service as stock

from forebay import service
from forebay.service.transport import local

from ..cluster import WorkerProcess
from ..stock import DispatcherProcess, bulky, call, slow, stock_worker, stock_workers
from .test_saves import slow as slow_by_counting

WORKERS = 2
PLACE = "localhost:%port%"
LIST = ",".join([PLACE] * WORKERS)
count = tf.data.Dataset.range


class Pair(NamedTuple):
    """A client, and a dispatcher with workers of one kind."""

    client: Any
    dispatcher: DispatcherProcess
    stock_workers: bool

    def distributed(self, dataset: Any, policy: str = "DYNAMIC", **options: Any) -> Any:
        mode = self.client.ShardingPolicy[policy]
        return dataset.apply(self.client.distribute(mode, self.dispatcher.target, **options))

    def register(self, dataset: Any, **options: Any) -> str:
        return name_of(self.client.register_dataset(self.dispatcher.target, dataset, **options))

    def from_id(self, dataset_id: str, policy: str = "DYNAMIC", **options: Any) -> Any:
        mode = self.client.ShardingPolicy[policy]
        return self.client.from_dataset_id(mode, self.dispatcher.target, dataset_id, **options)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DispatcherProcess]:
    with (
        DispatcherProcess(tmp_path_factory.mktemp("journal"), workers=LIST) as dispatcher,
        stock_workers(
            dispatcher, WORKERS, heartbeat_interval_ms=500, snapshot_max_chunk_size_bytes=1
        ),
    ):
        yield dispatcher


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DispatcherProcess]:
    """One of its workers is in this process."""
    with (
        DispatcherProcess(tmp_path_factory.mktemp("journal"), workers=LIST) as dispatcher,
        WorkerProcess(dispatcher.address, address=PLACE, save_chunk_bytes=1),
        service.WorkerServer(service.WorkerConfig(dispatcher.address, save_chunk_bytes=1)),
    ):
        yield dispatcher


AHEAD = 50
"""What TensorFlow may put between its client and a loop, which is prefetched as it likes."""

PAIRS = {
    "stock client, stock workers": (stock, "theirs"),
    "stock client": (stock, "ours"),
    "neither stock": (service, "ours"),
}


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Pair:
    client, kind = PAIRS[request.param]
    return Pair(client, request.getfixturevalue(kind), kind == "theirs")


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


def test_a_named_job_is_shared_and_nobody_has_more_than_was_allowed(pair: Pair) -> None:
    dataset_id = pair.register(count(200))
    how: dict[str, Any] = {"job_name": "shared", "max_outstanding_requests": WORKERS}
    first, second = (iter(pair.from_id(dataset_id, **how)) for _ in range(2))
    got = [int(next(first)), int(next(second))]
    rest = numbers(second)  # while the first one takes nothing
    most = WORKERS + (0 if pair.client is service else AHEAD)
    assert len(got + rest) >= 200 - most
    assert sorted(got + rest + numbers(first)) == list(range(200))


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
    assert read.cardinality() == tf.data.UNKNOWN_CARDINALITY
    endless = pair.from_id(pair.register(dataset.repeat()))
    assert endless.cardinality() == tf.data.INFINITE_CARDINALITY
    assert sorted(int(x) for x, _ in read) == list(range(10))


def test_a_size_that_must_be_evaluated(pair: Pair, tmp_path: Path) -> None:
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


def test_coordinated_reads_go_on_when_the_dispatcher_has_begun_anew(pair: Pair) -> None:
    """Each number comes twice in a row, so that both consumers have it in the same step."""
    twice = count(1 << 40).flat_map(lambda x: tf.data.Dataset.from_tensors(x).repeat(2)).repeat()
    dataset_id = pair.register(bulky(twice))
    policies = ("OFF", "DYNAMIC")
    consumers = [
        iter(
            pair.from_id(
                dataset_id, policy, job_name=f"{pair.client.__name__} in rounds, {policy}",
                consumer_index=index, num_consumers=2,
            )
        )
        for policy in policies for index in range(2)
    ]  # fmt: skip
    got: dict[str, list[int]] = {policy: [] for policy in policies}
    with ThreadPoolExecutor(len(consumers)) as pool:
        for step in range(60):
            if step == 30:
                pair.dispatcher.kill_and_restart()
            elements = [int(number) for number, _ in pool.map(next, consumers)]
            assert elements[0::2] == elements[1::2]
            for policy, element in zip(policies, elements[0::2], strict=True):
                got[policy].append(element)
    consumers.clear()
    times = {policy: collections.Counter(numbers) for policy, numbers in got.items()}
    assert [times["OFF"][number] for number in range(10)] == [WORKERS] * 10
    assert set(times["DYNAMIC"].values()) == {1}


def test_what_a_cross_trainer_cache_keeps_was_produced_once(pair: Pair) -> None:
    # Or one worker fills the cache before the other begins. They go on when this test is over.
    numbered = slow(count(1 << 40), 0.003)
    drawn = numbered.map(lambda x: (x, tf.random.uniform([], 0, 1 << 60, tf.int64))).repeat()
    dataset_id = pair.register(drawn)

    def of_both_workers(trainer_id: str) -> list[set[int]]:
        """What was drawn for the first numbers."""
        cached = pair.from_id(
            dataset_id, "OFF", job_name=f"{pair.client.__name__} cached",
            cross_trainer_cache=pair.client.CrossTrainerCache(trainer_id),
            max_outstanding_requests=4 * WORKERS,
        )  # fmt: skip
        found: list[set[int]] = [set() for _ in range(50)]
        elements = iter(cached)
        while any(len(values) < WORKERS for values in found):
            number, value = (int(x) for x in next(elements))
            if number < len(found):
                found[number].add(value)
        return found

    assert of_both_workers("one") == of_both_workers("another")


def test_a_save_is_loaded_through_the_service_and_here(pair: Pair, tmp_path: Path) -> None:
    """While it is written, and afterwards."""
    path = str(tmp_path / "save")
    ours = pair.client is service
    save = service.distributed_save if ours else tf.data.experimental.distributed_save
    save(slow_by_counting(count(60)), path, pair.dispatcher.address)
    loaded = tf.data.Dataset.load(path, wait=True)
    for dataset in (pair.distributed(loaded), loaded):
        assert sorted(numbers(dataset)) == [*range(60)]


def test_the_dispatcher_begins_anew_in_mid_epoch(pair: Pair) -> None:
    large = count(300).map(lambda x: tf.repeat(x, 2_000))
    elements = iter(pair.distributed(large, max_outstanding_requests=WORKERS))
    got = [int(x[0]) for x in itertools.islice(elements, 50)]
    pair.dispatcher.kill_and_restart()
    got += [int(x[0]) for x in elements]
    assert len(set(got)) == len(got)
    lost = WORKERS if pair.stock_workers else 0  # their GetSplit is not numbered
    assert len(got) >= 300 - lost


@pytest.mark.parametrize("name", PAIRS)
def test_workers_on_the_hosts_of_trainers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is tagged COLOCATED, with another trainer; then there is one in this process, too."""
    client, kind = PAIRS[name]
    workers = stock if kind == "theirs" else service
    has_local_ones = client is workers
    monkeypatch.setattr(local, "running", {})
    numbered, everything = count(40), [*range(40)]
    with contextlib.ExitStack() as stack:
        dispatcher = stack.enter_context(
            DispatcherProcess(tmp_path, workers=LIST, deployment_mode="COLOCATED")
        )

        def read(policy: str, targets: str = "AUTO", dataset: Any = numbered) -> list[int]:
            mode = client.ShardingPolicy[policy]
            how = client.distribute(mode, dispatcher.target, target_workers=targets)
            return sorted(numbers(dataset.apply(how)))

        def are_refused() -> None:
            for policy, targets in (("OFF", "LOCAL"), ("DATA", "AUTO")):
                with pytest.raises(
                    tf.errors.InvalidArgumentError, match=r"local tf\.data.* workers"
                ):
                    read(policy, targets)

        tags = ["unused", "Colocated"]
        if kind == "theirs":
            stack.enter_context(stock_workers(dispatcher, worker_tags=tags))
        else:
            process = WorkerProcess(dispatcher.address, address=PLACE, tags=",".join(tags))
            stack.enter_context(process)
        with pytest.raises(RuntimeError, match="Worker tags cannot be empty"):
            workers.WorkerServer(stock_worker(dispatcher.address, worker_tags=["", "a"]))
        are_refused()
        # A tag that nobody knows means nothing.
        here = workers.WorkerServer(stock_worker(dispatcher.address, worker_tags=["unused"]))
        stack.callback(here._stop)
        assert read("OFF", "any") == sorted(everything * WORKERS)
        assert read("OFF") == everything
        assert read("DYNAMIC") == everything  # the other one takes no splits
        python = count(4).map(lambda x: tf.numpy_function(lambda n: -n, [x], tf.int64))
        assert read("OFF", dataset=python) == [-3, -2, -1, 0]  # by who has its Python
        if has_local_ones:
            assert read("OFF", "LOCAL") == read("DYNAMIC", "local") == everything
            assert read("DATA") == [*range(1, 40, WORKERS)]  # the shard of the second
        else:
            are_refused()


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

    got = [x.numpy().tolist() for x in pair.distributed(count(3).map(looked_up), "OFF")]
    known = sorted((x[:3] for x in got), key=lambda x: x[2])  # of each worker
    assert known == [[10, 20, 30]] * 2 + [[11, 21, 31]] * 2 + [[-1, -1, 32]] * 2
    first = tf.random.Generator.from_seed(1).uniform([], 40, 1 << 40, tf.int64)
    assert int(first) in [x[3] for x in got]


def test_a_source_that_cannot_be_split(pair: Pair, tmp_path: Path) -> None:
    dataset = count(3).snapshot(str(tmp_path))
    with pytest.raises(tf.errors.UnimplementedError, match=r"SnapshotDatasetV2.*OFF"):
        list(pair.distributed(dataset))
    assert set(numbers(pair.distributed(dataset, "OFF"))) == {0, 1, 2}


@pytest.mark.parametrize("registrar", [stock, service], ids=["stock", "ours"])
@pytest.mark.parametrize(
    ("compression", "disabled"),
    [
        ("AUTO", False),
        ("AUTO", True),
        ("SNAPPY", False),
        ("SNAPPY", True),
        (None, False),
        (None, True),
    ],
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
    for client, kind in PAIRS.values():
        pair = Pair(client, {"theirs": theirs, "ours": ours}[kind], kind == "theirs")
        dataset_id = pair._replace(client=registrar).register(
            dataset, compression=compression, dataset_id=f"{registrar} {compression} {disabled}"
        )
        if disabled:  # by the first client that would rather not
            fields = {"dataset_id": dataset_id, "disable_compression_at_runtime": True}
            answer = call(pair.dispatcher, "DisableCompressionAtRuntime", fields)
            # Ours AUTO compresses on the way, and no elements.
            none = compression is None or (registrar, compression) == (service, "AUTO")
            assert answer.no_compression_to_disable == none
            assert answer.compression_disabled_at_runtime != none
        assert_same(pair.from_id(dataset_id), dataset)


def assert_same(got: Any, expected: Any) -> None:
    assert got.element_spec == expected.element_spec

    def plain(element: Any) -> Any:
        leaves = tf.nest.flatten(element, expand_composites=True)
        return [np.asarray(leaf).tolist() for leaf in leaves]

    assert sorted(map(plain, got), key=str) == sorted(map(plain, expected), key=str)

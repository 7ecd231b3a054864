"""Static sharding on Forebay's workers: the same shards as TensorFlow's, whichever worker dies.

`FOREBAY_PIPELINES=500` compares the shards of so many pipelines, and `FOREBAY_SEED` of others.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2
from tensorflow.data.experimental import service as stock
from tensorflow.python.data.experimental.ops import data_service_ops

from forebay import service
from forebay.service.connections.grpc_server import CHANNEL_OPTIONS
from forebay.service.errors import Unavailable
from forebay.service.proto import tf_service_pb2 as pb
from forebay.storage.tfrecord import frame

from .. import forks
from ..cluster import WorkerProcess
from ..pipelines.compositions import (
    CUT_SOURCES,
    ENDLESS_STEPS,
    EXACT_JOINS,
    EXACT_STEPS,
    OTHER_JOINS,
    OTHER_STEPS,
    REFUSED_SOURCES,
    SOURCES,
    Compositions,
    build,
    write_files,
)
from ..standbys import status
from ..stock import DispatcherProcess, OwnDispatcher, call, stock_worker, stock_workers

SEED = int(os.environ.get("FOREBAY_SEED", "1"))
PIPELINES = int(os.environ.get("FOREBAY_PIPELINES", "20"))

SHARDS = 2
LIST = ",".join(["localhost:%port%"] * SHARDS)
HINT = "shard(tf.data.experimental.SHARD_HINT, tf.data.experimental.SHARD_HINT)"
COMPARED = 50
"""Elements of a shard, of which there may be no end."""

PATIENCE_S = 20

# What differs by chance is not compared, nor what ours refuse: saves.
DIVIDED_SOURCES = [
    source for source in [*SOURCES, *CUT_SOURCES, *REFUSED_SOURCES[:1]] if "loaded(" not in source
]
DIVIDED_STEPS = [
    step for step in [*EXACT_STEPS, *OTHER_STEPS, ENDLESS_STEPS[0]] if "unordered" not in step
]
POLICIES = service.ShardingPolicy
STATIC = [POLICIES.FILE, POLICIES.DATA, POLICIES.FILE_OR_DATA, POLICIES.HINT]

Shard = list[int] | str
"""What a worker yields, or the code of its error."""


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[DispatcherProcess]]:
    """One of TensorFlow's workers, and one of ours."""
    folder = tmp_path_factory.mktemp("clusters")
    with (
        DispatcherProcess(folder / "a", workers=LIST, worker_timeout_ms=-1) as theirs,
        DispatcherProcess(folder / "b", workers=LIST) as ours,
        stock_workers(theirs, SHARDS),
    ):
        started = [
            service.WorkerServer(service.WorkerConfig(ours.address, "localhost:%port%"))
            for _ in range(SHARDS)
        ]
        yield [theirs, ours]
        for worker in started:
            worker.stop()


@pytest.fixture(scope="module")
def their_own() -> Iterator[OwnDispatcher]:
    """TensorFlow's dispatcher, and as many of its workers."""
    dispatcher = OwnDispatcher(LIST.split(","))
    with stock_workers(dispatcher.address, SHARDS):
        yield dispatcher
    dispatcher.kill()


def shards(cluster: DispatcherProcess, dataset: Any, policy: int) -> dict[int, Shard]:
    """Each shard in order, as a client of TensorFlow's asks the workers for it."""
    dataset_id = stock.register_dataset(cluster.target, dataset, compression=None).numpy().decode()
    mode = pb.ProcessingModeDef(sharding_policy=policy)  # type: ignore[arg-type]
    job = call(cluster, "GetOrCreateJob", {"dataset_id": dataset_id, "processing_mode_def": mode})
    joined = call(cluster, "GetOrCreateIteration", {"job_id": job.job_id})
    client = {"iteration_client_id": joined.iteration_client_id}
    tasks = call(cluster, "ClientHeartbeat", client).task_info
    places = places_of(cluster)
    found = {places[t.worker_address]: elements(t.worker_address, t.task_id) for t in tasks}
    call(cluster, "ReleaseIterationClient", client)
    return found


def shards_without_loss(
    theirs: DispatcherProcess, dataset: Any, policy: service.ShardingPolicy
) -> dict[int, Shard]:
    """Those of TensorFlow's workers; but their AUTO divides the files, then the elements as well
    where files are joined with something else, so half of them are lost."""
    if policy != POLICIES.FILE_OR_DATA:
        return shards(theirs, dataset, policy)
    found = shards(theirs, dataset, POLICIES.FILE)
    if "NOT_FOUND" in found.values():
        found = shards(theirs, dataset, POLICIES.DATA)
    return found


def places_of(cluster: DispatcherProcess) -> dict[str, int]:
    return {worker["address"]: worker["place"] for worker in status(cluster)["workers"]}


def elements(address: str, task_id: int) -> Shard:
    found: list[int] = []
    give_up_s = time.monotonic() + PATIENCE_S  # it may go on for ever without an element
    with grpc.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        get = channel.unary_unary(
            "/tensorflow.data.WorkerService/GetElement",
            pb.GetElementRequest.SerializeToString,
            pb.GetElementResponse.FromString,
        )
        while len(found) < COMPARED:
            try:
                answer = get(pb.GetElementRequest(task_id=task_id), timeout=PATIENCE_S)
            except grpc.RpcError as error:
                code = error.code()
                if code == grpc.StatusCode.UNAVAILABLE:  # the task is being made
                    if time.monotonic() < give_up_s:
                        continue
                    code = grpc.StatusCode.DEADLINE_EXCEEDED
                return str(code.name)
            if answer.end_of_sequence:
                break
            (data,) = answer.uncompressed.components
            found.append(int(tf.make_ndarray(tensor_pb2.TensorProto.FromString(data))))
    return found


class Divided(Compositions):
    """Pipelines, and how workers are to divide them among themselves."""

    def one(self) -> tuple[service.ShardingPolicy, str]:
        policy, depth = self._random.choice(STATIC), self._random.choice([0, 1, 1, 2])
        parts = [
            self._composed(depth, DIVIDED_SOURCES, DIVIDED_STEPS, [*EXACT_JOINS, *OTHER_JOINS])
        ]
        if policy == POLICIES.HINT:
            parts.append(HINT)
        if self._random.random() < 0.3:
            parts.append("with_options(undivided)")  # a policy of its own, which is not asked
        steps = self._random.sample(DIVIDED_STEPS, self._random.randint(0, 2))
        return policy, ".".join([*parts, *map(self.filled, steps)])


def test_a_shard_is_what_tensorflows_worker_makes_of_it(
    clusters: list[DispatcherProcess], tmp_path: Path
) -> None:
    write_files(tmp_path)
    made_up = Divided(SEED, tmp_path)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    for number in range(PIPELINES):
        policy, expression = made_up.one()
        with drawing_alike(number):
            dataset = build(expression, undivided=options)
        theirs = shards_without_loss(clusters[0], dataset, policy)
        ours = shards(clusters[1], dataset, policy)
        assert set(theirs) == set(range(SHARDS)), (policy.name, expression)
        assert ours == theirs, (policy.name, expression)


ENDS = [
    "batch(10).rebatch(3)",
    "batch(10).rebatch(3).prefetch(1)",
    "batch(10).rebatch(20)",
    "batch(10).rebatch([3, 2, 7])",
    "batch(10).rebatch(3, drop_remainder=True)",
    "batch(10).rebatch(3).with_options(pool)",
    "batch(10).rebatch(3).take(2)",
    "batch(10).rebatch(2).rebatch(3)",
    "batch(3)",
    "batch(3, drop_remainder=True)",
    "batch(3, num_parallel_calls=2)",
    "padded_batch(3)",
    "prefetch(2)",
    "with_options(pool)",
    "take(7)",
    "skip(3)",
    "repeat(2)",
    "shuffle(4, seed=1)",
    "apply(extra.shuffle_and_repeat(4, 2, seed=1))",
    "cache()",
    "batch(4).unbatch()",
    "window(2).flat_map(lambda w: w)",
    "filter(lambda i: i % 3 != 0)",
]
NOT_BY_FILE = ["apply(extra.ignore_errors())", "concatenate(count(3))"]


@pytest.mark.parametrize("policy", STATIC)
def test_a_pipelines_end_is_what_tensorflows_service_delivers(
    clusters: list[DispatcherProcess],
    their_own: OwnDispatcher,
    tmp_path: Path,
    policy: service.ShardingPolicy,
) -> None:
    """TensorFlow's rewrite treats some datasets at an end in a way of their own. Its workers'
    pipelines end in a map that compresses."""
    for name in range(4):
        (tmp_path / f"{name}.txt").write_text("".join(f"{i}\n" for i in range(name, 24, 4)))
    files = f"list_files('{tmp_path}/*.txt', shuffle=False).flat_map(text).map(number)"
    hinted = [HINT] if policy == POLICIES.HINT else []
    pool = tf.data.Options()
    pool.threading.private_threadpool_size = 2
    sources = [files] if policy == POLICIES.FILE else ["count(24)"]
    ends = ENDS if policy == POLICIES.FILE else ENDS + NOT_BY_FILE
    if policy == POLICIES.FILE_OR_DATA:
        sources.append(files)
    for source, end in itertools.product(sources, ends):
        dataset = build(".".join([source, *hinted, end]), pool=pool)
        lossless = policy
        if (source, end) == (files, "concatenate(count(3))"):  # see shards_without_loss
            lossless = POLICIES.DATA
        theirs = dataset.apply(
            data_service_ops._distribute(  # which has the option for a faster heartbeat
                stock.ShardingPolicy[lossless.name],
                their_own.target,
                task_refresh_interval_hint_ms=20,
            )
        )
        ours = dataset.apply(service.distribute(policy, clusters[1].target))
        assert delivered(ours) == delivered(theirs), (source, end)


@pytest.mark.parametrize("count", [2, 3, 7, 24])
def test_a_hinted_dataset_yields_all_its_elements(
    clusters: list[DispatcherProcess], count: int
) -> None:
    """TensorFlow takes some of them for infinite and others for empty, because the hint is -1."""
    for skipped in (0, 1):
        dataset = build(f"count({count}).{HINT}.skip({skipped})")
        got = dataset.apply(service.distribute(POLICIES.HINT, clusters[1].target))
        assert got.cardinality() == tf.data.UNKNOWN_CARDINALITY
        assert sorted(got.as_numpy_iterator()) == [*range(SHARDS * skipped, count)]


def delivered(dataset: Any) -> Counter[str]:
    """The elements, in whatever order."""
    return Counter(str(element) for element in dataset.as_numpy_iterator())


@contextlib.contextmanager
def drawing_alike(seed: int) -> Iterator[None]:
    """What is built meanwhile, and names no seed, shuffles alike wherever it is run."""
    tf.random.set_seed(seed)
    try:
        yield
    finally:
        tf.random.set_seed(None)


def test_a_dataset_that_does_not_fit_the_policy_is_refused(
    clusters: list[DispatcherProcess], tmp_path: Path
) -> None:
    """The same errors; but TensorFlow's workers take HINT without a hint for OFF."""
    (tmp_path / "records").write_bytes(frame(b"0"))
    one = tf.data.Dataset.from_tensor_slices([str(tmp_path / "records")])
    hint = tf.data.experimental.SHARD_HINT
    count = tf.data.Dataset.range(9)
    fewer = one.flat_map(tf.data.TFRecordDataset)
    hinted_fewer = one.shard(hint, hint).flat_map(tf.data.TFRecordDataset)
    for dataset, policy, expected in [
        (fewer, POLICIES.FILE, "INVALID_ARGUMENT"),
        (fewer, POLICIES.FILE_OR_DATA, "INVALID_ARGUMENT"),
        (hinted_fewer, POLICIES.HINT, "INVALID_ARGUMENT"),
        (count, POLICIES.FILE, "NOT_FOUND"),
        (count.shard(hint, hint), POLICIES.DATA, "FAILED_PRECONDITION"),
        (count.shard(hint, hint), POLICIES.FILE_OR_DATA, "FAILED_PRECONDITION"),
    ]:
        found, ours = (shards(cluster, dataset, policy) for cluster in clusters)
        assert ours == found
        assert found[0] == expected
    theirs, ours = (shards(cluster, count, POLICIES.HINT) for cluster in clusters)
    assert theirs == {shard: [*range(9)] for shard in range(SHARDS)}
    assert ours == dict.fromkeys(range(SHARDS), "INVALID_ARGUMENT")


def test_a_killed_workers_shard_is_read_anew_by_the_next_one(tmp_path: Path) -> None:
    options = {"workers": "127.0.0.1:%port%,127.0.0.1:%port%", "reconnect_grace_ms": 1_000}
    with DispatcherProcess(tmp_path, **options) as dispatcher:
        config = service.WorkerConfig(dispatcher.address, worker_address="127.0.0.1:%port%")
        with WorkerProcess(dispatcher.address) as first, service.WorkerServer(config) as other:
            place = places_of(dispatcher)[first.address]
            # More than fits between a worker and its reader: it has not ended when it dies.
            large = tf.data.Dataset.range(400).map(lambda x: tf.fill([1 << 15], x))
            dataset_id = service.register_dataset(dispatcher.target, large, compression=None)
            mode = POLICIES.DATA
            with service.read(dispatcher.target, dataset_id, processing_mode=mode) as reader:
                got = [int(next(reader)[0])]
                first.kill()
                dispatcher.kill_and_restart()
                with service.WorkerServer(config) as third:  # once the place is free
                    got += [int(element[0]) for element in reader]
                    places = places_of(dispatcher)
            assert (places[third.address], places[other.address]) == (place, 1 - place)
    assert set(got) == set(range(400))
    of_the_other = [x for x in got if x % 2 != place]
    assert len(set(of_the_other)) == len(of_the_other)


def test_workers_that_are_too_few_too_many_or_not_on_the_list(tmp_path: Path) -> None:
    """Who is not on it is refused; of more than it has, ours wait for a place; and an epoch waits
    for all of the list."""
    not_listed = {"worker_address": "127.0.0.1:%port%"}
    with DispatcherProcess(tmp_path, workers=LIST) as dispatcher:
        config = stock_worker(dispatcher.address, **not_listed)
        reason = r"Failed to assign an index for worker 127.*worker's address is not configured"
        for server in (stock.WorkerServer, service.WorkerServer):
            with pytest.raises(RuntimeError, match=reason):
                server(config)
        command = ["-m", "forebay.service.cli", "worker", "--dispatcher", dispatcher.address]
        refused = forks.run([*command, "--address", "127.0.0.1:%port%"])
        assert refused.returncode == 1
        assert refused.stderr.startswith("forebay: Failed to assign an index for worker 127.0.0.1")
        with service.WorkerServer(stock_worker(dispatcher.address)) as first:
            assert places_of(dispatcher) == {first.address: 0}
            both = [
                iter(
                    tf.data.Dataset.range(10).apply(
                        calls.distribute(calls.ShardingPolicy.DATA, dispatcher.target)
                    )
                )
                for calls in (stock, service)
            ]
            got = [[int(x) for x in itertools.islice(read, 5)] for read in both]
            assert got == [[0, 2, 4, 6, 8]] * 2  # there is no more yet
            second = WorkerProcess(dispatcher.address, address="localhost:%port%")
            with second:
                rest = [[int(x) for x in read] for read in both]
                assert rest == [[1, 3, 5, 7, 9]] * 2
                occupied = r"Failed to assign an index.*already running at the configured host"
                with pytest.raises(RuntimeError, match=occupied):
                    stock.WorkerServer(stock_worker(dispatcher.address))
                with pytest.raises(Unavailable, match=occupied):
                    service.WorkerServer(
                        stock_worker(dispatcher.address, dispatcher_timeout_ms=200)
                    )
                third = WorkerProcess(dispatcher.address, address="localhost:%port%")
                second.stop()
                with third:  # which has waited, and has the place now
                    assert places_of(dispatcher)[third.address] == 1

"""Static sharding on Forebay's workers: the shards of TensorFlow's own, and who is killed."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorflow.core.framework import tensor_pb2
from tensorflow.data.experimental import service as stock

from forebay import service
from forebay.journal.proto import events_pb2 as ev
from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.connections.grpc_server import CHANNEL_OPTIONS
from forebay.service.errors import NotFound, PipelineError
from forebay.service.proto import forebay_pb2
from forebay.service.proto import tf_service_pb2 as pb

from ..cluster import WorkerProcess
from ..stock import GRAPH, DispatcherProcess, call, stock_workers

SHARDS = 3
LIST = ",".join(["localhost:%port%"] * SHARDS)
POLICIES = service.ShardingPolicy
STATIC = [POLICIES.FILE, POLICIES.DATA, POLICIES.FILE_OR_DATA, POLICIES.HINT]

Shard = list[int] | str
"""What a worker yields, or the code of its error."""


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[DispatcherProcess]]:
    """One of TensorFlow's workers, and one of ours."""
    folder = tmp_path_factory.mktemp("clusters")
    with (
        DispatcherProcess(folder / "a", workers=LIST) as theirs,
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
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    names = []
    for number in range(2 * SHARDS):
        path = tmp_path_factory.mktemp("files") / "records"
        with tf.io.TFRecordWriter(str(path)) as writer:
            for record in range(number + 1):
                writer.write(str(10 * number + record).encode())
        names.append(str(path))
    return names


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


def places_of(cluster: DispatcherProcess) -> dict[str, int]:
    client = DispatcherClient(cluster.target)
    answer = client.call(forebay_pb2.GetStatusRequest(), forebay_pb2.GetStatusResponse)
    client.close()
    return {worker["address"]: worker["place"] for worker in json.loads(answer.status)["workers"]}


def elements(address: str, task_id: int) -> Shard:
    found: list[int] = []
    with grpc.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        get = channel.unary_unary(
            "/tensorflow.data.WorkerService/GetElement",
            pb.GetElementRequest.SerializeToString,
            pb.GetElementResponse.FromString,
        )
        while True:
            try:
                answer = get(pb.GetElementRequest(task_id=task_id), timeout=60)
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.UNAVAILABLE:  # the task is being made
                    continue
                return str(error.code().name)
            if answer.end_of_sequence:
                return found
            (data,) = answer.uncompressed.components
            found.append(int(tf.make_ndarray(tensor_pb2.TensorProto.FromString(data))))


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[str, int]]:
    """How a dataset is made of the one before, in words."""
    step = st.tuples(
        st.sampled_from(["batch", "concatenate", "interleave", "map", "prefetch", "repeat",
                         "shuffle", "skip", "take", "zip"]),
        st.integers(1, 4),
    )  # fmt: skip
    return draw(st.lists(step, max_size=3))


def stepped(dataset: Any, what: str, n: int) -> Any:
    """Of integers, as it was."""
    kinds = {
        "batch": lambda d: d.batch(n).map(tf.reduce_sum),
        "concatenate": lambda d: d.concatenate(d.take(n)),
        "interleave": lambda d: d.interleave(
            lambda x: tf.data.Dataset.from_tensors(x).repeat(n), cycle_length=2
        ),
        "map": lambda d: d.map(lambda x: x + n, num_parallel_calls=2),
        "prefetch": lambda d: d.prefetch(n),
        "repeat": lambda d: d.repeat(1 + n % 2),
        "shuffle": lambda d: d.shuffle(5, seed=n, reshuffle_each_iteration=False),
        "skip": lambda d: d.skip(n),
        "take": lambda d: d.take(4 * n),
        "zip": lambda d: tf.data.Dataset.zip((d, d.skip(1))).map(lambda x, y: x + 100 * y),
    }
    return kinds[what](dataset)


@settings(max_examples=12, deadline=None, database=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(
    source=st.sampled_from(["range", "slices", "records", "interleaved"]),
    before=steps(),
    after=steps(),
    policy=st.sampled_from(STATIC),
)
def test_a_shard_is_what_tensorflows_worker_makes_of_it(
    clusters: list[DispatcherProcess],
    files: list[str],
    source: str,
    before: list[tuple[str, int]],
    after: list[tuple[str, int]],
    policy: service.ShardingPolicy,
) -> None:
    names = tf.data.Dataset.from_tensor_slices(files)
    records = {
        "records": lambda: names.flat_map(tf.data.TFRecordDataset),
        "interleaved": lambda: names.interleave(tf.data.TFRecordDataset, num_parallel_calls=2),
    }
    dataset: Any
    if source in records:
        dataset = records[source]().map(lambda x: tf.strings.to_number(x, tf.int64))
    elif source == "slices":
        dataset = tf.data.Dataset.from_tensor_slices(np.arange(13))
    else:
        dataset = tf.data.Dataset.range(17)
    for step in before:
        dataset = stepped(dataset, *step)
    if policy == POLICIES.HINT:
        dataset = dataset.shard(service.SHARD_HINT, service.SHARD_HINT)
    for step in after:
        dataset = stepped(dataset, *step)
    theirs, ours = (shards(cluster, dataset, policy) for cluster in clusters)
    assert set(theirs) == set(range(SHARDS))
    assert ours == theirs


@pytest.mark.parametrize("policy", [POLICIES.FILE, POLICIES.DATA, POLICIES.HINT])
def test_forebays_clients_read_every_shard(
    clusters: list[DispatcherProcess], files: list[str], policy: service.ShardingPolicy
) -> None:
    target = clusters[1].target
    dataset = tf.data.Dataset.from_tensor_slices(files).flat_map(tf.data.TFRecordDataset)
    if policy == POLICIES.HINT:
        dataset = dataset.shard(service.SHARD_HINT, service.SHARD_HINT)
    whole = sorted(str(10 * n + r).encode() for n in range(len(files)) for r in range(n + 1))
    dataset_id = service.register_dataset(target, dataset)
    assert sorted(service.read(target, dataset_id, processing_mode=policy)) == whole
    got = service.from_dataset_id(policy, target, dataset_id)
    assert sorted(x.numpy() for x in got) == whole
    got = dataset.apply(service.distribute(policy, target))
    assert sorted(x.numpy() for x in got) == whole


def test_hint_without_a_hint_fails_at_the_trainer(clusters: list[DispatcherProcess]) -> None:
    target = clusters[1].target
    dataset_id = service.register_dataset(target, tf.data.Dataset.range(3))
    with pytest.raises(PipelineError, match=r"INVALID_ARGUMENT.*no hint"):
        list(service.read(target, dataset_id, processing_mode=POLICIES.HINT))


def test_a_killed_workers_shard_is_read_anew_by_the_next_one(tmp_path: pathlib.Path) -> None:
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


def test_readers_are_told_that_the_list_of_workers_is_another(tmp_path: pathlib.Path) -> None:
    with DispatcherProcess(tmp_path, workers="h:1") as dispatcher:
        client = DispatcherClient(dispatcher.target)
        register = forebay_pb2.RegisterDatasetRequest(graph=GRAPH)
        dataset_id = client.call(register, forebay_pb2.RegisterDatasetResponse).dataset_id
        create = forebay_pb2.GetOrCreateJobRequest(dataset_id=dataset_id, sharding=ev.DATA)
        job_id = client.call_numbered(create, forebay_pb2.GetOrCreateJobResponse).job_id
        join = forebay_pb2.JoinIterationRequest(job_id=job_id)
        joined = client.call_numbered(join, forebay_pb2.JoinIterationResponse)
        client.close()
        fields = {"job_id": job_id}
        stock_client = call(dispatcher, "GetOrCreateIteration", fields).iteration_client_id
    with DispatcherProcess(tmp_path, workers="h:2") as dispatcher:
        client = DispatcherClient(dispatcher.target)
        beat = forebay_pb2.ConsumerHeartbeatRequest(consumer_id=joined.consumer_id)
        with pytest.raises(NotFound, match="another list of workers"):
            client.call(beat, forebay_pb2.ConsumerHeartbeatResponse)
        client.close()
        with pytest.raises(grpc.RpcError, match="another list of workers"):
            call(dispatcher, "ClientHeartbeat", {"iteration_client_id": stock_client})

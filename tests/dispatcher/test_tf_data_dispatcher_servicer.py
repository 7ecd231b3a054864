"""TensorFlow's own clients and workers on our dispatcher, and its protocol by hand."""

from __future__ import annotations

import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import tensorflow as tf
from tensorflow.data.experimental import service

from forebay.service.proto import tf_service_pb2 as pb

from ..stock import DispatcherProcess, call, stock_workers


def distributed(
    dispatcher: DispatcherProcess, dataset: tf.data.Dataset, **options: Any
) -> tf.data.Dataset:
    dynamic = service.ShardingPolicy.DYNAMIC
    return dataset.apply(service.distribute(dynamic, dispatcher.target, **options))


# -- deaths ------------------------------------------------------------------------------------


def test_a_worker_that_joins_late_and_one_that_dies(tmp_path: Path) -> None:
    with (
        DispatcherProcess(tmp_path, worker_timeout_ms=2_000) as dispatcher,
        stock_workers(dispatcher, 1, heartbeat_interval_ms=200) as first,
    ):
        # Far more than what is buffered between the dispatcher and the trainer.
        large = tf.data.Dataset.range(1_000).map(lambda x: tf.repeat(x, 2_000))
        got = []
        with stock_workers(dispatcher, 1, heartbeat_interval_ms=200):
            for element in distributed(dispatcher, large, max_outstanding_requests=2):
                got.append(int(element[0]))
                if len(got) == 200:
                    first.kill()
    assert len(set(got)) == len(got)
    # What the dead one had begun: a split that it had asked for, and what it had made and nobody
    # had taken, where TensorFlow keeps some elements.
    assert len(got) >= 1_000 - 50


def test_without_a_worker_a_trainer_waits_for_one(tmp_path: Path) -> None:
    with DispatcherProcess(tmp_path) as dispatcher:
        dataset = iter(distributed(dispatcher, tf.data.Dataset.range(10)))
        with stock_workers(dispatcher, 1):
            assert sorted(int(x) for x in dataset) == list(range(10))


# -- the protocol by hand ----------------------------------------------------------------------


class TestProtocol:
    @pytest.fixture(autouse=True)
    def _set_dispatcher(self, dispatcher: DispatcherProcess) -> None:
        self.dispatcher = dispatcher

    def call(self, method: str, **fields: Any) -> Any:
        return call(self.dispatcher, method, fields)

    def join(self, dataset: tf.data.Dataset, sharding: str = "DYNAMIC") -> int:
        """Register the dataset; returns the id of a client of a new iteration."""
        dataset_id = service.register_dataset(self.dispatcher.target, dataset)
        mode = pb.ProcessingModeDef(sharding_policy=sharding)
        job = self.call(
            "GetOrCreateJob", dataset_id=dataset_id.numpy().decode(), processing_mode_def=mode
        )
        joined = self.call("GetOrCreateIteration", job_id=job.job_id)
        return joined.iteration_client_id

    def heartbeat(self, address: str, *current_tasks: int) -> Any:
        grpc_server = pb.DataTransferServerInfo(protocol="grpc", address=address)
        return self.call(
            "WorkerHeartbeat",
            worker_address=address,
            worker_uid=-1,
            worker_tags=["spare"],
            transfer_servers=[grpc_server],
            current_tasks=current_tasks,
        )

    def splits(self, iteration_id: int, repetition: int, provider: int = 0) -> list[int]:
        got: list[int] = []
        while True:
            answer = self.call(
                "GetSplit",
                iteration_id=iteration_id,
                repetition=repetition,
                split_provider_index=provider,
            )
            if answer.end_of_splits:
                return got
            split = tf.io.parse_tensor(answer.split, tf.int64)
            assert split.shape == ()
            got.append(int(split))

    def refuses(self, method: str, code: grpc.StatusCode, message: str, **fields: Any) -> None:
        with pytest.raises(grpc.RpcError, match=message) as raised:
            self.call(method, **fields)
        assert raised.value.code() == code

    def test_splits_of_several_providers_and_repetitions(self) -> None:
        numbers = tf.data.Dataset.range(10, 30, 5)
        letters = tf.data.Dataset.from_tensor_slices(["a", "b", "c"])
        client_id = self.join(tf.data.Dataset.zip((numbers, letters)))
        self.heartbeat("127.0.0.1:9")
        tasks = self.call("ClientHeartbeat", iteration_client_id=client_id).task_info
        iteration_id = tasks[0].iteration_id
        assert self.splits(iteration_id, 0, provider=1) == [0, 1, 2]
        assert self.splits(iteration_id, 0) == [10, 15, 20, 25]
        assert self.splits(iteration_id, 2) == [10, 15, 20, 25]  # a repetition is skipped
        assert self.splits(iteration_id, 1) == []  # and is over
        self.refuses(
            "GetSplit",
            grpc.StatusCode.INVALID_ARGUMENT,
            "2 split providers",
            iteration_id=iteration_id,
            split_provider_index=2,
        )

    def test_who_joins_finds_the_tasks_at_their_workers(self) -> None:
        pushed: list[int] = []

        def process_task(data: bytes, _: object) -> bytes:
            time.sleep(0.5)  # longer than the dispatcher takes to answer
            pushed.append(pb.ProcessTaskRequest.FromString(data).task.task_id)
            return b""

        method = {"ProcessTask": grpc.unary_unary_rpc_method_handler(process_task)}
        worker = grpc.server(ThreadPoolExecutor(1))
        worker.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("tensorflow.data.WorkerService", method)]
        )
        address = f"127.0.0.1:{worker.add_insecure_port('127.0.0.1:0')}"
        worker.start()
        before = {task.task_id for task in self.heartbeat(address).new_tasks}
        self.join(tf.data.Dataset.range(5))
        worker.stop(None).wait()
        (task_id,) = {task.task_id for task in self.heartbeat(address).new_tasks} - before
        assert task_id in pushed

    def test_the_life_of_a_task(self) -> None:
        address = "127.0.0.1:1"
        running = [task.task_id for task in self.heartbeat(address).new_tasks]
        client_id = self.join(tf.data.Dataset.range(5))
        answer = self.heartbeat(address, *running, 123)
        assert answer.tasks_to_delete == [123]
        (task,) = answer.new_tasks
        assert task.num_split_providers == 1
        assert task.worker_address == address
        assert task.processing_mode_def.sharding_policy == pb.ProcessingModeDef.DYNAMIC
        assert (
            task.dataset_def == self.call("GetDatasetDef", dataset_id=task.dataset_id).dataset_def
        )
        assert self.heartbeat(address, *running).new_tasks == [task]  # it was restarted
        infos = self.call("ClientHeartbeat", iteration_client_id=client_id)
        (info,) = (info for info in infos.task_info if info.worker_address == address)
        assert info.worker_tags == ["spare"]
        assert [server.protocol for server in info.transfer_servers] == ["grpc"]
        progress = [pb.TaskProgress(task_id=task.task_id, completed=True)]
        self.call("WorkerUpdate", worker_address=address, updates=progress)
        self.call("WorkerUpdate", worker_address=address, updates=progress)  # kindly
        assert self.heartbeat(address, *running, task.task_id).tasks_to_delete == [task.task_id]
        infos = self.call("ClientHeartbeat", iteration_client_id=client_id)
        assert task.task_id in [info.task_id for info in infos.task_info]
        self.call("ReleaseIterationClient", iteration_client_id=client_id)
        self.refuses(
            "ClientHeartbeat",
            grpc.StatusCode.NOT_FOUND,
            f"client id {client_id}",
            iteration_client_id=client_id,
        )

    def test_the_first_answer_about_compression_is_final(self) -> None:
        target = self.dispatcher.target
        for dataset_id, compression in (("with", "AUTO"), ("without", None)):
            service.register_dataset(
                target, tf.data.Dataset.range(3), compression=compression, dataset_id=dataset_id
            )
        for disable in (True, False):
            answer = self.call(
                "DisableCompressionAtRuntime",
                dataset_id="with",
                disable_compression_at_runtime=disable,
            )
            assert answer.compression_disabled_at_runtime
        answer = self.call("DisableCompressionAtRuntime", dataset_id="without")
        assert answer.no_compression_to_disable

    def test_an_id_stands_for_one_structure(self) -> None:
        target = self.dispatcher.target
        service.register_dataset(target, tf.data.Dataset.range(3), dataset_id="taken")
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"same structure.*element_spec"):
            service.register_dataset(
                target, tf.data.Dataset.from_tensor_slices(["x", "y", "z"]), dataset_id="taken"
            )
        with pytest.raises(tf.errors.InvalidArgumentError, match="another cardinality"):
            service.register_dataset(target, tf.data.Dataset.range(4), dataset_id="taken")

    def test_version_config_and_workers(self) -> None:
        assert self.call("GetVersion").version == 9
        assert not self.call("GetDataServiceConfig").config.deployment_mode
        self.heartbeat("127.0.0.1:2")
        assert "127.0.0.1:2" in [w.address for w in self.call("GetWorkers").workers]
        assert self.call("MaybeRemoveTask", task_id=1).removed

    @pytest.mark.parametrize(
        ("method", "fields"),
        [
            ("GetDatasetDef", {"dataset_id": "nothing"}),
            ("GetDataServiceMetadata", {"dataset_id": "nothing"}),
            ("DisableCompressionAtRuntime", {"dataset_id": "nothing"}),
            ("GetOrCreateJob", {"dataset_id": "nothing"}),
            ("GetOrCreateIteration", {"job_id": 1}),
            ("ClientHeartbeat", {"iteration_client_id": 1}),
            ("GetSplit", {"iteration_id": 1}),
        ],
    )
    def test_unknown_ids(self, method: str, fields: dict[str, Any]) -> None:
        self.refuses(method, grpc.StatusCode.NOT_FOUND, "(nothing|1).*not found|id 1:", **fields)

    @pytest.mark.parametrize("method", ["GetSnapshotSplit", "GetSnapshotStreams"])
    def test_unknown_saves(self, method: str) -> None:
        self.refuses(method, grpc.StatusCode.NOT_FOUND, "does not know of a save at ''")

    @pytest.mark.parametrize("graph", [b"", b"\xff" * 20, b"no graph", struct.pack("<q", 7)])
    def test_a_graph_that_is_none(self, graph: bytes) -> None:
        self.refuses(
            "GetOrRegisterDataset",
            grpc.StatusCode.INVALID_ARGUMENT,
            "graph|GraphDef",
            dataset=pb.DatasetDef(graph=graph),
        )
        self.refuses(
            "Snapshot",
            grpc.StatusCode.INVALID_ARGUMENT,
            "graph|GraphDef",
            dataset=pb.DatasetDef(graph=graph),
        )

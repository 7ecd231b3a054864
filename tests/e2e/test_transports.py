"""Every way from a worker to a trainer, by name and by itself; and compression as registered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.data.experimental import service as stock

from forebay import service
from forebay.journal.proto import events_pb2 as ev
from forebay.service import malloc
from forebay.service.client import links
from forebay.service.client.reader import fetch_dataset
from forebay.service.connections.protocols import GRPC, TCP, UNIX, transfer_protocol
from forebay.service.errors import FailedPrecondition, InvalidArgument
from forebay.service.transport import BlockClient, LocalClient

from ..cluster import WorkerProcess
from ..stock import DispatcherProcess

OFF, DYNAMIC = service.ShardingPolicy.OFF, service.ShardingPolicy.DYNAMIC
SIZE = 3000


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The protocols by which clients of this process have connected."""
    protocols = set()
    connect, start = BlockClient._connect_to, LocalClient.start

    def connect_to(self: BlockClient, protocol: str, address: str) -> Any:
        reader = connect(self, protocol, address)
        protocols.add(protocol)
        return reader

    def start_locally(self: LocalClient) -> None:
        protocols.add("local")
        start(self)

    monkeypatch.setattr(BlockClient, "_connect_to", connect_to)
    monkeypatch.setattr(LocalClient, "start", start_locally)
    return protocols


@pytest.fixture(scope="module")
def dataset_id(dispatcher: DispatcherProcess) -> str:
    return service.register_dataset(dispatcher.target, tf.data.Dataset.range(SIZE))


def numbers(elements: Any) -> list[int]:
    with elements:
        return [int(x) for x in elements]


@pytest.fixture(scope="class")
def neighbour(dispatcher: DispatcherProcess) -> Iterator[None]:
    with WorkerProcess(dispatcher.address).until_told():
        yield


@pytest.fixture(scope="class")
def worker_here(dispatcher: DispatcherProcess) -> Iterator[None]:
    with service.WorkerServer(service.WorkerConfig(dispatcher.address)):
        yield


@pytest.mark.usefixtures("neighbour")
class TestByName:
    @pytest.mark.parametrize("protocol", [UNIX, TCP, GRPC, "TCP", "gRPC"])
    def test_a_named_protocol_is_used(
        self, dispatcher: DispatcherProcess, dataset_id: str, used: set[str], protocol: str
    ) -> None:
        elements = service.read(dispatcher.target, dataset_id, data_transfer_protocol=protocol)
        assert numbers(elements) == [*range(SIZE)]
        assert used == {protocol.lower()}

    @pytest.mark.parametrize("protocol", [None, "AUTO", "auto"])
    def test_neighbours_use_the_unix_socket(
        self, dispatcher: DispatcherProcess, dataset_id: str, used: set[str], protocol: str | None
    ) -> None:
        elements = service.read(dispatcher.target, dataset_id, data_transfer_protocol=protocol)
        assert numbers(elements) == [*range(SIZE)]
        assert used == {UNIX}

    def test_grpc_is_the_last_resort(
        self,
        dispatcher: DispatcherProcess,
        dataset_id: str,
        used: set[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """As on another host, behind a firewall that lets only gRPC's port pass."""
        addresses = links._addresses
        monkeypatch.setattr(
            links,
            "_addresses",
            lambda task, wanted: [
                (protocol, {UNIX: "@of-another-host", TCP: "127.0.0.1:1"}.get(protocol, address))
                for protocol, address in addresses(task, wanted)
            ],
        )
        assert numbers(service.read(dispatcher.target, dataset_id)) == [*range(SIZE)]
        assert used == {GRPC}

    def test_from_dataset_id_uses_the_protocol(
        self, dispatcher: DispatcherProcess, used: set[str]
    ) -> None:
        batches = tf.data.Dataset.range(100).batch(10)
        distribute = service.distribute(DYNAMIC, dispatcher.target, data_transfer_protocol="grpc")
        got = [x for batch in batches.apply(distribute) for x in batch.numpy().tolist()]
        assert sorted(got) == [*range(100)]
        assert used == {GRPC}

    def test_local_is_for_workers_in_this_process(
        self, dispatcher: DispatcherProcess, dataset_id: str
    ) -> None:
        elements = service.read(dispatcher.target, dataset_id, data_transfer_protocol="local")
        with pytest.raises(FailedPrecondition, match=r"cannot be reached by local .*'tcp'"):
            numbers(elements)


@pytest.mark.parametrize(
    ("offered", "others"), [(GRPC, [UNIX, TCP]), (TCP, [UNIX, GRPC]), (UNIX, [TCP, GRPC])]
)
def test_a_worker_that_offers_one_protocol(
    tmp_path: Path, used: set[str], offered: str, others: list[str]
) -> None:
    with (
        DispatcherProcess(tmp_path) as dispatcher,
        WorkerProcess(dispatcher.address, data_transfer_protocol=offered.upper()),
    ):
        dataset_id = service.register_dataset(dispatcher.target, tf.data.Dataset.range(10))
        assert numbers(service.read(dispatcher.target, dataset_id)) == [*range(10)]
        assert used == {offered}
        for other in others:
            elements = service.read(dispatcher.target, dataset_id, data_transfer_protocol=other)
            with pytest.raises(FailedPrecondition, match=rf"by {other} .*only by \['{offered}'\]"):
                numbers(elements)


@pytest.mark.usefixtures("worker_here")
class TestInOneProcess:
    def test_a_task_that_has_ended_gives_its_memory_back(
        self, dispatcher: DispatcherProcess, dataset_id: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given_back = threading.Event()
        monkeypatch.setattr(malloc, "give_back", given_back.set)
        assert numbers(service.read(dispatcher.target, dataset_id)) == [*range(SIZE)]
        assert given_back.wait(30)

    @pytest.mark.parametrize("protocol", [None, "LOCAL"])
    def test_a_worker_in_this_process_is_read_without_a_socket(
        self, dispatcher: DispatcherProcess, used: set[str], protocol: str | None
    ) -> None:
        dataset = tf.data.Dataset.range(SIZE).apply(
            service.distribute(DYNAMIC, dispatcher.target, data_transfer_protocol=protocol)
        )
        assert sorted(int(x) for x in dataset) == [*range(SIZE)]
        assert used == {"local"}

    def test_a_named_protocol_uses_a_socket_within_a_process(
        self, dispatcher: DispatcherProcess, dataset_id: str, used: set[str]
    ) -> None:
        elements = service.read(dispatcher.target, dataset_id, data_transfer_protocol="tcp")
        assert numbers(elements) == [*range(SIZE)]
        assert used == {TCP}

    def test_what_the_pipeline_may_still_use_cannot_be_changed(
        self, dispatcher: DispatcherProcess
    ) -> None:
        """All of these elements share one tensor of TensorFlow's."""
        dataset = tf.data.Dataset.from_tensors(np.zeros(100_000, np.float32)).repeat(5)
        dataset_id = service.register_dataset(dispatcher.target, dataset)
        with service.read(dispatcher.target, dataset_id) as elements:
            for array in elements:
                with pytest.raises(ValueError, match="read-only"):
                    array += 1

    def test_who_shares_a_job_has_the_same_targets(
        self, dispatcher: DispatcherProcess, dataset_id: str
    ) -> None:
        numbers(service.read(dispatcher.target, dataset_id, job_name="targets"))
        elements = service.read(
            dispatcher.target, dataset_id, job_name="targets", target_workers="LOCAL"
        )
        with pytest.raises(InvalidArgument, match="target workers"):
            numbers(elements)

    def test_a_worker_that_stops_hands_over_what_it_has(
        self, dispatcher: DispatcherProcess, used: set[str]
    ) -> None:
        dataset_id = service.register_dataset(dispatcher.target, tf.data.Dataset.range(20_000))
        leaving = service.WorkerServer(service.WorkerConfig(dispatcher.address))
        elements = service.read(dispatcher.target, dataset_id, processing_mode=DYNAMIC)
        with elements:
            got = [int(next(elements)) for _ in range(100)]
            leaving.stop(drain=False)
            got += [int(x) for x in elements]
        assert len(got) == len(set(got))
        assert used == {"local"}


@pytest.mark.parametrize("name", ["http", "", 5])
def test_an_unknown_protocol_of_a_worker(name: Any) -> None:
    with pytest.raises(InvalidArgument, match="use 'AUTO', 'unix', 'tcp' or 'grpc'"):
        service.WorkerServer(service.WorkerConfig("h:1", data_transfer_protocol=name))


def test_workers_cannot_be_told_to_be_local() -> None:
    with pytest.raises(InvalidArgument):
        service.WorkerServer(service.WorkerConfig("h:1", data_transfer_protocol="local"))
    assert transfer_protocol("LOCAL") == "local"


@pytest.mark.usefixtures("neighbour")
class TestCompression:
    @pytest.mark.parametrize(
        ("name", "registered"),
        [
            ("AUTO", ev.MEASURED), (None, ev.NEVER), ("SNAPPY", ev.NEVER), ("ZSTD", ev.ZSTD),
            ("LZ4", ev.LZ4),
        ],
    )  # fmt: skip
    def test_a_named_compression_is_used(
        self, dispatcher: DispatcherProcess, name: str | None, registered: ev.BlockCompression
    ) -> None:
        """Over TCP, into NumPy; and a stock client gets the same elements."""
        dataset = tf.data.Dataset.range(8).map(lambda x: tf.fill([20_000], x))
        dataset_id = service.register_dataset(dispatcher.target, dataset, name)
        definition = fetch_dataset(dispatcher.target, dataset_id).definition
        assert definition.compression == registered
        ours = service.from_dataset_id(
            OFF, dispatcher.target, dataset_id, data_transfer_protocol="tcp"
        )
        assert [x.numpy().tolist() for x in ours] == [[n] * 20_000 for n in range(8)]
        theirs = stock.from_dataset_id(
            "parallel_epochs", dispatcher.target, dataset_id, dataset.element_spec
        )
        assert [x.numpy().tolist() for x in theirs] == [[n] * 20_000 for n in range(8)]

    def test_a_dataset_id_has_one_compression(self, dispatcher: DispatcherProcess) -> None:
        dataset = tf.data.Dataset.range(3)
        service.register_dataset(dispatcher.target, dataset, "ZSTD", "fixed")
        with pytest.raises(InvalidArgument, match="compression"):
            service.register_dataset(dispatcher.target, dataset, "LZ4", "fixed")

    def test_an_unknown_compression_is_refused(self, dispatcher: DispatcherProcess) -> None:
        with pytest.raises(ValueError, match=r"gzip\. Must be one of"):
            service.register_dataset(dispatcher.target, tf.data.Dataset.range(1), "gzip")


def test_a_read_in_bundles_passes_over_a_worker_that_no_protocol_leads_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As one of another host that has Unix sockets only. Other reads miss its elements."""
    with (
        DispatcherProcess(tmp_path) as dispatcher,
        WorkerProcess(dispatcher.address, data_transfer_protocol="UNIX"),
        WorkerProcess(dispatcher.address, data_transfer_protocol="TCP"),
    ):
        dataset_id = service.register_dataset(dispatcher.target, tf.data.Dataset.range(500))

        def read(**how: Any) -> list[int]:
            return numbers(
                service.read(dispatcher.target, dataset_id, data_transfer_protocol="tcp", **how)
            )

        assert sorted(read(ordered=True)) == [*range(500)]
        assert caplog.text.count("reads without a worker: the worker") == 1
        with pytest.raises(FailedPrecondition, match="cannot be reached by tcp from this process"):
            read(processing_mode=DYNAMIC)

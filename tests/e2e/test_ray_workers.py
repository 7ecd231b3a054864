"""Workers of Forebay on a Ray cluster, whose nodes are processes on loopback."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from forebay import service
from forebay.service import DispatchServer, WorkerConfig
from forebay.service.errors import ForebayError, InvalidArgument
from forebay.service.proto import forebay_pb2 as pb

from ..standbys import wait_until

pytestmark = pytest.mark.long

NODE = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "include_log_monitor": False}
# A node that was killed refuses health checks. Ray waits 10 s for one that is merely slow.
QUICK = {"health_check_initial_delay_ms": 200, "health_check_period_ms": 200}


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes with one CPU each."""
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # loopback, as on macOS
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with tempfile.TemporaryDirectory(prefix="ray") as directory:  # a short name, for its sockets
        monkeypatch.setenv("RAY_TMPDIR", directory)
        import ray
        from ray.cluster_utils import Cluster

        head = {**NODE, "include_dashboard": False, "_system_config": QUICK}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(**NODE)
            ray.init(cluster.address, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def numbers(split: int) -> Iterator[int]:
    yield from range(10 * split, 10 * split + 10)


def test_each_node_has_a_worker(ray_cluster: Any) -> None:
    import ray

    from forebay.service.launch.ray_cluster import ForebayWorkers

    def pid(actor: Any, *attributes: str) -> int:
        """Of the actor's process; with attributes, of its worker's."""
        call = actor.__ray_call__.remote(
            lambda self: self._worker._process.pid if attributes else os.getpid()
        )
        return int(ray.get(call))

    with DispatchServer() as dispatcher:
        dataset_id = service.register_dataset(dispatcher.target, numbers, splits=range(20))

        def addresses() -> set[str]:
            answer = dispatcher._ask(pb.GetStatusRequest(workers_only=True), pb.GetStatusResponse)
            return {worker["address"] for worker in json.loads(answer.status)["workers"]}

        def wait_for_new(number: int, but: set[str]) -> None:
            wait_until(lambda: len(addresses()) == 2 and len(addresses() - but) == number)

        def check_read() -> None:
            read = service.read(dispatcher.target, dataset_id, processing_mode="distributed_epoch")
            assert sorted(map(int, read)) == [*range(200)]

        config = WorkerConfig(dispatcher.address, drain_timeout_ms=1000)
        with pytest.raises(InvalidArgument, match="no node .* has the `resources` {'CPU': 2}"):
            ForebayWorkers(config, resources={"CPU": 2})
        nowhere = WorkerConfig(dispatcher.address, port=1, host="192.0.2.1")
        with pytest.raises(ForebayError, match=r"^the worker did not start: --host 192\.0\.2\.1"):
            ForebayWorkers(nowhere, workers=3, resources={"CPU": 0.5})

        with ForebayWorkers(config) as workers:
            started = addresses()
            assert len(started) == 2
            check_read()
            os.kill(pid(workers._actors[0]), signal.SIGKILL)
            os.kill(pid(workers._actors[1], "worker"), signal.SIGKILL)
            wait_for_new(2, but=started)
            check_read()
            restarted = addresses()
            [node] = ray_cluster.worker_nodes
            ray_cluster.remove_node(node, allow_graceful=False)
            ray_cluster.add_node(**NODE)
            wait_for_new(1, but=restarted)
            check_read()
        assert not addresses()

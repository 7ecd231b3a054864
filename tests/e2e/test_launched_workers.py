"""Workers of Forebay on clusters of Ray and of Dask, whose nodes are real processes."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distributed
import pytest

from forebay import service
from forebay.service import DispatchServer, WorkerConfig
from forebay.service.errors import ForebayError, InvalidArgument, Unavailable
from forebay.service.launch.dask_cluster import ForebayWorkers
from forebay.service.proto import forebay_pb2 as pb

from ..standbys import status, wait_until

NODE = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "include_log_monitor": False}
# A node that was killed refuses health checks. Ray waits 10 s for one that is merely slow.
QUICK = {"health_check_initial_delay_ms": 200, "health_check_period_ms": 200}


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes with one CPU each."""
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # loopback, as on macOS
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes a token into the home folder
    with tempfile.TemporaryDirectory(prefix="ray") as directory:  # a short name, for its sockets
        monkeypatch.setenv("RAY_TMPDIR", directory)
        # These nodes have no TensorFlow, whose import is most of what a worker's start costs.
        hiding = Path(directory, "sitecustomize.py")
        hiding.write_text("import sys; sys.modules['tensorflow'] = None")
        monkeypatch.setenv("PYTHONPATH", directory)
        import ray
        from ray.cluster_utils import Cluster

        head = {**NODE, "include_dashboard": False, "_system_config": QUICK}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            ray.init(cluster.address, log_to_driver=False)  # at the head, which no test removes
            cluster.add_node(**NODE)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def numbers(split: int) -> Iterator[int]:
    yield from range(10 * split, 10 * split + 10)


def test_each_node_has_a_worker(ray_cluster: Any) -> None:
    import ray

    from forebay.service.launch.ray_cluster import RayWorkers

    with DispatchServer() as dispatcher:
        config = WorkerConfig(dispatcher.address, drain_timeout_ms=1000)
        with pytest.raises(InvalidArgument, match=r"no node .* has the `resources` {'CPU': 2}"):
            RayWorkers(config, resources={"CPU": 2})
        with pytest.raises(InvalidArgument, match="must be more than 0"):
            RayWorkers(config, resources={"CPU": 0})
        with pytest.raises(Unavailable, match=r"{'CPU': 1\.0} for each of 3 workers within"):
            RayWorkers(config, workers=3, timeout_s=0.1)
        nowhere = WorkerConfig(dispatcher.address, port=1, host="192.0.2.1")
        with pytest.raises(ForebayError, match=r"^the worker did not start: --host 192\.0\.2\.1"):
            RayWorkers(nowhere, workers=3, resources={"CPU": 0.5})

        dataset_id = service.register_dataset(dispatcher.target, numbers, splits=range(20))

        def check_read() -> None:
            read = service.read(dispatcher.target, dataset_id, processing_mode="distributed_epoch")
            assert sorted(map(int, read)) == [*range(200)]

        def addresses() -> set[str]:
            answer = dispatcher._ask(pb.GetStatusRequest(workers_only=True), pb.GetStatusResponse)
            return {worker["address"] for worker in json.loads(answer.status)["workers"]}

        def replaced(before: set[str], number: int) -> bool:
            time.sleep(0.3)  # to ask costs more than to wait
            now = addresses()
            return len(now) == 2 and len(now - before) == number

        with RayWorkers(config) as workers:
            check_read()
            before = addresses()
            assert len(before) == 2
            of_actor, of_worker = (lambda _: os.getpid()), (lambda self: self._worker._process.pid)
            for actor, pid in zip(workers._actors, (of_actor, of_worker), strict=True):
                os.kill(ray.get(actor.__ray_call__.remote(pid)), signal.SIGKILL)
            wait_until(replaced, before, 2)
            check_read()
            before = addresses()
            [node] = ray_cluster.worker_nodes
            ray_cluster.remove_node(node, allow_graceful=False)
            ray_cluster.add_node(**NODE)
            wait_until(replaced, before, 1)
            check_read()
            workers.stop()
            assert not addresses()


def addresses(dispatcher: DispatchServer) -> set[str]:
    """Of the registered workers."""
    return {worker["address"] for worker in status(dispatcher)["workers"]}


def test_each_dask_worker_has_a_worker_until_it_goes() -> None:
    with (
        DispatchServer() as dispatcher,
        distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as dask,
        distributed.Client(dask) as client,
    ):
        nowhere = ForebayWorkers(WorkerConfig(dispatcher.address, port=1, host="192.0.2.1"))
        with pytest.raises(ForebayError, match=r"worker did not start: --host 192\.0\.2\.1"):
            client.register_plugin(nowhere, name="nowhere")
        client.unregister_worker_plugin("nowhere")
        config = WorkerConfig(dispatcher.address, drain_timeout_ms=1000)
        client.register_plugin(ForebayWorkers(config, resource="absent"), name="none")
        assert dispatcher._num_workers() == 0
        client.register_plugin(ForebayWorkers(config))
        assert dispatcher._num_workers() == 1
        dask.scale(2)
        wait_until(lambda: dispatcher._num_workers() == 2)
        dataset_id = service.register_dataset(dispatcher.target, numbers, splits=range(20))
        read = service.read(dispatcher.target, dataset_id, processing_mode="distributed_epoch")
        assert sorted(map(int, read)) == [*range(200)]
        before = addresses(dispatcher)
        os.kill(min(client.run(os.getpid).values()), signal.SIGKILL)
        # The Nanny starts it again, perhaps before the dispatcher has missed it.
        wait_until(lambda: len(now := addresses(dispatcher)) == 2 and now != before)
        client.unregister_worker_plugin(ForebayWorkers.name)
        assert dispatcher._num_workers() == 0

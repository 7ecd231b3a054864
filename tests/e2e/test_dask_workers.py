"""Workers of Forebay come and go with those of a Dask cluster, whose processes are real."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import distributed
import pytest

from forebay import service
from forebay.service import DispatchServer, WorkerConfig
from forebay.service.errors import ForebayError
from forebay.service.launch.dask_cluster import ForebayWorkers

from ..standbys import status, wait_until


def numbers(split: int) -> Iterator[int]:
    yield from range(10 * split, 10 * split + 10)


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

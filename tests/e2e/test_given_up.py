"""A worker that was given up, and lives: nothing is read twice, and nothing is missing."""

from __future__ import annotations

import json

import pytest
import tensorflow as tf

from forebay import service
from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.proto import forebay_pb2 as pb

from ..cluster import WorkerProcess
from ..standbys import wait_until
from ..stock import DispatcherProcess, slow

ELEMENTS = 400


def workers_of(dispatcher: DispatcherProcess) -> list[int]:
    client = DispatcherClient(dispatcher.target)
    try:
        answer = client.call(pb.GetStatusRequest(), pb.GetStatusResponse)
        return [worker["worker_id"] for worker in json.loads(answer.status)["workers"]]
    finally:
        client.close()


@pytest.mark.parametrize("policy", ["OFF", "DYNAMIC"])
def test_a_worker_that_was_paused_for_too_long_goes_on(policy: str) -> None:
    with (
        DispatcherProcess("memory:", worker_timeout_ms=1_000) as dispatcher,
        WorkerProcess(dispatcher.address) as worker,
    ):
        dataset_id = service.register_dataset(
            dispatcher.target, slow(tf.data.Dataset.range(ELEMENTS), 0.005)
        )
        before = workers_of(dispatcher)
        got = []
        mode = service.ShardingPolicy[policy]
        with service.read(dispatcher.target, dataset_id, processing_mode=mode) as elements:
            for element in elements:
                got.append(int(element))
                if len(got) == 20:
                    with worker.paused():
                        wait_until(lambda: workers_of(dispatcher) == [])
        assert workers_of(dispatcher) != before
    assert sorted(got) == list(range(ELEMENTS))

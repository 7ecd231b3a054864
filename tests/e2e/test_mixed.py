"""Stock clients, stock workers and Forebay's, on one dispatcher."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow.data.experimental import service as stock

from forebay import service

from ..cluster import WorkerProcess
from ..standbys import status, wait_until
from ..stock import DispatcherProcess, stock_workers

DYNAMIC = "distributed_epoch"
# How often a stock client asks the dispatcher. Only one that has heard of the iteration's end can
# miss what is left, and what it has heard cannot be seen from here: so tests wait for two of them.
STOCK_HEARTBEAT_S = 1.0


pytestmark = pytest.mark.usefixtures("worker")


def test_both_clients_share_a_job(dispatcher: DispatcherProcess) -> None:
    dataset_id = service.register_dataset(dispatcher.target, tf.data.Dataset.range(500))
    ours = service.from_dataset_id(DYNAMIC, dispatcher.target, dataset_id, job_name="both")
    theirs = stock.from_dataset_id(DYNAMIC, dispatcher.target, dataset_id, job_name="both")
    first, second = iter(theirs), iter(ours)
    got = [int(next(first))]
    got += [int(x) for x in second]
    wait_until(is_finished, dispatcher, "both")
    time.sleep(2 * STOCK_HEARTBEAT_S)  # it asks workers no more once it has heard
    got += [int(x) for x in first]
    assert sorted(got) == list(range(500))


def test_a_stock_client_that_pauses_before_the_end_misses_nothing(
    dispatcher: DispatcherProcess,
) -> None:
    dataset = tf.data.Dataset.range(500).apply(stock.distribute(DYNAMIC, dispatcher.target))
    elements = iter(dataset)
    got = [
        int(next(elements)) for _ in range(480)
    ]  # the client holds some more: into the last block
    time.sleep(2 * STOCK_HEARTBEAT_S)  # the pause: long enough to hear of an end too early
    got += [int(x) for x in elements]
    assert sorted(got) == list(range(500))


def is_finished(dispatcher: DispatcherProcess, job_name: str) -> bool:
    """Whether the job's only iteration has come to its end."""
    jobs = status(dispatcher)["jobs"]
    (iteration,) = next(
        job["iterations"] for job in jobs if (job["name"] or "").endswith(f"/{job_name}")
    )
    return bool(iteration["finished"])


def test_a_worker_that_is_told_to_stop_does_not_fail_stock_clients(tmp_path: Path) -> None:
    with (
        DispatcherProcess(tmp_path) as d,
        WorkerProcess(d.address) as stopping,
        WorkerProcess(d.address),
    ):
        dataset = tf.data.Dataset.range(3000).apply(stock.distribute(DYNAMIC, d.target))
        told = threading.Thread(target=stopping.stop)
        got = []
        for x in dataset:
            got.append(int(x))
            if len(got) == 500:
                told.start()
        told.join()
        assert sorted(got) == list(range(3000))


def test_a_stock_client_with_both_kinds_of_workers(dispatcher: DispatcherProcess) -> None:
    with stock_workers(dispatcher, 2):
        dataset = tf.data.Dataset.range(2000).apply(stock.distribute(DYNAMIC, dispatcher.target))
        assert sorted(int(x) for x in dataset) == list(range(2000))
        ours = tf.data.Dataset.range(9).apply(service.distribute(DYNAMIC, dispatcher.target))
        with pytest.raises(tf.errors.UnimplementedError, match="service's own"):
            list(ours)

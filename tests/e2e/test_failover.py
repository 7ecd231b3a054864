"""Trainers and workers whose dispatcher is succeeded by another: they notice nothing."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow.data.experimental import service as stock

from forebay import service
from forebay.storage import open_storage

from ..cluster import WorkerProcess
from ..standbys import leads, running_pair, wait_until
from ..stock import DispatcherProcess, ServerProcess, slow, stock_workers

DYNAMIC = "distributed_epoch"
ELEMENTS = 2_000
BALANCER = Path(__file__).parent.parent / "balancer.py"


@pytest.fixture
def pair(any_storage: str) -> Iterator[list[DispatcherProcess]]:
    with running_pair(any_storage) as running:
        yield running


def test_forebays_workers_and_trainers_go_on(
    pair: list[DispatcherProcess], any_storage: str
) -> None:
    addresses = ",".join(one.address for one in pair)
    with WorkerProcess(addresses), WorkerProcess(pair[1].address):
        dataset_id = service.register_dataset(
            addresses, slow(tf.data.Dataset.range(ELEMENTS), 0.001)
        )
        got = []
        with service.read(pair[0].address, dataset_id, processing_mode=DYNAMIC) as elements:
            for element in elements:
                got.append(int(element))
                if len(got) == 100:
                    pair[0].kill()
                if len(got) == 800:
                    wait_until(leads, pair[1], 2)  # or the first one, which is back, leads again
                    pair[0].restart()
                    if "://" in any_storage:
                        with pair[1].paused():
                            wait_until(leads, pair[0], 3)
                    else:  # nobody displaces a leader that lives on local files
                        pair[1].kill()
                        wait_until(leads, pair[0], 3)
    assert sorted(got) == list(range(ELEMENTS))


@pytest.mark.long
@pytest.mark.parametrize("any_storage", ["files"], indirect=True)
def test_stock_workers_and_trainers_go_on_through_a_balancer(
    pair: list[DispatcherProcess], any_storage: str
) -> None:
    balancer = ServerProcess([str(BALANCER), *(one.address for one in pair)])
    try:
        address = balancer.first_line()
        with stock_workers(address, 2):
            dataset = slow(tf.data.Dataset.range(ELEMENTS), 0.001)
            got = []
            for element in dataset.apply(stock.distribute(DYNAMIC, f"grpc://{address}")):
                got.append(int(element))
                if len(got) == 100:
                    pair[0].kill()
                if len(got) == 500:
                    wait_until(leads, pair[1], 2)
                    pair[0].restart()
                if len(got) == 800:
                    pair[1].kill()
                    wait_until(leads, pair[0], 3)
    finally:
        balancer.kill()
    assert max(collections.Counter(got).values()) == 1
    # A split for each GetSplit that a dispatcher had written down and could not answer: at most
    # one a worker, as often as it was succeeded.
    terms = len({record.term for record in open_storage(any_storage).read(0)})
    assert terms >= 3
    assert len(got) >= ELEMENTS - 2 * (terms - 1)

"""Repeated and zipped datasets over several workers that come and go."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tensorflow as tf

from forebay import service
from forebay.service.errors import Unimplemented

from ..cluster import WorkerProcess
from ..stock import DispatcherProcess

OFF, DYNAMIC = service.ShardingPolicy.OFF, service.ShardingPolicy.DYNAMIC
Dataset = Any
count = tf.data.Dataset.range
zipped = tf.data.Dataset.zip


def test_every_worker_of_an_endless_pipeline_works(dispatcher: DispatcherProcess) -> None:
    """There are more workers than splits."""
    endless = count(2).repeat().enumerate()  # each worker counts for itself, as in tf.data service
    dataset_id = service.register_dataset(dispatcher.target, endless)
    with (
        WorkerProcess(dispatcher.address).until_told(),
        WorkerProcess(dispatcher.address).until_told(),
        WorkerProcess(dispatcher.address).until_told(),
        service.read(
            dispatcher.target, dataset_id, processing_mode=DYNAMIC, max_outstanding_requests=12
        ) as elements,
    ):
        reached = 0
        while reached < 3:
            number, _ = next(elements)
            reached += number == 100


REFUSED: dict[str, tuple[Callable[[], Dataset], str]] = {
    "neighbours": (lambda: zipped((count(100), count(100).skip(1))), r"Skip\(1\)"),
    "endless shuffle_and_repeat": (
        lambda: count(9).apply(tf.data.experimental.shuffle_and_repeat(3)),
        r"write shuffle\(…\)\.repeat\(\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_dataset_that_cannot_be_split_is_refused_where_it_is_read(
    dispatcher: DispatcherProcess, name: str
) -> None:
    """The caller gets the error with its reason, without any worker. Unsharded reads work."""
    build, reason = REFUSED[name]
    dataset, target = build(), dispatcher.target
    dataset_id = service.register_dataset(target, dataset)
    ways: list[Callable[[service.ShardingPolicy], object]] = [
        lambda policy: dataset.apply(service.distribute(policy, target)),
        lambda policy: service.from_dataset_id(policy, target, dataset_id, dataset.element_spec),
        lambda policy: service.read(target, dataset_id, processing_mode=policy).close(),
    ]
    for way in ways:
        with pytest.raises(Unimplemented, match=reason):
            way(DYNAMIC)
        way(OFF)


def test_a_drained_worker_leaves_no_pass_incomplete(dispatcher: DispatcherProcess) -> None:
    dataset_id = service.register_dataset(dispatcher.target, count(1000).repeat(40))
    with (
        WorkerProcess(dispatcher.address) as first,
        WorkerProcess(dispatcher.address),
        service.read(
            dispatcher.target, dataset_id, processing_mode=DYNAMIC, max_outstanding_requests=200
        ) as elements,
        ThreadPoolExecutor(1) as beside,
    ):
        got = Counter(int(x) for x in itertools.islice(elements, 20_000))
        stopped = beside.submit(first.stop)
        got.update(int(x) for x in elements)
        assert stopped.result() == 0
    assert got == dict.fromkeys(range(1000), 40)

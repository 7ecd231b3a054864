"""distributed_save with real processes that are killed: load gets each element once."""

from __future__ import annotations

import os
import pathlib

import pytest
import tensorflow as tf

from forebay import service

from ..cluster import WorkerProcess
from ..standbys import wait_until
from ..stock import DispatcherProcess, stock_workers

ELEMENTS = 300


def slow(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Some milliseconds an element, in C++, without a clock: what reads one is not saved."""

    def count(x: tf.Tensor) -> tf.Tensor:
        loop = tf.while_loop(lambda i: i < 3_000, lambda i: [i + 1], [0])
        with tf.control_dependencies(loop):
            return tf.identity(x)

    return dataset.map(count)


def test_stock_clients_and_workers_and_a_dispatcher_that_dies(tmp_path: pathlib.Path) -> None:
    dataset = tf.data.Dataset.range(ELEMENTS).repeat(2)
    path = str(tmp_path / "save")
    with (
        DispatcherProcess(tmp_path / "journal") as dispatcher,
        stock_workers(dispatcher, 2, heartbeat_interval_ms=100),
    ):
        tf.data.experimental.distributed_save(dataset, path, dispatcher.address)
        wait_until(lambda: any((tmp_path / "save").glob("streams/*/splits/*/*/*")))
        dispatcher.kill_and_restart()
        loaded = tf.data.Dataset.load(path, wait=True)
        assert sorted(loaded.as_numpy_iterator()) == sorted([*range(ELEMENTS)] * 2)
        with pytest.raises(tf.errors.AlreadyExistsError, match="already started or completed"):
            tf.data.experimental.distributed_save(dataset, path, dispatcher.address)


def test_forebays_workers_and_dispatcher_die_and_the_rest_goes_on(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "save"
    with (
        DispatcherProcess(tmp_path / "journal", reconnect_grace_ms=1_000) as dispatcher,
        WorkerProcess(dispatcher.address, save_chunk_bytes=1) as one,
        service.WorkerServer(service.WorkerConfig(dispatcher.target, save_chunk_bytes=1)),
    ):
        service.distributed_save(
            slow(tf.data.Dataset.range(ELEMENTS)), str(path), dispatcher.target
        )
        wait_until(lambda: len(os.listdir(path / "chunks")) > 2)
        one.kill()
        dispatcher.kill_and_restart()
        loaded = tf.data.Dataset.load(str(path), wait=True)
        assert sorted(loaded.as_numpy_iterator()) == list(range(ELEMENTS))
    assert (path / "DONE").exists()

"""distributed_save with real processes that are killed: load gets each element once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from forebay import service
from forebay.service.proto import tf_service_pb2 as pb

from ..cluster import WorkerProcess
from ..pipelines.compositions import write_chunk, write_save
from ..standbys import status, wait_until
from ..stock import DispatcherProcess, call, stock_workers

ELEMENTS = 300
STOCK_ELEMENTS = 100


def slow(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Elements take some milliseconds each, in C++ and without a clock: clocks cannot be saved."""

    def count(x: tf.Tensor) -> tf.Tensor:  # each needs its loop, so that TensorFlow leaves none out
        (end,) = tf.while_loop(lambda i: i < x + 500, lambda i: [i + 1], [x])
        return end - 500

    return dataset.map(count)


def test_stock_clients_and_a_stock_worker_and_a_dispatcher_that_die(tmp_path: Path) -> None:
    """One worker at a time, so that zipped elements stay together."""
    numbers = tf.data.Dataset.range(STOCK_ELEMENTS)
    zipped = tf.data.Dataset.zip(slow(numbers), numbers.map(lambda x: x + 1_000))
    saves: dict[str | None, tuple[Any, list[Any]]] = {
        "AUTO": (slow(numbers).repeat(2), sorted([*range(STOCK_ELEMENTS)] * 2)),
        "GZIP": (zipped, [(x, x + 1_000) for x in range(STOCK_ELEMENTS)]),
        None: (slow(numbers), list(range(STOCK_ELEMENTS))),
    }
    paths = {compression: tmp_path / f"save {compression}" for compression in saves}
    info = pb.SnapshotStreamInfo

    def states() -> set[int]:
        found: set[int] = set()
        for path in paths.values():
            answer = call(dispatcher, "GetSnapshotStreams", {"path": str(path)})
            assert len(answer.streams) <= 1
            found.update(stream.state for stream in answer.streams)
        return found

    with DispatcherProcess(
        tmp_path / "journal", worker_timeout_ms=3_000, reconnect_grace_ms=1_000
    ) as dispatcher:
        save = tf.data.experimental.distributed_save
        with stock_workers(dispatcher, heartbeat_interval_ms=100):
            for compression, (dataset, _) in saves.items():
                save(dataset, str(paths[compression]), dispatcher.address, compression)
            for path in paths.values():
                wait_until(lambda path: any(path.glob("streams/*/splits/*/*/*")), path)
        assert not any((path / "DONE").exists() for path in paths.values())
        assert states() <= {info.ASSIGNED, info.ORPHAN}
        wait_until(lambda: states() == {info.ORPHAN})
        with stock_workers(dispatcher, heartbeat_interval_ms=100):
            wait_until(lambda: info.ORPHAN not in states())
            (paths["AUTO"] / "streams" / "stream_x").mkdir()  # somebody else's, which stops nobody
            dispatcher.kill_and_restart()
            for compression, (_, elements) in saves.items():
                loaded = tf.data.Dataset.load(str(paths[compression]), wait=True)
                assert sorted(loaded.as_numpy_iterator()) == elements
            assert states() == {info.DONE}
            with pytest.raises(tf.errors.AlreadyExistsError, match="already started or completed"):
                save(numbers, str(paths[None]), dispatcher.address)


def test_forebays_workers_and_dispatcher_die_and_the_rest_goes_on(tmp_path: Path) -> None:
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
        rates = status(dispatcher)["save_rates"]
        assert rates[0]["elements_per_s"] > 0
        one.kill()
        dispatcher.kill_and_restart()
        loaded = tf.data.Dataset.load(str(path), wait=True)
        assert sorted(loaded.as_numpy_iterator()) == list(range(ELEMENTS))
    assert (path / "DONE").exists()


def test_arguments_that_make_no_sense() -> None:
    """The error names the first wrong argument, as tf.data service does with the address."""
    numbers, endless = tf.data.Dataset.range(9), tf.data.Dataset.range(9).repeat()
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((numbers, "", 1), "`service` must be a string"),
        ((numbers, "", ""), "`service` must not be empty"),
        ((numbers, "", "h:1"), "`path` must be the path of a directory"),
        ((endless, "/a", "h:1"), "infinite dataset is not allowed"),
        (([9], "/a", "h:1"), "`dataset` must be a tf.data.Dataset"),
        ((numbers, "/a", "h:1", "ZSTD"), "Invalid `compression` argument: ZSTD"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message) as raised:
            service.distributed_save(*arguments)
        assert isinstance(raised.value, tf.errors.InvalidArgumentError)


def test_a_worker_dies_that_loads_a_save(tmp_path: Path) -> None:
    """Its leased splits are lost, and nothing comes twice. The test writes the save itself."""
    path = tmp_path / "save"
    write_save(path, {})
    written: list[int] = []

    def write(chunks: int) -> None:
        for _ in range(chunks):
            number = len(written)
            write_chunk(path, f"chunk_0_{number}_1", [number])
            written.append(number)

    in_order = lambda chunks: chunks.flat_map(lambda chunk: chunk)  # noqa: E731
    with (
        DispatcherProcess(tmp_path / "journal", reconnect_grace_ms=1_000) as dispatcher,
        WorkerProcess(dispatcher.address) as one,
        service.WorkerServer(service.WorkerConfig(dispatcher.target)),
    ):
        loaded = tf.data.Dataset.load(str(path), reader_func=in_order)
        dataset_id = service.register_dataset(dispatcher.target, loaded)
        elements = service.read(
            dispatcher.target, dataset_id, processing_mode="distributed_epoch", job_name="j"
        )
        write(8)
        got = [int(next(elements)) for _ in range(8)]
        assert sorted(got) == written
        dispatcher.kill_and_restart()
        write(8)
        got += [int(next(elements)) for _ in range(8)]
        assert sorted(got) == written
        one.kill()
        write(20)
        (path / "DONE").touch()
        got += map(int, elements)
        assert len(set(got)) == len(got)
        found = status(dispatcher)
        (lost,) = {
            source["lost"]
            for job in found["jobs"]
            for iteration in job["iterations"]
            for source in iteration["sources"]
        }
        assert len(written) - len(got) <= lost

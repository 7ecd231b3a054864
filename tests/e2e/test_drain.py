"""A worker that is told to stop logs what its trainers did not take in time."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest
import tensorflow as tf

from forebay import service

from ..cluster import WorkerProcess
from ..forks import Fork
from ..standbys import status, wait_until
from ..stock import DispatcherProcess
from .test_coordinated_reads import Read

ELEMENTS = 60  # of eight megabytes
CREDIT = 4  # of them, that a trainer takes in advance


def megabytes() -> tf.data.Dataset:
    return tf.data.Dataset.range(ELEMENTS).map(lambda x: tf.fill([1 << 20], x))


def wait_until_all_is_full(dispatcher: DispatcherProcess) -> None:
    """The trainer has its credit, and the worker its buffers."""
    wait_until(lambda: begun(dispatcher) > CREDIT + 8)
    # `status` shows whole leases, not how far the pipeline has come in one. A draining worker hands
    # back the splits that it has not begun, so the pipeline gets a second to fill its buffers.
    time.sleep(1)


def begun(dispatcher: DispatcherProcess) -> int:
    jobs = status(dispatcher)["jobs"]
    [source] = jobs[0]["iterations"][0]["sources"]
    return int(source["leased"] + source["begun"])


def test_a_draining_worker_logs_what_a_slow_trainer_did_not_take(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with (
        DispatcherProcess("memory:") as dispatcher,
        WorkerProcess(dispatcher.address, drain_timeout_ms=200) as worker,
    ):
        dataset_id = service.register_dataset(dispatcher.target, megabytes())
        with service.read(dispatcher.target, dataset_id, processing_mode="distributed_epoch") as it:
            next(it)
            wait_until_all_is_full(dispatcher)
            assert worker.stop() == 3
            log = capfd.readouterr().err
            found = re.search(r"are dropped: (\d+) elements .*begun last: splits (\d+)–(\d+)", log)
            assert found, log
            dropped, first, last = map(int, found.groups())
            assert dropped > 0
            assert 0 < first <= last < ELEMENTS
            assert "200 ms" in log
            jobs = status(dispatcher)["jobs"]
            assert sum(loss["elements"] for loss in jobs[0]["losses"]) == dropped
            with WorkerProcess(dispatcher.address):  # the splits that it handed back
                rest = [int(element[0]) for element in it]
    missing = set(range(1, ELEMENTS)) - set(rest)
    assert len(missing) >= dropped


READS = """
import sys
from forebay import service
with service.read(sys.argv[1], sys.argv[2], processing_mode="distributed_epoch") as elements:
    next(elements)
    print("has one", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("protocol", ["tcp", pytest.param("grpc", marks=pytest.mark.long)])
def test_a_killed_trainer_does_not_hold_up_a_draining_worker(
    protocol: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The worker waits neither for the killed trainer nor for the end of the epoch."""
    with (
        DispatcherProcess("memory:", reconnect_grace_ms=200) as dispatcher,
        WorkerProcess(
            dispatcher.address, data_transfer_protocol=protocol, drain_timeout_ms=3_600_000
        ) as worker,
    ):
        dataset_id = service.register_dataset(dispatcher.target, megabytes())
        trainer = Fork(["-c", READS, dispatcher.target, dataset_id])
        assert trainer.line() == "has one"
        wait_until(lambda: begun(dispatcher) > CREDIT + 8)
        trainer.kill()
        trainer.finish()
        assert worker.stop() == 0
        assert "nobody reads it" in capfd.readouterr().err


@pytest.mark.long
def test_a_worker_that_drains_for_long_holds_up_only_its_own_readers(tmp_path: Path) -> None:
    """Coordinated reads continue without it; new ones, and new saves, do not use it."""
    path = str(tmp_path / "save")
    with (
        DispatcherProcess(tmp_path / "journal") as dispatcher,
        WorkerProcess(dispatcher.address, drain_timeout_ms=3_600_000) as drains,
    ):
        target = dispatcher.target
        dataset_id = service.register_dataset(target, megabytes())
        with service.read(target, dataset_id, processing_mode="distributed_epoch") as slow:
            next(slow)
            wait_until(lambda: begun(dispatcher) > CREDIT + 8)
            with Read(target, 2) as before, WorkerProcess(dispatcher.address):
                before.read_until(workers=2)
                told = threading.Thread(target=drains.stop)
                told.start()
                wait_until(lambda: are_draining(dispatcher) == [True, False])
                before.read_without_one()
                with Read(target, 2) as after:
                    after.read(20)
                service.distributed_save(tf.data.Dataset.range(99), path, target)
                loaded = tf.data.Dataset.load(path, wait=True)
                assert sorted(loaded.as_numpy_iterator()) == list(range(99))
                assert told.is_alive() and are_draining(dispatcher) == [True, False]
        told.join()


def are_draining(dispatcher: DispatcherProcess) -> list[bool]:
    workers = status(dispatcher)["workers"]
    return [worker["draining"] for worker in workers]

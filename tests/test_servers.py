"""`DispatchServer` and `WorkerServer`, started from a user's own process."""

from __future__ import annotations

import collections
import functools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.core.protobuf import data_service_pb2, service_config_pb2
from tensorflow.data.experimental import service as stock

from forebay import service
from forebay.service.errors import ForebayError, InvalidArgument, Unavailable
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.worker.worker import Worker

from .standbys import status, wait_until

OFF, DYNAMIC = service.ShardingPolicy.OFF, service.ShardingPolicy.DYNAMIC


def children() -> set[str]:
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(os.getpid())], capture_output=True, text=True
    ).stdout.split()
    return {pid for pid in listed if Path(f"/proc/{pid}/cmdline").exists()}


def test_start_read_stop_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.delenv(name)  # this process may have to train on a GPU
    before, children_before = set(threading.enumerate()), children()
    environment = dict(os.environ)
    with service.DispatchServer() as dispatcher:
        assert dispatcher.target == f"grpc://{dispatcher.address}"
        assert dispatcher.address.startswith("localhost:")  # as of tf.data service's own
        config = service.WorkerConfig(dispatcher.address, worker_tags=("a", "b"))
        with service.WorkerServer(config) as worker:
            assert worker.address.startswith("localhost:")
            assert (num_tasks(worker), workers(dispatcher)) == (0, 1)
            dataset = tf.data.Dataset.range(100).apply(
                service.distribute(DYNAMIC, dispatcher.target)
            )
            assert sorted(int(x) for x in dataset) == list(range(100))
            endless = service.register_dataset(dispatcher.target, tf.data.Dataset.range(1 << 40))
            with service.read(dispatcher.target, endless) as elements:
                next(elements)
                assert endless in datasets_read(dispatcher)
                assert num_tasks(worker) > 0
            assert endless not in datasets_read(dispatcher)  # at once, and not by and by
            read = service.from_dataset_id(OFF, dispatcher.target, endless)
            for unfinished in (read, read.map(lambda n: n + 1).batch(2).prefetch(1)):
                dropped = iter(unfinished)
                next(dropped)
                assert endless in datasets_read(dispatcher)
                del dropped
                wait_until(lambda: endless not in datasets_read(dispatcher))
            wait_until(lambda: num_tasks(worker) == 0)
            named = iter(
                service.from_dataset_id(OFF, dispatcher.target, endless, job_name="goes on")
            )
            next(named)
            assert readers(dispatcher, "goes on") == 1
            del named
            wait_until(lambda: readers(dispatcher, "goes on") == 0)
            python_id = service.register_dataset(
                dispatcher.target, lambda split: [os.environ["CUDA_VISIBLE_DEVICES"]], splits=[0],
                element_spec=tf.TensorSpec([], tf.string),
            )  # fmt: skip
            assert list(service.read(dispatcher.target, python_id)) == [b"-1"]  # it is ours
            worker.stop()
        worker.stop()
    dispatcher.stop()
    assert dict(os.environ) == environment
    left = {t.name for t in set(threading.enumerate()) - before if "forebay" in t.name}
    assert left <= {"forebay-leaving"}  # one for the process, which waits for dropped iterations
    assert children() <= children_before


def num_tasks(worker: service.WorkerServer) -> int:
    """Under the name that TensorFlow's tests call."""
    return worker._num_tasks()


def jobs(dispatcher: service.DispatchServer) -> list[dict[str, Any]]:
    return status(dispatcher)["jobs"]


def datasets_read(dispatcher: service.DispatchServer) -> list[str]:
    """Of each job that the dispatcher knows."""
    return [job["dataset_id"] for job in jobs(dispatcher)]


def workers(dispatcher: service.DispatchServer) -> int:
    """How many are registered."""
    return len(status(dispatcher)["workers"])


def readers(dispatcher: service.DispatchServer, name: str) -> int:
    """Of the job of that name."""
    (job,) = [job for job in jobs(dispatcher) if (job["name"] or "").endswith(name)]
    return sum(iteration["consumers"] for iteration in job["iterations"])


def test_a_stock_worker_and_a_stock_client_in_the_dispatchers_process() -> None:
    """Their bindings hold the interpreter lock while they wait for the dispatcher."""
    with service.DispatchServer() as dispatcher:
        worker = stock.WorkerServer(stock.WorkerConfig(dispatcher_address=dispatcher.address))
        assert workers(dispatcher) == 1
        dataset = tf.data.Dataset.range(20)
        dataset_id = stock.register_dataset(dispatcher.target, dataset)
        got = stock.from_dataset_id("distributed_epoch", dispatcher.target, dataset_id)
        assert sorted(int(x) for x in got) == list(range(20))
        del worker


def test_a_storage_is_not_among_the_arguments_of_a_process(tmp_path: Path) -> None:
    """Its URL may have a password."""
    config = service.DispatcherConfig(storage=f"file://{tmp_path}")
    assert str(tmp_path) not in repr(config)
    with service.DispatchServer(config) as dispatcher:
        assert dispatcher._process is not None
        arguments = Path(f"/proc/{dispatcher._process.pid}/cmdline").read_text()
        assert "dispatcher" in arguments
        assert str(tmp_path) not in arguments
        assert [*tmp_path.iterdir()], "it is used"


def test_servers_live_as_tensorflows_do(tmp_path: Path) -> None:
    """As their own tests use them: their configurations, and what has no public name."""
    dispatcher = service.DispatchServer(start=False)
    assert dispatcher.target == ""
    dispatcher.start()
    port = int(dispatcher.address.rpartition(":")[2])
    dispatcher._stop()
    told = service_config_pb2.DispatcherConfig(
        port=port, work_dir=str(tmp_path), fault_tolerant_mode=True, job_gc_timeout_ms=20,
        deployment_mode=data_service_pb2.DEPLOYMENT_MODE_REMOTE, job_gc_check_interval_ms=50,
        worker_max_concurrent_snapshots=2, client_timeout_ms=90_000,
        gc_dynamic_sharding_jobs=True,
    )  # fmt: skip
    dispatcher = service.DispatchServer(told, start=False)
    assert dispatcher._address == f"localhost:{port}"  # and nothing listens there yet
    assert dispatcher._options.most_saves_a_worker == 2
    assert dispatcher._options.client_timeout_ms == 90_000
    dispatcher.start()
    dispatcher.start()
    dataset_id = service.register_dataset(dispatcher.target, tf.data.Dataset.range(9))
    message = service_config_pb2.WorkerConfig(
        dispatcher_address=dispatcher.address, worker_address="localhost:%port%",
        worker_tags=["a"], heartbeat_interval_ms=100, dispatcher_timeout_ms=5_000,
        data_transfer_address="localhost:%dts_port%", shutdown_quiet_period_ms=1,
    )  # fmt: skip
    worker = service.WorkerServer(message, start=False)
    worker.start()
    worker.start()
    assert worker._address.startswith("localhost:")
    left = service.register_dataset(dispatcher.target, tf.data.Dataset.range(1 << 40))
    with service.read(
        dispatcher.target, left, processing_mode=DYNAMIC, job_name="left early"
    ) as elements:
        next(elements)
        assert num_tasks(worker) == 1
    wait_until(lambda: num_tasks(worker) == 0)  # gc_dynamic_sharding_jobs: it is collected
    dispatcher.stop()
    config = service.DispatcherConfig(port, None, dispatcher._config.work_dir, True)
    dispatcher = service.DispatchServer(config)  # at the same place
    assert dispatcher.target == f"grpc://localhost:{port}"
    endless = (
        tf.data.Dataset.range(9)
        .repeat()
        .apply(service.distribute("parallel_epochs", dispatcher.target))
    )
    iterator = iter(endless)
    assert int(next(iterator)) == 0
    assert num_tasks(worker) == 1
    del iterator
    got = service.from_dataset_id(DYNAMIC, dispatcher.target, dataset_id)
    assert sorted(int(x) for x in got) == list(range(9))
    other = service.WorkerServer(stock.WorkerConfig(dispatcher.address))
    assert dispatcher._num_workers() == 2
    for server in (other, worker, dispatcher):
        server.stop()
        server._stop()
        server.join()
        with pytest.raises(RuntimeError, match="Server cannot be started after it has been stop"):
            server.start()


def test_what_tensorflows_configurations_say_of_epochs_under_dynamic(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are never collected, unless `gc_dynamic_sharding_jobs` says so: then as all others."""
    told = functools.partial(service_config_pb2.DispatcherConfig, job_gc_timeout_ms=20)
    ours = service.DispatcherConfig().options()
    cases: list[tuple[Any, int, int]] = [
        (told(), -1, -1),
        (stock.DispatcherConfig(job_gc_timeout_ms=20), -1, -1),
        (told(gc_dynamic_sharding_jobs=True), 20, ours.max_idle_iterations),
        (
            service_config_pb2.DispatcherConfig(gc_dynamic_sharding_jobs=True),
            ours.job_gc_timeout_ms,
            ours.max_idle_iterations,
        ),
        (service.DispatcherConfig(), ours.dynamic_gc_timeout_ms, ours.max_idle_iterations),
    ]
    for config, timeout_ms, most in cases:
        options = service.DispatchServer(config, start=False)._options
        assert (options.dynamic_gc_timeout_ms, options.max_idle_iterations) == (timeout_ms, most)
    assert not caplog.records
    Later = collections.namedtuple("Later", "port, shiny, dull")
    Later.__name__ = "DispatcherConfig"
    service.DispatchServer(Later(5, shiny=True, dull=0), start=False)
    assert caplog.messages == ["DispatcherConfig: shiny has no effect here"]


def wait_for(gate: Path) -> Any:
    """Waits for a file without Python, which a save cannot have."""

    def look(found: tf.Tensor) -> list[tf.Tensor]:
        nothing = tf.strings.substr(tf.strings.as_string(found), 0, 0)  # so that it looks anew
        return [tf.size(tf.io.matching_files(tf.strings.join([str(gate), nothing])))]

    def wait(x: tf.Tensor) -> tf.Tensor:
        (found,) = tf.while_loop(lambda found: found < 1, look, [0])
        return x * tf.cast(found, x.dtype)  # TensorFlow leaves out a loop that no value needs

    return wait


@pytest.mark.parametrize("servers", [stock, service], ids=["TensorFlow's", "Forebay's"])
def test_what_becomes_of_a_save_is_told_as_by_tensorflows_servers(
    servers: Any, tmp_path: Path
) -> None:
    path, gate = tmp_path / "save", tmp_path / "gate"
    config = servers.DispatcherConfig(work_dir=str(tmp_path / "work"), fault_tolerant_mode=True)
    dispatcher = servers.DispatchServer(config)
    config = servers.WorkerConfig(dispatcher._address, heartbeat_interval_ms=50)
    workers = [servers.WorkerServer(config) for _ in range(2)]

    def states() -> list[tuple[int, int]]:
        return [(s.index, s.state) for s in dispatcher._snapshot_streams(str(path))]

    def told() -> list[tuple[bytes, int, bool]]:
        return sorted(
            (p.snapshot_task_base_path, p.snapshot_task_stream_index, p.completed)
            for worker in workers
            for p in worker._snapshot_task_progresses()
        )

    assert told() == []
    save = tf.data.experimental.distributed_save if servers is stock else service.distributed_save
    numbers = tf.data.Dataset.range(500)  # more than the first worker asks for ahead
    save(numbers.map(wait_for(gate)), str(path), dispatcher._address)
    wait_until(lambda: len(told()) == 2)
    assert told() == [(bytes(path), 0, False), (bytes(path), 1, False)]
    assigned, orphan, done = 1, 2, 4
    assert states() == [(0, assigned), (1, assigned)]
    if servers is service:  # TensorFlow's says ASSIGNED of a lost worker's, too
        lost = workers.pop()
        ((_, number, _),) = lost._snapshot_task_progresses()
        lost.stop()
        wait_until(lambda: (number, orphan) in states())
        assert states() == [(i, orphan if i == number else assigned) for i in range(2)]
    gate.touch()
    wait_until((path / "DONE").exists)
    wait_until(lambda: all(state == done for _, state in states()))
    wait_until(lambda: all(completed for _, _, completed in told()))
    assert sorted(tf.data.Dataset.load(str(path)).as_numpy_iterator()) == list(range(500))
    for server in (*workers, dispatcher):
        server._stop()


@pytest.mark.parametrize("how", ["forgotten", "stopped"])
def test_a_worker_can_be_stopped_in_whatever_thread(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reconcile, beaten = Worker._reconcile, threading.Event()

    def forgotten(self: Worker, response: pb.WorkerHeartbeatResponse) -> None:
        reconcile(self, response)
        if threading.current_thread() is not threading.main_thread():
            if how == "stopped" and forgettable:  # as a finalizer of the program may
                forgettable[0].stop()
            forgettable.clear()  # as the garbage collector may, in the worker's own thread
            beaten.set()

    monkeypatch.setattr(Worker, "_reconcile", forgotten)
    with service.DispatchServer() as dispatcher:
        config = service.WorkerConfig(dispatcher.address, heartbeat_interval_ms=10)
        forgettable = [service.WorkerServer(config)]
        assert beaten.wait(60)
        while workers(dispatcher):
            time.sleep(0.05)


FORGOTTEN = """
import gc, threading, weakref
from forebay.service.servers import _in_new_thread

class Worker:
    def stop(self):
        with lock:  # as its sessions and queues do
            print(threading.current_thread().name)
        stopped.set()

class Server:
    def __init__(self):
        weakref.finalize(self, _in_new_thread, Worker().stop)
        self.itself = self

lock, stopped = threading.Lock(), threading.Event()
Server()
with lock:
    gc.collect()
stopped.wait()
lasting = Server()
"""


def test_a_worker_that_is_forgotten_is_stopped_in_the_main_thread_at_exit_only() -> None:
    """Garbage is collected at any allocation, while a lock is held that stopping takes, too."""
    done = subprocess.run(
        [sys.executable, "-c", FORGOTTEN], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["stops-forebay-worker", "MainThread"], done.stderr


def test_variables_for_servers_are_not_for_its_dispatcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are there for a server that the user runs besides, from the same profile."""
    monkeypatch.setenv("FOREBAY_STORAGE", str(tmp_path / "journal"))
    monkeypatch.setenv("FOREBAY_PORT", "no port")
    monkeypatch.setenv("FOREBAY_LOG_LEVEL", "debug")  # of whatever logs to this terminal
    with service.DispatchServer() as dispatcher:
        assert dispatcher.target
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ForebayError, match="scheme"):
        service.DispatchServer(service.DispatcherConfig(storage="ftp://x"))
    monkeypatch.setenv("FOREBAY_LOG_LEVEL", "loud")
    with pytest.raises(ForebayError, match="'loud' is no level"):
        service.DispatchServer()


def test_ctrl_c_is_meant_for_the_users_program() -> None:
    program = (
        "from forebay import service; import os, signal\n"
        "d = service.DispatchServer(); first = d.target\n"
        "try: os.killpg(0, signal.SIGINT); signal.pause()\n"
        "except KeyboardInterrupt: pass\n"
        "try: service.read(d.target, 'x')\n"
        "except service.ForebayError as e: print(e)\n"
        "os.kill(d._process.pid, signal.SIGKILL); d._process.wait(); d.start()\n"
        "try: service.read(d.target, 'x')\n"
        "except service.ForebayError as e: print(e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=60, start_new_session=True,
    )  # fmt: skip
    assert done.stdout.count("Dataset id x not found") == 2, done.stderr


def test_errors_are_the_peers() -> None:
    with pytest.raises(ValueError, match="Cannot enable fault tolerant mode without"):
        service.DispatchServer(service.DispatcherConfig(fault_tolerant_mode=True))
    with pytest.raises(ValueError, match="Must specify a `dispatcher_address`"):
        service.WorkerServer(service.WorkerConfig(None))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="'grpc'"):
        service.DispatchServer(service.DispatcherConfig(protocol="http"))
    with pytest.raises(ForebayError, match="scheme"):
        service.DispatchServer(service.DispatcherConfig(storage="ftp://x"))
    with pytest.raises(ValueError, match="address is empty"):
        service.WorkerServer(service_config_pb2.WorkerConfig(port=1))
    with pytest.raises(RuntimeError, match=r"Worker tags cannot be empty\. Got tags \['', 'a'\]"):
        service.WorkerServer(service.WorkerConfig("127.0.0.1:1", worker_tags=["", "a"]))
    with pytest.raises(RuntimeError, match="is it running") as raised:
        service.WorkerServer(stock.WorkerConfig("127.0.0.1:1", dispatcher_timeout_ms=200))
    assert isinstance(raised.value, Unavailable)
    for wrong in ({"port": 1}, service.WorkerConfig("127.0.0.1:1")):
        with pytest.raises(InvalidArgument, match="`config` must be a DispatcherConfig, not"):
            service.DispatchServer(wrong)
    with pytest.raises(InvalidArgument, match="`config` must be a WorkerConfig, not '127"):
        service.WorkerServer("127.0.0.1:1")

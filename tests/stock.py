"""A Forebay dispatcher and TensorFlow's own workers, each in a process of its own.

The dispatcher must not share a process with TensorFlow's servers and clients: some of their
Python bindings hold the interpreter lock while they wait for it.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import grpc

from forebay.service.connections.grpc_server import CHANNEL_OPTIONS
from forebay.service.processes import ChildProcess
from forebay.service.proto import graph_pb2 as graph
from forebay.service.proto import tf_service_pb2 as pb

from .forks import DISPATCHER, Fork

STOP_TIMEOUT_S = 40

_NUMBERS = itertools.count(1)

GRAPH = graph.GraphDef(
    node=[
        graph.NodeDef(name="source", op="RangeDataset"),
        graph.NodeDef(name="result", op="_Retval", input=["source"]),
    ]
).SerializeToString()
"""The least that passes for a dataset's graph."""


WORKERS = """
import sys
from tensorflow.core.protobuf import service_config_pb2
from tensorflow.data.experimental import service

config = service_config_pb2.WorkerConfig.FromString(bytes.fromhex(sys.argv[1]))
workers = [service.WorkerServer(config) for _ in range(int(sys.argv[2]))]
print(workers[0]._address, flush=True)
sys.stdin.read()  # until the parent closes it, or is gone
"""

OWN_DISPATCHER = """
import sys
from tensorflow.core.protobuf import service_config_pb2
from tensorflow.data.experimental import service

config = service_config_pb2.DispatcherConfig(protocol="grpc", worker_addresses=sys.argv[1:])
dispatcher = service.DispatchServer(config)
print(dispatcher.target, flush=True)
sys.stdin.read()
"""


class ServerProcess:
    """A process that says on its first line of output where it serves, and lives until told.

    It is `command` behind `python`, with more `environment`, or a fork.
    """

    def __init__(
        self, command: list[str] | Fork, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._process: ChildProcess | Fork
        if isinstance(command, Fork):
            self._process = command
        else:
            self._process = ChildProcess(
                [sys.executable, *command], None, piped=True, environment=environment
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def first_line(self) -> str:
        """Wait until it serves."""
        line = self._process.line()
        if not line:
            raise AssertionError(f"the server ended with {self._close()}")
        return line

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """SIGSTOP, and SIGCONT at the end."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self._process.terminate()
        return self._close()

    def wait(self) -> int:
        """Wait until it has ended by itself; the exit code."""
        return self._close()

    def _close(self) -> int:
        return self._process.finish(STOP_TIMEOUT_S)


class DispatcherProcess:
    """`forebay dispatcher`, on one port over all its restarts."""

    def __init__(self, storage: str | Path, **options: object) -> None:
        self._command = ["-m", "forebay.service.cli", "dispatcher"]
        for name, value in {"storage": storage, **options}.items():
            flag = f"--{name.replace('_', '-')}"
            self._command += [flag] if value is True else [flag, str(value)]
        self._port = 0
        self._server = self._start()

    def _start(self) -> ServerProcess:
        command = [*self._command, "--port", str(self._port)]
        server = ServerProcess(Fork(command, DISPATCHER))
        self.target = server.first_line()
        self.address = self.target.removeprefix("grpc://")
        self._port = int(self.address.rpartition(":")[2])
        return server

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        return self._server.pid

    def kill(self) -> None:
        """kill -9."""
        self._server.kill()

    def restart(self) -> None:
        """A new process that replays the journal."""
        self._server = self._start()

    def kill_and_restart(self) -> None:
        """kill -9, and a new process that replays the journal."""
        self.kill()
        self.restart()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        return self._server.stop()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """SIGSTOP, and SIGCONT at the end."""
        return self._server.paused()

    def wait(self) -> int:
        """Wait until it has ended by itself; the exit code."""
        return self._server.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class OwnDispatcher(ServerProcess):
    """TensorFlow's dispatcher, without a journal; with `workers` for static sharding."""

    def __init__(self, workers: Sequence[str] = ()) -> None:
        super().__init__(Fork(["-c", OWN_DISPATCHER, *workers]))
        self.target = self.first_line()
        self.address = self.target.removeprefix("grpc://")


class StockWorkers(ServerProcess):
    """Some of TensorFlow's C++ workers."""

    def __init__(self, config: Any, count: int) -> None:
        super().__init__(Fork(["-c", WORKERS, config.SerializeToString().hex(), str(count)]))
        self.address = self.first_line()  # of the first one


@contextlib.contextmanager
def stock_workers(
    dispatcher: DispatcherProcess | str,
    count: int = 1,
    heartbeat_interval_ms: int = 30_000,
    **options: Any,
) -> Iterator[StockWorkers]:
    """A process with `count` of TensorFlow's C++ workers, for as long as the context lasts."""
    address = dispatcher if isinstance(dispatcher, str) else dispatcher.address
    config = stock_worker(address, heartbeat_interval_ms=heartbeat_interval_ms, **options)
    process = StockWorkers(config, count)
    try:
        yield process
    finally:
        process.kill()


def stock_worker(dispatcher: str, **options: Any) -> Any:
    """The configuration of one of TensorFlow's workers, with all that its message has fields for:
    from Python it has no tags. Forebay's take it, too."""
    from tensorflow.core.protobuf import service_config_pb2

    usual = {
        "dispatcher_address": dispatcher,
        "worker_address": "localhost:%port%",
        "protocol": "grpc",
        "data_transfer_address": "localhost:%dts_port%",
    }
    return service_config_pb2.WorkerConfig(**{**usual, **options})


def bulky(numbers: Any) -> Any:
    """(number, 64 KB of noise). Of numbers alone, a worker makes 100,000 before a buffer is full,
    at the cost of seconds of processor time."""
    import tensorflow as tf

    return numbers.map(lambda x: (x, tf.random.stateless_uniform([1 << 14], [x, x])))


def slow(dataset: Any, seconds: float) -> Any:
    """An element takes its time, in C++, and no processor's."""
    from tensorflow.python.data.experimental.ops import testing

    return dataset.apply(testing.sleep(round(1e6 * seconds)))


def stock_consumers(target: str, number: int) -> list[Any]:
    """TensorFlow's iterators over a coordinated read. A worker's first round is 0 … number − 1, and
    the next one goes on from there: element[0] is its number."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops import data_service_ops

    dataset = bulky(tf.data.Dataset.range(1 << 60)).repeat()
    name = f"stock {next(_NUMBERS)}"
    return [
        iter(
            dataset.apply(
                data_service_ops._distribute(  # which has the option for a faster heartbeat
                    data_service_ops.ShardingPolicy.OFF, target, job_name=name,
                    consumer_index=index, num_consumers=number, task_refresh_interval_hint_ms=20,
                )
            )
        )
        for index in range(number)
    ]  # fmt: skip


def call(dispatcher: DispatcherProcess, method: str, fields: Mapping[str, Any] = {}) -> Any:
    """Call a method of TensorFlow's protocol. Raises grpc.RpcError."""
    request = getattr(pb, f"{method}Request")(**fields)
    response = getattr(pb, f"{method}Response")
    return response.FromString(call_raw(dispatcher, method, request.SerializeToString()))


def call_raw(dispatcher: DispatcherProcess, method: str, request: bytes) -> bytes:
    """Call a method with any bytes at all. Raises grpc.RpcError."""
    with grpc.insecure_channel(dispatcher.address, CHANNEL_OPTIONS) as channel:
        send = channel.unary_unary(f"/tensorflow.data.DispatcherService/{method}", None, None)
        answer: bytes = send(request, timeout=60, wait_for_ready=True)
    return answer

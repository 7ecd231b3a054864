"""`DispatchServer` and `WorkerServer`: servers started from a user's own process.

The dispatcher runs in a child process. Some of TensorFlow's Python bindings hold the
interpreter lock while they wait for the dispatcher, so one that needs that lock to answer
would never be heard; and a dispatcher should not share a trainer's interpreter anyway. The
child ends when its parent does, however the parent ends. A worker runs in this process:
nothing that holds the lock waits for one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from types import TracebackType
from typing import Self

from .connections.grpc_server import WILDCARDS
from .connections.protocols import SERVED, transfer_protocol
from .errors import ForebayError, InvalidArgument
from .processes import end, forebay

DEFAULT_TIMEOUT_MS = 60_000


@dataclass(frozen=True)
class DispatcherConfig:
    """Configures a `DispatchServer`: tf.data service's parameters, and six more.

    `storage` is a URL: "memory:", "file:///dir" or a plain path, "redis://host:port/db".
    `work_dir` together with `fault_tolerant_mode` means "file://<work_dir>". It listens on `host`.
    `allow_volatile` takes a Redis whose settings can lose acknowledged events. A consumer that is
    silent for `client_timeout_ms` is given up. Of the iterations of a job that nobody reads,
    workers keep the latest `max_idle_iterations`; `dynamic_gc_timeout_ms` is `job_gc_timeout_ms`
    for those with DYNAMIC sharding, which go on with the splits that are left if somebody joins
    them again. `worker_addresses` is for static sharding, which this version refuses. Times are in
    milliseconds; None is the default, −1 never.
    """

    port: int = 0
    protocol: str | None = None
    work_dir: str | None = None
    fault_tolerant_mode: bool = False
    worker_addresses: Iterable[str] | None = None
    job_gc_check_interval_ms: int | None = None
    job_gc_timeout_ms: int | None = None
    worker_timeout_ms: int | None = None
    worker_max_concurrent_snapshots: int = 0
    _: KW_ONLY
    storage: str | None = None
    host: str = "127.0.0.1"
    allow_volatile: bool = False
    client_timeout_ms: int | None = None
    dynamic_gc_timeout_ms: int | None = None
    max_idle_iterations: int | None = None

    def storage_url(self) -> str:
        """Where the journal lives. Raises InvalidArgument for a contradiction."""
        if self.fault_tolerant_mode and not (self.work_dir or self.storage):
            raise InvalidArgument(
                "Cannot enable fault tolerant mode without configuring a work dir. Make sure to "
                "set `work_dir` in the `config` object passed to `DispatcherServer`."
            )
        if self.storage is not None:
            return self.storage
        return f"file://{os.path.abspath(self.work_dir or '')}" if self.fault_tolerant_mode else (
            "memory:"
        )  # fmt: skip


class DispatchServer:
    """A dispatcher in a child process. Raises ForebayError with the reason if it cannot start.

    A context manager; `stop` is idempotent and leaves no process, thread or port behind.
    """

    def __init__(self, config: DispatcherConfig | None = None, start: bool = True) -> None:
        self._config = config or DispatcherConfig()
        _require_grpc(self._config.protocol)
        self._storage = self._config.storage_url()
        self._process: subprocess.Popen[str] | None = None
        self._target = ""
        self._finalizer: Callable[[], object] | None = None
        if start:
            self.start()

    def start(self) -> None:
        """Start it, and return once it serves. A server that runs is left alone."""
        if self._process is not None and self._process.poll() is None:
            return
        self.stop()
        config = self._config
        options = {
            "port": config.port,
            "host": config.host,
            "storage": self._storage,
            # As tf.data service's own says, which listens on every address, too.
            "address": "localhost:%port%" if config.host in WILDCARDS else None,
            "job-gc-check-interval-ms": config.job_gc_check_interval_ms,
            "job-gc-timeout-ms": config.job_gc_timeout_ms,
            "dynamic-gc-timeout-ms": config.dynamic_gc_timeout_ms,
            "max-idle-iterations": config.max_idle_iterations,
            "worker-timeout-ms": config.worker_timeout_ms,
            "client-timeout-ms": config.client_timeout_ms,
        }
        arguments = [f"--{name}={value}" for name, value in options.items() if value is not None]
        arguments += ["--allow-volatile"] if config.allow_volatile else []
        process = subprocess.Popen(
            forebay("cli", "dispatcher", "--exit-with-parent", *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is meant for the user's program
        )
        assert process.stdout is not None
        self._target = process.stdout.readline().strip()
        if not self._target:
            _, errors = process.communicate()
            reason = (errors.splitlines() or [f"exit code {process.returncode}"])[-1]
            raise ForebayError(f"the dispatcher did not start: {reason.removeprefix('forebay: ')}")
        threading.Thread(
            target=_forward_log, args=(process,), name="forebay-dispatcher-log", daemon=True
        ).start()
        self._process = process
        self._finalizer = weakref.finalize(self, end, process)

    @property
    def target(self) -> str:
        """What clients connect to: "grpc://host:port"."""
        return self._target

    @property
    def address(self) -> str:
        """The same without the protocol, for workers: "host:port"."""
        return self._target.removeprefix("grpc://")

    def join(self) -> None:
        """Wait until the dispatcher has ended."""
        if self._process is not None:
            self._process.wait()

    def stop(self) -> None:
        """End it: what it has decided is answered, then the journal is closed. Idempotent."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stop()


def _forward_log(process: subprocess.Popen[str]) -> None:
    """What the dispatcher logs, to where this process logs; until it has ended."""
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            sys.stderr.write(line)


@dataclass(frozen=True)
class WorkerConfig:
    """Configures a `WorkerServer`: tf.data service's parameters, and `worker_tags`, `host`,
    `drain_timeout_ms`.

    `dispatcher_address` may name several dispatchers, comma-separated. `worker_address` is
    what clients are told to connect to; by default, the host and port that are listened on,
    and "%port%" in it stands for that port. `data_transfer_protocol` is the only way that
    elements are offered to Forebay's clients, "unix", "tcp" or "grpc"; by default all of them
    are. `data_transfer_address` is what they are told to connect to over TCP, if not the host of
    `worker_address`. `drain_timeout_ms` is how long `stop(drain=True)` waits for trainers to take
    what has been begun; what they do not take is dropped, and named in the log. Times are in
    milliseconds; None is the default.
    """

    dispatcher_address: str
    worker_address: str | None = None
    port: int = 0
    protocol: str | None = None
    heartbeat_interval_ms: int | None = None
    dispatcher_timeout_ms: int | None = None
    data_transfer_protocol: str | None = None
    data_transfer_address: str | None = None
    _: KW_ONLY
    worker_tags: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    drain_timeout_ms: int | None = None


class WorkerServer:
    """A worker in this process. A context manager; `stop` is idempotent."""

    def __init__(self, config: WorkerConfig, start: bool = True) -> None:
        if config.dispatcher_address is None:
            raise InvalidArgument(
                "Must specify a `dispatcher_address` in the `config` passed to `WorkerServer`."
            )
        _require_grpc(config.protocol)
        from .worker import Worker, WorkerOptions

        self._worker = Worker(
            WorkerOptions(
                dispatcher=config.dispatcher_address,
                host=config.host,
                port=config.port,
                address=config.worker_address or "",
                data_address=config.data_transfer_address or "",
                data_transfer_protocol=transfer_protocol(config.data_transfer_protocol, SERVED),
                tags=tuple(config.worker_tags),
                heartbeat_interval_ms=config.heartbeat_interval_ms or 5_000,
                dispatcher_timeout_ms=config.dispatcher_timeout_ms or DEFAULT_TIMEOUT_MS,
                drain_timeout_ms=(
                    WorkerOptions.drain_timeout_ms
                    if config.drain_timeout_ms is None
                    else config.drain_timeout_ms
                ),
            )
        )
        self._started = False
        self._ended = threading.Event()
        # At the interpreter's exit too: whoever waits for this process must not wait for ever.
        self._finalizer = weakref.finalize(self, self._worker.stop)
        if start:
            self.start()

    def start(self) -> None:
        """Start it, and return once it is registered. Raises Unavailable, AddressInUse."""
        if not self._started:
            self._started = True
            self._worker.start()

    @property
    def address(self) -> str:
        """Where it is registered: "host:port"."""
        return self._worker.address

    def join(self) -> None:
        """Wait until somebody has stopped it."""
        self._ended.wait()

    def stop(self, *, drain: bool = False) -> None:
        """End it. With `drain`, begin no further split, hand back what was not begun, and let
        consumers take the rest first. Idempotent."""
        self._worker.stop(drain=drain)
        self._finalizer.detach()
        self._ended.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stop()


def _require_grpc(protocol: str | None) -> None:
    if protocol not in (None, "grpc"):
        raise InvalidArgument(f"protocol {protocol!r} is not supported; use 'grpc' or leave it out")

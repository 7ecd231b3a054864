"""`DispatchServer` and `WorkerServer`: servers started from a user's own process.

The dispatcher runs in a child process. Some of TensorFlow's Python bindings hold the
interpreter lock while they wait for the dispatcher, so a dispatcher that needs that lock would
deadlock. The child ends with its parent, however the parent ends. A worker runs in this process:
no holder of the lock waits for a worker.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from google.protobuf.message import Message

from .address_forms import is_wildcard
from .connections.credentials import credentials_of_server
from .connections.dispatcher_client import SERVICE, DispatcherClient
from .connections.grpc_server import advertised_address
from .dispatcher.options import DispatcherOptions
from .errors import FailedPrecondition, ForebayError, InvalidArgument, Unavailable
from .options import Declared, ServerOptions, described, flags, options_of
from .platforms import require
from .processes import LOG_LEVEL, ChildProcess, forebay, open_standard_descriptors
from .proto import forebay_pb2 as pb
from .proto import tf_service_pb2 as tf
from .worker.options import WorkerOptions

log = logging.getLogger(__name__)

Options = TypeVar("Options", DispatcherOptions, WorkerOptions)
Config = TypeVar("Config", bound="_Config")
Answer = TypeVar("Answer", bound=Message)

LOG_S = 10.0
"""How long to wait for the last log lines of a dispatcher that has ended."""

OWN_THREADS = "forebay-"
"""How the names of threads begin that a worker may wait for."""

SAYS = "forebay: "
"""The prefix of the line in which a command says why it failed."""

TENSORFLOWS = "tensorflow.data.DispatcherService"
"""TensorFlow's protocol, for requests that only its tests make."""

MESSAGE_NAMES = {
    "data_transfer_port": "data_port",
    "snapshot_max_chunk_size_bytes": "save_chunk_bytes",
}
"""The fields that have another name in tf.data service's messages only."""


class _Config:
    """Arguments of a server: tf.data service's by position, and Forebay's options by keyword. It
    does not change, and equals one of the same arguments; None is an argument that is left out."""

    OPTIONS: ClassVar[type[ServerOptions]]
    NAMES: ClassVar[Mapping[str, str]] = {}
    """The options for which the configuration has tf.data service's name."""

    OTHERS: ClassVar[tuple[str, ...]] = ("protocol",)
    """Arguments of tf.data service's that are no options."""

    given: dict[str, Any]

    def __init__(self, arguments: dict[str, Any]) -> None:
        if unknown := arguments.keys() - self.names():
            raise TypeError(f"{', '.join(sorted(unknown))}: a server has no such option")
        given = {name: value for name, value in arguments.items() if value is not None}
        object.__setattr__(self, "given", given)

    def __getattr__(self, name: str) -> Any:
        if name not in self.names():
            raise AttributeError(f"{type(self).__name__} has no option {name!r}")
        return self.given.get(name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: a configuration does not change; make another one")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), *sorted(self.given)))

    def __repr__(self) -> str:
        shown = {k: v for k, v in self.given.items() if k != "storage"}  # it may have a password
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def by_option(self) -> dict[str, Any]:
        """The values by the options' own names."""
        values = {}
        for name, declared in self.declared().items():
            value = self.given.get(name)
            values[declared.name] = 1 if value == 0 and declared.least == 1 else value
        return values

    @classmethod
    def declared(cls) -> dict[str, Declared]:
        """The options, by the names of the arguments."""
        return {cls.NAMES.get(each.name, each.name): each for each in options_of(cls.OPTIONS)}

    @classmethod
    def names(cls) -> set[str]:
        """Those of all arguments."""
        return {*cls.OTHERS, *cls.declared()}


class DispatcherConfig(_Config):
    """Configures a `DispatchServer`: tf.data service's parameters, and by keyword Forebay's.

    `work_dir` together with `fault_tolerant_mode` means the `storage` "file://<work_dir>".
    None is an option's default; 0 ms of one that may be 1 ms is 1 ms, as with tf.data service:
    """

    OPTIONS = DispatcherOptions
    NAMES: ClassVar[Mapping[str, str]] = {"workers": "worker_addresses"}
    OTHERS: ClassVar[tuple[str, ...]] = ("protocol", "work_dir", "fault_tolerant_mode")

    def __init__(
        self,
        port: int = 0,
        protocol: str | None = None,
        work_dir: str | None = None,
        fault_tolerant_mode: bool = False,
        worker_addresses: Iterable[str] | None = None,
        job_gc_check_interval_ms: int | None = None,
        job_gc_timeout_ms: int | None = None,
        worker_timeout_ms: int | None = None,
        worker_max_concurrent_snapshots: int = 0,
        **options: Any,
    ) -> None:
        options |= {
            "port": port,
            "protocol": protocol,
            "work_dir": work_dir,
            "fault_tolerant_mode": fault_tolerant_mode,
            "worker_addresses": worker_addresses,
            "job_gc_check_interval_ms": job_gc_check_interval_ms,
            "job_gc_timeout_ms": job_gc_timeout_ms,
            "worker_timeout_ms": worker_timeout_ms,
            "worker_max_concurrent_snapshots": worker_max_concurrent_snapshots,
        }
        super().__init__(options)

    def storage_url(self) -> str:
        """The URL of the journal. Raises InvalidArgument for a contradiction."""
        storage = self.storage
        if self.fault_tolerant_mode and not (self.work_dir or storage):
            raise InvalidArgument(
                "Cannot enable fault tolerant mode without configuring a work dir. Make sure to "
                "set `work_dir` in the `config` object passed to `DispatcherServer`."
            )
        if storage is not None:
            return str(storage)
        if self.fault_tolerant_mode:
            return f"file://{os.path.abspath(self.work_dir or '')}"
        return DispatcherOptions.storage

    def options(self) -> DispatcherOptions:
        """What it asks for. Raises InvalidArgument."""
        _require_grpc(self.protocol)
        return DispatcherOptions(**{**self.by_option(), "storage": self.storage_url()})


class _Server(ABC):
    """The common interface of tf.data service's own servers; a context manager."""

    _stopped = False

    @property
    @abstractmethod
    def address(self) -> str: ...

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    @property
    def _address(self) -> str:
        return self.address

    def _stop(self) -> None:
        self.stop()

    def _require_not_stopped(self) -> None:
        if self._stopped:
            raise FailedPrecondition(
                "Server cannot be started after it has been stopped: make another one with the "
                "same configuration"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class DispatchServer(_Server):
    """A dispatcher in a child process. Raises ForebayError with the reason if it cannot start.

    `config` may also be tf.data service's own `DispatcherConfig`, or the message of that name.
    Then unread epochs under DYNAMIC are kept, unless it sets `gc_dynamic_sharding_jobs`. A
    context manager; `stop` is idempotent and leaves no process, thread or port behind.
    """

    def __init__(self, config: DispatcherConfig | Any | None = None, start: bool = True) -> None:
        require("a dispatcher", "memfd_create")
        self._config = _config_of(config or DispatcherConfig(), DispatcherConfig)
        self._options = _secured(_at_localhost(self._config.options(), wildcard=True))
        self._process: ChildProcess | None = None
        self._log: threading.Thread | None = None
        self._target = f"grpc://{told}" if (told := _address_before_start(self._options)) else ""
        self._finalizer: Callable[[], object] | None = None
        if start:
            self.start()

    def start(self) -> None:
        """Start it, and return once it serves. No effect on a running server.

        Raises FailedPrecondition, a RuntimeError, if it has been stopped.
        """
        self._require_not_stopped()
        open_standard_descriptors()
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        level = os.environ.get(LOG_LEVEL)
        # Its password, if it has one, would be seen among the arguments.
        of_storage = "FOREBAY_STORAGE", self._options.storage
        others = dataclasses.replace(self._options, storage=DispatcherOptions().storage)
        process = ChildProcess(
            forebay("service.cli", "dispatcher", *flags(others)),
            subprocess.PIPE,
            piped=True,
            exit_with_parent=True,
            environment=dict([of_storage, *([] if level is None else [(LOG_LEVEL, level)])]),
        )
        self._target, self._log = first_line(process, "dispatcher")
        self._process = process
        self._finalizer = weakref.finalize(self, process.end)

    @property
    def target(self) -> str:
        """The address for clients, as in "grpc://host:5050"; "" before a start on any free port."""
        return self._target

    @property
    def address(self) -> str:
        """The address for workers, such as "host:5050"."""
        return self._target.removeprefix("grpc://")

    def _num_workers(self) -> int:
        """The number of registered workers. tf.data service's tests call this."""
        answer = self._ask(pb.GetStatusRequest(workers_only=True), pb.GetStatusResponse)
        return len(json.loads(answer.status)["workers"])

    def _snapshot_streams(self, path: str) -> Sequence[tf.SnapshotStreamInfo]:
        """Each stream of a save: its `index`, and its `state` in TensorFlow's numbers: ASSIGNED,
        ORPHAN while its worker is lost, or DONE. tf.data service's tests call this.

        Raises NotFound.
        """
        request = tf.GetSnapshotStreamsRequest(path=path)
        return self._ask(request, tf.GetSnapshotStreamsResponse, TENSORFLOWS).streams

    def _ask(self, request: Message, response: type[Answer], service: str = SERVICE) -> Answer:
        own = credentials_of_server(self._options)
        with DispatcherClient(self.address, credentials=own) as dispatcher:
            return dispatcher.call(request, response, patience_s=10, service=service)

    def join(self) -> None:
        """Wait until the dispatcher has ended."""
        if self._process is not None:
            self._process.wait()

    def stop(self) -> None:
        """End it: it answers what it has decided, then closes the journal. Idempotent."""
        self._stopped = True
        self._end()

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        if self._log is not None and self._log is not threading.current_thread():
            self._log.join(LOG_S)  # it ends after the process's last line
        self._process = self._log = None


def worker_process(options: WorkerOptions) -> ChildProcess:
    """A worker in a child process, for `first_line`. Linux ends it with the calling thread."""
    command = forebay("service.cli", "worker", *flags(options))
    return ChildProcess(command, subprocess.PIPE, piped=True)


def first_line(process: ChildProcess, what: str) -> tuple[str, threading.Thread]:
    """What a server says once it serves; a thread copies its log to this process's stderr.

    The process has pipes for both. Raises ForebayError with the server's reason if it ends.
    """
    if not (line := process.line()):
        _, errors = process.communicate()
        lines = errors.splitlines() or [f"exit code {process.returncode}"]
        # The error is the last line, except for lines that libraries log at exit.
        reason = next((line for line in reversed(lines) if line.startswith(SAYS)), lines[-1])
        raise ForebayError(f"the {what} did not start: {reason.removeprefix(SAYS)}")
    log = threading.Thread(
        target=_forward_log, args=(process,), name=f"forebay-{what}-log", daemon=True
    )
    log.start()
    return line, log


def _forward_log(process: ChildProcess) -> None:
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            sys.stderr.write(line)  # looked up for each line: a program may replace it


class WorkerConfig(_Config):
    """Configures a `WorkerServer`: tf.data service's parameters, and by keyword Forebay's.

    None is an option's default; 0 ms of one that may be 1 ms is 1 ms, as with tf.data service:
    """

    OPTIONS = WorkerOptions
    NAMES: ClassVar[Mapping[str, str]] = {
        "dispatcher": "dispatcher_address",
        "address": "worker_address",
        "data_address": "data_transfer_address",
        "tags": "worker_tags",
    }

    def __init__(
        self,
        dispatcher_address: str,
        worker_address: str | None = None,
        port: int = 0,
        protocol: str | None = None,
        heartbeat_interval_ms: int | None = None,
        dispatcher_timeout_ms: int | None = None,
        data_transfer_protocol: str | None = None,
        data_transfer_address: str | None = None,
        **options: Any,
    ) -> None:
        options |= {
            "dispatcher_address": dispatcher_address,
            "worker_address": worker_address,
            "port": port,
            "protocol": protocol,
            "heartbeat_interval_ms": heartbeat_interval_ms,
            "dispatcher_timeout_ms": dispatcher_timeout_ms,
            "data_transfer_protocol": data_transfer_protocol,
            "data_transfer_address": data_transfer_address,
        }
        super().__init__(options)

    def options(self) -> WorkerOptions:
        """What it asks for. Raises InvalidArgument."""
        if self.dispatcher_address is None:
            raise InvalidArgument(
                "Must specify a `dispatcher_address` in the `config` passed to `WorkerServer`."
            )
        _require_grpc(self.protocol)
        return WorkerOptions(**self.by_option())


class SnapshotTaskProgress(NamedTuple):
    """A stream of a save that a worker writes, with tf.data service's field names."""

    snapshot_task_base_path: bytes
    snapshot_task_stream_index: int
    completed: bool


def _config_of(config: Config | Any, kind: type[Config]) -> Config:
    """Convert tf.data service's own message or configuration; return our own as it is.

    Raises InvalidArgument.
    """
    if isinstance(config, kind):
        return config
    if isinstance(config, Message):
        said = {field.name: value for field, value in config.ListFields()}
    elif type(config).__name__ == kind.__name__ and hasattr(config, "_asdict"):
        said = {name: value for name, value in config._asdict().items() if value}  # 0: default
    else:
        raise InvalidArgument(f"`config` must be a {kind.__name__}, not {config!r:.100}")
    known = kind.names()
    said = {MESSAGE_NAMES.get(name, name): value for name, value in said.items()}
    if kind is WorkerConfig:
        said.setdefault("dispatcher_address", "")
    elif said.pop("gc_dynamic_sharding_jobs", False):
        said["dynamic_gc_timeout_ms"] = said.get("job_gc_timeout_ms")
    else:  # tf.data service's default: epochs under DYNAMIC are kept
        said |= {"dynamic_gc_timeout_ms": -1, "max_idle_iterations": -1}
    if unknown := said.keys() - known:
        log.warning("%s: %s has no effect here", kind.__name__, ", ".join(sorted(unknown)))
    return kind(**{name: value for name, value in said.items() if name in known})


def _at_localhost(options: Options, *, wildcard: bool = False) -> Options:
    """By default, advertise localhost, as tf.data service's own servers do; with `wildcard` also if
    it listens on all addresses."""
    is_default = options.host == ServerOptions.host
    if options.address or not (is_default or (wildcard and is_wildcard(options.host))):
        return options
    return dataclasses.replace(options, address="localhost:%port%")


def _secured(options: Options) -> Options:
    """With the credentials that the server has; by default those of this process."""
    credentials = credentials_of_server(options)
    files: dict[str, Any] = {} if credentials is None else credentials.files()
    return dataclasses.replace(options, **files)


def _address_before_start(options: ServerOptions) -> str:
    """The address of a server before its start; "" if it will use any free port."""
    if not options.port:
        return ""
    return advertised_address(options.address, f"{options.host}:{options.port}")


for _config in (DispatcherConfig, WorkerConfig):
    _config.__doc__ = f"{_config.__doc__}\n{described(_config.OPTIONS, _config.NAMES)}"


class _NotStarted(Unavailable, RuntimeError):
    """No dispatcher has accepted the worker in time."""


class WorkerServer(_Server):
    """A worker in this process. A context manager; `stop` is idempotent.

    `config` may also be tf.data service's own `WorkerConfig`, or the message of that name.
    """

    def __init__(self, config: WorkerConfig | Any, start: bool = True) -> None:
        from .worker.worker import Worker

        self._config = _config_of(config, WorkerConfig)
        self._options = _secured(_at_localhost(self._config.options()))
        self._worker = Worker(self._options)
        self._started = False
        self._ended = threading.Event()
        # Also runs at the interpreter's exit, so that the process can end.
        self._finalizer = weakref.finalize(self, _in_new_thread, self._worker.stop)
        if start:
            self.start()

    def start(self) -> None:
        """Start it, and return once it is registered. No effect on a running worker.

        Raises AddressInUse, Unavailable, and, if it has been stopped, FailedPrecondition. The last
        two are RuntimeErrors here, as in TensorFlow.
        """
        self._require_not_stopped()
        open_standard_descriptors()
        if not self._started:
            self._started = True
            try:
                self._worker.start()
            except Unavailable as error:
                raise _NotStarted(str(error)) from error

    @property
    def address(self) -> str:
        """The registered address, such as "host:5051"; "" before a start on any free port."""
        return self._worker.address or _address_before_start(self._options)

    @property
    def http_address(self) -> str:
        """HOST:PORT of its HTTP port (`http_port`); "" without one."""
        return self._worker.http_address

    def _num_tasks(self) -> int:
        """The number of running tasks. tf.data service's tests call this."""
        return self._worker.num_tasks

    def _snapshot_task_progresses(self) -> list[SnapshotTaskProgress]:
        """The streams of saves that it writes. tf.data service's tests call this."""
        return [
            SnapshotTaskProgress(os.fsencode(path), number, completed)
            for number, path, completed in self._worker.streams
        ]

    def join(self) -> None:
        """Wait until somebody has stopped it."""
        self._ended.wait()

    def stop(self, *, drain: bool = False) -> None:
        """End it. With `drain`, first return unstarted splits, start no others, and let consumers
        read the rest. Idempotent.

        Called by a finalizer in one of the worker's own threads, which it waits for, it ends the
        worker in a new thread, and returns at once."""
        self._stopped = True
        if threading.current_thread().name.startswith(OWN_THREADS):
            _in_new_thread(partial(self._end, drain))
        else:
            self._end(drain)

    def _end(self, drain: bool) -> None:
        self._worker.stop(drain=drain)
        self._finalizer.detach()
        self._ended.set()


def _in_new_thread(stop: Callable[[], object]) -> None:
    """Stop a worker that was garbage-collected, or in one of its threads. The garbage collector may
    run in a thread that the worker waits for, or hold a lock that stopping takes. At its exit, the
    interpreter starts no threads, so this one stops the worker itself."""
    if threading.main_thread().is_alive():
        threading.Thread(target=stop, name="stops-forebay-worker", daemon=True).start()
    else:
        stop()


def _require_grpc(protocol: str | None) -> None:
    if protocol not in (None, "grpc"):
        raise InvalidArgument(f"protocol {protocol!r} is not supported; use 'grpc' or leave it out")

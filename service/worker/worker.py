"""The worker: stateless, it runs the tasks that the dispatcher lists for it.

One thread sends heartbeats. The dispatcher answers when its task list changes, and the thread
starts and stops tasks to match the list. Recovery needs nothing else:

- A dispatcher that restarted with its state, or had given this worker up, lists the same tasks.
- One whose journal was in memory, or was repaired, registers this worker anew and lists no tasks.
- One that lost a durable journal refuses the heartbeat, and the worker keeps retrying.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from ...journal.proto import events_pb2 as ev
from ...storage.thread_pool import ThreadPool
from ..address_forms import parse_service
from ..connections import tunnel
from ..connections.admission import Admission
from ..connections.credentials import credentials_of_server, is_loopback, serves_tensorflow
from ..connections.data_keys import KnownKeys
from ..connections.dispatcher_client import SERVICE, DispatcherClient
from ..connections.grpc_server import (
    advertised_address,
    bind,
    interceptors,
    refusing_handler,
    server_options,
)
from ..connections.protocols import GRPC, SERVED, TCP
from ..connections.relay import mark_grpc_used
from ..delivery import (
    BundlesOutput,
    CachedOutput,
    FirstComeOutput,
    Listener,
    MemoryBudget,
    RoundsOutput,
    TaskOutput,
)
from ..errors import ForebayError, InvalidArgument, Unavailable
from ..fetched import fetched
from ..findings import SMALL_BUDGET, is_small
from ..http.opening import open_http_thread
from ..memory_limit import memory_limit
from ..pipelines import PythonRules
from ..platforms import require
from ..proto import forebay_pb2 as pb
from ..proto import tf_service_pb2 as tf
from ..proto.metrics_pb2 import TaskMetrics
from ..transport import MAX_AWAY_BYTES, BlockServer
from . import losses
from .bundle_tasks import BundleReports, BundleTask
from .host import HostWatch
from .idle import IdleTasks
from .metrics import Condition, WorkerMetrics
from .options import WorkerOptions
from .read_errors import ReadErrors
from .running_tasks import RunningTasks
from .saves import StreamWriters
from .task_consumers import TaskConsumers
from .task_pipeline import Datasets, Pipelines
from .task_states import JournalSeen, Listed, StopAsked
from .tasks import DeliveryCounter, TaskDependencies, TaskRunner, WorkerTask
from .tf_data_worker_servicer import TfDataWorkerServicer

if TYPE_CHECKING:
    from ..http.server import HttpThread

log = logging.getLogger(__name__)

SHARE = 8
"""Tasks hold up to 1/SHARE of the memory limit by default."""

GRPC_THREADS = 256
"""A waiting stock client holds a thread, so this bounds how many can wait at a time. In a
coordinated read all clients wait for the last one. The pool creates threads on demand."""

MIN_AWAY_BYTES = 64 << 20
"""The least that may be held for disconnected consumers, so that a network cut loses nothing."""

STOP_S = 3.0
"""How long `stop` waits for cancelled tasks to end."""

STARTING = 2
"""How many tasks load their graphs at a time. Hundreds at once would starve other threads."""


class Worker:
    """`start` registers the worker; `stop` ends it and leaves no thread behind."""

    def __init__(self, options: WorkerOptions, *, pipelines: Pipelines | None = None) -> None:
        """Tasks open their pipelines with `pipelines`."""
        require("a worker", "memfd_create")
        self._options = options
        self._pipelines = pipelines or Pipelines()
        self.uid = secrets.randbits(62) + 1  # identifies this process
        self._credentials = credentials_of_server(options)
        own = self._credentials
        self._dispatcher = DispatcherClient(options.dispatcher, credentials=own)
        # Heartbeats never queue behind the tasks' calls: the dispatcher gives up a late worker.
        self._beats = DispatcherClient(options.dispatcher, own_connection=True, credentials=own)
        budget_bytes = options.memory_budget or memory_limit() // SHARE
        if is_small(budget_bytes):
            log.warning(
                "--memory-budget is %d bytes for the elements of all tasks: each waits until "
                "trainers have taken what it made; give %d MB at least",
                budget_bytes, SMALL_BUDGET >> 20,
            )  # fmt: skip
        self._data_keys = KnownKeys()
        self._blocks = BlockServer(
            self.uid, options.host, options.data_port,
            max_away_bytes=min(MAX_AWAY_BYTES, max(budget_bytes // 4, MIN_AWAY_BYTES)),
            credentials=own, keys=None if own is None else self._data_keys,
            checksums=options.payload_checksums,
        )  # fmt: skip
        self.tasks = RunningTasks(self._make, self._blocks.sessions)
        self._errors = ReadErrors()
        self._host = HostWatch()
        self._needs = TaskDependencies(
            self._dispatcher, threading.Semaphore(STARTING), self._pipelines,
            self.tasks.report, Datasets(self._dispatcher), self._errors,
        )  # fmt: skip
        self._servicer = TfDataWorkerServicer(self.tasks.runner_of)
        self.consumers = TaskConsumers(self._blocks.sessions, self._servicer, self._dispatcher)
        self.idle = IdleTasks(
            self.tasks.unfinished, self.consumers.read_tasks, self.consumers.forget_left,
            budget_bytes, options.expected_s, options.kept_pipelines,
        )  # fmt: skip
        self._bundle_reports = BundleReports()
        self._streams = StreamWriters(self.uid, self._dispatcher, options)
        self._stopping = threading.Event()
        self._heartbeats = threading.Thread(
            target=self._heartbeat, name="forebay-heartbeat", daemon=True
        )
        self._registration = pb.WorkerHeartbeatRequest()
        self.address = ""
        self._heard_s: float | None = None  # when the dispatcher last answered a heartbeat
        self._http: HttpThread | None = None
        self._cache_watch = threading.Thread(
            target=self._watch_cache, name="forebay-cache", daemon=True
        )
        mark_grpc_used()
        self._admission = None if own is None else Admission(own, [tunnel.METHOD])
        self._grpc_threads = ThreadPool(GRPC_THREADS + tunnel.MAX_TUNNELS, "forebay-worker-grpc")
        self._grpc = grpc.server(
            self._grpc_threads,  # type: ignore[arg-type] # any Executor does
            handlers=[
                self._servicer.handlers(serves=serves_tensorflow(options, own)),
                tunnel.handlers(self._blocks.serve, self._admission),
                *dispatcher_handlers(options.dispatcher),
            ],
            interceptors=interceptors(self._admission),
            options=[*server_options(own, datasets=False), *tunnel.SERVER_OPTIONS],
        )

    def start(self) -> None:
        """Listen, and register with the dispatcher.

        Raises AddressInUse, InvalidArgument for a library of custom ops that cannot be loaded, and
        Unavailable when no dispatcher answers within its timeout.
        """
        options = self._options
        advertised_address(options.address, f"{options.host}:1")  # fail early, before slow imports
        self._pipelines.load(options.load_op_library)
        try:
            bound = bind(self._grpc, options.host, options.port, self._credentials)
            self.address = advertised_address(options.address, bound)
            metrics = WorkerMetrics(
                self.tasks, self.consumers, self._blocks.sessions, self.idle.budget,
                self._condition, None if self._admission is None else self._admission.denials,
            )  # fmt: skip
            self._http = open_http_thread(metrics, options, self._credentials)
            self._pipelines.python = PythonRules(
                may_run_python(options), options.processes, self.address,
                data_roots=options.data_root,
                cache=(options.cache_directory, options.cache_bytes),
            )  # fmt: skip
            if options.cache_directory:
                self._cache_watch.start()
            self._blocks.start()
            self._grpc.start()
            self._registration = pb.WorkerHeartbeatRequest(
                address=self.address,
                uid=self.uid,
                tags=options.tags,
                transfer_servers=[
                    ev.TransferServer(protocol=protocol, address=address)
                    for protocol, address in self._data_addresses()
                ],
                wait_ms=0,
                no_python=not self._pipelines.python.allowed,
            )
            self._reconcile(self._beat(patience_s=options.dispatcher_timeout_ms / 1000))
        except BaseException:
            self.stop()
            raise
        self._registration.wait_ms = options.heartbeat_interval_ms
        self._heartbeats.start()
        self.idle.start()

    def stop(self, *, drain: bool = False) -> bool:
        """End every task and leave the service. Idempotent.

        With `drain`, the worker first returns unstarted splits. It then delivers begun splits to
        consumers and commits chunks being saved, within the drain timeout. Returns False if
        elements of a task that is being read were dropped; the log has the details.
        """
        if self._stopping.is_set():
            return True
        self.idle.stop()
        delivered = self._drain() if drain else True
        self._stopping.set()
        metrics = self._metrics()
        self.tasks.handle(StopAsked())
        self._streams.cancel()
        self._blocks.stop()
        if worker_id := self.tasks.states.worker_id:
            try:
                # No retry: an unreachable dispatcher notices the missed heartbeats. The
                # heartbeats' connection follows the leader.
                request = pb.LeaveServiceRequest(worker_id=worker_id, metrics=metrics)
                self._beats.call(request, pb.LeaveServiceResponse, timeout_s=2, patience_s=0)
            except Unavailable:
                log.info("leaves while no dispatcher answers: the next one notices by itself")
            except ForebayError as error:
                log.info("could not say goodbye to the dispatcher: %s", error)
        # Let gRPC send the last elements to stock clients. Waiting calls return, as outputs ended.
        quiet_s = self._options.shutdown_quiet_period_ms / 1000
        self._grpc.stop(max(quiet_s, STOP_S) if drain else quiet_s).wait()
        self._grpc_threads.shutdown(wait=False)
        self._dispatcher.close()
        self._beats.close()
        if self._heartbeats.is_alive():
            self._heartbeats.join()
        if self._cache_watch.is_alive():
            self._cache_watch.join(STOP_S)
        give_up_s = time.monotonic() + STOP_S
        self.tasks.join(give_up_s)  # after the join above: the heartbeat may just have added one
        self._streams.join(give_up_s)
        self._pipelines.close()
        if self._http is not None:
            self._http.stop()
        return delivered

    def _data_addresses(self) -> list[tuple[str, str]]:
        """Protocols and addresses of the data plane, as told to clients, preferred first."""
        bound = f"{self.address.rpartition(':')[0]}:{self._blocks.port}"
        addresses = dict(self._blocks.addresses)
        addresses[TCP] = advertised_address(self._options.data_address, bound, "--data-address")
        addresses[GRPC] = self.address
        wanted = self._options.data_transfer_protocol
        return [(p, addresses[p]) for p in SERVED if wanted is None or p == wanted]

    @property
    def journal_id(self) -> str:
        """The id of the dispatcher's journal; empty before the first answer."""
        return self.tasks.states.journal_id

    def unread(self) -> list[int]:
        """The unfinished tasks without consumers. `stop` doesn't wait for these to be read."""
        unfinished = [runner.task.task_id for runner in self.tasks.unfinished()]
        return [task_id for task_id in unfinished if not self.consumers.is_read(task_id)]

    @property
    def http_address(self) -> str:
        """HOST:PORT of its HTTP port; "" without one."""
        return "" if self._http is None else self._http.address

    @property
    def num_tasks(self) -> int:
        """The number of unfinished tasks."""
        return len(self.tasks.unfinished())

    @property
    def streams(self) -> list[tuple[int, str, bool]]:
        """The save streams written here: number, the save's path, and whether it is complete."""
        return self._streams.progress()

    def _make(self, task: pb.Task) -> WorkerTask:
        if task.HasField("order"):
            bundles = BundlesOutput(budget=self.idle.budget)
            return BundleTask(task, bundles, self._needs, self._bundle_reports)
        # A completed shard is never read again, so it completes only once its elements arrived.
        counter = DeliveryCounter() if task.num_shards else None
        output = _output(task, self._options, counter, self.idle.budget)
        return TaskRunner(task, output, self._needs, counter)

    def _drain(self) -> bool:
        give_up_s = time.monotonic() + self._options.drain_timeout_ms / 1000
        self._announce_drain()
        self._streams.drain()
        self.tasks.drain(give_up_s)
        runners = self.tasks.unfinished()
        for runner in runners:
            self.consumers.wait(partial(self._has_ended_or_is_unread, runner), give_up_s)
        # Completed tasks, too, may have blocks in flight.
        received = self._blocks.sessions.wait_until_received
        self.consumers.wait(lambda within_s: not received(within_s), give_up_s)
        self._streams.join(give_up_s)
        lacking = received(0)
        delivered = True
        for runner in dict.fromkeys([*runners, *self.tasks.runners()]):
            task_id = runner.task.task_id
            if (what := runner.undelivered(lacking.get(task_id, 0))) is not None:
                is_read = self.consumers.is_read(task_id)
                delivered &= not is_read
                runner.pipeline.report(dropped=what.elements)
                losses.dropped(
                    runner.task, what,
                    is_read=is_read, drain_timeout_ms=self._options.drain_timeout_ms,
                )  # fmt: skip
            elif runner in runners:
                runner.pipeline.report(all_delivered=True)
        return delivered

    def _announce_drain(self) -> None:
        """Stop new assignments: tell the dispatcher now and with each later heartbeat."""
        self._registration.draining = True
        if not self.tasks.states.worker_id:
            return
        request = pb.WorkerHeartbeatRequest()
        request.CopyFrom(self._registration)
        request.version = request.wait_ms = 0
        try:
            self._dispatcher.call(request, pb.WorkerHeartbeatResponse, timeout_s=2, patience_s=0)
        except Unavailable:
            log.info("no dispatcher answers: the next heartbeat says that this worker drains")
        except ForebayError as error:
            log.info("could not tell the dispatcher yet that this worker drains: %s", error)

    def _has_ended_or_is_unread(self, runner: WorkerTask, within_s: float) -> bool:
        return not self.consumers.is_read(runner.task.task_id) or runner.join(within_s)

    def _condition(self) -> Condition:
        beats = self._heartbeats.ident is None or self._heartbeats.is_alive()
        stops = self._stopping.is_set()
        return Condition(
            has_failed=not (beats or stops),
            is_leaving=self._registration.draining or stops,
            heard_s=self._heard_s,
            streams=sum(not complete for _, _, complete in self.streams),
        )

    # -- the dispatcher ------------------------------------------------------------------------

    def _metrics(self) -> list[TaskMetrics]:
        """The metrics of all tasks, KEPT ones included: dispatchers hold metrics only in memory,
        and a new one needs them too."""
        found = (runner.pipeline.metrics() for runner in self.tasks.runners())
        return [metrics for metrics in found if metrics is not None]

    def _beat(self, patience_s: float | None = None) -> pb.WorkerHeartbeatResponse:
        checked = self._bundle_reports.take()
        request = pb.WorkerHeartbeatRequest(
            metrics=self._metrics(), checked=checked, loads=self.tasks.loads(),
            memory_budget=self.idle.budget.max_bytes, errors=self._errors.told(),
            host=self._host.load(),
        )  # fmt: skip
        if self._options.cache_directory:
            request.cache.held_bytes = fetched.held_bytes
            request.cache.limit_bytes = self._options.cache_bytes
            request.cache.hit_bytes = fetched.cached_bytes
            request.cache.missed_bytes = fetched.fetched_bytes
        request.MergeFrom(self._registration)
        try:
            return self._beats.call(
                request,
                pb.WorkerHeartbeatResponse,
                timeout_s=self._registration.wait_ms / 1000 + 5,
                patience_s=patience_s,
                closed=self._stopping,
            )
        except ForebayError:
            self._bundle_reports.put_back(checked)
            raise

    def _heartbeat(self) -> None:
        while not self._stopping.is_set():
            try:
                self._reconcile(self._beat())
            except ForebayError as error:
                if not self._stopping.is_set():
                    log.error("the dispatcher refuses this worker's heartbeat: %s", error)
            except Exception:  # a bug; a worker without heartbeats would be worse
                log.exception("the heartbeat failed, and is tried again")
            else:
                continue
            self._stopping.wait(self._options.heartbeat_interval_ms / 1000)

    def _watch_cache(self) -> None:
        from ..pipelines.files import byte_cache

        options = self._options
        byte_cache.watch(options.cache_directory, options.cache_bytes, self._stopping)

    def _reconcile(self, response: pb.WorkerHeartbeatResponse) -> None:
        """Make the running tasks and streams match the dispatcher's list."""
        self._heard_s = time.monotonic()
        self._dispatcher.learn(response.journal)
        self._data_keys.learn(response.data_keys)
        if response.journal.journal_id != self.journal_id:
            self._bundle_reports.forget()
            self._errors.forget()
        self.tasks.handle(JournalSeen(response.journal.journal_id))
        self._registration.version = response.version
        listed = {task.task_id: task for task in response.tasks}
        unfinished = {runner.task.task_id for runner in self.tasks.unfinished()}
        read = (unfinished - listed.keys()) & self._blocks.sessions.read_tasks()
        self.tasks.handle(Listed(response.worker_id, listed, read, time.monotonic()))
        self._streams.reconcile(response.streams, partial=response.streams_are_partial)
        self.tasks.forget_ended()


def dispatcher_handlers(dispatcher: str) -> list[grpc.GenericRpcHandler[Any, Any]]:
    """Every method of a dispatcher fails here, with the right address."""
    error = InvalidArgument(
        f"this address is a worker's; use the address of its dispatcher instead: {dispatcher}"
    )
    services = (SERVICE, pb), ("tensorflow.data.DispatcherService", tf)
    return [refusing_handler(*each, error, is_async=False) for each in services]


def may_run_python(options: WorkerOptions) -> bool:
    """Whoever reaches the dispatcher can have this worker run code. If both listen on loopback,
    only programs of this machine can."""
    dispatchers = parse_service(options.dispatcher)
    hosts = [options.host, *(address.rpartition(":")[0] for address in dispatchers)]
    return options.allow_python or all(map(is_loopback, hosts))


def _output(
    task: pb.Task, options: WorkerOptions, listener: Listener | None, budget: MemoryBudget
) -> TaskOutput:
    if task.cross_trainer_cache:
        cache_bytes, ahead_bytes = options.cross_trainer_cache_size_bytes, options.output_bytes
        return CachedOutput(cache_bytes, listener, ahead_bytes=ahead_bytes, budget=budget)
    if task.num_consumers:
        return RoundsOutput(task.num_consumers, options.output_bytes, listener, budget)
    return FirstComeOutput(options.output_bytes, listener, budget)

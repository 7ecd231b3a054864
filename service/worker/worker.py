"""The worker: stateless, it runs the tasks that the dispatcher lists for it.

One thread asks the dispatcher what to run (a heartbeat that is answered when the list
changes) and starts and stops tasks accordingly. That is the whole of its recovery too: a
dispatcher that was restarted with its state, or had given this worker up, lists the same tasks;
one whose journal was in memory, or was repaired, lists none, and registers this worker anew. One
that has lost a journal which was meant to last refuses the heartbeat: this worker waits for the
right one to come back.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc

from ...journal.proto import events_pb2 as ev
from ..connections import tunnel
from ..connections.dispatcher_client import DispatcherClient, parse_service
from ..connections.grpc_server import SERVER_OPTIONS, bind, told_address
from ..connections.protocols import GRPC, SERVED, TCP
from ..connections.relay import grpc_is_used
from ..delivery import AnyOutput, CachedOutput, Listener, RoundsOutput, TaskOutput
from ..errors import ForebayError
from ..pipelines import PythonRules
from ..proto import forebay_pb2 as pb
from ..proto.metrics_pb2 import TaskMetrics
from ..transport import BlockServer
from . import misdirected
from .element_face import ElementFace
from .observer import Observer
from .options import WorkerOptions
from .saves import StreamWriters
from .task_states import (
    BeginAnew,
    Cancel,
    Drain,
    DrainAsked,
    Ended,
    Event,
    HandedOut,
    Instruction,
    JournalSeen,
    Listed,
    NotMade,
    Start,
    StopAsked,
    TaskStates,
)
from .tasks import Arrivals, Datasets, Pipelines, TaskRunner

log = logging.getLogger(__name__)

GRPC_THREADS = 256
"""Stock clients wait for elements in calls, so this bounds how many can at a time. In a coordinated
read all wait for the last of them. A thread is there once it was needed."""

GONE_CHECK_S = 0.5
"""While it drains: how often the dispatcher is asked whether consumers that are away have gone."""

STOP_S = 3.0
"""For tasks to end, once they are cancelled."""

STARTING = 2
"""Tasks that load their graphs at a time: hundreds at once would leave the interpreter to nobody
else for long."""


class Worker:
    """`start` registers it, `stop` ends it and leaves no thread behind."""

    def __init__(
        self,
        options: WorkerOptions,
        *,
        observer: Observer | None = None,
        pipelines: Pipelines | None = None,
    ) -> None:
        """`observer` is told what is lost, in place of the log; tasks have their runs from
        `pipelines`.
        """
        self._options = options
        self._observer = observer or Observer()
        self._pipelines = pipelines or Pipelines()
        self.uid = secrets.randbits(62) + 1  # of this process, for all to know it by
        self._dispatcher = DispatcherClient(options.dispatcher)
        self._datasets = Datasets(self._dispatcher)
        # Never behind the calls of the tasks: who is late is given up.
        self._beats = DispatcherClient(options.dispatcher, own_connection=True)
        self._blocks = BlockServer(self.uid, options.host, options.data_port)
        self._states = TaskStates()
        self._runners: dict[int, TaskRunner] = {}  # of each task that is not absent there
        self._ending: list[TaskRunner] = []  # cancelled, and not yet over
        self._lock = threading.Lock()  # of these three
        self._starting = threading.Semaphore(STARTING)
        self._streams = StreamWriters(self.uid, self._dispatcher, options)
        self._stopping = threading.Event()
        self._heartbeats = threading.Thread(
            target=self._heartbeat, name="forebay-heartbeat", daemon=True
        )
        self._registration = pb.WorkerHeartbeatRequest()
        self.address = ""
        self._face = ElementFace(self.runner_of)
        grpc_is_used()
        self._grpc = grpc.server(
            ThreadPoolExecutor(
                GRPC_THREADS + tunnel.MAX_TUNNELS, thread_name_prefix="forebay-worker-grpc"
            ),
            handlers=[
                self._face.handlers(),
                tunnel.handlers(self._blocks.serve),
                *misdirected.handlers(options.dispatcher),
            ],
            options=[*SERVER_OPTIONS, *tunnel.SERVER_OPTIONS],
        )

    def start(self) -> None:
        """Listen, and register with the dispatcher.

        Raises AddressInUse, InvalidArgument for a library of custom ops that cannot be loaded, and
        Unavailable when no dispatcher answers within its timeout.
        """
        options = self._options
        told_address(options.address, f"{options.host}:1")  # before it takes long
        self._pipelines.load(options.load_op_library)
        try:
            bound = bind(self._grpc, options.host, options.port)
            self.address = told_address(options.address, bound)
            self._pipelines.python = PythonRules(
                _may_run_python(options), options.processes, self.address
            )
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
            self._obey(self._beat(patience_s=options.dispatcher_timeout_ms / 1000))
        except BaseException:
            self.stop()
            raise
        self._registration.wait_ms = options.heartbeat_interval_ms
        self._heartbeats.start()

    def stop(self, *, drain: bool = False) -> bool:
        """End every task and leave the service. Idempotent.

        With `drain`, splits that were leased and not begun are handed back first, and
        consumers take what has been begun, and saves what has been written, for at most the drain
        timeout. Whether those that read have got all of it; what was dropped is in the log.
        """
        if self._stopping.is_set():
            return True
        delivered = self._drain() if drain else True
        self._stopping.set()
        metrics = self._metrics()
        self._handle(StopAsked())
        self._streams.cancel()
        self._blocks.stop()
        if self._states.worker_id:
            try:
                # Once, over the heartbeats' connection, which follows the leader: a dispatcher that
                # is away finds out by itself.
                request = pb.LeaveServiceRequest(worker_id=self._states.worker_id, metrics=metrics)
                self._beats.call(request, pb.LeaveServiceResponse, timeout_s=2, patience_s=0)
            except ForebayError as error:
                log.info("could not say goodbye to the dispatcher: %s", error)
        # Stock clients' last elements are on their way; calls that wait end, as outputs have.
        quiet_s = self._options.shutdown_quiet_period_ms / 1000
        self._grpc.stop(max(quiet_s, STOP_S) if drain else quiet_s).wait()
        self._dispatcher.close()
        self._beats.close()
        if self._heartbeats.is_alive():
            self._heartbeats.join()
        give_up_s = time.monotonic() + STOP_S
        for runner in self._ending:  # only now: the heartbeat may just have cancelled one
            if not runner.join(max(0.0, give_up_s - time.monotonic())):
                log.warning("task %d is still in an element, and is left", runner.task.task_id)
        self._streams.join(give_up_s)
        self._pipelines.close()
        return delivered

    def _data_addresses(self) -> list[tuple[str, str]]:
        """Where blocks are to be had, the best way first, as clients are told."""
        bound = f"{self.address.rpartition(':')[0]}:{self._blocks.port}"
        addresses = dict(self._blocks.addresses)
        addresses[TCP] = told_address(self._options.data_address, bound, "--data-address")
        addresses[GRPC] = self.address
        wanted = self._options.data_transfer_protocol
        return [(p, addresses[p]) for p in SERVED if wanted is None or p == wanted]

    @property
    def journal_id(self) -> str:
        """Of the dispatcher's journal; empty before one has answered."""
        return self._states.journal_id

    def unread(self) -> list[int]:
        """The tasks here that nobody reads: draining waits for nobody who would come for them."""
        with self._lock:
            unfinished = self._states.unfinished()
        return [task_id for task_id in unfinished if not self._is_read(task_id)]

    @property
    def num_tasks(self) -> int:
        """Of those that have not ended."""
        with self._lock:
            return len(self._states.unfinished())

    @property
    def streams(self) -> list[tuple[int, str, bool]]:
        """Of saves that it writes: number, path, and whether it has come to its end."""
        return self._streams.progress()

    def runner_of(self, task_id: int) -> TaskRunner | None:
        """Of a task that runs here, or ran here lately."""
        with self._lock:
            return self._runners.get(task_id)

    # -- tasks -----------------------------------------------------------------------------------

    def _handle(self, event: Event) -> list[Instruction]:
        """Start and cancel what is to be; all that is to be done, for whoever does the rest."""
        with self._lock:
            instructions = self._states.handle(event)
            cancelled = []
            for instruction in instructions:
                match instruction:
                    case Start(task):
                        self._start(task)
                    case Cancel(task_id, given_up):
                        cancelled.append((self._runners.pop(task_id), given_up))
            self._ending += [runner for runner, _ in cancelled]
        for instruction in instructions:
            if isinstance(instruction, BeginAnew):
                self._observer.journal_changed(*instruction)
                self._blocks.forget_all()
        for runner, given_up in cancelled:
            if given_up and (what := runner.undelivered()) is not None:
                self._observer.given_up(runner.task, what)
            runner.cancel()
            self._blocks.remove_task(runner.task.task_id)
        return instructions

    def _start(self, task: pb.Task) -> None:
        # Whatever one task lacks, what else is to be done is done.
        try:
            runner = self._make(task)
        except Exception:
            log.exception("task %d cannot be made, and is tried again", task.task_id)
            self._states.handle(NotMade(task.task_id))
            return
        try:
            runner.start()
        except (RuntimeError, MemoryError) as error:  # no thread is to be had
            log.error("task %d cannot be started: %s", task.task_id, error)
            runner.output.fail("RESOURCE_EXHAUSTED", f"the worker cannot start the task: {error}")
            self._states.handle(Ended(task.task_id))

    def _make(self, task: pb.Task) -> TaskRunner:
        # Nobody reads a shard again that was read to its end: it must have arrived.
        arrivals = Arrivals() if task.num_shards else None
        output = _output(task, self._options, arrivals)
        runner = TaskRunner(
            task, self._dispatcher, output, self._starting, self._pipelines, self._observer,
            self._told, arrivals, self._datasets,
        )  # fmt: skip
        self._blocks.add_task(task.task_id, output)
        self._runners[task.task_id] = runner
        return runner

    def _told(self, runner: TaskRunner, event: HandedOut | Ended) -> list[Instruction]:
        """By a runner, of its task. One that was cancelled has no more to say: its task may be
        another one's by now, as another journal counts anew."""
        with self._lock:
            if self._runners.get(event.task_id) is not runner:
                return []
            return self._states.handle(event)

    def _drain(self) -> bool:
        give_up_s = time.monotonic() + self._options.drain_timeout_ms / 1000
        self._say_that_it_drains()
        self._streams.drain()
        instructions = self._handle(DrainAsked())
        with self._lock:
            shall = {i.task_id for i in instructions if isinstance(i, Drain)}
            draining = [runner for i, runner in self._runners.items() if i in shall]
            runners = [self._runners[i] for i in self._states.unfinished()]
        if draining:
            with ThreadPoolExecutor(len(draining), thread_name_prefix="forebay-drain") as pool:
                list(pool.map(lambda runner: runner.drain(give_up_s), draining))
        for runner in runners:
            self._wait_for_consumers(partial(self._has_ended_or_is_unread, runner), give_up_s)
        # Of completed tasks, too, blocks may be on their way.
        received = self._blocks.wait_until_received
        self._wait_for_consumers(lambda within_s: not received(within_s), give_up_s)
        self._streams.join(give_up_s)
        lacking = received(0)
        delivered = True
        with self._lock:
            runners = list(dict.fromkeys([*runners, *self._runners.values()]))
        for runner in runners:
            task_id = runner.task.task_id
            if (what := runner.undelivered(lacking.get(task_id, 0))) is not None:
                is_read = self._is_read(task_id)
                delivered &= not is_read
                self._observer.dropped(
                    runner.task, what,
                    is_read=is_read, drain_timeout_ms=self._options.drain_timeout_ms,
                )  # fmt: skip
        return delivered

    def _say_that_it_drains(self) -> None:
        """So that nothing new comes: once, and with each heartbeat from now on."""
        self._registration.draining = True
        if not self._states.worker_id:
            return
        request = pb.WorkerHeartbeatRequest()
        request.CopyFrom(self._registration)
        request.version = request.wait_ms = 0
        try:
            self._dispatcher.call(request, pb.WorkerHeartbeatResponse, timeout_s=2, patience_s=0)
        except ForebayError as error:
            log.info("the dispatcher hears later that this worker drains: %s", error)

    def _wait_for_consumers(self, done: Callable[[float], bool], give_up_s: float) -> None:
        """Until `done` (within so many seconds) is true, but for consumers that have gone."""
        while not done(max(0.0, min(GONE_CHECK_S, give_up_s - time.monotonic()))):
            if time.monotonic() >= give_up_s:
                return
            self._forget_gone()

    def _has_ended_or_is_unread(self, runner: TaskRunner, within_s: float) -> bool:
        return not self._is_read(runner.task.task_id) or runner.join(within_s)

    def _forget_gone(self) -> None:
        """A killed process says nothing over TCP but that its connections end, as a cut network
        does: who has not come back to the dispatcher either does not come for its blocks."""
        request = pb.FindGoneConsumersRequest(consumer_ids=self._blocks.away())
        if not request.consumer_ids:
            return
        try:
            found = self._dispatcher.call(
                request, pb.FindGoneConsumersResponse, timeout_s=1, patience_s=GONE_CHECK_S
            )
        except ForebayError as error:
            log.info("whether consumers have gone is not known: %s", error)
            return
        if lacking := self._blocks.forget_gone(found.gone):
            self._observer.consumers_forgotten(list(found.gone), lacking)

    def _is_read(self, task_id: int) -> bool:
        return self._blocks.is_read(task_id) or self._face.is_read(task_id)

    # -- the dispatcher ------------------------------------------------------------------------

    def _metrics(self) -> list[TaskMetrics]:
        """Of the tasks that are here, those that are only kept included: a dispatcher keeps what it
        is told in memory, and a new one is to know it as well."""
        with self._lock:
            runners = [*self._runners.values()]
        return [metrics for runner in runners if (metrics := runner.metrics()) is not None]

    def _beat(self, patience_s: float | None = None) -> pb.WorkerHeartbeatResponse:
        request = pb.WorkerHeartbeatRequest(metrics=self._metrics())
        request.MergeFrom(self._registration)
        return self._beats.call(
            request,
            pb.WorkerHeartbeatResponse,
            timeout_s=self._registration.wait_ms / 1000 + 5,
            patience_s=patience_s,
            closed=self._stopping,
        )

    def _heartbeat(self) -> None:
        while not self._stopping.is_set():
            try:
                self._obey(self._beat())
            except ForebayError as error:
                if not self._stopping.is_set():
                    log.error("the dispatcher refuses this worker's heartbeat: %s", error)
            except Exception:  # a bug; a worker that is silently deaf would be worse than one
                log.exception("the heartbeat failed, and is tried again")
            else:
                continue
            self._stopping.wait(self._options.heartbeat_interval_ms / 1000)

    def _obey(self, response: pb.WorkerHeartbeatResponse) -> None:
        """Run what the dispatcher lists, and nothing else."""
        self._dispatcher.learn(response.journal)
        self._handle(JournalSeen(response.journal.journal_id))
        self._registration.version = response.version
        listed = {task.task_id: task for task in response.tasks}
        with self._lock:
            unlisted = [i for i in self._states.unfinished() if i not in listed]
        read = {i for i in unlisted if self._blocks.is_read(i)}
        self._handle(Listed(response.worker_id, listed, read, time.monotonic()))
        self._streams.obey(response.streams)
        with self._lock:
            self._ending = [runner for runner in self._ending if not runner.join(0)]


def _may_run_python(options: WorkerOptions) -> bool:
    """What a dispatcher lists is code of whoever reaches it: of programs of this machine alone if
    it is on loopback, as this worker is."""
    dispatchers = parse_service(options.dispatcher)
    hosts = [options.host, *(address.rpartition(":")[0] for address in dispatchers)]
    return options.allow_python or all(map(_is_loopback, hosts))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _output(task: pb.Task, options: WorkerOptions, listener: Listener | None) -> TaskOutput:
    """What the task's consumers read, by the policy of its job."""
    if task.cross_trainer_cache:
        cache_bytes = options.cross_trainer_cache_size_bytes
        return CachedOutput(cache_bytes, listener, ahead_bytes=options.output_bytes)
    if task.num_consumers:
        return RoundsOutput(task.num_consumers, options.output_bytes, listener)
    return AnyOutput(options.output_bytes, listener)

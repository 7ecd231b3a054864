"""The worker: stateless, it runs the tasks that the dispatcher lists for it.

One thread sends heartbeats. The dispatcher answers when its task list changes, and the thread
starts and stops tasks to match the list. Recovery needs nothing else:

- A dispatcher that restarted with its state, or had given this worker up, lists the same tasks.
- One whose journal was in memory, or was repaired, registers this worker anew and lists no tasks.
- One that lost a durable journal refuses the heartbeat, and the worker keeps retrying.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc

from ...journal.proto import events_pb2 as ev
from ..connections import tunnel
from ..connections.dispatcher_client import DispatcherClient, parse_service
from ..connections.grpc_server import SERVER_OPTIONS, bind, told_address
from ..connections.protocols import GRPC, SERVED, TCP
from ..connections.relay import grpc_is_used
from ..delivery import (
    AnyOutput,
    CachedOutput,
    Listener,
    MemoryBudget,
    RoundsOutput,
    TaskOutput,
)
from ..errors import ForebayError
from ..pipelines import PythonRules
from ..proto import forebay_pb2 as pb
from ..proto.metrics_pb2 import TaskMetrics
from ..transport import MAX_AWAY_BYTES, BlockServer
from . import not_a_dispatcher
from .element_face import ElementFace
from .idle import IdleTasks
from .memory import default_budget
from .observer import Observer
from .options import WorkerOptions
from .saves import StreamWriters
from .task_pipeline import Datasets, Pipelines
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
from .tasks import DeliveryCounter, TaskRunner

log = logging.getLogger(__name__)

GRPC_THREADS = 256
"""A waiting stock client holds a thread, so this bounds how many can wait at a time. In a
coordinated read all clients wait for the last one. The pool creates threads on demand."""

MIN_AWAY_BYTES = 64 << 20
"""The least that may be held for disconnected consumers, so that a network cut loses nothing."""

GONE_CHECK_S = 0.5
"""A draining worker asks the dispatcher this often whether disconnected consumers are gone."""

STOP_S = 3.0
"""How long `stop` waits for cancelled tasks to end."""

STARTING = 2
"""How many tasks load their graphs at a time. Hundreds at once would starve other threads."""


class Worker:
    """`start` registers the worker; `stop` ends it and leaves no thread behind."""

    def __init__(
        self,
        options: WorkerOptions,
        *,
        observer: Observer | None = None,
        pipelines: Pipelines | None = None,
    ) -> None:
        """`observer` is told about lost elements; the default one logs them. Tasks open their
        pipelines with `pipelines`.
        """
        self._options = options
        self._observer = observer or Observer()
        self._pipelines = pipelines or Pipelines()
        self.uid = secrets.randbits(62) + 1  # identifies this process
        self._dispatcher = DispatcherClient(options.dispatcher)
        self._datasets = Datasets(self._dispatcher)
        # Heartbeats never queue behind the tasks' calls: the dispatcher gives up a late worker.
        self._beats = DispatcherClient(options.dispatcher, own_connection=True)
        budget_bytes = options.memory_budget or default_budget()
        self._idle = IdleTasks(
            self._unfinished, self._read_tasks, self._forget_left, self._observer,
            budget_bytes, options.expected_s, options.kept_pipelines,
        )  # fmt: skip
        self._blocks = BlockServer(
            self.uid, options.host, options.data_port,
            max_away_bytes=min(MAX_AWAY_BYTES, max(budget_bytes // 4, MIN_AWAY_BYTES)),
        )  # fmt: skip
        self._states = TaskStates()
        self._runners: dict[int, TaskRunner] = {}  # of each task that is not ABSENT in _states
        self._ending: list[TaskRunner] = []  # cancelled, threads still running
        self._lock = threading.Lock()  # guards the three fields above
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
                *not_a_dispatcher.handlers(options.dispatcher),
            ],
            options=[*SERVER_OPTIONS, *tunnel.SERVER_OPTIONS],
        )

    def start(self) -> None:
        """Listen, and register with the dispatcher.

        Raises AddressInUse, InvalidArgument for a library of custom ops that cannot be loaded, and
        Unavailable when no dispatcher answers within its timeout.
        """
        options = self._options
        told_address(options.address, f"{options.host}:1")  # fail early, before slow imports
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
        self._idle.start()

    def stop(self, *, drain: bool = False) -> bool:
        """End every task and leave the service. Idempotent.

        With `drain`, the worker first returns unstarted splits. It then delivers begun splits to
        consumers and commits chunks being saved, within the drain timeout. Returns False if
        elements of a task that is being read were dropped; the observer gets the details.
        """
        if self._stopping.is_set():
            return True
        self._idle.stop()
        delivered = self._drain() if drain else True
        self._stopping.set()
        metrics = self._metrics()
        self._handle(StopAsked())
        self._streams.cancel()
        self._blocks.stop()
        if self._states.worker_id:
            try:
                # No retry: an unreachable dispatcher notices the missed heartbeats. The
                # heartbeats' connection follows the leader.
                request = pb.LeaveServiceRequest(worker_id=self._states.worker_id, metrics=metrics)
                self._beats.call(request, pb.LeaveServiceResponse, timeout_s=2, patience_s=0)
            except ForebayError as error:
                log.info("could not say goodbye to the dispatcher: %s", error)
        # Let gRPC send the last elements to stock clients. Waiting calls return, as outputs ended.
        quiet_s = self._options.shutdown_quiet_period_ms / 1000
        self._grpc.stop(max(quiet_s, STOP_S) if drain else quiet_s).wait()
        self._dispatcher.close()
        self._beats.close()
        if self._heartbeats.is_alive():
            self._heartbeats.join()
        give_up_s = time.monotonic() + STOP_S
        for runner in self._ending:  # after the join above: the heartbeat may just have added one
            if not runner.join(max(0.0, give_up_s - time.monotonic())):
                log.warning("task %d is still in an element, and is left", runner.task.task_id)
        self._streams.join(give_up_s)
        self._pipelines.close()
        return delivered

    def _data_addresses(self) -> list[tuple[str, str]]:
        """Protocols and addresses of the data plane, as told to clients, preferred first."""
        bound = f"{self.address.rpartition(':')[0]}:{self._blocks.port}"
        addresses = dict(self._blocks.addresses)
        addresses[TCP] = told_address(self._options.data_address, bound, "--data-address")
        addresses[GRPC] = self.address
        wanted = self._options.data_transfer_protocol
        return [(p, addresses[p]) for p in SERVED if wanted is None or p == wanted]

    @property
    def journal_id(self) -> str:
        """The id of the dispatcher's journal; empty before the first answer."""
        return self._states.journal_id

    def _unfinished(self) -> list[TaskRunner]:
        with self._lock:
            return [self._runners[i] for i in self._states.unfinished() if i in self._runners]

    def _read_tasks(self) -> set[int]:
        """The tasks for which `_is_read` is true."""
        return self._blocks.read_tasks() | self._face.read_tasks()

    def unread(self) -> list[int]:
        """The unfinished tasks without consumers. `stop` doesn't wait for these to be read."""
        with self._lock:
            unfinished = self._states.unfinished()
        return [task_id for task_id in unfinished if not self._is_read(task_id)]

    @property
    def num_tasks(self) -> int:
        """The number of unfinished tasks."""
        with self._lock:
            return len(self._states.unfinished())

    @property
    def streams(self) -> list[tuple[int, str, bool]]:
        """The save streams written here: number, the save's path, and whether it is complete."""
        return self._streams.progress()

    def runner_of(self, task_id: int) -> TaskRunner | None:
        """The runner of a current or recently completed task; None if unknown."""
        with self._lock:
            return self._runners.get(task_id)

    # -- tasks -----------------------------------------------------------------------------------

    def _handle(self, event: Event) -> list[Instruction]:
        """Carry out Start, Cancel and BeginAnew; return all instructions for the caller."""
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
        # A task that fails to start must not stop the other instructions.
        try:
            runner = self._make(task)
        except Exception:
            log.exception("task %d cannot be made, and is tried again", task.task_id)
            self._states.handle(NotMade(task.task_id))
            return
        try:
            runner.start()
        except (RuntimeError, MemoryError) as error:  # no thread available
            log.error("task %d cannot be started: %s", task.task_id, error)
            runner.output.fail("RESOURCE_EXHAUSTED", f"the worker cannot start the task: {error}")
            self._states.handle(Ended(task.task_id))

    def _make(self, task: pb.Task) -> TaskRunner:
        # A completed shard is never read again, so it completes only once its elements arrived.
        counter = DeliveryCounter() if task.num_shards else None
        output = _output(task, self._options, counter, self._idle.budget)
        runner = TaskRunner(
            task, self._dispatcher, output, self._starting, self._pipelines, self._observer,
            self._told, counter, self._datasets,
        )  # fmt: skip
        self._blocks.add_task(task.task_id, output)
        self._runners[task.task_id] = runner
        return runner

    def _told(self, runner: TaskRunner, event: HandedOut | Ended) -> list[Instruction]:
        """Handle a runner's event. Events of cancelled runners are ignored: after a journal
        change the same task id may belong to another runner."""
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
        # Completed tasks, too, may have blocks in flight.
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
        """Stop new assignments: tell the dispatcher now and with each later heartbeat."""
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
        """Call `done(within_s)` until it is true, and meanwhile forget consumers that are gone."""
        while not done(max(0.0, min(GONE_CHECK_S, give_up_s - time.monotonic()))):
            if time.monotonic() >= give_up_s:
                return
            self._forget_gone()

    def _has_ended_or_is_unread(self, runner: TaskRunner, within_s: float) -> bool:
        return not self._is_read(runner.task.task_id) or runner.join(within_s)

    def _forget_left(self) -> None:
        """Forget consumers that the dispatcher has given up, and tasks that no stock client reads
        any more: those don't tell the worker when they leave."""
        self._forget_gone(left=True, task_ids=self._face.read_tasks())

    def _forget_gone(self, *, left: bool = False, task_ids: Iterable[int] = ()) -> None:
        """Over TCP a killed process looks like a network cut. A consumer counts as gone if it has
        not reconnected to the dispatcher either."""
        request = pb.FindGoneConsumersRequest(
            consumer_ids=self._blocks.away(), left=left, task_ids=task_ids
        )
        if not (request.consumer_ids or request.task_ids):
            return
        try:
            found = self._dispatcher.call(
                request, pb.FindGoneConsumersResponse, timeout_s=1, patience_s=GONE_CHECK_S
            )
        except ForebayError as error:
            log.info("whether consumers have gone is not known: %s", error)
            return
        self._face.forget(found.unread_task_ids)
        if lacking := self._blocks.forget_gone(found.gone):
            self._observer.consumers_forgotten(list(found.gone), lacking)

    def _is_read(self, task_id: int) -> bool:
        return self._blocks.is_read(task_id) or self._face.is_read(task_id)

    # -- the dispatcher ------------------------------------------------------------------------

    def _metrics(self) -> list[TaskMetrics]:
        """The metrics of all tasks, KEPT ones included: dispatchers hold metrics only in memory,
        and a new one needs them too."""
        with self._lock:
            runners = [*self._runners.values()]
        return [metrics for runner in runners if (metrics := runner.pipeline.metrics()) is not None]

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
            except Exception:  # a bug; a worker without heartbeats would be worse
                log.exception("the heartbeat failed, and is tried again")
            else:
                continue
            self._stopping.wait(self._options.heartbeat_interval_ms / 1000)

    def _obey(self, response: pb.WorkerHeartbeatResponse) -> None:
        """Make the running tasks and streams match the dispatcher's list."""
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
    """Whoever reaches the dispatcher can have this worker run code. If both listen on loopback,
    only programs of this machine can."""
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


def _output(
    task: pb.Task, options: WorkerOptions, listener: Listener | None, budget: MemoryBudget
) -> TaskOutput:
    """The output that implements the delivery policy of the task's job."""
    if task.cross_trainer_cache:
        cache_bytes, ahead_bytes = options.cross_trainer_cache_size_bytes, options.output_bytes
        return CachedOutput(cache_bytes, listener, ahead_bytes=ahead_bytes, budget=budget)
    if task.num_consumers:
        return RoundsOutput(task.num_consumers, options.output_bytes, listener, budget)
    return AnyOutput(options.output_bytes, listener, budget)

"""The worker: stateless, it runs the tasks that the dispatcher lists for it.

One thread asks the dispatcher what to run (a heartbeat that is answered when the list
changes) and starts and stops tasks accordingly. That is the whole of its recovery too: a
dispatcher that was restarted with its state, or had given this worker up, lists the same tasks;
one whose journal was in memory, or was repaired, lists none, and registers this worker anew. One
that has lost a journal which was meant to last refuses the heartbeat: this worker waits for the
right one to come back.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import grpc

from ...journal.proto import events_pb2 as ev
from ..blocks import BLOCK_BYTES
from ..connections import tunnel
from ..connections.dispatcher_client import DispatcherClient
from ..connections.grpc_server import SERVER_OPTIONS, bind, told_address
from ..connections.protocols import GRPC, SERVED, TCP
from ..delivery import AnyOutput
from ..errors import ForebayError
from ..pipelines import load
from ..proto import forebay_pb2 as pb
from ..transport import BlockServer
from .tasks import TaskRunner
from .tensorflow_face import TensorFlowFace

log = logging.getLogger(__name__)

GRPC_THREADS = 32
"""Stock clients wait for elements in calls, so this bounds how many can at a time."""

GONE_CHECK_S = 0.5
"""While it drains: how often the dispatcher is asked whether consumers that are away have gone."""

STOP_S = 3.0
"""For tasks to end, once they are cancelled."""

STARTING = 2
"""Tasks that load their graphs at a time: hundreds at once would leave the interpreter to nobody
else for long."""

COME_BACK_S = 5.0
"""For consumers to find a worker that had been given up, before what they do not read is let go."""

KEPT_COMPLETED = 64
"""Completed tasks that late consumers may still ask for."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """`address` and `data_address` are what clients are told; by default, host and port.

    "%port%" in them stands for the port. `data_transfer_protocol` is the only way that blocks
    are offered, "unix", "tcp" or "grpc"; by default, all of them are.
    """

    dispatcher: str
    host: str = "127.0.0.1"
    port: int = 0
    data_port: int = 0
    address: str = ""
    data_address: str = ""
    data_transfer_protocol: str | None = None
    tags: tuple[str, ...] = ()
    heartbeat_interval_ms: int = 5_000  # the longest that a heartbeat waits for a change
    dispatcher_timeout_ms: int = 60_000
    output_bytes: int = BLOCK_BYTES  # of finished blocks a task, before it waits for consumers
    drain_timeout_ms: int = 20_000  # with what follows, up to 10 s, Kubernetes' 30 s


class Worker:
    """`start` registers it, `stop` ends it and leaves no thread behind."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._uid = secrets.randbits(62) + 1
        self._dispatcher = DispatcherClient(options.dispatcher)
        # Never behind the calls of the tasks: who is late is given up.
        self._beats = DispatcherClient(options.dispatcher, own_connection=True)
        self._blocks = BlockServer(self._uid, options.host, options.data_port)
        self._tasks: dict[int, TaskRunner] = {}
        self._completed: dict[int, TaskRunner] = {}
        self._ending: list[TaskRunner] = []  # cancelled, and not yet over
        self._tasks_lock = threading.Lock()
        self._starting = threading.Semaphore(STARTING)
        self._stopping = threading.Event()
        self._draining = False
        self._heartbeats = threading.Thread(
            target=self._heartbeat, name="forebay-heartbeat", daemon=True
        )
        self._registration = pb.WorkerHeartbeatRequest()
        self._worker_id = 0
        self._came_back_s = -math.inf
        self._journal_id = ""
        self.address = ""
        self._face = TensorFlowFace(self.runner_of)
        self._grpc = grpc.server(
            ThreadPoolExecutor(
                GRPC_THREADS + tunnel.MAX_TUNNELS, thread_name_prefix="forebay-worker-grpc"
            ),
            handlers=[self._face.handlers(), tunnel.handlers(self._blocks.serve)],
            options=[*SERVER_OPTIONS, *tunnel.SERVER_OPTIONS],
        )

    def start(self) -> None:
        """Listen, and register with the dispatcher.

        Raises AddressInUse, and Unavailable when no dispatcher answers within its timeout.
        """
        options = self._options
        told_address(options.address, f"{options.host}:1")  # before it takes long
        load()
        try:
            bound = bind(self._grpc, options.host, options.port)
            self.address = told_address(options.address, bound)
            self._blocks.start()
            self._grpc.start()
            self._registration = pb.WorkerHeartbeatRequest(
                address=self.address,
                uid=self._uid,
                tags=options.tags,
                transfer_servers=[
                    ev.TransferServer(protocol=protocol, address=address)
                    for protocol, address in self._data_addresses()
                ],
                wait_ms=0,
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
        consumers take what has been begun, for at most the drain timeout. Whether those that
        read have got all of it; what was dropped is in the log.
        """
        if self._stopping.is_set():
            return True
        delivered = self._drain() if drain else True
        self._stopping.set()
        runners = self._take_all()
        for runner in runners:
            runner.cancel()
        self._blocks.stop()
        if self._worker_id:
            try:
                request = pb.LeaveServiceRequest(worker_id=self._worker_id)
                self._dispatcher.call(request, pb.LeaveServiceResponse, timeout_s=2, patience_s=2)
            except ForebayError as error:
                log.info("could not say goodbye to the dispatcher: %s", error)
        # Stock clients' last elements are on their way; calls that wait end, as outputs have.
        self._grpc.stop(STOP_S if drain else 0).wait()
        self._dispatcher.close()
        self._beats.close()
        if self._heartbeats.is_alive():
            self._heartbeats.join()
        runners += self._ending  # only now: the heartbeat may just have cancelled one
        give_up_s = time.monotonic() + STOP_S
        for runner in runners:
            if not runner.join(max(0.0, give_up_s - time.monotonic())):
                log.warning("task %d is still in an element, and is left", runner.task.task_id)
        return delivered

    def _data_addresses(self) -> list[tuple[str, str]]:
        """Where blocks are to be had, the best way first, as clients are told."""
        bound = f"{self.address.rpartition(':')[0]}:{self._blocks.port}"
        addresses = dict(self._blocks.addresses)
        addresses[TCP] = told_address(self._options.data_address, bound, "--data-address")
        addresses[GRPC] = self.address
        wanted = self._options.data_transfer_protocol
        return [(p, addresses[p]) for p in SERVED if wanted is None or p == wanted]

    def _take_all(self) -> list[TaskRunner]:
        with self._tasks_lock:
            runners = [*self._tasks.values(), *self._completed.values()]
            self._tasks.clear()
            self._completed.clear()
        return runners

    def runner_of(self, task_id: int) -> TaskRunner | None:
        """Of a task that runs here, or ran here lately."""
        with self._tasks_lock:
            return self._tasks.get(task_id) or self._completed.get(task_id)

    def _drain(self) -> bool:
        self._draining = True
        give_up_s = time.monotonic() + self._options.drain_timeout_ms / 1000
        with self._tasks_lock:
            runners = list(self._tasks.values())
        if runners:
            with ThreadPoolExecutor(len(runners), thread_name_prefix="forebay-drain") as pool:
                list(pool.map(lambda runner: runner.drain(give_up_s), runners))
        for runner in runners:
            self._wait_for_consumers(partial(self._has_ended_or_is_unread, runner), give_up_s)
        # Of completed tasks, too, blocks may be on their way.
        received = self._blocks.wait_until_received
        self._wait_for_consumers(lambda within_s: not received(within_s), give_up_s)
        lacking = received(0)
        delivered = True
        for runner in dict.fromkeys([*runners, *self._completed.values()]):
            task_id = runner.task.task_id
            if what := runner.undelivered(lacking.get(task_id, 0)):
                is_read = self._is_read(task_id)
                delivered &= not is_read
                log.warning(
                    "of task %d of dataset %s are dropped: %s; %s",
                    task_id, runner.task.dataset_id, what,
                    f"its readers did not take them within {self._options.drain_timeout_ms} ms: "
                    "a longer --drain-timeout-ms gives them more time"
                    if is_read else "nobody reads it",
                )  # fmt: skip
        return delivered

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
            log.warning(
                "consumers %s have gone, and lack %d elements that were sent: they have come back "
                "neither here nor to the dispatcher", list(found.gone), lacking,
            )  # fmt: skip

    def _is_read(self, task_id: int) -> bool:
        return self._blocks.is_read(task_id) or self._face.is_read(task_id)

    # -- the dispatcher ------------------------------------------------------------------------

    def _beat(self, patience_s: float | None = None) -> pb.WorkerHeartbeatResponse:
        return self._beats.call(
            self._registration,
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
        journal_id = response.journal.journal_id
        if self._journal_id not in ("", journal_id):
            log.warning(
                "the dispatcher has another journal (%s, was %s), since that was in memory, or was "
                "repaired; this worker begins anew", journal_id, self._journal_id,
            )  # fmt: skip
            self._blocks.forget_all()
            for runner in self._take_all():
                runner.cancel()
                self._ending.append(runner)
        # Given up, we were perhaps stopped, and what consumers have told us lies in the sockets.
        if self._worker_id not in (0, response.worker_id):
            self._came_back_s = time.monotonic()
        came_back = time.monotonic() - self._came_back_s < COME_BACK_S
        self._worker_id, self._journal_id = response.worker_id, journal_id
        self._registration.version = response.version
        listed = {task.task_id: task for task in response.tasks}
        with self._tasks_lock:
            if self._stopping.is_set():
                return
            # Who reads a task of an iteration that went on without us still gets what was begun.
            gone = [
                runner
                for i, runner in self._tasks.items()
                if i not in listed
                and (runner.drained.is_set() or not (came_back or self._blocks.is_read(i)))
            ]
            new = [task for i, task in listed.items() if i not in self._tasks]
            for runner in gone:
                del self._tasks[runner.task.task_id]
                if runner.drained.is_set():
                    self._completed[runner.task.task_id] = runner
            while len(self._completed) > KEPT_COMPLETED:
                gone.append(self._completed.pop(next(iter(self._completed))))
            for task in [] if self._draining else new:
                output = AnyOutput(self._options.output_bytes)
                runner = TaskRunner(task, self._dispatcher, output, self._starting)
                self._tasks[task.task_id] = runner
                self._blocks.add_task(task.task_id, output)
                runner.start()
        for runner in gone:
            if runner.task.task_id not in self._completed:
                if what := runner.undelivered(0):
                    log.info("task %d is given up, with %s", runner.task.task_id, what)
                runner.cancel()
                self._blocks.remove_task(runner.task.task_id)
                self._ending.append(runner)  # its thread may be in an element for long
        self._ending = [runner for runner in self._ending if not runner.join(0)]

"""The worker's gRPC service for stock tf.data clients, which fetch elements one by one."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

import grpc

from ..blocks import Block
from ..connections.credentials import NO_TENSORFLOW
from ..connections.grpc_server import refusing_handler, threaded_handler
from ..delivery import (
    ANY,
    MAX_TRAINERS,
    Cached,
    End,
    EndOfTask,
    ReadRequest,
    Rounds,
    RoundsOutput,
    Skips,
    Subscription,
    TaskFailed,
    TaskUnknown,
)
from ..errors import PermissionDenied, PipelineError, Unavailable
from ..pipelines import response_maker
from ..proto import tf_service_pb2 as pb
from .tasks import WorkerTask

log = logging.getLogger(__name__)

SERVICE = "tensorflow.data.WorkerService"
WAIT_S = 10.0
"""A call waits this long for an element; then the client is told to retry."""

EXPECTED_S = 2.0
"""Consumers of a coordinated read may know a task this much earlier than its worker does."""

LOOK_S = 0.02
LOOK_AGAIN_S = 1.0


class TfDataWorkerServicer:
    """The methods of tensorflow.data.WorkerService that clients call on a Forebay worker."""

    def __init__(self, runner_of: Callable[[int], WorkerTask | None]) -> None:
        self._runner_of = runner_of
        self._elements: dict[int, _Elements] = {}
        self._lock = threading.Lock()

    def handlers(self, *, serves: bool = True) -> grpc.GenericRpcHandler[Any, Any]:
        """The service, for a threaded server. If not `serves`, it refuses all calls."""
        if not serves:
            return refusing_handler(SERVICE, pb, PermissionDenied(NO_TENSORFLOW), is_async=False)
        return threaded_handler(
            SERVICE,
            {
                "GetElement": (self.get_element, pb.GetElementRequest, pb.GetElementResponse),
                "GetWorkerTasks": (
                    lambda _: pb.GetWorkerTasksResponse(),
                    *(pb.GetWorkerTasksRequest, pb.GetWorkerTasksResponse),
                ),
                "ProcessTask": (  # does nothing: the heartbeat lists the task, too
                    lambda _: pb.ProcessTaskResponse(),
                    *(pb.ProcessTaskRequest, pb.ProcessTaskResponse),
                ),
            },
        )

    def read_tasks(self) -> set[int]:
        """The tasks that clients have asked for. Clients that left are not noticed here."""
        with self._lock:
            return set(self._elements)

    def forget(self, task_ids: Iterable[int]) -> None:
        """Mark these tasks as unread: their clients have left."""
        with self._lock:
            gone = set(task_ids)
            self._elements = {i: e for i, e in self._elements.items() if i not in gone}

    def get_element(
        self, request: pb.GetElementRequest, is_awaited: Callable[[], bool] = lambda: True
    ) -> pb.GetElementResponse:
        runner = self._runner_of(request.task_id)
        if runner is None and request.HasField("consumer_index"):
            # A task of a coordinated read is removed if none of its consumers finds it.
            give_up_s = time.monotonic() + EXPECTED_S
            while runner is None and time.monotonic() < give_up_s:
                time.sleep(LOOK_S)
                runner = self._runner_of(request.task_id)
        with self._lock:
            if runner is None:
                self._elements.pop(request.task_id, None)
                # Not here yet, or no more: clients retry until the dispatcher tells them.
                raise Unavailable(f"Task {request.task_id} not found")
            elements = self._elements.get(request.task_id)
            if elements is None or elements.runner is not runner:
                is_in_rounds = isinstance(runner.output, RoundsOutput)
                elements = (_RoundElements if is_in_rounds else _TaskElements)(runner)
                known = {i: e for i, e in self._elements.items() if self._runner_of(i) is e.runner}
                self._elements = {**known, request.task_id: elements}
        return elements.get(request, is_awaited)


class _Elements(ABC):
    """Serves a task's elements to stock clients."""

    def __init__(self, runner: WorkerTask) -> None:
        self.runner = runner
        self._respond: Callable[[Block], pb.GetElementResponse] | None = None

    @abstractmethod
    def get(
        self, request: pb.GetElementRequest, is_awaited: Callable[[], bool]
    ) -> pb.GetElementResponse:
        """`is_awaited` says whether the client still waits. Raises PipelineError, Unavailable."""

    def _response(self, item: Block | End | None) -> pb.GetElementResponse:
        if isinstance(item, Block):
            if self._respond is None:
                self._respond = response_maker(self.runner.pipeline.definition)
            return self._respond(item)
        if isinstance(item, TaskFailed):
            raise PipelineError(item.code, item.message)
        if item is None:
            raise Unavailable("no element is ready yet; ask again")
        raise Unavailable("the task has been stopped")


class _TaskElements(_Elements):
    """Gives each element to one client, or with a cross-trainer cache to every trainer."""

    def __init__(self, runner: WorkerTask) -> None:
        super().__init__(runner)
        output = runner.output
        self._opened = lru_cache(MAX_TRAINERS)(lambda request: (output.open(request), Skips()))
        self._opening = threading.Lock()  # else one request could be opened twice

    def get(self, request: pb.GetElementRequest, _: Callable[[], bool]) -> pb.GetElementResponse:
        cached = self.runner.task.cross_trainer_cache
        item = self.next(Cached(request.trainer_id) if cached else ANY)
        if isinstance(item, EndOfTask):
            return pb.GetElementResponse(end_of_sequence=True)
        return self._response(item)

    def next(self, request: ReadRequest) -> Block | End | None:
        """A block of one element; None on timeout."""
        with self._opening:
            opened, skips = self._opened(request)
        item = _next_element(opened)
        if isinstance(item, Block) and item.skipped and skips.add(item.skipped):
            log.warning(  # stock clients cannot be told
                "%s of task %d has skipped %d elements so far, which had left the cross-trainer "
                "cache: others are faster, and --cross-trainer-cache-size-bytes lets them be "
                "further ahead", request, self.runner.task.task_id, skips.elements,
            )  # fmt: skip
        return item


class _RoundElements(_Elements):
    """Gives each consumer one element a round, once all consumers have asked for the round.

    No consumer passes a round that another has not asked for. So an unanswered consumer can still
    go on without the task.
    """

    def __init__(self, runner: WorkerTask) -> None:
        super().__init__(runner)
        assert isinstance(runner.output, RoundsOutput)
        self._consumers = runner.output.num_consumers
        self._requested: dict[int, int] = {}  # consumer: the last round that it asked for
        self._opened = [
            runner.output.open(Rounds(consumer, self._consumers))
            for consumer in range(self._consumers)
        ]
        self._turns = [threading.Lock() for _ in self._opened]  # one call a consumer at a time
        self._given: dict[int, tuple[int, pb.GetElementResponse]] = {}  # by consumer: last round
        self._changed = threading.Condition()

    def get(
        self, request: pb.GetElementRequest, is_awaited: Callable[[], bool]
    ) -> pb.GetElementResponse:
        consumer, number = request.consumer_index, request.round_index
        asks = request.HasField("consumer_index") and request.HasField("round_index")
        if not (asks and 0 <= consumer < self._consumers and number >= 0):
            raise PipelineError(
                "FAILED_PRECONDITION",
                f"Requesting data for consumer index {consumer}, but the task is configured for "
                f"only {self._consumers} consumers, each of which names itself and a round",
            )
        while not self._turns[consumer].acquire(timeout=LOOK_AGAIN_S):
            _require(is_awaited)
        try:
            return self._next(consumer, number, is_awaited)
        finally:
            self._turns[consumer].release()

    def _next(
        self, consumer: int, number: int, is_awaited: Callable[[], bool]
    ) -> pb.GetElementResponse:
        with self._changed:
            reached, response = self._given.get(consumer, (-1, None))
            if response is not None and number == reached:
                return response  # a retry after a lost response
            if number <= reached:
                raise PipelineError(
                    "FAILED_PRECONDITION",
                    f"Consumer {consumer} requested data for round {number}, but the current round "
                    f"has already reached {reached}. This may indicate that the consumer was "
                    "restarted with the same iteration name.",
                )
            self._requested[consumer] = number
            self._changed.notify_all()
            # Wait here: a client told to retry asks the dispatcher first, which waits for all.
            while not self._changed.wait_for(partial(self._all_ask_for, number), LOOK_AGAIN_S):
                if self._is_cancelled(consumer):
                    break
                _require(is_awaited)
        # Without a timeout: the task would be removed if all consumers were told to retry.
        while (item := _next_element(self._opened[consumer])) is None:
            _require(is_awaited)
        response = self._response(item)
        with self._changed:
            self._given[consumer] = number, response
        return response

    def _is_cancelled(self, consumer: int) -> bool:
        opened = self._opened[consumer]
        return not isinstance(opened, Subscription) or opened.next(credit=False) == TaskUnknown()

    def _all_ask_for(self, number: int) -> bool:
        return len(self._requested) == self._consumers and min(self._requested.values()) >= number


def _require(is_awaited: Callable[[], bool]) -> None:
    """Raise Unavailable if the client is gone, so that its retries don't pile up threads."""
    if not is_awaited():
        raise Unavailable("the client that asked for an element has gone")


def _next_element(opened: Subscription | End) -> Block | End | None:
    """A block of one element; None on timeout. The rest of its block stays for later calls."""
    if not isinstance(opened, Subscription):
        return opened
    give_up = time.monotonic() + WAIT_S
    while True:
        wait_s = max(0.0, give_up - time.monotonic())
        item = opened.wait(wait_s, max_elements=1)
        if not isinstance(item, Block) or item.count:
            return item

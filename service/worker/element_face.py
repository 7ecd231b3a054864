"""The worker's side of TensorFlow's protocol: elements one by one, for stock clients."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from ..blocks import Block
from ..connections.grpc_server import generic_handler
from ..delivery import ANY, Cached, End, EndOfTask, Order, Skips, Subscription, TaskFailed
from ..errors import PipelineError, Unavailable, Unimplemented
from ..pipelines import response_maker
from ..proto import tf_service_pb2 as pb
from .tasks import TaskRunner

log = logging.getLogger(__name__)

SERVICE = "tensorflow.data.WorkerService"
WAIT_S = 10.0
"""After that the client is told to ask again."""


class ElementFace:
    """The methods of tensorflow.data.WorkerService that reach a worker of ours."""

    def __init__(self, runner_of: Callable[[int], TaskRunner | None]) -> None:
        self._runner_of = runner_of
        self._elements: dict[int, _TaskElements] = {}
        self._lock = threading.Lock()

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        """The service, for a threaded server."""
        return generic_handler(
            SERVICE,
            {
                "GetElement": (self.get_element, pb.GetElementRequest, pb.GetElementResponse),
                "GetWorkerTasks": (
                    self.get_worker_tasks, pb.GetWorkerTasksRequest, pb.GetWorkerTasksResponse,
                ),
                "ProcessTask": (self.process_task, pb.ProcessTaskRequest, pb.ProcessTaskResponse),
            },
        )  # fmt: skip

    def is_read(self, task_id: int) -> bool:
        """Whether a client has asked for the task's elements."""
        with self._lock:
            return task_id in self._elements

    def get_element(self, request: pb.GetElementRequest) -> pb.GetElementResponse:
        if request.HasField("consumer_index"):
            raise Unimplemented(
                "Forebay's workers have no coordinated reads yet, which consumer "
                f"{request.consumer_index} asks for: leave consumer_index and num_consumers out, "
                "or have only tf.data service's own workers"
            )
        runner = self._runner_of(request.task_id)
        with self._lock:
            if runner is None:
                self._elements.pop(request.task_id, None)
                # Not here yet, or no more: a client asks on until the dispatcher says which.
                raise Unavailable(f"Task {request.task_id} not found")
            elements = self._elements.get(request.task_id)
            if elements is None or elements.runner is not runner:
                elements = _TaskElements(runner)
                known = {i: e for i, e in self._elements.items() if self._runner_of(i) is e.runner}
                self._elements = {**known, request.task_id: elements}
        cached = runner.task.cross_trainer_cache
        return elements.next(Cached(request.trainer_id) if cached else ANY)

    def get_worker_tasks(self, _: pb.GetWorkerTasksRequest) -> pb.GetWorkerTasksResponse:
        return pb.GetWorkerTasksResponse()

    def process_task(self, _: pb.ProcessTaskRequest) -> pb.ProcessTaskResponse:
        """Nothing to do: the heartbeat lists the task, too."""
        return pb.ProcessTaskResponse()


class _TaskElements:
    """The elements of a task, to whoever asks next; or to each trainer, in a cached job."""

    def __init__(self, runner: TaskRunner) -> None:
        self.runner = runner
        self._opened: dict[Order, Subscription | End] = {}
        self._skips: dict[Order, Skips] = {}
        self._respond: Callable[[Block], pb.GetElementResponse] | None = None

    def next(self, order: Order) -> pb.GetElementResponse:
        item = self._next_element(order)
        if isinstance(item, Block):
            if self._respond is None:
                self._respond = response_maker(self.runner.definition)
            return self._respond(item)
        if isinstance(item, EndOfTask):
            return pb.GetElementResponse(end_of_sequence=True)
        if isinstance(item, TaskFailed):
            raise PipelineError(item.code, item.message)
        if item is None:
            raise Unavailable("no element is ready yet; ask again")
        raise Unavailable("the task has been stopped")

    def _next_element(self, order: Order) -> Block | End | None:
        """In a block of its own. The rest of its block stays, for whoever asks next."""
        opened = self._opened.get(order)
        if opened is None:
            opened = self._opened.setdefault(order, self.runner.output.open(order))
        if not isinstance(opened, Subscription):
            return opened
        give_up = time.monotonic() + WAIT_S
        while True:
            wait_s = max(0.0, give_up - time.monotonic())
            item = opened.wait(wait_s, max_elements=1)
            if not isinstance(item, Block) or item.count:
                if isinstance(item, Block) and item.skipped:
                    self._say_skipped(order, item.skipped)
                return item

    def _say_skipped(self, order: Order, elements: int) -> None:
        """Stock clients cannot be told."""
        skips = self._skips.setdefault(order, Skips())
        if skips.add(elements):
            log.warning(
                "%s of task %d has skipped %d elements so far, which had left the cross-trainer "
                "cache: others are faster, and --cross-trainer-cache-size-bytes lets them be "
                "further ahead", order, self.runner.task.task_id, skips.elements,
            )  # fmt: skip

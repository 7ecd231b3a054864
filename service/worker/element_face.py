"""The worker's side of TensorFlow's protocol: elements one by one, for stock clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from ..blocks import Block
from ..connections.grpc_server import generic_handler
from ..delivery import ANY, End, EndOfTask, Subscription, TaskFailed
from ..errors import PipelineError, Unavailable, Unimplemented
from ..pipelines import response_maker
from ..proto import tf_service_pb2 as pb
from .tasks import TaskRunner

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
        if request.trainer_id:
            raise Unimplemented(
                f"Forebay's workers have no cross-trainer cache yet, which the trainer "
                f"{request.trainer_id!r} asks for: leave cross_trainer_cache out, or have only "
                "tf.data service's own workers"
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
        return elements.next()

    def get_worker_tasks(self, _: pb.GetWorkerTasksRequest) -> pb.GetWorkerTasksResponse:
        return pb.GetWorkerTasksResponse()

    def process_task(self, _: pb.ProcessTaskRequest) -> pb.ProcessTaskResponse:
        """Nothing to do: the heartbeat lists the task, too."""
        return pb.ProcessTaskResponse()


class _TaskElements:
    """The elements of a task, to whoever asks next."""

    def __init__(self, runner: TaskRunner) -> None:
        self.runner = runner
        self._opened = runner.output.open(ANY)
        self._respond: Callable[[Block], pb.GetElementResponse] | None = None

    def next(self) -> pb.GetElementResponse:
        item = self._next_element()
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

    def _next_element(self) -> Block | End | None:
        """In a block of its own. The rest of its block stays, for whoever asks next."""
        if not isinstance(self._opened, Subscription):
            return self._opened
        give_up = time.monotonic() + WAIT_S
        while True:
            wait_s = max(0.0, give_up - time.monotonic())
            item = self._opened.wait(wait_s, max_elements=1)
            if not isinstance(item, Block) or item.count:
                return item

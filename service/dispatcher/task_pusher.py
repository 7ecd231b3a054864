"""Pushes new tasks to TensorFlow's workers, which otherwise poll only every 30 seconds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable

import grpc

from ...journal.proto import events_pb2 as ev
from ..connections.grpc_server import connect
from ..errors import ForebayError
from ..proto import tf_service_pb2 as pb
from .dispatcher import Dispatcher

log = logging.getLogger(__name__)

PUSHERS = 8
MAX_WAITING = 10_000
"""The most queued pushes; the workers' heartbeats fetch the others."""
TIMEOUT_S = 10.0
PATIENCE_S = 2.0
"""How long a client that joins an iteration is kept waiting for its tasks to be pushed."""


class TaskPusher:
    """Calls ProcessTask of a stock worker for each task created for it.

    A push may fail or be left out: the worker's heartbeat fetches the task. A worker ignores a
    task that arrives twice. `task_def` returns None for ended tasks. Each push holds its `turn`.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        task_def: Callable[[int], Awaitable[pb.TaskDef | None]],
        turn: Callable[[Iterable[int]], contextlib.AbstractAsyncContextManager[None]],
    ) -> None:
        self._dispatcher = dispatcher
        self._task_def = task_def
        self._turn = turn
        self._waiting: asyncio.Queue[int] = asyncio.Queue(MAX_WAITING)
        self._unpushed: dict[int, asyncio.Future[None]] = {}
        self._pushers = [
            asyncio.create_task(self._push_all(), name=f"forebay-push-{i}") for i in range(PUSHERS)
        ]
        for pusher in self._pushers:
            pusher.add_done_callback(dispatcher.task_ended)
        # An earlier leader may have died before it pushed these.
        for worker in dispatcher.state.workers.values():
            if worker.stock:
                for task_id in worker.tasks:
                    self._add(task_id)
        dispatcher.subscribe(self._see)

    async def wait_until_pushed(self, task_ids: Iterable[int]) -> None:
        """Wait until these tasks' pushes have ended, for at most PATIENCE_S."""
        unpushed = [self._unpushed[i] for i in task_ids if i in self._unpushed]
        if unpushed:
            await asyncio.wait(unpushed, timeout=PATIENCE_S)

    async def close(self) -> None:
        """Cancel queued and running pushes."""
        for pusher in self._pushers:
            pusher.cancel()
        await asyncio.wait(self._pushers)

    def _see(self, event: ev.Event) -> None:
        for kind in ("task_created", "task_proposed"):
            if event.HasField(kind):
                task = getattr(event, kind)
                worker = self._dispatcher.state.workers.get(task.worker_id)
                if worker is not None and worker.stock:
                    self._add(task.task_id)

    def _add(self, task_id: int) -> None:
        if task_id not in self._unpushed and not self._waiting.full():
            self._waiting.put_nowait(task_id)
            self._unpushed[task_id] = asyncio.get_running_loop().create_future()

    async def _push_all(self) -> None:
        while True:
            task_id = await self._waiting.get()
            try:
                async with self._turn([task_id]):
                    await self._push(task_id)
            except grpc.aio.AioRpcError as error:
                self._log(task_id, f"{error.code().name}: {error.details()}")
            except ForebayError as error:
                self._log(task_id, str(error))
            finally:
                self._unpushed.pop(task_id).set_result(None)

    def _log(self, task_id: int, reason: str) -> None:
        log.info(
            "task %d was not pushed, its worker's heartbeat will fetch it: %s", task_id, reason
        )

    async def _push(self, task_id: int) -> None:
        await self._dispatcher.settled()
        if (task := await self._task_def(task_id)) is None:
            return
        async with connect(task.worker_address, is_async=True) as channel:
            call = channel.unary_unary(
                "/tensorflow.data.WorkerService/ProcessTask",
                request_serializer=pb.ProcessTaskRequest.SerializeToString,
                response_deserializer=pb.ProcessTaskResponse.FromString,
            )
            await call(pb.ProcessTaskRequest(task=task), timeout=TIMEOUT_S)

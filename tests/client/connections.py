"""In place of a consumer's connections."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from forebay.journal.proto import events_pb2 as ev
from forebay.service.blocks import Block, Component
from forebay.service.client.consumer import Consumer
from forebay.service.client.options import ReadOptions
from forebay.service.errors import Unavailable
from forebay.service.proto import forebay_pb2 as pb


class Dispatcher:
    """Has nothing to say."""

    def call_numbered(self, _: Any, response: type[Any]) -> Any:
        return response(consumer_id=1)

    def call(
        self, _: Any, response: type[Any], *, closed: threading.Event | None = None, **__: Any
    ) -> Any:
        if closed is None:
            return response()
        closed.wait()
        raise Unavailable("the consumer was closed")


class Client:
    """In place of a connection. Keeps what it was told."""

    all: dict[int, Client]  # by the worker's uid

    def __init__(
        self, _: Any, *, worker_uid: int, deliver: Callable[..., None], **__: object
    ) -> None:
        self.deliver = deliver
        self.all[worker_uid] = self
        self.reads: list[int] = []
        self.stopped: list[int] = []
        self.held = 0
        self.silence: tuple[bool, float] = (False, 0.0)
        self.connected = True
        self.closed = False

    def read(self, task_id: int, _: object) -> None:
        self.reads.append(task_id)

    def start(self) -> None: ...

    def send(self, task_id: int, *numbers: int) -> None:
        self.held += 1
        self.deliver(task_id, 0, Block(len(numbers), (Component(np.array(numbers)),)))

    def taken(self, _: Block, __: object = None) -> None:
        self.held -= 1

    def stop_task(self, task_id: int) -> None:
        self.stopped.append(task_id)

    def silent(self) -> tuple[bool, float]:
        return self.silence

    def hand_back(self, _: object) -> None: ...

    def hang_up(self) -> None: ...

    def close(self, _: float = 0.0) -> bool:
        self.closed = True
        return True


def task(task_id: int, worker_uid: int | None = None, **info: Any) -> pb.TaskInfo:
    """A task as the dispatcher lists it. By default its worker's uid is its id and 10."""
    return pb.TaskInfo(
        task_id=task_id,
        worker_uid=10 + task_id if worker_uid is None else worker_uid,
        worker_address=f"h:{task_id}",
        transfer_servers=[ev.TransferServer(protocol="tcp", address="h:1")],
        **info,
    )


def news(*task_ids: int, **info: Any) -> pb.ConsumerHeartbeatResponse:
    """The dispatcher lists these tasks."""
    return pb.ConsumerHeartbeatResponse(tasks=[task(i, **info) for i in task_ids])


@contextlib.contextmanager
def consuming(**options: Any) -> Iterator[Consumer]:
    """A consumer that has joined, and is closed at the end. The test has the fixture `connections`
    or its own."""
    dispatcher: Any = Dispatcher()
    joined = pb.JoinIterationResponse(consumer_id=1)
    consumer = Consumer(dispatcher, joined, credit_bytes=1, options=ReadOptions(**options))
    try:
        yield consumer
    finally:
        consumer.close()

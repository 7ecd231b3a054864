"""In place of a consumer's connections."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from forebay.service.blocks import Block, Component
from forebay.service.errors import Unavailable


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

"""Lets a child that builds its dataset ask its worker for splits while it sends blocks.

TensorFlow's threads ask, and one thread sends blocks. A third thread receives, and passes each
answer to the thread that asked.
"""

from __future__ import annotations

import itertools
import os
import queue
import socket
import threading
import traceback
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from ....journal.proto import events_pb2 as ev
from ..splits import SplitRange
from .child_blocks import MESSAGE_BYTES, Sender


class ListeningSender(Sender):
    """A Sender with a thread that receives, also while another one sends."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self._told: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._freed = threading.Condition()
        self._listening = threading.Thread(
            target=self._listen, name="forebay-listening", daemon=True
        )

    def told(self) -> list[Any]:
        if self._listening.ident is None:
            self._listening.start()
        return self._told.get()

    def _listen(self) -> None:
        try:
            while True:
                self._hear(self._receive())
        except BaseException:  # noqa: BLE001 - else threads would wait for answers forever
            traceback.print_exc()
            os._exit(1)

    def _read(self, flags: int) -> tuple[bytes, list[int]]:
        data, descriptors, *_ = socket.recv_fds(self._connection, MESSAGE_BYTES, 2)
        return data, descriptors

    def _hear(self, message: list[Any]) -> None:
        match message:
            case ["free", slabs, abandoned, blocks]:
                with self._freed:
                    self._free(slabs, abandoned, blocks)
                    self._freed.notify()
            case _:
                self._told.put(message)

    def _wait_for_credit(self) -> None:
        with self._freed:
            self._freed.wait_for(lambda: self._credit > 0)

    def _spend_credit(self) -> None:
        with self._freed:
            super()._spend_credit()


class Asker(ListeningSender):
    """A Sender through which several threads may ask."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self._numbers = itertools.count()
        self._asking = threading.Lock()
        self._answers: dict[int, tuple[AskedFeed, Future[Any]]] = {}

    def ask(self, feed: AskedFeed, what: str, *about: Any) -> Any:
        """The answer, once it arrives; None when the feed is closed. Thread-safe."""
        answer: Future[Any] = Future()
        with self._asking:
            if feed.closed:
                return None
            number = next(self._numbers)
            self._answers[number] = feed, answer
            self.send(["ask", number, what, *about])
        return answer.result()

    def close(self, feed: AskedFeed) -> None:
        """Close a feed: pending and future questions get None. Thread-safe."""
        with self._asking:
            feed.closed = True
        for number, (whose, _) in list(self._answers.items()):
            if whose is feed:
                self._answer(number, None)

    def _answer(self, number: int, said: Any) -> None:
        _, answer = self._answers.pop(number, (None, None))
        if answer is not None:  # else its feed was closed
            answer.set_result(said)

    def _hear(self, message: list[Any]) -> None:
        match message:
            case ["answer", number, said]:
                self._answer(number, said)
            case _:
                super()._hear(message)


class AskedFeed:
    """A feed that asks the worker, for one run; close it."""

    def __init__(self, sources: Sequence[ev.SplitSource], asker: Asker) -> None:
        self.sources = sources
        self.closed = False  # then all questions get None
        self._asker = asker

    def next_range(self, source: int, opening: int, endless: bool) -> SplitRange | None:
        match self._asker.ask(self, "range", source, opening, endless):
            case [first, count, pass_number, names]:
                return SplitRange(first, count, pass_number, tuple(names))
        return None

    def is_over(self, sources: Iterable[int]) -> bool:
        return self._asker.ask(self, "over", list(sources)) is not False

    def close(self) -> None:
        self._asker.close(self)

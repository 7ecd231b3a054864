"""WorkerClient: the base of BlockClient and LocalClient. A thread delivers one worker's blocks."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator

from ..blocks import Block
from ..delivery import ANY, End, EndPending, ReadRequest, TaskFailed
from .messages import Key


class WorkerClient(ABC):
    """Reads tasks of one worker. Thread-safe."""

    def __init__(
        self,
        name: str,
        deliver: Callable[[int, int, Block | End | EndPending], None],
        lost: Callable[[str], None],
    ) -> None:
        """The client's thread calls `deliver(task_id, subscription, block or end)`, in the order of
        each subscription; nothing follows an end. `deliver` must not wait: credit bounds the
        blocks. The thread calls `lost(reason)` once, if it cannot deliver any more although `close`
        was not called.
        """
        self._deliver = deliver
        self._lost = lost
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"forebay-blocks-of-{name}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    @abstractmethod
    def read(self, task_id: int, request: ReadRequest = ANY, subscription: int = 0) -> None:
        """Deliver the task's blocks. `request` must be of the kind that the task's policy serves.

        If a task has several subscriptions, each needs a unique number above 0.
        """

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is asked within the block is sent in few pieces, at the latest at its end."""
        yield

    @abstractmethod
    def stop_task(self, task_id: int, subscription: int = 0) -> None:
        """Deliver no more of it, once a delivery under way has returned."""

    @abstractmethod
    def taken(self, block: Block, key: Key | None = None) -> None:
        """The trainer has the block, or needs it no more: free its credit.

        Call it once for each delivered block. If the subscription hands back, call it in order, and
        with its `key`: the task and the subscription.
        """

    @abstractmethod
    def trace(self, traceparent: str) -> None:
        """The consumer waits in the span of this `traceparent`, and tells the worker. "": it does
        not wait, and tells nothing."""

    @property
    def connected(self) -> bool:
        """Whether the worker can send."""
        return True

    @abstractmethod
    def silent(self) -> tuple[bool, float]:
        """Whether connections are refused, as after the worker's process has ended; and how many
        seconds have passed without a connection or a message.
        """

    @abstractmethod
    def hand_back(self, given: tuple[Key, int] | None) -> None:
        """Say goodbye: subscriptions that hand back return all elements that were not taken.

        `given` is the subscription and the number of elements of the block that is being taken; the
        trainer keeps these.
        """

    @abstractmethod
    def hang_up(self) -> None:
        """End the connection, and soon the thread. Idempotent."""

    @abstractmethod
    def close(self, give_up_s: float = 0.0) -> bool:
        """Hang up, and join the thread; nothing is delivered afterwards. Idempotent.

        After `hand_back`, wait until the monotonic clock's `give_up_s` for the worker's answer.
        Returns whether the worker has heard the goodbye, or needs none.
        """

    def _join(self, timeout_s: float | None = None) -> None:
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    @abstractmethod
    def _read_on(self) -> str:
        """Deliver blocks until the client is closed, or cannot go on; return the reason."""

    @abstractmethod
    def _reading(self) -> Collection[Key]:
        """The subscriptions that have not ended."""

    def _run(self) -> None:
        reason = "its thread crashed; the log says why"
        try:
            reason = self._read_on()
        except Exception as error:  # a bug, or no memory: those who wait must learn of it
            for key in list(self._reading()):
                failed = f"reading from its worker failed: {error!r}"
                self._deliver(*key, TaskFailed("INTERNAL", failed))
            raise
        finally:
            if not self._closing.is_set():
                self._lost(reason)

"""What BlockClient and LocalClient have in common: one worker's blocks, delivered by a thread."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from ..blocks import Block
from ..delivery import ANY, End, HeldByOthers, Order, TaskFailed
from .messages import Key


class WorkerClient(ABC):
    """Reads tasks of one worker. Thread-safe."""

    def __init__(
        self,
        name: str,
        deliver: Callable[[int, int, Block | End | HeldByOthers], None],
        lost: Callable[[str], None],
    ) -> None:
        """`deliver(task_id, subscription, block or end)` is called in the order of each
        subscription, by a thread of the client's own; nothing follows an end. It must not wait:
        credit bounds what comes. `lost(reason)` is called by the same thread, once, when nothing
        will be delivered any more although `close` was not called.
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
    def read(self, task_id: int, order: Order = ANY, subscription: int = 0) -> None:
        """Have the task's blocks delivered, in an order that the task has.

        Who wants several subscriptions of a task gives each a number above 0, and none twice.
        """

    @abstractmethod
    def stop_task(self, task_id: int, subscription: int = 0) -> None:
        """Have no more of it delivered, as soon as a delivery under way has returned."""

    @abstractmethod
    def taken(self, block: Block, key: Key | None = None) -> None:
        """The trainer has the block, or nobody wants it: another may come in its place.

        To be called once for each block that was delivered. Of a subscription that hands back, in
        their order, with its `key`: the task and the subscription.
        """

    @abstractmethod
    def silent(self) -> tuple[bool, float]:
        """Whether connections are refused, as by a process that has ended, and for how many
        seconds there has been none, or nothing has come over it.
        """

    @abstractmethod
    def hand_back(self, given: tuple[Key, int] | None) -> None:
        """Say goodbye: of subscriptions that hand back, what was not taken goes to others, but for
        what was `given`: so many elements of the block that was delivered, and is being taken.
        """

    @abstractmethod
    def hang_up(self) -> None:
        """End the connection, and the thread soon. Idempotent."""

    @abstractmethod
    def close(self, give_up_s: float = 0.0) -> bool:
        """Hang up, and await the thread; nothing is delivered afterwards. Idempotent.

        After `hand_back` the worker has until `give_up_s`, of the monotonic clock, to hear it.
        Whether it has.
        """

    def _join(self, timeout_s: float | None = None) -> None:
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    @abstractmethod
    def _read_on(self) -> str:
        """Deliver what comes, until the client is closed or there is a reason why no more does."""

    @abstractmethod
    def _reading(self) -> Collection[Key]:
        """What has not ended."""

    def _run(self) -> None:
        reason = "its thread crashed; the log says why"
        try:
            reason = self._read_on()
        except Exception as error:  # a bug, or no memory: who waits must hear of it
            for key in list(self._reading()):
                failed = f"reading from its worker failed: {error!r}"
                self._deliver(*key, TaskFailed("INTERNAL", failed))
            raise
        finally:
            if not self._closing.is_set():
                self._lost(reason)

"""LocalClient: a consumer in the worker's process. It gets blocks without socket, encoding or copy.

`Sessions` handles retained blocks, credit, turns among consumers and ends as over any connection.
Only here no block is ever on its way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable

from ..block_limits import cost
from ..blocks import Block
from ..delivery import ANY, End, EndPending, ReadRequest
from ..platforms import at_fork
from ..proto import transfer_pb2 as pb
from .budget import Share
from .messages import Key
from .sending import Ended, Refusal, Sent
from .sessions import Sessions
from .worker_client import WorkerClient

running: dict[int, Sessions] = {}
"""Of this process, by the worker's uid: its consumers read from these without a connection."""
at_fork(after_in_child=running.clear)  # a child has none of their threads


def local_worker(uid: int) -> Sessions | None:
    """The sessions of a worker, or None if it does not run in this process."""
    return running.get(uid)


def has_local_workers() -> bool:
    """Whether any worker runs in this process."""
    return bool(running)


class LocalClient(WorkerClient):
    """Reads tasks of a worker of this process."""

    def __init__(
        self,
        worker: Sessions,
        *,
        consumer_id: int,
        deliver: Callable[[int, int, Block | End | EndPending], None],
        lost: Callable[[str], None],
        credit_bytes: int = 64 << 20,
        elements: Share | None = None,
    ) -> None:
        super().__init__(str(consumer_id), deliver, lost)
        self._worker = worker
        self._credit_bytes = credit_bytes
        self._elements = elements
        self._connection = worker.attach(consumer_id, lambda: None)
        self._subscribed: set[Key] = set()  # subscriptions that have not ended
        self._positions: dict[Key, pb.Position] = {}
        self._traceparent = ""  # of the consumer's wait
        self._moving = threading.Lock()  # of the positions: `hand_back` must see all that was taken

    def start(self) -> None:
        self._give(self._credit_bytes)
        super().start()

    def read(self, task_id: int, request: ReadRequest = ANY, subscription: int = 0) -> None:
        key = task_id, subscription
        self._subscribed.add(key)
        with self._moving:
            self._positions[key] = pb.Position(task_id=task_id, subscription=subscription)
        if self._traceparent:
            self._worker.trace(self._connection, self._traceparent, task_id)
        self._worker.read(self._connection, task_id, 0, request, subscription)

    def trace(self, traceparent: str) -> None:
        self._traceparent = traceparent
        if traceparent:
            self._worker.trace(self._connection, traceparent)

    def stop_task(self, task_id: int, subscription: int = 0) -> None:
        self._subscribed.discard((task_id, subscription))
        if subscription:
            with self._moving:
                self._positions.pop((task_id, subscription), None)
        self._worker.stop_reading(self._connection, task_id, subscription)

    def taken(self, block: Block, key: Key | None = None) -> None:
        if self._elements is not None:
            self._elements.taken(block.count)
        with self._moving:
            positions = []
            if key is not None and key in self._positions:
                position = self._positions[key]
                position.taken = min(position.taken + 1, position.received)
                positions.append(position)
            self._give(cost(block), positions)

    def silent(self) -> tuple[bool, float]:
        return False, 0.0  # the worker is always reachable

    def hand_back(self, given: tuple[Key, int] | None) -> None:
        with self._moving:
            self._closing.set()
            if given is not None and given[0] in self._positions:
                self._positions[given[0]].elements = given[1]
            self._worker.goodbye(self._connection, [*self._positions.values()])

    def hang_up(self) -> None:
        self._closing.set()
        if self._elements is not None:
            self._elements.leave()
        self._worker.detach(self._connection)

    def close(self, give_up_s: float = 0.0) -> bool:
        self.hang_up()
        self._join()
        return True

    def _reading(self) -> Collection[Key]:
        return self._subscribed

    def _read_on(self) -> str:
        reason = "it does not know this consumer any more"
        while (batch := self._worker.next_batch(self._connection)) is not None:
            for out in batch:
                match out:
                    case Sent():
                        self._receive(out)
                    case Ended(task_id, end, subscription):
                        if isinstance(end, EndPending):
                            self._deliver(task_id, subscription, end)
                        elif (task_id, subscription) in self._subscribed:
                            if subscription:
                                self.stop_task(task_id, subscription)
                            self._subscribed.discard((task_id, subscription))
                            self._deliver(task_id, subscription, end)
                    case Refusal(text, _):
                        reason = text
        return reason

    def _receive(self, sent: Sent) -> None:
        task_id, subscription = sent.task_id, sent.subscription
        with self._moving:
            position = self._positions.get((task_id, subscription))
            if position is not None:
                position.received = sent.number
                self._worker.give_credit(self._connection, 0, [position])
        if self._elements is not None:
            self._elements.received(sent.block.count)
        if (task_id, subscription) in self._subscribed:
            self._deliver(task_id, subscription, sent.block)
        else:
            self.taken(sent.block)

    def _give(self, size: int, positions: Iterable[pb.Position] = ()) -> None:
        elements = None
        if self._elements is not None:
            elements = self._elements.grant() if self._elements.is_due() else 0
        self._worker.give_credit(self._connection, size, positions, elements)

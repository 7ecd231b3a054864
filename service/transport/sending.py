"""One consumer's session, send buffers and connection: retained blocks, and credit.

A *session* is the worker's state of one consumer, and outlives its connections for a while. It has
a *send buffer* for each subscription of the consumer. A send buffer retains the blocks that the
consumer has not acknowledged, so that a cut connection loses nothing. If the subscription hands
back, it also holds the blocks that the trainer has not taken, so that others can get them. A
*connection* has an outbox, and the credit that is left.

Nothing here is thread-safe: sessions.py has the lock, and knows all consumers.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from ..blocks import Block, split
from ..delivery import End, EndPending, Subscription, TaskOutput, TaskUnknown
from ..errors import ProtocolError
from .messages import Key

BATCH_BYTES = 256 << 10  # of small blocks are sent together
MAX_RETAINED_BYTES = 256 << 20  # for one consumer; further blocks wait until it acknowledges some


class Sent(NamedTuple):
    """A block that was handed to a consumer."""

    task_id: int
    number: int
    block: Block
    cost: int
    compression: int = 0  # an events_pb2.BlockCompression
    subscription: int = 0


class Ended(NamedTuple):
    task_id: int
    end: End | EndPending
    subscription: int = 0


class Refusal(NamedTuple):
    """The last message of a connection."""

    reason: str
    broken: bool  # the consumer broke a rule on this connection; it may connect again


class Farewell(NamedTuple):
    """The last message of a connection whose consumer said goodbye."""


Outgoing = Sent | Ended | Refusal | Farewell


class SendBuffer:
    """One subscription of a consumer, and its blocks that are on their way."""

    def __init__(
        self, key: Key, subscription: Subscription, received: int, session: Session
    ) -> None:
        self.key = key
        self.subscription = subscription
        subscription.carrier = self
        self._session = session
        self.connection: Connection | None = None  # that it is read on, until its end is sent there
        self.number = received  # of the last block given to this consumer
        self.retained: deque[Sent] = deque()  # given and not acknowledged: up to `number`
        self.held: deque[Sent] = deque()  # received and not taken, if it may be handed back
        self.retained_bytes = 0  # of both
        self._pending: EndPending | None = None  # since the last block
        self.resend: deque[Sent] = deque()  # retained blocks to send again on this connection

    def received(self, count: int) -> None:
        """The consumer acknowledges the blocks up to `count`."""
        if not self.number - len(self.retained) <= count <= self.number:
            raise ProtocolError(
                f"{count} blocks of task {self.key[0]} were reported as received, after "
                f"{self.number - len(self.retained)} of the {self.number} sent"
            )
        arrived = self._until(count, self.retained)
        if self.subscription.hands_back:
            self.held += arrived
        else:
            self._done_with(arrived)

    def taken(self, count: int) -> bool:
        """The trainer has taken the blocks up to `count`; return whether any is newly taken."""
        if count > self.number - len(self.retained):
            raise ProtocolError(
                f"{count} blocks of task {self.key[0]} were reported as taken, and "
                f"{self.number - len(self.retained)} as received"
            )
        taken = self._until(count, self.held)
        self._done_with(taken)
        return bool(taken)

    def hand_back(self, taken: int, elements: int) -> None:
        """The consumer leaves: hand back all but the blocks up to `taken`, and the first `elements`
        of the next one.
        """
        self.taken(taken)
        left = [sent.block for sent in (*self.held, *self.retained)]
        if elements and left and self.number - len(left) == taken:
            if elements > left[0].count:
                raise ProtocolError(
                    f"{elements} elements of block {taken + 1} of task {self.key[0]} were reported "
                    f"as taken, which has {left[0].count}"
                )
            if elements == left[0].count:
                self.subscription.received([left.pop(0)])
            else:
                head, left[0] = split(left[0], elements)
                self.subscription.received([head])
        self.held.clear()
        self.retained.clear()
        self.subscription.hand_back(left)
        self.close()

    def resume(self, connection: Connection) -> None:
        """Continue on another connection: resend all retained blocks."""
        if self.connection is not None:
            self.connection.asleep.pop(self, None)
        self.resend = deque(self.retained)
        self._pending = None
        self.connection = connection
        self.subscription.set_round_trip(connection.round_trip_s)
        connection.buffers.append(self)

    def _until(self, count: int, sent: deque[Sent]) -> list[Sent]:
        found = []
        while sent and sent[0].number <= count:
            found.append(sent.popleft())
        return found

    def _done_with(self, sent: list[Sent]) -> None:
        if sent:
            self._retain(-sum(each.cost for each in sent))
            self.subscription.received([each.block for each in sent])

    def next(self, credit: bool, room: bool, max_elements: int | None) -> Sent | Ended | None:
        """The next message to send: a block only with `credit`, and a new one only with `room`.

        A new block has `max_elements` at most; a block that is sent again is unchanged.
        """
        if self.resend:
            return self.resend.popleft() if credit else None
        item = self.subscription.next(credit and room, max_elements)
        if item is None:
            return None
        task_id, subscription_number = self.key
        if isinstance(item, EndPending):
            if item == self._pending:
                return None
            self._pending = item
            return Ended(task_id, item, subscription_number)
        if not isinstance(item, tuple):
            self.connection = None
            return Ended(task_id, item, subscription_number)
        self._pending = None
        self.number += 1
        compression = self.subscription.output.compression
        sent = Sent(task_id, self.number, *item, compression, subscription_number)
        self.retained.append(sent)
        self._retain(sent.cost)
        return sent

    def _retain(self, size: int) -> None:
        self.retained_bytes += size
        self._session.retained_bytes += size

    def retry_s(self) -> float | None:
        """After how many seconds `next` may give a block although nothing changes, if ever."""
        return None if self.resend else self.subscription.retry_s()

    def close(self) -> None:
        """The consumer wants no more of it: drop the blocks that it lacks, or has not taken."""
        self.subscription.close([sent.block for sent in (*self.held, *self.retained)])
        self.held.clear()
        self.retained.clear()  # at once: reference cycles would keep the blocks until a collection
        self.resend.clear()
        self._retain(-self.retained_bytes)
        self.subscription.carrier = None


class Session:
    """One consumer."""

    def __init__(self, consumer_id: int) -> None:
        self.consumer_id = consumer_id
        self.buffers: dict[Key, SendBuffer] = {}
        self.connection: Connection | None = None
        self.left_at = 0.0
        self.retained_bytes = 0  # of its buffers

    def lacking(self) -> Counter[int]:
        """How many elements of each task the consumer was given and has not acknowledged."""
        found: Counter[int] = Counter()
        for (task_id, _), buffer in self.buffers.items():
            found[task_id] += sum(sent.block.count for sent in buffer.retained)
        return +found

    def close_buffer(self, key: Key) -> SendBuffer | None:
        """Close and return the buffer, if it exists."""
        buffer = self.buffers.pop(key, None)
        if buffer is not None:
            buffer.close()
        return buffer


class Connection:
    """One connection of a consumer. `cut` closes its socket, and may be called at any time."""

    def __init__(
        self,
        session: Session,
        lock: threading.Lock,
        cut: Callable[[], None],
        iteration_id: int | None = None,
    ) -> None:
        self.session = session
        self.iteration_id = iteration_id  # whose tasks may be read on it; None: all
        self.round_trip_s = 0.0  # set before anything is read on it
        self.cut = cut
        self.ready = threading.Condition(lock)  # the outbox has something, or it is closed
        self.outbox: deque[Outgoing] = deque()
        self.buffers: deque[SendBuffer] = deque()  # that may have something, served in turn
        self.asleep: dict[SendBuffer, None] = {}  # that have nothing until their outputs change
        self.credit = 0
        self.elements: int | None = None  # that may be sent, if they are counted
        # Subscriptions that the consumer has asked for; None once its first credit ends the list.
        self.resubscribed: set[Key] | None = set()
        self.closed = False
        self.ending = False  # nothing more is added to the outbox

    def refuse(self, refusal: Refusal) -> None:
        """Send this after the outbox, and then nothing more."""
        self.ending = True
        self.outbox.append(refusal)
        self.ready.notify()

    def close(self) -> None:
        """Send nothing more."""
        self.closed = True
        self.outbox.clear()
        self.ready.notify()

    def retry_s(self) -> float | None:
        """After how many seconds `fill` may find something although nothing changes, if ever."""
        times = [buffer.retry_s() for buffer in self.buffers]
        return min((seconds for seconds in times if seconds is not None), default=None)

    def wake(self, buffer: SendBuffer) -> None:
        """The buffer may have something."""
        if buffer in self.asleep:
            del self.asleep[buffer]
            self.buffers.append(buffer)

    def remove(self, buffer: SendBuffer) -> None:
        """Serve it no more."""
        if buffer in self.asleep:
            del self.asleep[buffer]
        else:
            self.buffers = deque(other for other in self.buffers if other is not buffer)

    def fill(self) -> None:
        """Fill the outbox from its buffers, as far as there is credit."""
        if self.ending or self.closed:
            return
        room = MAX_RETAINED_BYTES - self.session.retained_bytes
        batch = sum(out.cost for out in self.outbox if isinstance(out, Sent))
        misses = 0
        while batch < BATCH_BYTES and misses < len(self.buffers):
            buffer = self.buffers.popleft()
            credit = self.credit > 0 and self.elements != 0
            out = buffer.next(credit, room > 0, self.elements)
            if out is None and credit and room > 0 and buffer.subscription.sleeps:
                self.asleep[buffer] = None
                continue
            if out is None:
                self.buffers.append(buffer)
                misses += 1
                continue
            misses = 0
            self.outbox.append(out)
            if isinstance(out, Ended):
                if isinstance(out.end, EndPending):
                    self.buffers.append(buffer)
                elif isinstance(out.end, TaskUnknown):  # the consumer may subscribe again
                    self.session.close_buffer(buffer.key)
            else:
                self.buffers.append(buffer)
                self.credit -= out.cost
                if self.elements is not None:
                    self.elements = max(0, self.elements - out.block.count)
                room -= out.cost
                batch += out.cost


class Idle(dict[Connection, None]):
    """The connections whose senders wait, the longest first."""

    def wake(self, connection: Connection) -> None:
        """Fill an idle connection's outbox, and notify its sender if it has something to do."""
        if connection in self:
            connection.fill()
            if connection.outbox or connection.retry_s() is not None:
                del self[connection]
                connection.ready.notify()

    def wake_readers(self, output: TaskOutput) -> None:
        """Wake those that read from the output."""
        for connection in list(self):
            if any(buffer.subscription.output is output for buffer in connection.buffers):
                self.wake(connection)

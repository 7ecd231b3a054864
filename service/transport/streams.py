"""What is on its way to one consumer, and what it may have: the state of BlockServer's sessions.

A *session* is what the worker knows of a consumer. It outlives connections for a while: for
each subscription of the consumer to a task, a *stream*, it keeps the blocks that the consumer has
not yet said it received, so that a connection that is cut loses nothing. A *link* is one
connection: what is on its way to the consumer, and for how much more there is credit.

Nothing here is thread-safe: sessions.py has the lock, and knows all consumers.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from ..blocks import Block
from ..delivery import End, Subscription, TaskUnknown
from ..errors import ProtocolError
from .messages import Key

BATCH_BYTES = 256 << 10  # of small blocks leave together
MAX_RETAINED_BYTES = 256 << 20  # for one consumer; more waits until it says what it received


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
    end: End
    subscription: int = 0


class Refusal(NamedTuple):
    """The last that a link sends."""

    reason: str
    broken: bool  # a rule was, on this connection: another may be made


Outgoing = Sent | Ended | Refusal


class Stream:
    """A subscription, as it is carried to its consumer."""

    def __init__(self, key: Key, subscription: Subscription, received: int) -> None:
        self.key = key
        self.subscription = subscription
        self.link: Link | None = None  # that it is read on, until its end is sent there
        self.number = received  # of the last block handed to this consumer
        self.retained: deque[Sent] = deque()  # handed to it and not received: up to `number`
        self.retained_bytes = 0
        self.resend: deque[Sent] = deque()  # of these, what this connection still has to send

    def received(self, count: int) -> None:
        """The consumer has the blocks up to `count`."""
        if not self.number - len(self.retained) <= count <= self.number:
            raise ProtocolError(
                f"{count} blocks of task {self.key[0]} were reported as received, after "
                f"{self.number - len(self.retained)} of the {self.number} sent"
            )
        blocks = []
        while self.retained and self.retained[0].number <= count:
            sent = self.retained.popleft()
            self.retained_bytes -= sent.cost
            blocks.append(sent.block)
        if blocks:
            self.subscription.received(blocks)

    def next(self, credit: bool, room: bool, max_elements: int | None) -> Sent | Ended | None:
        """What to send next: a block only with `credit`, and a new one only with `room`.

        A new one has `max_elements` at most; one that is sent again is as it was.
        """
        if self.resend:
            return self.resend.popleft() if credit else None
        item = self.subscription.next(credit and room, max_elements)
        if item is None:
            return None
        task_id, subscription_number = self.key
        if not isinstance(item, tuple):
            self.link = None
            return Ended(task_id, item, subscription_number)
        self.number += 1
        compression = self.subscription.output.compression
        sent = Sent(task_id, self.number, *item, compression, subscription_number)
        self.retained.append(sent)
        self.retained_bytes += sent.cost
        return sent

    def close(self) -> None:
        """The consumer wants no more of it, nor what it has not received."""
        self.subscription.close([sent.block for sent in self.retained])
        self.retained.clear()  # now: we are part of cycles of references
        self.resend.clear()
        self.retained_bytes = 0


class Session:
    """One consumer."""

    def __init__(self, consumer_id: int) -> None:
        self.consumer_id = consumer_id
        self.streams: dict[Key, Stream] = {}
        self.link: Link | None = None
        self.left_at = 0.0

    @property
    def retained_bytes(self) -> int:
        return sum(stream.retained_bytes for stream in self.streams.values())

    def lacking(self) -> Counter[int]:
        """How many elements of each task were handed to the consumer and not received."""
        found: Counter[int] = Counter()
        for (task_id, _), stream in self.streams.items():
            found[task_id] += sum(sent.block.count for sent in stream.retained)
        return +found

    def close_stream(self, key: Key) -> Stream | None:
        """The consumer wants no more of it. Returns what was closed, if there was any."""
        stream = self.streams.pop(key, None)
        if stream is not None:
            stream.close()
        return stream


class Link:
    """One connection of a consumer. `cut` closes its socket, and may be called at any time."""

    def __init__(self, session: Session, lock: threading.Lock, cut: Callable[[], None]) -> None:
        self.session = session
        self.cut = cut
        self.ready = threading.Condition(lock)  # the outbox has something, or the link is closed
        self.outbox: deque[Outgoing] = deque()
        self.streams: deque[Stream] = deque()  # those that have not ended, in turn
        self.credit = 0
        self.elements: int | None = None  # that may be sent, if they are counted
        self.resumed = False  # it has said which tasks it goes on with
        self.closed = False
        self.refused = False

    def fill(self) -> None:
        """Put into the outbox what its streams have, and there is credit for."""
        if self.refused or self.closed:
            return
        room = MAX_RETAINED_BYTES - self.session.retained_bytes
        batch = sum(out.cost for out in self.outbox if isinstance(out, Sent))
        misses = 0
        while batch < BATCH_BYTES and misses < len(self.streams):
            stream = self.streams.popleft()
            out = stream.next(self.credit > 0 and self.elements != 0, room > 0, self.elements)
            if out is None:
                self.streams.append(stream)
                misses += 1
                continue
            misses = 0
            self.outbox.append(out)
            if isinstance(out, Ended):
                if isinstance(out.end, TaskUnknown):  # the consumer may ask for it anew
                    self.session.close_stream(stream.key)
            else:
                self.streams.append(stream)
                self.credit -= out.cost
                if self.elements is not None:
                    self.elements = max(0, self.elements - out.block.count)
                room -= out.cost
                batch += out.cost

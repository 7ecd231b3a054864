"""What is on its way to one consumer, and what it may have: the state of BlockServer's sessions.

A *session* is what the worker knows of a consumer. It outlives connections for a while: for
each subscription of the consumer to a task, a *sending*, it keeps the blocks that the consumer has
not yet said it received, so that a connection that is cut loses nothing; and, of who hands back,
those that its trainer has not taken, so that what is left goes to others. A *link* is one
connection: what is on its way to the consumer, and for how much more there is credit.

Nothing here is thread-safe: sessions.py has the lock, and knows all consumers.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from ..blocks import Block, split
from ..delivery import End, HeldByOthers, Subscription, TaskUnknown
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
    end: End | HeldByOthers
    subscription: int = 0


class Refusal(NamedTuple):
    """The last that a link sends."""

    reason: str
    broken: bool  # a rule was, on this connection: another may be made


class Farewell(NamedTuple):
    """The last that a link sends to who has said goodbye."""


Outgoing = Sent | Ended | Refusal | Farewell


class Sending:
    """A subscription, as it is carried to its consumer."""

    def __init__(self, key: Key, subscription: Subscription, received: int) -> None:
        self.key = key
        self.subscription = subscription
        self.link: Link | None = None  # that it is read on, until its end is sent there
        self.number = received  # of the last block handed to this consumer
        self.retained: deque[Sent] = deque()  # handed to it and not received: up to `number`
        self.held: deque[Sent] = deque()  # received and not taken, if it may be handed back
        self.retained_bytes = 0  # of both
        self._told: HeldByOthers | None = None  # since the last block
        self.resend: deque[Sent] = deque()  # of these, what this connection still has to send

    def received(self, count: int) -> None:
        """The consumer has the blocks up to `count`."""
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
        """The consumer's trainer has the blocks up to `count`; whether that is news."""
        if count > self.number - len(self.retained):
            raise ProtocolError(
                f"{count} blocks of task {self.key[0]} were reported as taken, and "
                f"{self.number - len(self.retained)} as received"
            )
        taken = self._until(count, self.held)
        self._done_with(taken)
        return bool(taken)

    def hand_back(self, taken: int, elements: int) -> None:
        """The consumer leaves: but for the blocks up to `taken`, and so many elements of the next
        one, what it was given is for others.
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

    def resume(self, link: Link) -> None:
        """It is read on another connection: what was said on the one before may not have come."""
        self.resend = deque(self.retained)
        self._told = None
        self.link = link

    def _until(self, count: int, sent: deque[Sent]) -> list[Sent]:
        found = []
        while sent and sent[0].number <= count:
            found.append(sent.popleft())
        return found

    def _done_with(self, sent: list[Sent]) -> None:
        if sent:
            self.retained_bytes -= sum(each.cost for each in sent)
            self.subscription.received([each.block for each in sent])

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
        if isinstance(item, HeldByOthers):
            if item == self._told:
                return None
            self._told = item
            return Ended(task_id, item, subscription_number)
        if not isinstance(item, tuple):
            self.link = None
            return Ended(task_id, item, subscription_number)
        self._told = None
        self.number += 1
        compression = self.subscription.output.compression
        sent = Sent(task_id, self.number, *item, compression, subscription_number)
        self.retained.append(sent)
        self.retained_bytes += sent.cost
        return sent

    def close(self) -> None:
        """The consumer wants no more of it, nor what it has not received."""
        self.subscription.close([sent.block for sent in (*self.held, *self.retained)])
        self.held.clear()
        self.retained.clear()  # now: we are part of cycles of references
        self.resend.clear()
        self.retained_bytes = 0


class Session:
    """One consumer."""

    def __init__(self, consumer_id: int) -> None:
        self.consumer_id = consumer_id
        self.sendings: dict[Key, Sending] = {}
        self.link: Link | None = None
        self.left_at = 0.0

    @property
    def retained_bytes(self) -> int:
        return sum(sending.retained_bytes for sending in self.sendings.values())

    def lacking(self) -> Counter[int]:
        """How many elements of each task were handed to the consumer and not received."""
        found: Counter[int] = Counter()
        for (task_id, _), sending in self.sendings.items():
            found[task_id] += sum(sent.block.count for sent in sending.retained)
        return +found

    def close_sending(self, key: Key) -> Sending | None:
        """The consumer wants no more of it. Returns what was closed, if there was any."""
        sending = self.sendings.pop(key, None)
        if sending is not None:
            sending.close()
        return sending


class Link:
    """One connection of a consumer. `cut` closes its socket, and may be called at any time."""

    def __init__(self, session: Session, lock: threading.Lock, cut: Callable[[], None]) -> None:
        self.session = session
        self.cut = cut
        self.ready = threading.Condition(lock)  # the outbox has something, or the link is closed
        self.outbox: deque[Outgoing] = deque()
        self.sendings: deque[Sending] = deque()  # those that have not ended, in turn
        self.credit = 0
        self.elements: int | None = None  # that may be sent, if they are counted
        # What it has asked for; None from its first credit on, by which all is asked for again.
        self.goes_on_with: set[Key] | None = set()
        self.closed = False
        self.ending = False  # what is in the outbox is the last

    def fill(self) -> None:
        """Put into the outbox what its sendings have, and there is credit for."""
        if self.ending or self.closed:
            return
        room = MAX_RETAINED_BYTES - self.session.retained_bytes
        batch = sum(out.cost for out in self.outbox if isinstance(out, Sent))
        misses = 0
        while batch < BATCH_BYTES and misses < len(self.sendings):
            sending = self.sendings.popleft()
            out = sending.next(self.credit > 0 and self.elements != 0, room > 0, self.elements)
            if out is None:
                self.sendings.append(sending)
                misses += 1
                continue
            misses = 0
            self.outbox.append(out)
            if isinstance(out, Ended):
                if isinstance(out.end, HeldByOthers):
                    self.sendings.append(sending)
                elif isinstance(out.end, TaskUnknown):  # the consumer may ask for it anew
                    self.session.close_sending(sending.key)
            else:
                self.sendings.append(sending)
                self.credit -= out.cost
                if self.elements is not None:
                    self.elements = max(0, self.elements - out.block.count)
                room -= out.cost
                batch += out.cost

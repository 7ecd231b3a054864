"""What a consumer is to get from one worker, and what it has got: the accounts of a BlockClient.

Who reads what and how far it has come, so that a connection can be made again; and the credit: what
was granted and not used, and what was delivered and not taken. It knows no connection, and has no
lock: its owner does.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..block_limits import cost
from ..blocks import Block
from ..delivery import AnyBlock, End, HeldByOthers, Order, TaskUnknown, orders
from ..errors import ProtocolError
from ..proto import transfer_pb2 as pb
from .budget import Share
from .messages import Key

_UNREPORTED_BYTES = 16 << 20  # the worker keeps for us what we have received: not for long


class Incoming:
    """A subscription, and how far it has come."""

    def __init__(self, order: Order) -> None:
        self.order = order  # of what is still to come
        self.received = 0  # blocks
        self.taken = 0  # of these
        self.is_over = False  # as far as is known, nothing more comes
        self.ended = False

    @property
    def hands_back(self) -> bool:
        return isinstance(self.order, AnyBlock) and self.order.hands_back


class Receiving:
    """What comes from one worker.

    Blocks that were delivered and not yet taken, and those on the way, are never more than
    `credit_bytes` and one block. With `elements`, these are counted, too.
    """

    def __init__(self, credit_bytes: int, elements: Share | None) -> None:
        self.incoming: dict[Key, Incoming] = {}
        self.unsaid = False  # that something came, or was taken
        self._credit_bytes = credit_bytes
        self._elements = elements
        self._to_report: set[Key] = set()  # whose position the worker has not been told
        self._held = 0  # bytes delivered and not taken
        self._granted = 0  # credit that the worker has not used
        self._unreported = 0  # bytes received since the last message of credit

    def read(self, key: Key, order: Order) -> pb.ToWorker:
        """Begin; returns what the worker is to be told."""
        incoming = self.incoming[key] = Incoming(order)
        return _read(key, incoming)

    def resume(self) -> Iterator[pb.ToWorker]:
        """A connection has been made: what was granted before has ended with the one before.
        Yields what is to be said on it first.
        """
        self._granted = 0
        if self._elements is not None:
            self._elements.take_back()
        # What was said of it before may not have come; what was received, is said as it is read.
        self._to_report.update(key for key, i in self.incoming.items() if i.hands_back)
        for key, incoming in self.incoming.items():
            yield _read(key, incoming)

    def accept(self, key: Key, number: int, block: Block, peer: str) -> bool:
        """Account for a block that has arrived; say whether to deliver it.

        Raises ProtocolError for one that should not have been sent.
        """
        size = cost(block)
        task_id = key[0]
        counted = self._elements is None or self._elements.received(block.count)
        if self._granted <= 0 or not counted:
            raise ProtocolError(f"{peer} sent block {number} of task {task_id} without credit")
        self._granted -= size
        self._unreported += size
        incoming = self.incoming.get(key)
        if incoming is None or incoming.ended or number <= incoming.received:
            if self._elements is not None:
                self._elements.taken(block.count)
            return False
        if number != incoming.received + 1:
            raise ProtocolError(
                f"{peer} sent block {number} of task {task_id} after {incoming.received}"
            )
        try:
            incoming.order = incoming.order.after(block)
        except ValueError as error:
            raise ProtocolError(f"{peer} sent block {number} of task {task_id}: {error}") from None
        incoming.received = number
        incoming.is_over = False
        self._held += size
        self._to_report.add(key)
        self.unsaid = True
        return True

    def over(self, key: Key, end: End | HeldByOthers) -> bool:
        """Of a subscription nothing more comes, for all that is known; whether that is news."""
        incoming = self.incoming.get(key)
        if incoming is None or incoming.ended:
            return False
        incoming.is_over, incoming.ended = True, not isinstance(end, HeldByOthers)
        if incoming.ended and (isinstance(end, TaskUnknown) or not incoming.hands_back):
            del self.incoming[key]
        return True

    def goodbye(self, given: tuple[Key, int] | None) -> pb.Goodbye:
        """What the worker is to be told at last. `given` are the elements that the trainer has of
        the block that was delivered and not yet taken.
        """
        goodbye = pb.Goodbye()
        for key, incoming in self.incoming.items():
            if incoming.hands_back:
                goodbye.positions.append(_position(key, incoming))
                if given is not None and given[0] == key:
                    goodbye.positions[-1].elements = given[1]
        return goodbye

    def taken(self, block: Block, key: Key | None) -> bool:
        """A block that was delivered is not here any more; whether it was the last one."""
        last = False
        if key is not None and (incoming := self.incoming.get(key)) is not None:
            incoming.taken = min(incoming.taken + 1, incoming.received)  # it may have begun anew
            self._to_report.add(key)
            last = incoming.is_over and incoming.taken == incoming.received
        self._held -= cost(block)
        if self._elements is not None:
            self._elements.taken(block.count)
        self.unsaid = True  # a slab may be free
        return last

    def credit(self, at_once: bool, connected: bool) -> pb.Credit | None:
        """What the worker is to be told of room and of what has come; None if that is not worth a
        message yet, unless it goes `at_once`.
        """
        room = max(0, self._credit_bytes - self._held - self._granted)
        enough = self._credit_bytes // 4
        due = self._elements is not None and self._elements.is_due()
        unreported = self._unreported >= min(enough, _UNREPORTED_BYTES)
        if not (at_once or due or room >= enough or unreported):
            return None
        credit = pb.Credit(bytes=room)
        for key in self._to_report:
            if (incoming := self.incoming.get(key)) is not None:
                credit.positions.append(_position(key, incoming))
        if self._elements is not None and connected:
            credit.elements = self._elements.grant()
        self._to_report.clear()
        self.unsaid = False
        self._granted += room
        self._unreported = 0
        return credit


def _position(key: Key, incoming: Incoming) -> pb.Position:
    task_id, subscription = key
    position = pb.Position(task_id=task_id, received=incoming.received, subscription=subscription)
    if incoming.hands_back:
        position.taken = incoming.taken
    return position


def _read(key: Key, incoming: Incoming) -> pb.ToWorker:
    task_id, subscription = key
    read = pb.Read(task_id=task_id, subscription=subscription, received=incoming.received)
    return pb.ToWorker(read=orders.encode(incoming.order, read))

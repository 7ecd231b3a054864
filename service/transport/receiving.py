"""The bookkeeping of a BlockClient: what it reads from one worker, how far, and with which credit.

It records the position of each subscription, so that the client can reconnect. It also counts the
credit that was granted and not used, and the bytes that were delivered and not taken. It knows no
connection and has no lock: its owner has both.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..block_limits import cost
from ..blocks import Block
from ..delivery import AnyBlock, End, EndPending, ReadRequest, TaskUnknown, read_requests
from ..errors import ProtocolError
from ..proto import transfer_pb2 as pb
from .budget import Share
from .messages import Key

_UNREPORTED_BYTES = 16 << 20  # the worker retains blocks until we acknowledge them


class Incoming:
    """A subscription, and how far it has come."""

    def __init__(self, request: ReadRequest) -> None:
        self.request = request  # of the blocks still to come
        self.received = 0  # blocks
        self.taken = 0  # of these
        self.held = 0  # elements received and not taken
        self.unreported = 0  # elements taken since the last report to the worker
        self.ended = False

    @property
    def hands_back(self) -> bool:
        return isinstance(self.request, AnyBlock) and self.request.hands_back


class Receiving:
    """The subscriptions and the credit of one worker.

    Blocks on the way, and those delivered and not yet taken, never exceed `credit_bytes` and one
    block. `elements` also bounds the elements.
    """

    def __init__(self, credit_bytes: int, elements: Share | None) -> None:
        self.incoming: dict[Key, Incoming] = {}
        self.must_report = False  # whether blocks came or were taken since the last report
        self._credit_bytes = credit_bytes
        self._elements = elements
        self._to_report: set[Key] = set()  # whose positions the worker does not know
        self._held = 0  # bytes delivered and not taken
        self._granted = 0  # credit that the worker has not used
        self._unreported = 0  # bytes received since the last Credit

    def read(self, key: Key, request: ReadRequest) -> pb.ToWorker:
        """Add a subscription; return the message for the worker."""
        incoming = self.incoming[key] = Incoming(request)
        return _read(key, incoming)

    def resume(self) -> Iterator[pb.ToWorker]:
        """Start over on a new connection, without the credit of the last one.

        Yields the first messages to send on it.
        """
        self._granted = 0
        if self._elements is not None:
            self._elements.take_back()
        # Earlier reports may be lost. A Read repeats `received`, but not `taken`.
        self._to_report.update(key for key, i in self.incoming.items() if i.hands_back)
        for key, incoming in self.incoming.items():
            yield _read(key, incoming)

    def accept(self, key: Key, number: int, block: Block, peer: str) -> bool:
        """Count a block that has arrived; return whether to deliver it.

        Raises ProtocolError for a block that the worker should not have sent.
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
            incoming.request = incoming.request.after(block)
        except ValueError as error:
            raise ProtocolError(f"{peer} sent block {number} of task {task_id}: {error}") from None
        incoming.received = number
        incoming.held += block.count
        self._held += size
        self._to_report.add(key)
        self.must_report = True
        return True

    def over(self, key: Key, end: End | EndPending) -> bool:
        """Record a subscription's end, or EndPending; return False if it is unknown or ended."""
        incoming = self.incoming.get(key)
        if incoming is None or incoming.ended:
            return False
        incoming.ended = not isinstance(end, EndPending)
        if incoming.ended and (isinstance(end, TaskUnknown) or not incoming.hands_back):
            del self.incoming[key]
        return True

    def goodbye(self, given: tuple[Key, int] | None) -> pb.Goodbye:
        """The last message to the worker. `given` is the subscription and the number of elements
        that the trainer has of the block that it is still taking.
        """
        goodbye = pb.Goodbye()
        for key, incoming in self.incoming.items():
            if incoming.hands_back:
                goodbye.positions.append(_position(key, incoming))
                if given is not None and given[0] == key:
                    goodbye.positions[-1].elements = given[1]
        return goodbye

    def taken(self, block: Block, key: Key | None) -> bool:
        """A delivered block was taken; return whether to tell the worker at once.

        The worker gives a subscription that hands back only as much as its trainer takes, so each
        fourth of the elements is urgent. Others may wait for the last block, so that is urgent too.
        """
        urgent = False
        if key is not None and (incoming := self.incoming.get(key)) is not None:
            incoming.taken = min(incoming.taken + 1, incoming.received)  # `read` may have reset it
            incoming.held = max(0, incoming.held - block.count)
            incoming.unreported += block.count
            self._to_report.add(key)
            urgent = incoming.hands_back and 3 * incoming.unreported >= incoming.held
        self._held -= cost(block)
        if self._elements is not None:
            self._elements.taken(block.count)
        self.must_report = True  # a slab may be free
        return urgent

    def credit(self, at_once: bool, connected: bool) -> pb.Credit | None:
        """New credit and acknowledgements, always if `at_once`; None if not yet worth a message."""
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
                incoming.unreported = 0
        if self._elements is not None and connected:
            credit.elements = self._elements.grant()
        self._to_report.clear()
        self.must_report = False
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
    return pb.ToWorker(read=read_requests.encode(incoming.request, read))

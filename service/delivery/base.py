"""The seam between a task's producer and those who read the task: which block goes to whom.

A *policy* is a TaskOutput: it buffers a task's blocks, and gives them to *subscriptions*, which
are what one consumer reads of the task, each opened with an order (orders.py). What it gives to
which subscription, and when it forgets a block, is all that policies differ in.

Between subscriptions and consumers is a *carrier*: the transport, which has credit, and keeps
what it was given until the consumer has it, so that a cut connection loses nothing, under any
policy; or a face that answers one request at a time.

**Ordering.** A subscription gives its blocks in the order of the policy, and then its end, again
and again. What it was given stays its consumer's, and is given to nobody else instead.

**Handing back.** A subscription that `hands_back` has what it was given until it is said to be
received, which its carrier then says of what a trainer has *taken*, and may hand the rest back,
for others. So the task ends for others only when it has nothing left: until then they are told how
much others have (HeldByOthers), and may go without waiting for it.

**Wake-ups.** As long as there is something for a subscription, `next` with credit gives it.
Whenever the producer's side (`put`, `finish`, `fail`, `cancel`, or what else a policy has) may
have made something ready, `on_change` is called, by the thread that did so, with no lock of the
output held. `open` and a subscription's methods never call it, since carriers call them under their
own lock. What `open` ends and what `close` leaves to others they are told when they are asked next:
carriers then ask those that had nothing.

**Waiting.** Only the producer waits, in `put`, while the buffer is full; and who calls
`wait_drained` or `Subscription.wait`. `next`, `received`, `close` and `cancel` never do.

**Threads.** All methods are thread-safe. Of one subscription, one thread at a time calls `next`,
unless its policy says otherwise.

**Reports.** A Listener hears of each element that was put, once: when it was acknowledged (a
consumer's process has it) or dropped (nobody gets it from here any more). So both add up to what
was put, once nothing waits and all subscriptions are closed. A policy that gives an element to
several subscriptions reports it for each, and as dropped if it was given to none.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ...journal.proto import events_pb2 as ev
from ..blocks import Block
from ..errors import ForebayError
from .orders import Order


@dataclass(frozen=True, slots=True)
class EndOfTask:
    """The task has ended; its last block has come before."""


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """The task's pipeline raised, or it cannot be read in that order."""

    code: str  # canonical status name, such as INVALID_ARGUMENT
    message: str


@dataclass(frozen=True, slots=True)
class TaskUnknown:
    """The worker does not have the task, or has it no longer."""


@dataclass(frozen=True, slots=True)
class EndOfBundle:
    """The bundle has ended; the last block of it for this subscription has come before."""

    bundle: int
    length: int  # elements, whoever they were for


@dataclass(frozen=True, slots=True)
class BundleForgotten:
    """The bundle is not run for this reader from `index` on, or not any more: it has to be run
    again for it, and then it may ask again. What was given before is right.
    """

    bundle: int
    index: int  # of the element that it would have been given next


@dataclass(frozen=True, slots=True)
class Superseded:
    """Another has taken the place of this reader: one of a newer `generation`; or, if it is the
    reader's own, whoever asked for the same elements after it.
    """

    generation: int


@dataclass(frozen=True, slots=True)
class HeldByOthers:
    """No end: the task makes no more, and has given all to subscriptions that may hand it back."""

    elements: int  # that others than this one have


End = EndOfTask | TaskFailed | TaskUnknown | EndOfBundle | BundleForgotten | Superseded


class OutputCancelled(ForebayError):
    """Nobody wants the blocks any more: their producer should stop."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some elements of a task: how many, and which where that is known."""

    count: int
    bundle: int | None = None
    index: int = 0  # of the first
    stride: int = 1  # from each to the next


class Listener(Protocol):
    """Who keeps the ledger. Called with locks held: it must not wait, nor call back."""

    def acknowledged(self, part: Part) -> None:
        """A consumer has these."""

    def dropped(self, part: Part) -> None:
        """Nobody gets these any more: their consumer has gone, or they were never asked for."""


class Subscription(ABC):
    """What one consumer reads of a task."""

    hands_back = False
    """Whether what is not received may be handed back."""

    def __init__(self, output: TaskOutput) -> None:
        self.output = output

    @abstractmethod
    def next(
        self, credit: bool, max_elements: int | None = None
    ) -> tuple[Block, int] | End | HeldByOthers | None:
        """The next block with its cost; the end, again and again, if no block is left for this
        subscription; None if there is neither yet. Likewise HeldByOthers, if it hands back.

        Without `credit` there is no block. A block has `max_elements` at most; what is cut off
        stays. Never waits.
        """

    @abstractmethod
    def received(self, blocks: Sequence[Block]) -> None:
        """The consumer has these: the longest given ago of those not yet received. Never waits."""

    @abstractmethod
    def close(self, lacking: Sequence[Block] = ()) -> None:
        """The consumer wants no more; it never received what is `lacking` of what was given.

        To be called once, and nothing after it. Never waits.
        """

    def hand_back(self, blocks: Sequence[Block]) -> None:
        """Of what was given and not received: these go to others, in this order, before all else.

        Only if it `hands_back`. Never waits.
        """
        raise TypeError(f"{type(self).__name__} hands nothing back")

    def wait(self, timeout_s: float, max_elements: int | None = None) -> Block | End | None:
        """`next` for a consumer without a connection: waits for it, None if it does not come in
        time. What it gives counts as received.
        """
        found: tuple[Block, int] | End | HeldByOthers | None = None

        def look() -> bool:
            nonlocal found
            found = self.next(True, max_elements)
            return not isinstance(found, HeldByOthers | None)

        with self.output.changed:
            self.output.changed.wait_for(look, timeout_s)
        if isinstance(found, HeldByOthers):
            return None
        if not isinstance(found, tuple):
            return found
        self.received((found[0],))
        return found[0]


class TaskOutput(ABC):
    """One task's blocks, from its producer to its subscriptions: the contract is above.

    It holds up to `max_bytes` of blocks, by their cost, and one block however large; a policy
    says of what.
    """

    def __init__(self, max_bytes: int = 64 << 20, listener: Listener | None = None) -> None:
        # How its blocks travel; its producer may set it before the first one.
        self.compression: ev.BlockCompression = ev.MEASURED
        self.changed = threading.Condition(threading.RLock())  # guards all, also of policies
        self._opened = False  # for good, once there was a subscription
        self._when_opened: Callable[[], None] | None = None
        self._max_bytes = max_bytes
        self._listener = listener
        self._end: End | None = None
        self._on_change: Callable[[TaskOutput], None] | None = None

    # -- the producer ---------------------------------------------------------------------------

    @abstractmethod
    def put(self, block: Block) -> None:
        """Add a block, waiting while the buffer is full.

        Raises OutputCancelled; TypeError or ValueError for a block that cannot travel, or that
        the policy cannot place.
        """

    def finish(self) -> None:
        """There are no more blocks. Consumers are told once the last one is handed out."""
        self._finish(EndOfTask())

    def fail(self, code: str, message: str) -> None:
        """The pipeline raised. Consumers are told after the blocks that came before it.

        `code` is a canonical status name, such as "INVALID_ARGUMENT".
        """
        self._finish(TaskFailed(code, message))

    def cancel(self) -> None:
        """Drop what is buffered; `put` raises from now on. Consumers get TaskUnknown."""
        with self.changed:
            self._end = TaskUnknown()
            self._clear()
            self.changed.notify_all()
        self._tell()

    # -- the carrier ----------------------------------------------------------------------------

    def open(self, order: Order) -> Subscription | End:
        """A subscription for a consumer; an end if it can never have a block. Never waits.

        An order of another policy's is answered with TaskFailed.
        """
        opened = self._open(order)
        if isinstance(opened, Subscription):
            with self.changed:
                self._opened = True
                callback, self._when_opened = self._when_opened, None
            if callback is not None:
                callback()
        return opened

    def when_opened(self, callback: Callable[[], None]) -> None:
        """Have this called once there is a subscription: now, if there was one. It never waits."""
        with self.changed:
            if not self._opened:
                self._when_opened = callback
                return
        callback()

    def on_change(self, callback: Callable[[TaskOutput], None] | None) -> None:
        """Have this called, from any thread, when a subscription may have something new."""
        self._on_change = callback

    # -- the worker -----------------------------------------------------------------------------

    def wait_drained(self, timeout_s: float) -> bool:
        """Wait until the output has ended and every element has been given to who wants it; and
        received by who may hand it back, unless `forgo_handing_back` was called.

        What was given is kept until its consumer says that it has it: see BlockServer.stop.
        """
        with self.changed:
            return self.changed.wait_for(
                lambda: self._end is not None and not self._holds(), timeout_s
            )

    def forgo_handing_back(self) -> None:  # noqa: B027 - most policies have none
        """Wait no more for what may be handed back: nobody could be given it much longer."""

    @property
    @abstractmethod
    def waiting_elements(self) -> int:
        """How many elements are buffered that were given to nobody."""

    @property
    def ended(self) -> bool:
        """Whether there will be no more blocks."""
        return self._end is not None

    # -- for policies ---------------------------------------------------------------------------

    @abstractmethod
    def _open(self, order: Order) -> Subscription | End:
        """`open`, which remembers that there was a subscription."""

    @abstractmethod
    def _holds(self) -> bool:
        """Whether any block is buffered."""

    @abstractmethod
    def _clear(self) -> None:
        """Drop all that is buffered, and report it."""

    def _check_open(self) -> None:
        """For `put`, once there is room."""
        if isinstance(self._end, TaskUnknown):
            raise OutputCancelled("the task was cancelled")
        if self._end is not None:
            raise RuntimeError("put() after finish() or fail()")

    def _finish(self, end: End) -> None:
        with self.changed:
            if self._end is None:
                self._end = end
            self.changed.notify_all()
        self._tell()

    def _tell(self) -> None:
        if self._on_change is not None:
            self._on_change(self)

    def _acknowledged(self, blocks: Iterable[Block], stride: int = 1) -> None:
        if self._listener is not None:
            for part in parts_of(blocks, stride):
                self._listener.acknowledged(part)

    def _dropped(self, blocks: Iterable[Block], stride: int = 1) -> None:
        if self._listener is not None:
            for part in parts_of(blocks, stride):
                self._listener.dropped(part)


def refused(order: Order, offered: str) -> TaskFailed:
    """The answer to an order of another policy's."""
    return TaskFailed("INVALID_ARGUMENT", f"{order!r} of a task that gives {offered}")


def parts_of(blocks: Iterable[Block], stride: int) -> Iterator[Part]:
    """What the blocks are of: one part for those that follow one another."""
    part: Part | None = None
    for block in filter(lambda block: block.count, blocks):
        if part is not None and _follows(part, block):
            part = replace(part, count=part.count + block.count)
            continue
        if part is not None:
            yield part
        part = Part(block.count, block.bundle, block.index, stride)
    if part is not None:
        yield part


def _follows(part: Part, block: Block) -> bool:
    if part.bundle != block.bundle:
        return False
    return block.bundle is None or block.index == part.index + part.count * part.stride

"""Delivery policies: the interface between a task's producer and the consumers of its blocks.

A *policy* is a TaskOutput. It buffers a task's blocks and gives them to *subscriptions*. One
consumer opens a subscription with a read request (read_requests.py). Policies differ only in which
subscription gets a block, and in when they forget it.

A *carrier* connects subscriptions and consumers. The transport is one: it has credit, and keeps
each block until the consumer has received it. So a cut connection loses nothing, under any policy.
A gRPC service that answers one request at a time is another.

**Ordering.** A subscription gives its blocks in the policy's order, and then its end, repeatedly.
A block that it was given belongs to its consumer; no other subscription gets it instead.

**Handing back.** A subscription that `hands_back` holds its blocks until `received`. Its carrier
calls that for elements that the trainer has *taken*, and may hand the others back. The task ends
for a subscription only when no other one holds elements. Until then `next` answers EndPending,
and the consumer may leave without waiting.

**Wake-ups.** `next` with credit gives a block as long as the subscription has one. The producer's
methods (`put`, `finish`, `fail`, `cancel`, or a policy's own) call `on_change` when they may have
made something ready, with the subscriptions that may have it, or None for any; they don't hold the
output's lock then. `open` and the methods of subscriptions don't notify, since carriers call them
under their own lock. After `open` or `close` a carrier therefore polls its idle subscriptions
again, except those that `sleep`.

**Waiting.** Only `put` (while the buffer is full), `wait_drained` and `Subscription.wait` block.
`next`, `received`, `close` and `cancel` never do.

**Threads.** All methods are thread-safe. Only one thread at a time calls `next` of a subscription,
unless its policy says otherwise.

**Reports.** The Listener hears once of each element that was put: as acknowledged (a consumer's
process has it) or as dropped (nobody will get it from here). Both add up to the elements put, once
the buffer is empty and all subscriptions are closed. If a policy gives an element to several
subscriptions, it reports it for each; if to none, as dropped.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...journal.proto import events_pb2 as ev
from ..blocks import Block
from ..errors import ForebayError
from ..stopwatch import Stopwatch
from .in_flight import InFlightElements
from .memory import LOOK_S, STARVED_S, MemoryBudget
from .read_requests import ReadRequest


@dataclass(frozen=True, slots=True)
class EndOfTask:
    """The task has ended; its last block was given before."""


END_OF_TASK = EndOfTask()


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """The task's pipeline raised, or the task does not serve that kind of request."""

    code: str  # canonical status name, such as INVALID_ARGUMENT
    message: str


@dataclass(frozen=True, slots=True)
class TaskUnknown:
    """The worker does not have the task, or no longer has it."""


@dataclass(frozen=True, slots=True)
class EndOfSlice:
    """The slice has ended: its last block was given before, or the bundle ends earlier."""

    bundle: int
    length: int  # elements that the bundle is known to have
    complete: bool  # it has no more


@dataclass(frozen=True, slots=True)
class Superseded:
    """A later subscription asked for the same elements."""


@dataclass(frozen=True, slots=True)
class EndPending:
    """The task produces no more, but other subscriptions may still hand elements back."""

    elements: int  # that the other subscriptions hold


End = EndOfTask | TaskFailed | TaskUnknown | EndOfSlice | Superseded


class OutputCancelled(ForebayError):
    """No consumer wants further blocks: their producer should stop."""


class OutputReset(ForebayError):
    """All blocks so far, and this one, are dropped: the producer restarts with its first block."""


class Listener:
    """Learns how many elements were received or dropped. Called with locks held: must neither wait
    nor call back. This one ignores it."""

    def acknowledged(self, elements: int) -> None:
        """A consumer has received so many."""

    def dropped(self, elements: int) -> None:
        """No consumer will get so many: theirs has gone, or none asked for them."""


class Subscription(ABC):
    """One consumer's view of a task: the blocks that the policy gives to it."""

    hands_back = False
    """Whether blocks that are not yet received may be handed back."""

    carrier: object = None
    """The carrier's own object for this subscription, which it finds by it in `on_change`."""

    def __init__(self, output: TaskOutput) -> None:
        self.output = output

    @property
    def sleeps(self) -> bool:
        """Whether only an `on_change` can make `next` give something. Valid after `next` has
        returned None with credit."""
        return False

    def next(
        self, credit: bool, max_elements: int | None = None
    ) -> tuple[Block, int] | End | EndPending | None:
        """Return the next block with its cost, or the end, or None if neither is ready.

        The end is returned on every call after the last block. A subscription that hands back may
        also get EndPending. Without `credit` no block is returned. A larger block is split: the
        elements beyond `max_elements` stay in the buffer. Never waits.
        """
        with self.output.lock:
            return self.next_locked(credit, max_elements)

    @abstractmethod
    def next_locked(
        self, credit: bool, max_elements: int | None
    ) -> tuple[Block, int] | End | EndPending | None:
        """The policy's part of `next`."""

    def received(self, blocks: Sequence[Block]) -> None:
        """The consumer has these: the oldest of those given and not yet received. Never waits."""
        self.output.listener.acknowledged(elements_of(blocks))

    def close(self, lacking: Sequence[Block] = ()) -> None:
        """The consumer wants no more. It never received the blocks in `lacking`.

        Call it once, as the last method. Never waits.
        """
        self.output.listener.dropped(elements_of(lacking))

    def hand_back(self, blocks: Sequence[Block]) -> None:
        """Return blocks that were given and not received: others get them first, in this order.

        Only if `hands_back` is true. Never waits.
        """
        raise TypeError(f"{type(self).__name__} hands nothing back")

    def retry_s(self) -> float | None:
        """After how many seconds `next` may give a block although nothing changes; or None."""
        return None

    def set_round_trip(self, seconds: float) -> None:  # noqa: B027 - most policies ignore it
        """Set the measured round trip between worker and consumer."""

    def wait(self, timeout_s: float, max_elements: int | None = None) -> Block | End | None:
        """`next` for a consumer without a connection: waits; None after `timeout_s`.

        The returned block counts as received.
        """
        found: tuple[Block, int] | End | EndPending | None = None

        def look() -> bool:
            nonlocal found
            found = self.next_locked(True, max_elements)
            return not isinstance(found, EndPending | None)

        with self.output.changed:
            self.output.changed.wait_for(look, timeout_s)
        if isinstance(found, EndPending):
            return None
        if not isinstance(found, tuple):
            return found
        self.received((found[0],))
        return found[0]


OnChange = Callable[["TaskOutput", Iterable[Subscription] | None], None]


class TaskOutput(ABC):
    """One task's blocks, from its producer to its subscriptions: the module states the contract.

    It buffers blocks up to a total cost of `max_bytes`, and always one block however large. The
    policy defines which blocks count. All outputs of a worker share a `budget`, which also counts
    blocks that were given to consumers, as far as the policy keeps them.
    """

    def __init__(
        self,
        max_bytes: int = 64 << 20,
        listener: Listener | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        # How blocks are compressed; the producer may set it before the first block.
        self.compression: ev.BlockCompression = ev.MEASURED
        self.lock = threading.Lock()  # guards all state, also of policies
        self.changed = threading.Condition(self.lock)
        self.blocked = Stopwatch()  # while the producer waits for room
        self.opens = 0  # subscriptions opened so far
        self.in_flight: InFlightElements | None = None  # if each element goes to one consumer
        # Told the `traceparent` of a consumer that waits.
        self.on_trace: Callable[[str], object] = lambda _: None
        self._when_opened: list[tuple[int, Callable[[], None]]] = []
        # Called, from any thread, when subscriptions may have something new.
        self.on_change: OnChange = lambda output, changed: None
        self.memory = (budget or MemoryBudget()).share()
        self.listener = listener or Listener()
        self._parked_after: int | None = None  # see `park`; a number of subscriptions
        self._is_reset = False
        self._max_bytes = max_bytes
        self._end: End | None = None

    # -- the producer ---------------------------------------------------------------------------

    @abstractmethod
    def put(self, block: Block) -> None:
        """Add a block, waiting while the buffer is full.

        Raises OutputCancelled; OutputReset; TypeError or ValueError for a block that cannot be
        sent, or that the policy cannot place.
        """

    def finish(self, end: End = END_OF_TASK) -> None:
        """End the task: consumers get `end` after the last block. Raises OutputReset."""
        with self.changed:
            if isinstance(end, EndOfTask) and self._is_reset:
                self._check_open()
            if self._end is None:
                self._end = end
            self.changed.notify_all()
        self.on_change(self, None)

    def fail(self, code: str, message: str) -> None:
        """The pipeline raised. Consumers get TaskFailed after the blocks that came before it.

        `code` is a canonical status name, such as "INVALID_ARGUMENT".
        """
        self.finish(TaskFailed(code, message))

    def cancel(self) -> None:
        """Drop the buffered blocks; `put` raises from now on. Consumers get TaskUnknown."""
        with self.changed:
            self._end = TaskUnknown()
            self._clear()
            self.memory.close()
            self.changed.notify_all()
        self.on_change(self, None)

    def park(self, after: int | None) -> None:
        """Let `put` exceed the buffer until more than `after` subscriptions were opened, so that
        the pipeline of a task that nobody reads can end. None restores the bound."""
        with self.changed:
            self._parked_after = after
            self.changed.notify_all()

    def reset(self, after: int) -> bool:
        """Drop the buffered blocks; `put` and `finish` raise until `restart`.

        An output that has ended keeps its blocks, since nothing is put any more. If more than
        `after` subscriptions were opened, it drops nothing and returns False: those consumers would
        get the end of one run and the whole of another.
        """
        with self.changed:
            if self.opens > after:
                return False
            if self._end is None:
                self._clear()
                self._is_reset = True
            self.changed.notify_all()
        return True

    def restart(self) -> None:
        """The producer puts its first block next. Idempotent."""
        self._is_reset = False

    def shed(self, *, after: int, restart: bool = False) -> int | None:
        """Drop the buffered blocks and return their number of elements. `restart` reopens an output
        that has ended, for a producer that starts over. If more than `after` subscriptions were
        opened, drop nothing and return None."""
        with self.changed:
            if self.opens > after:
                return None
            elements = self.waiting_elements
            self._clear()
            if restart and isinstance(self._end, EndOfTask):
                self._end = None
            self.changed.notify_all()
        self.on_change(self, None)
        return elements

    # -- the carrier ----------------------------------------------------------------------------

    def open(self, request: ReadRequest, *, notify: bool = True) -> Subscription | End:
        """Open a subscription; return an end if it can never have a block.

        A request of another policy gets TaskFailed. The `when_opened` callbacks may start a thread,
        which can take half a second on a busy machine. A caller that holds a lock therefore passes
        `notify=False`, and calls `notify_opened` after releasing it; `open` then never waits.
        """
        opened = self._open(request)
        if isinstance(opened, Subscription):
            with self.changed:
                self.opens += 1
            if notify:
                self.notify_opened()
        return opened

    def notify_opened(self) -> None:
        """Run the `when_opened` callbacks that are due. Idempotent."""
        with self.changed:
            due = [callback for after, callback in self._when_opened if self.opens > after]
            self._when_opened = [each for each in self._when_opened if self.opens <= each[0]]
        for callback in due:
            callback()

    def when_opened(self, callback: Callable[[], None], after: int = 0) -> None:
        """Call this once more than `after` subscriptions have been opened: now, if they have."""
        with self.changed:
            self._when_opened.append((after, callback))
        self.notify_opened()

    # -- the worker -----------------------------------------------------------------------------

    def wait_drained(self, timeout_s: float) -> bool:
        """Wait until the output is drained or parked; return whether it is drained.

        It is drained when it has ended and every element was given to a consumer. Subscriptions
        that hand back must also have received theirs, unless `forgo_handing_back` was called. The
        transport keeps given blocks until consumers acknowledge them: see BlockServer.stop.
        """

        def drained() -> bool:
            return self._end is not None and not self._holds()

        with self.changed:
            self.changed.wait_for(lambda: self._parked_after is not None or drained(), timeout_s)
            return drained()

    def forgo_handing_back(self) -> None:  # noqa: B027 - most policies have none
        """Stop waiting for elements that may be handed back: soon no consumer could get them."""

    @property
    @abstractmethod
    def waiting_elements(self) -> int:
        """How many buffered elements were given to no consumer. Takes no lock."""

    @property
    def ended(self) -> bool:
        """Whether there will be no more blocks."""
        return self._end is not None

    @property
    def held_bytes(self) -> int:
        """How much of the worker's memory budget it holds."""
        return self.memory.held

    # -- for policies ---------------------------------------------------------------------------

    @abstractmethod
    def _open(self, request: ReadRequest) -> Subscription | End:
        """The policy's part of `open`."""

    def _holds(self) -> bool:
        """Whether `wait_drained` must still wait once the output has ended."""
        return self.waiting_elements > 0

    @abstractmethod
    def _clear(self) -> None:
        """Drop all buffered blocks, and report them as dropped."""

    def _check_open(self) -> None:
        """Raise if `put` is not allowed now; called once there is room."""
        if isinstance(self._end, TaskUnknown):
            raise OutputCancelled("the task was cancelled")
        if self._is_reset:
            raise OutputReset("nobody reads the task any more")
        if self._end is not None:
            raise RuntimeError("put() after finish() or fail()")

    def _take_memory(
        self, size: int, is_full: Callable[[], bool], must: Callable[[], bool]
    ) -> None:
        """For `put`, with the lock held: wait until the output has room and the worker has memory.
        Don't wait if the block `must` be put, because consumers cannot go on without it."""
        give_up_s = time.monotonic() + STARVED_S
        while self._end is None and not self._is_reset:
            forced = must() or (self._parked_after is not None and self.opens <= self._parked_after)
            if not forced and is_full():
                with self.blocked:
                    self.changed.wait()  # until a consumer reads, or cancel()
                continue
            forced |= time.monotonic() >= give_up_s and not self.waiting_elements
            if self.memory.take(size, force=forced):
                break
            with self.blocked:
                self.changed.wait(LOOK_S)  # until other outputs release memory, or as above
        self.memory.wait_no_more()
        self._check_open()


def elements_of(blocks: Iterable[Block]) -> int:
    return sum(block.count for block in blocks)


def refused(request: ReadRequest, offered: str) -> TaskFailed:
    """The answer to a request of another policy."""
    return TaskFailed("INVALID_ARGUMENT", f"{request!r} of a task that gives {offered}")

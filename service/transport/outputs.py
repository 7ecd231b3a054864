"""TaskOutput: the bounded buffer between a task's producer and the connections that read it."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

from ...journal.proto import events_pb2 as ev
from ..blocks import Block, split
from ..errors import ForebayError
from .messages import End, EndOfTask, TaskFailed, TaskUnknown, check_block, cost


class OutputCancelled(ForebayError):
    """Nobody wants the task's blocks any more: its producer should stop."""


class TaskOutput:
    """One task's blocks, from one producer to any number of consumers, each block to one.

    It holds up to `max_bytes` of blocks, and one block however large. Thread-safe.
    """

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        # How its blocks travel; its producer may set it before the first one.
        self.compression: ev.BlockCompression = ev.MEASURED
        self._max_bytes = max_bytes
        self._changed = threading.Condition(threading.RLock())
        self._blocks: collections.deque[tuple[Block, int]] = collections.deque()  # with their cost
        self._bytes = 0
        self._end: End | None = None
        self._on_change: Callable[[TaskOutput], None] | None = None

    def put(self, block: Block) -> None:
        """Add a block, waiting while the buffer is full.

        Raises OutputCancelled; TypeError or ValueError for a block that cannot travel.
        """
        check_block(block)
        size = cost(block)
        with self._changed:
            while self._end is None and self._blocks and self._bytes + size > self._max_bytes:
                self._changed.wait()  # for a consumer, or for cancel()
            if isinstance(self._end, TaskUnknown):
                raise OutputCancelled("the task was cancelled")
            if self._end is not None:
                raise RuntimeError("put() after finish() or fail()")
            self._blocks.append((block, size))
            self._bytes += size
            self._changed.notify_all()
        self._tell()

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
        with self._changed:
            self._end = TaskUnknown()
            self._blocks.clear()
            self._bytes = 0
            self._changed.notify_all()
        self._tell()

    def get(self, timeout_s: float, max_elements: int | None = None) -> Block | End | None:
        """Take a block as a consumer without a connection does; the end, again and again, if
        no block is left; None if there is neither in time.

        If the block has more than `max_elements`, its rest stays.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._blocks or self._end, timeout_s)
            item = self.take(with_block=True, max_elements=max_elements)
        return item[0] if isinstance(item, tuple) else item

    def wait_drained(self, timeout_s: float) -> bool:
        """Wait until the output has ended and every element has been taken.

        A consumer's blocks are kept until it says that it has them: see BlockServer.stop.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: self._end is not None and not self._blocks, timeout_s
            )

    @property
    def waiting_elements(self) -> int:
        """How many elements nobody has taken yet."""
        with self._changed:
            return sum(block.count for block, _ in self._blocks)

    @property
    def ended(self) -> bool:
        """Whether there will be no more blocks."""
        return self._end is not None

    def take(
        self, with_block: bool, max_elements: int | None = None
    ) -> tuple[Block, int] | End | None:
        """For the server: the next block with its cost, the end if no block is left, or None.

        Without `with_block` blocks stay where they are. If a block has more than `max_elements`,
        its rest stays. Never waits.
        """
        with self._changed:
            if not self._blocks:
                return self._end
            if not with_block:
                return None
            block, size = self._blocks.popleft()
            self._bytes -= size
            if max_elements is not None and block.count > max_elements:
                block, rest = split(block, max_elements)
                size, rest_size = cost(block), cost(rest)
                self._blocks.appendleft((rest, rest_size))
                self._bytes += rest_size
            self._changed.notify_all()
            return block, size

    def on_change(self, callback: Callable[[TaskOutput], None] | None) -> None:
        """For the server: call this, from any thread, when `take` may have something new."""
        self._on_change = callback

    def _finish(self, end: End) -> None:
        with self._changed:
            if self._end is None:
                self._end = end
            self._changed.notify_all()
        self._tell()

    def _tell(self) -> None:
        if self._on_change is not None:
            self._on_change(self)

"""The open consumers of this process, and how they are closed before it exits.

If the job allows it, a consumer hands back elements that it received and its trainer did not get. A
*taker* gives blocks to a trainer by element, and knows how far the trainer has come. It closes its
own iteration; other threads ask it to.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable
from typing import Protocol

GOODBYES_S = 3.0
"""How long the process takes at most, at its exit, to close consumers that still read."""

INTO_TENSORFLOW_S = 0.1
"""How long threads have to return from `blocks` into TensorFlow."""


class Taker(Protocol):
    """Gives blocks to a trainer by element. Meanwhile other threads call only `leave`, and `left`
    while `begun` is the same before and after.
    """

    begun: int = 0
    """How many blocks it has begun to give; always 0 if it does not count them."""

    failed: bool = False
    """Whether the iteration is closed because the trainer's step raised an exception."""

    is_left: bool = False
    """Whether the iteration ends as soon as it can: another thread has closed it."""

    def left(self) -> int:
        """How many elements of the current block were not given."""

    def leave(self) -> None:
        """Close the iteration when the next element is asked for. Called by any thread."""

    def close(self) -> None:
        """Close the iteration. Raises ValueError if another thread is executing it."""


class OpenConsumer(Protocol):
    """A consumer that must be closed before the process exits."""

    taker: Taker | None

    def is_ours(self) -> bool:
        """Whether this process made it, not the process that was forked."""

    def leave(self) -> None:
        """Close once a taker has given its last element. Called by any thread."""

    def close(self, left: int = 0) -> None:
        """Leave. `left` elements of the last block were not given to the trainer."""


class Stopping:
    """Whether this process must stop; while it must, no iteration begins. Thread-safe."""

    def __init__(self) -> None:
        self._caught_by: set[object] = set()
        self._said_by: set[object] = set()
        # Set where processes read for this one (loaders.py). The first is called by any thread, and
        # by signal handlers, once something here has changed. The second says how many of those
        # processes still read, and have not handed back their elements.
        self.tell: Callable[[], None] = lambda: None
        self.readers_elsewhere: Callable[[], int] = lambda: 0

    def catch_sigterm(self, who: object) -> None:
        """From now on `who` catches SIGTERM, and would call `begin` for it."""
        self._caught_by.add(who)
        self.tell()

    def release_sigterm(self, who: object) -> None:
        """Idempotent."""
        self._caught_by.discard(who)
        self.tell()

    def begin(self, who: object) -> None:
        self._said_by.add(who)
        self.tell()

    def end(self, who: object) -> None:
        """`who` no longer says so: the program continues. Idempotent."""
        self._said_by.discard(who)
        self.tell()

    def is_set(self) -> bool:
        return bool(self._said_by)

    def is_sigterm_caught(self) -> bool:
        """Whether a SIGTERM does not end this process."""
        return bool(self._caught_by)


stopping = Stopping()

_open: weakref.WeakSet[OpenConsumer] = weakref.WeakSet()


def opened(consumer: OpenConsumer) -> None:
    _open.add(consumer)


def closed(consumer: OpenConsumer) -> None:
    """Forgets a consumer that is closed or being closed. Idempotent."""
    _open.discard(consumer)


def open_consumers() -> list[OpenConsumer]:
    """The open consumers that this process made."""
    return [consumer for consumer in list(_open) if consumer.is_ours()]


def could_close(close: Callable[[], None]) -> bool:
    """Call this, which closes a generator. Returns False if another thread is executing that."""
    try:
        close()
    except ValueError as error:
        if "already executing" not in str(error):
            raise
        return False
    return True


def close_between_steps(consumer: OpenConsumer) -> None:
    """Close a consumer in the thread that takes its elements, while it takes none."""
    taker = consumer.taker
    consumer.close(taker.left() if taker is not None and could_close(taker.close) else 0)


@atexit.register
def _leave_all() -> None:
    # A TensorFlow thread that runs Python while the interpreter shuts down would hang for ever,
    # and TensorFlow waits for that thread.
    give_up_s = time.monotonic() + GOODBYES_S
    consumers = list(_open)
    for consumer in consumers:
        if time.monotonic() < give_up_s:
            close_between_steps(consumer)
    if consumers:
        time.sleep(INTO_TENSORFLOW_S)

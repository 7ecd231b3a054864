"""Leaving: the consumers of this process that are open, and how they are closed in good time.

What a consumer had received, and its trainer was not given, is handed back where that may be. Who
gives blocks to a trainer by the element, a *taker*, knows how far that has come, and closes its
iteration itself: other threads ask it to.
"""

from __future__ import annotations

import atexit
import time
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .consumer import Consumer

GOODBYES_S = 3.0
"""For those who are still reading when the process exits."""

INTO_TENSORFLOW_S = 0.1
"""For threads to get from `blocks` back into TensorFlow."""


class Taker(Protocol):
    """Who gives blocks to a trainer by the element. While it does, only `leave` is called."""

    def left(self) -> int:
        """How many elements of the block that it has were not given."""

    def leave(self) -> None:
        """Close the iteration when the next element is asked for. Called by any thread."""

    def close(self) -> None:
        """Close the iteration. Raises ValueError if another thread is in the midst of it."""


class Messenger(Protocol):
    """Who passes on what `stopping` says to processes that read for this one."""

    def tell(self) -> None:
        """It says something else than before. Called by any thread, and by signal handlers."""

    def readers(self) -> int:
        """How many of those processes are reading."""


class Stopping:
    """Whether this process is to go: no iteration begins while anybody says so. Thread-safe."""

    def __init__(self) -> None:
        self._caught_by: set[object] = set()
        self._said_by: set[object] = set()
        self._messengers: list[Messenger] = []

    def catch(self, who: object) -> None:
        """Whoever would say so catches SIGTERM from now on."""
        self._caught_by.add(who)
        self._tell()

    def catch_no_more(self, who: object) -> None:
        """Idempotent."""
        self._caught_by.discard(who)
        self._tell()

    def begin(self, who: object) -> None:
        self._said_by.add(who)
        self._tell()

    def end(self, who: object) -> None:
        """The program goes on. Idempotent."""
        self._said_by.discard(who)
        self._tell()

    def is_set(self) -> bool:
        return bool(self._said_by)

    def is_caught(self) -> bool:
        """Whether a SIGTERM to this process is not its end."""
        return bool(self._caught_by)

    def add_messenger(self, messenger: Messenger) -> None:
        """To say it elsewhere from now on, too."""
        self._messengers.append(messenger)

    def readers_elsewhere(self) -> int:
        """How many processes read for this one, which have not handed back yet."""
        return sum(messenger.readers() for messenger in self._messengers)

    def _tell(self) -> None:
        for messenger in self._messengers:
            messenger.tell()


stopping = Stopping()

_open: weakref.WeakSet[Consumer] = weakref.WeakSet()


def opened(consumer: Consumer) -> None:
    """It is to be closed."""
    _open.add(consumer)


def closed(consumer: Consumer) -> None:
    """It is closed, or being closed. Idempotent."""
    _open.discard(consumer)


def open_consumers() -> list[Consumer]:
    """Those of this process that were not closed."""
    return [consumer for consumer in list(_open) if consumer.is_ours()]


def close_between_steps(consumer: Consumer) -> None:
    """In the thread that takes its elements, while it takes none."""
    left = 0
    if consumer.taker is not None:
        try:
            consumer.taker.close()
            left = consumer.taker.left()
        except ValueError as error:  # another thread takes them, and is in the midst of it
            if "already executing" not in str(error):
                raise
    consumer.close(left)


@atexit.register
def _leave_all() -> None:
    # A thread of TensorFlow's that runs Python while the interpreter is taken down would never
    # get out of it, and TensorFlow waits for that thread.
    give_up_s = time.monotonic() + GOODBYES_S
    consumers = list(_open)
    for consumer in consumers:
        if time.monotonic() < give_up_s:
            close_between_steps(consumer)
    if consumers:
        time.sleep(INTO_TENSORFLOW_S)

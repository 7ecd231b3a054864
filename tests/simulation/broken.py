"""Known-bad variants of the product, to prove that the simulation finds what it is there for.

Each is a bug that somebody could make in a few lines, put in for as long as the context lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from forebay.service.core import commands, decide
from forebay.service.dispatcher.dispatcher import Dispatcher
from forebay.service.dispatcher.leadership import Leadership
from forebay.service.transport.client import BlockClient
from forebay.service.transport.sessions import Stream
from forebay.service.worker.leases import LeaseFeed
from forebay.service.worker.worker import Worker

from .disk import Disk
from .remote import Server

Broken = Callable[[], AbstractContextManager[None]]


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def answers_before_durable() -> AbstractContextManager[None]:
    """A dispatcher that lets its answers go before the storage has what they say."""

    async def settled(self: Dispatcher) -> None: ...

    return _replaced(Dispatcher, "settled", settled)


def answers_unproven() -> AbstractContextManager[None]:
    """A dispatcher that answers questions without knowing that it still leads."""

    async def prove(self: Leadership) -> None: ...

    return _replaced(Leadership, "prove", prove)


def forgets_requests() -> AbstractContextManager[None]:
    """A dispatcher that decides anew when a request comes a second time."""

    def forgetful(state: Any, command: commands.Command, now_ms: int) -> Any:
        return decide._DECIDE[type(command)](state, command, now_ms)

    from forebay.service.dispatcher import dispatcher

    return _replaced(dispatcher, "decide", forgetful)


def leases_returned_splits_twice() -> AbstractContextManager[None]:
    """An `apply` that leaves a range that was handed back, and leased again, in the pool."""
    from forebay.service.core import ranges

    return _replaced(ranges, "remove", lambda *_: None)


def resends_what_has_arrived() -> AbstractContextManager[None]:
    """A worker that sends everything again after a reconnect, to a consumer that takes it."""
    received = Stream.received
    accept = BlockClient._accept

    def keeps(self: Stream, count: int) -> None:
        if not self.retained or count != self.retained[-1].number:
            received(self, min(count, self.number - len(self.retained)))

    def takes(self: BlockClient, task_id: int, number: int, block: Any, peer: str) -> bool:
        stream = self._streams.get(task_id)
        if stream is not None and number <= stream.received:
            stream.received = number - 1
        return accept(self, task_id, number, block, peer)

    @contextmanager
    def both() -> Iterator[None]:
        with _replaced(Stream, "received", keeps), _replaced(BlockClient, "_accept", takes):
            yield

    return both()


def forgets_what_was_sent() -> AbstractContextManager[None]:
    """A worker that takes a block for received once it was sent."""
    following = Stream.next

    def forgets(self: Stream, credit: bool, room: bool) -> Any:
        self.retained.clear()
        return following(self, credit, room)

    return _replaced(Stream, "next", forgets)


def keeps_splits_at_drain() -> AbstractContextManager[None]:
    """A worker that is told to stop, and hands nothing back."""
    return _replaced(LeaseFeed, "drain", lambda _: None)


def cuts_consumers_off_at_drain() -> AbstractContextManager[None]:
    """A worker that is told to stop, and does not wait for its consumers."""
    return _replaced(Worker, "_is_read", lambda *_: False)


def disk_lies() -> AbstractContextManager[None]:
    """A disk that says it has synced, and has not."""
    return _replaced(Disk, "lies", True)


def storage_does_not_fence() -> AbstractContextManager[None]:
    """A storage that takes appends of writers whose term is over."""
    return _replaced(Server, "fences", False)


def snapshot_misses_events() -> AbstractContextManager[None]:
    """A snapshot that claims to be of a later event than it is."""
    write = Dispatcher._snapshot

    async def late(self: Dispatcher, sequence: int, state: bytes, time_ms: int) -> None:
        await write(self, sequence + 1, state, time_ms)

    return _replaced(Dispatcher, "_snapshot", late)


BROKEN: dict[str, Broken] = {
    variant.__name__: variant
    for variant in (
        answers_before_durable,
        answers_unproven,
        forgets_requests,
        leases_returned_splits_twice,
        resends_what_has_arrived,
        forgets_what_was_sent,
        keeps_splits_at_drain,
        cuts_consumers_off_at_drain,
        disk_lies,
        storage_does_not_fence,
        snapshot_misses_events,
    )
}

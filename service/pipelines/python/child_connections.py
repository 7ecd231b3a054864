"""The worker's end of the connections to a Python dataset's children, and what comes over them."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ...blocks import Array, Block
from ...proto import metrics_pb2 as pb
from ...shared import Borrower
from ..splits import SplitRange
from .child_blocks import MESSAGE_BYTES
from .columns import read
from .fork_server import ended, readable

ENDING_MS = 5_000


class ElementPlace(NamedTuple):
    """An element: its split, and its index in the split."""

    split: int
    element: int


class Received(NamedTuple):
    """Elements, the place behind them, and the metrics of splits that end with them."""

    block: Block
    behind: ElementPlace
    metrics: pb.Metrics


class Counted(NamedTuple):
    """Metrics, up to this place, of splits that end without elements."""

    behind: ElementPlace
    metrics: pb.Metrics


class Asked(NamedTuple):
    """A request for a source's next splits, as SplitFeed.next_range; answer it."""

    number: int
    source: int
    opening: int
    endless: bool


class AskedIfOver(NamedTuple):
    """A request for SplitFeed.is_over; answer it."""

    number: int
    sources: list[int]


class AskedToSkip(NamedTuple):
    """A request to leave out so many records from this place on, or with 0 the rest of the split;
    answer it, with any number."""

    at: ElementPlace
    records: int
    reason: str


class Finished(NamedTuple):
    """The request has been run."""


class Failed(NamedTuple):
    """The function has failed at this place, and all elements before it came. The place is (−1, −1)
    if the function was not called yet."""

    code: str
    text: str
    at: ElementPlace


class Died(NamedTuple):
    """The process has ended, perhaps on request, at this place. Unsent elements are lost; all
    splits before `sent` were sent completely."""

    how: str
    at: ElementPlace
    sent: ElementPlace
    file: int = -1  # that it read last, of a dataset of files


Event = Received | Counted | Asked | AskedIfOver | AskedToSkip | Finished | Failed | Died


class ChildConnection:
    """The worker's end of a connection to a child, for the blocks of one request at a time. For one
    thread at a time."""

    def __init__(
        self, connection: socket.socket, control: socket.socket, at: npt.NDArray[np.int64]
    ) -> None:
        self._connection = connection
        self._control = control
        self._at = at
        self._borrower = Borrower("a dataset's process", passes_on=True)

    def filenos(self) -> tuple[int, int]:
        """Descriptors; one is readable when `receive` has an event."""
        return self._connection.fileno(), self._control.fileno()

    @property
    def lives(self) -> bool:
        """False once the process is known to have ended."""
        return not readable(self._control, timeout_ms=0)

    @property
    def at(self) -> ElementPlace:
        """The place that the process reports to be at."""
        return ElementPlace(*self._at[:2].tolist())

    @property
    def sent(self) -> ElementPlace:
        """The place before which the process reports to have sent everything."""
        return ElementPlace(int(self._at[2]), 0)

    def answer(self, number: int, answer: SplitRange | bool | None) -> None:
        """Answer its question of this number."""
        if isinstance(answer, SplitRange):
            told = [answer.first, answer.count, answer.pass_number, answer.names]
            self._send(["answer", number, told])
        else:
            self._send(["answer", number, answer])

    def take(self, blocks: int = 1) -> None:
        """Tell it that the consumer has taken so many of the received blocks."""
        self._send(["free", *self._borrower.released(), blocks])

    def receive(self) -> Event:
        """Its next event; waits for it."""
        ready = readable(self._connection, self._control)
        if self._connection.fileno() not in ready:  # a fork of it may hold the other end open
            return self._died()
        try:
            received = socket.recv_fds(self._connection, MESSAGE_BYTES, 1)
        except ConnectionResetError:  # it ended with unread messages; read what it sent before
            received = socket.recv_fds(self._connection, MESSAGE_BYTES, 1)
        data, descriptors, *_ = received
        match msgspec.msgpack.decode(data) if data else None:
            case ["block", count, size, header, slab, behind, metrics]:
                payload = self._payload(size, slab, descriptors)
                loan = None if slab is None else self._borrower.loan(slab, payload)
                block = replace(read(count, header, payload), loan=loan)
                return Received(block, ElementPlace(*behind), pb.Metrics.FromString(metrics))
            case ["counted", behind, metrics]:
                return Counted(ElementPlace(*behind), pb.Metrics.FromString(metrics))
            case ["ask", number, "range", source, opening, endless]:
                return Asked(number, source, opening, endless)
            case ["ask", number, "over", sources]:
                return AskedIfOver(number, sources)
            case ["skip", split, element, records, reason]:
                return AskedToSkip(ElementPlace(split, element), records, reason)
            case ["end"]:
                return Finished()
            case ["failed", code, text, split, element]:
                return Failed(code, text, ElementPlace(split, element))
        return self._died()

    def _died(self) -> Died:
        try:
            how = ended(self._control)
        except ConnectionResetError:  # it was told to end, and has not read that
            how = ended(self._control)
        return Died(how, self.at, self.sent, int(self._at[3]))

    def _payload(self, size: int, slab: int | None, descriptors: list[int]) -> Any:
        try:
            if slab is None:  # copied, as a mapping would hold a descriptor
                return _copy(descriptors[0], size)
            if descriptors:
                self._borrower.learn(slab, descriptors[0])
            return self._borrower.borrow(slab, size)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def end(self) -> None:
        """Tell the process to end, with the processes that it has forked. Events that it has sent
        still come, and then Died."""
        with contextlib.suppress(OSError):
            self._control.send(b"end")

    def cancel(self) -> None:
        """The request is over; `kill` it next."""
        self.end()

    def kill(self) -> None:
        """End the process, with the processes that it has forked; wait for that. Idempotent."""
        with contextlib.suppress(OSError):
            self._control.send(b"end")
            ended(self._control)
        self._control.close()
        self._connection.close()

    def _send(self, message: list[Any], descriptors: list[int] = []) -> None:  # noqa: B006
        try:
            socket.send_fds(self._connection, [msgspec.msgpack.encode(message)], descriptors)
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                raise
            # It has ended; `receive` reports that.


class BundleRequest(NamedTuple):
    """A bundle of a dataset that a function builds, from element `start` of it on."""

    first: int
    splits: int
    number: int
    seed: int
    start: int


class BundleConnection(ChildConnection):
    """A connection for one bundle at a time, to a process that runs several. Closing it cancels the
    bundle."""

    def __init__(
        self,
        connection: socket.socket,
        control: socket.socket,
        at: npt.NDArray[np.int64],
        left: Callable[[], None],
    ) -> None:
        super().__init__(connection, control, at)
        self._left: Callable[[], None] | None = left

    def begin(self, request: BundleRequest) -> None:
        """Start this bundle; call `receive` until Finished, Failed or Died."""
        self._at[:] = -1
        self._send(["bundle", *request])

    def cancel(self) -> None:
        """`kill` does it."""

    def _died(self) -> Died:
        # How a process has ended comes a little after its connections have ended.
        if not readable(self._control, timeout_ms=ENDING_MS):  # only the thread has ended
            return Died("the thread that made the bundle ended", self.at, self.sent)
        return super()._died()

    def kill(self) -> None:
        """Close the connection; the process goes on. Idempotent."""
        self._control.close()
        self._connection.close()
        left, self._left = self._left, None
        if left is not None:
            left()


def _copy(descriptor: int, size: int) -> Array:
    """The first bytes of a file."""
    memory = np.empty(size, np.uint8)
    done = 0
    while done < size:
        done += os.preadv(descriptor, [memory[done:].data], done)
    return memory

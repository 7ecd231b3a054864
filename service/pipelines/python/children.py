"""The worker's side of a Python dataset's children: starts, watches, reuses and ends them."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ...blocks import Array, Block
from ...errors import PipelineError
from ...proto import metrics_pb2 as pb
from ...shared import Borrower, new_slab
from ..splits import SplitRange
from .child import PROGRESS_BYTES
from .child_blocks import MESSAGE_BYTES
from .columns import read
from .fork_server import ForkServer, ended

TEARDOWN_MS = 5_000

MOST_CONNECTIONS = 4
"""How many idle connections of bundles are kept, with the memory that was lent over them: new
memory for each bundle took half of the throughput."""


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


Event = Received | Counted | Asked | AskedIfOver | Finished | Failed | Died


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
        return not _readable(self._control, timeout_ms=0)

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
        ready = _readable(self._connection, self._control)
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
        return Died(how, self.at, self.sent)

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


class PythonChild(ChildConnection):
    """A process that runs the function of one dataset."""

    def __init__(self, fork_server: ForkServer, definition: bytes, structure: str) -> None:
        """Raises PipelineError."""
        told = structure.encode()
        with contextlib.ExitStack() as sent, contextlib.ExitStack() as kept:
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                kept.enter_context(ours)
                with theirs:
                    control = kept.enter_context(fork_server.fork(theirs))
                stored, memory = new_slab(max(1, len(told) + len(definition)))
                sent.callback(os.close, stored)
                progress, shared = new_slab(PROGRESS_BYTES)
                sent.callback(os.close, progress)
            except OSError as error:
                raise PipelineError(
                    "RESOURCE_EXHAUSTED", f"no process can be started: {error}"
                ) from error
            super().__init__(ours, control, shared.view(np.int64))
            memory[: len(told) + len(definition)] = np.frombuffer(told + definition, np.uint8)
            self._send(["setup", len(told), len(definition)], [stored, progress])
            kept.pop_all()

    def run(self, first: int, count: int, start: int, seed: str | None, *, awaited: bool) -> None:
        """Start these splits, without the first `start` elements; call `receive` until Finished,
        Failed or Died. If the first element is `awaited`, it comes alone."""
        self._at[:] = -1
        self._send(["run", first, count, start, seed, awaited])

    def build(self, *, asks: bool) -> None:
        """Start the dataset that its function builds, in the same way: on the splits that it asks
        for, or on all of them."""
        self._at[:] = -1
        self._send(["build", asks])

    def connect(self, left: Callable[[], None]) -> BundleConnection:
        """A connection for bundles of the dataset that its function builds. Any thread may call
        this. `left` is called when the connection is closed. Raises PipelineError."""
        with contextlib.ExitStack() as kept:
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                kept.enter_context(ours)
                with theirs:
                    control = kept.enter_context(self._control.dup())
                    progress, shared = new_slab(PROGRESS_BYTES)
                    try:
                        self._send(["connect"], [theirs.fileno(), progress])
                    finally:
                        os.close(progress)
            except OSError as error:
                raise PipelineError(
                    "RESOURCE_EXHAUSTED", f"no bundle can be started in a process: {error}"
                ) from error
            kept.pop_all()
        return BundleConnection(ours, control, shared.view(np.int64), left)

    def begin_teardown(self) -> None:
        self._send(["teardown"])

    def wait_until_ended(self, timeout_ms: int) -> None:
        _readable(self._control, timeout_ms=timeout_ms)


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


def _readable(*ends: socket.socket, timeout_ms: int | None = None) -> set[int]:
    polled = select.poll()  # select supports no descriptor above 1,023
    for end in ends:
        polled.register(end, select.POLLIN)
    return {descriptor for descriptor, _ in polled.poll(timeout_ms)}


def finish(children: Sequence[PythonChild]) -> None:
    """End idle children, all at once. Each runs its function's teardown, for a few seconds at
    most."""
    for child in children:
        child.begin_teardown()
    give_up_s = time.monotonic() + TEARDOWN_MS / 1000
    for child in children:
        child.wait_until_ended(max(0, int(1000 * (give_up_s - time.monotonic()))))
        child.kill()


class Children:
    """The processes of one dataset. Thread-safe."""

    def __init__(
        self, fork_server: ForkServer, definition: bytes, structure: str, most_idle: int
    ) -> None:
        self._fork_server = fork_server
        self._definition = definition
        self._structure = structure
        self._most_idle = most_idle
        self._lock = threading.Lock()
        self._idle: list[PythonChild] = []
        self._of_bundles: PythonChild | None = None  # runs all bundles of a dataset that it builds
        self._connected = 0  # connections to it
        self._connections: list[BundleConnection] = []  # idle ones
        self._closed = False

    def take(self) -> PythonChild:
        """An idle child. Raises PipelineError."""
        while True:
            with self._lock:
                found = self._idle.pop() if self._idle else None
            if found is None:
                return self._start()
            if found.lives:
                return found
            found.kill()

    def connection(self) -> BundleConnection:
        """An idle connection to the process that runs bundles. Raises PipelineError."""
        while True:
            with self._lock:
                if not self._connections:
                    return self._connect()
                found = self._connections.pop()
            if found.lives:
                return found
            found.kill()

    def keep(self, connection: BundleConnection) -> None:
        """Return an idle connection."""
        with self._lock:
            kept = not self._closed and len(self._connections) < MOST_CONNECTIONS
            if kept:
                self._connections.append(connection)
        if not kept:
            connection.kill()

    def _connect(self) -> BundleConnection:
        child = self._of_bundles
        if child is None or not child.lives:
            if child is not None:
                child.kill()
            child = self._of_bundles = self._start()
            self._connected = 0
        made = child.connect(lambda: self._leave(child))
        self._connected += 1
        return made

    def _leave(self, child: PythonChild) -> None:
        with self._lock:
            if child is not self._of_bundles:  # it has died, and another one took its place
                return
            self._connected -= 1
        self._end_unused()

    def _end_unused(self) -> None:
        """After `close`, end the process of bundles once it has none."""
        with self._lock:
            if not self._closed or self._connected:
                return
            unused, self._of_bundles = self._of_bundles, None
        if unused is not None:
            finish([unused])

    def _start(self) -> PythonChild:
        return PythonChild(self._fork_server, self._definition, self._structure)

    def give_back(self, children: Sequence[PythonChild]) -> None:
        """Return idle children. Those beyond the number to keep end at once."""
        with self._lock:
            kept = 0 if self._closed else max(0, self._most_idle - len(self._idle))
            self._idle += children[:kept]
        finish(children[kept:])

    def close(self) -> None:
        """End idle children, and others when they are given back. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            connections, self._connections = self._connections, []
        finish(idle)
        for connection in connections:
            connection.kill()
        self._end_unused()

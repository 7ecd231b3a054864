"""The worker's end of a Python dataset's children, and what comes from them; which are idle, and
when they end."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ...blocks import Array, Block
from ...errors import PipelineError
from ...fetched import fetched
from ...processes import open_standard_descriptors
from ...proto import metrics_pb2 as pb
from ...shared import Borrower, new_slab, sealed_file
from .child import PROGRESS_BYTES
from .child_blocks import MESSAGE_BYTES
from .columns import read
from .fork_server import ForkServer, ended, readable


class ElementPlace(NamedTuple):
    """An element: its split, and its index in the split."""

    split: int
    element: int


class Received(NamedTuple):
    """Elements, or None; the place behind them, and the metrics of splits that end there."""

    block: Block | None
    behind: ElementPlace
    metrics: pb.Metrics


class AskedToSkip(NamedTuple):
    """A request to leave out so many records from this place on, or with 0 the rest of the split;
    answer it."""

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
    """The process has ended, perhaps on request, at this place: (−1, −1) during its start, (−1, 0)
    before it began what it was to run. Unsent elements are lost; all splits before `sent` were sent
    completely."""

    how: str
    at: ElementPlace
    sent: ElementPlace
    file: int = -1  # that it read last, of a dataset of files


Event = Received | AskedToSkip | Finished | Failed | Died


class StoredDataset:
    """What a dataset's children are told of it, in memory that they share. Thread-safe."""

    def __init__(self, structure: str, definition: bytes, files: bytes = b"") -> None:
        """`files` are those of the PythonDataset whose definition has none. Raises
        PipelineError."""
        parts = structure.encode(), definition, files
        self.sizes = [*map(len, parts)]
        open_standard_descriptors()
        try:
            self.descriptor = sealed_file(parts)
        except OSError as error:
            raise _no_process(error) from error
        weakref.finalize(self, os.close, self.descriptor)

    def files(self) -> bytes:
        return os.pread(self.descriptor, self.sizes[2], sum(self.sizes[:2]))


def _no_process(error: OSError) -> PipelineError:
    return PipelineError("RESOURCE_EXHAUSTED", f"no process can be started: {error}")


class PythonChild:
    """The worker's end of a process that runs the function of one dataset. For one thread at a
    time."""

    def __init__(self, fork_server: ForkServer, dataset: StoredDataset) -> None:
        """Raises PipelineError."""
        open_standard_descriptors()
        with contextlib.ExitStack() as sent, contextlib.ExitStack() as kept:
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                kept.enter_context(ours)
                with theirs:
                    control = kept.enter_context(fork_server.fork(theirs))
                progress, shared = new_slab(PROGRESS_BYTES)
                sent.callback(os.close, progress)
            except OSError as error:
                raise _no_process(error) from error
            self._connection, self._control = ours, control
            self._at = shared.view(np.int64)
            self._at[:4] = -1
            self._fetched = [0, 0]
            self._borrower = Borrower("a dataset's process", passes_on=True)
            self._send(["setup", *dataset.sizes], [dataset.descriptor, progress])
            kept.pop_all()

    def run(self, first: int, count: int, start: int, seed: str | None, *, awaited: bool) -> None:
        """Start these splits, without the first `start` elements; call `receive` until Finished,
        Failed or Died. If the first element is `awaited`, it comes alone."""
        self._at[:4] = -1, min(0, self._at[0]), -1, -1
        self._send(["run", first, count, start, seed, awaited])

    def begin_teardown(self) -> None:
        self._send(["teardown"])

    def wait_until_ended(self, timeout_ms: int) -> None:
        readable(self._control, timeout_ms=timeout_ms)

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

    def answer(self, allowed: bool) -> None:
        """Answer whether it may skip what it has asked to skip."""
        self._send(["answer", allowed])

    def take(self) -> None:
        """Tell it that the consumer has taken one more of the received blocks."""
        self._send(["free", *self._borrower.released(), 1])

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
                return Received(None, ElementPlace(*behind), pb.Metrics.FromString(metrics))
            case ["skip", split, element, records, reason]:
                return AskedToSkip(ElementPlace(split, element), records, reason)
            case ["end"]:
                self._count_fetched()
                return Finished()
            case ["failed", code, text, split, element]:
                return Failed(code, text, ElementPlace(split, element))
        return self._died()

    def _count_fetched(self) -> None:
        now = self._at[4:].tolist()
        fetched.add(*(after - before for after, before in zip(now, self._fetched, strict=True)))
        self._fetched = now

    def _died(self) -> Died:
        self._count_fetched()
        try:
            how = ended(self._control)
        except ConnectionResetError:  # it was told to end, and has not read that
            how = ended(self._control)
        sent, file = self._at[2:4].tolist()
        return Died(how, self.at, ElementPlace(sent, 0), file)

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

    def kill(self) -> None:
        """End the process, with the processes that it has forked; wait for that. Idempotent."""
        with contextlib.suppress(OSError):
            self._control.send(b"end")
            ended(self._control)
        self._control.close()
        self._connection.close()

    def _send(self, message: list[Any], descriptors: list[int] = []) -> None:  # noqa: B006
        with contextlib.suppress(OSError):  # it has ended; `receive` reports that
            socket.send_fds(self._connection, [msgspec.msgpack.encode(message)], descriptors)


def _copy(descriptor: int, size: int) -> Array:
    """The first bytes of a file."""
    memory = np.empty(size, np.uint8)
    done = 0
    while done < size:
        done += os.preadv(descriptor, [memory[done:].data], done)
    return memory


# -- idle children --------------------------------------------------------------------------------

TEARDOWN_MS = 5_000


def _finish(children: Sequence[PythonChild]) -> None:
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

    def __init__(self, fork_server: ForkServer, dataset: StoredDataset, most_idle: int) -> None:
        self._fork_server = fork_server
        self._dataset = dataset
        self._most_idle = most_idle
        self._lock = threading.Lock()
        self._idle: list[PythonChild] = []
        self._closed = False

    def take(self) -> PythonChild:
        """An idle child. Raises PipelineError."""
        while True:
            with self._lock:
                found = self._idle.pop() if self._idle else None
            if found is None:
                return PythonChild(self._fork_server, self._dataset)
            if found.lives:
                return found
            found.kill()

    def give_back(self, child: PythonChild) -> None:
        """Return an idle child. One beyond the number to keep ends at once."""
        with self._lock:
            if not self._closed and len(self._idle) < self._most_idle:
                self._idle.append(child)
                return
        _finish([child])

    def close(self) -> None:
        """End idle children, and others when they are given back. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        _finish(idle)

"""The worker's side of a Python dataset's children: starts, watches, reuses and ends them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from ...errors import PipelineError
from ...processes import open_standard_descriptors
from ...shared import new_slab
from .child import PROGRESS_BYTES
from .child_connections import BundleConnection, ChildConnection
from .fork_server import ForkServer, readable

TEARDOWN_MS = 5_000

MOST_CONNECTIONS = 4
"""How many idle connections of bundles are kept, with the memory that was lent over them: new
memory for each bundle took half of the throughput."""


class PythonChild(ChildConnection):
    """A process that runs the function of one dataset."""

    def __init__(self, fork_server: ForkServer, definition: bytes, structure: str) -> None:
        """Raises PipelineError."""
        told = structure.encode()
        open_standard_descriptors()
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
                    "RESOURCE_EXHAUSTED",
                    f"no bundle can be started in a process: {error}. Each open one takes "
                    "a connection: raise the worker's limit of open files (ulimit -n), or read "
                    "with a smaller cycle_length",
                ) from error
            kept.pop_all()
        return BundleConnection(ours, control, shared.view(np.int64), left)

    def begin_teardown(self) -> None:
        self._send(["teardown"])

    def wait_until_ended(self, timeout_ms: int) -> None:
        readable(self._control, timeout_ms=timeout_ms)


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
            self._of_bundles = None  # also if none can be started
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

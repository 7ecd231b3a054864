"""Looks at files to register: in processes of their own where a library in C++ reads them, or there
are many. Damaged bytes, or such as are made to harm, can end such a process (SIGABRT); they are not
to end this one.

The processes are forks of a fork server that ends with the registration.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from ...errors import FailedPrecondition
from ..files.byte_sources import AHEAD_BYTES
from ..files.formats import Damaged, Facts, Options
from ..files.inspecting import AT_ONCE, ERRORS, inspected, reads_ends, received, send
from ..files.known_formats import format_of
from ..files.manifest import FileEntry
from ..files.stores import is_url
from ..python.fork_server import ForkServer, ended

_MOST_BYTES = 8 * AHEAD_BYTES
"""Of files that are read as a whole at a time, each of which is read ahead."""

_MOST_PROCESSES = 4
_IN_A_ROW = 4
"""Files that one process looks at before another one gets some."""

_MANY, _MANY_OBJECTS = 1000, 16
"""So many are worth a process, which starts within a second."""

_fork_server = ForkServer("..files.preloaded")
_lock = threading.Lock()
_users = 0


@contextlib.contextmanager
def fork_server_kept() -> Iterator[None]:
    """It ends with the last context of these, in whatever threads they are."""
    global _users
    with _lock:
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _fork_server.close()


class FileInspector:
    """Looks at the files of one format. For one thread; close it."""

    def __init__(self, of: str, options: Options, files: Sequence[FileEntry]) -> None:
        """Raises FailedPrecondition."""
        self._of, self._options = of, options
        kind = format_of(of)
        self._reads_ends = reads_ends(kind, options)
        many = len(files) >= (_MANY_OBJECTS if is_url(files[0].path) else _MANY)
        self._here = not (kind.native or many)
        count = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)), -(-len(files) // _IN_A_ROW))
        self._processes = [_Process(of, options) for _ in range(count)]
        self._turns = itertools.cycle(p for p in self._processes for _ in range(_IN_A_ROW))
        self._asked: deque[tuple[FileEntry, _Process]] = deque()  # without an answer yet

    @property
    def has_room(self) -> bool:
        """Whether one more file may be asked about before the next answer."""
        sizes = (0 if self._reads_ends else min(one.size, AHEAD_BYTES) for one, _ in self._asked)
        return len(self._asked) < (1 if self._here else AT_ONCE) and sum(sizes) < _MOST_BYTES

    def ask(self, entry: FileEntry) -> None:
        """Begin to look at a file. Raises FailedPrecondition, OverflowError."""
        self._asked.append((entry, process := next(self._turns)))
        if not self._here:
            process.ask(entry)

    def answer(self) -> Facts:
        """Of the file that was asked about first. Raises Damaged, OSError, InvalidArgument, and
        FailedPrecondition where the library is not installed."""
        entry, process = self._asked.popleft()
        return inspected(self._of, self._options, entry) if self._here else process.answer()

    def close(self) -> None:
        for process in self._processes:
            process.close()


class _Process:
    """Looks at files in a process of its own, which starts with the first one."""

    def __init__(self, of: str, options: Options) -> None:
        self._of, self._options = of, options
        self._asked: deque[FileEntry] = deque()  # without an answer yet
        self._kept = contextlib.ExitStack()
        self._channel: Connection | None = None
        self._control: socket.socket

    def ask(self, entry: FileEntry) -> None:
        """Raises FailedPrecondition, OverflowError."""
        self._asked.append(entry)
        self._send(entry)

    def answer(self) -> Facts:
        """As of FileInspector."""
        entry = self._asked.popleft()
        assert self._channel is not None
        told = received(self._channel)
        if told is None and self._asked:  # perhaps because of another one
            self._channel = None
            told = received(self._send(entry))
            for other in self._asked if told else ():
                self._send(other)
        match told:
            case ["facts", *facts]:
                return Facts(*facts)
            case ["error", int(number), said, name]:
                raise OSError(number, said, name)
            case ["error", str(kind), said]:
                raise ERRORS[kind](said)
        raise Damaged(
            f"the process that looked at it ended ({ended(self._control)}), so it is damaged, or "
            "memory was short. Write it again, or leave it out"
        )

    def _send(self, entry: FileEntry) -> Connection:
        """Raises FailedPrecondition, OverflowError."""
        if self._channel is None:
            self._channel = self._started()
        with contextlib.suppress(OSError):  # the process has ended
            send(self._channel, [entry.path, entry.size, entry.fingerprint, 0])
        return self._channel

    def _started(self) -> Connection:
        """Raises FailedPrecondition, OverflowError."""
        fill = self._options.get("fill", {})
        large = {name: float(value) for name, value in fill.items() if _is_large(value)}
        about = [self._of, {**self._options, "fill": fill | large}]
        self._kept.enter_context(fork_server_kept())
        ours, theirs = socket.socketpair()
        channel = self._kept.enter_context(Connection(ours.detach()))
        try:
            with theirs:
                self._control = self._kept.enter_context(_fork_server.fork(theirs))
            send(channel, about)
            answer = received(channel)
        except OSError as error:
            raise FailedPrecondition(
                f"no process can be started to look at files: {error}"
            ) from error
        if answer is None:
            raise FailedPrecondition(
                f"the process that looks at files has not started: {ended(self._control)}"
            )
        return channel

    def close(self) -> None:
        self._kept.close()


def _is_large(value: Any) -> bool:
    """Whether it is an integer that cannot be sent, and fits no column."""
    return isinstance(value, int) and not -(1 << 63) <= value < 1 << 64

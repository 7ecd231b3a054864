"""Looks at files to register, in a process of its own where a library in C++ reads them. Damaged
bytes, or such as are made to harm, can end that process (SIGABRT); they are not to end this one.

The process is a fork of a fork server that ends with the registration.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from ...errors import FailedPrecondition
from ..files.formats import Damaged, Facts, Options
from ..files.inspecting import ERRORS, inspected, received, send
from ..files.known_formats import format_of
from ..files.manifest import FileEntry
from ..python.fork_server import ForkServer, ended

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

    def __init__(self, of: str, options: Options) -> None:
        self._of, self._options = of, options
        self._kept = contextlib.ExitStack()
        self._channel: Connection | None = None
        self._control: socket.socket
        self._asked = 0  # files without an answer yet

    def facts(self, entry: FileEntry, following: Sequence[FileEntry] = ()) -> Facts:
        """`following` are those that the next calls are for, if they may be looked at meanwhile: up
        to AT_ONCE, with those of earlier calls. Raises Damaged, OSError, OverflowError,
        InvalidArgument, and FailedPrecondition where the library is not installed."""
        if not format_of(self._of).is_native:
            return inspected(self._of, self._options, entry)
        if self._channel is None:
            self._channel = self._started()
        asked = [entry, *following]
        try:
            for one in asked[self._asked :]:
                send(self._channel, [one.path, one.size, one.fingerprint, 0])
            told = received(self._channel)
        except OSError:  # the process has ended
            told = None
        self._asked = len(following)
        if told is None and len(asked) > 1:  # perhaps because of another one
            self._channel, self._asked = None, 0
            return self.facts(entry)
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

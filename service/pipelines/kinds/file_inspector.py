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
from typing import Any, Self

from ....storage.errors import Corrupt
from ...errors import FailedPrecondition
from ..files.byte_sources import AHEAD_BYTES, opened_now
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

_State = tuple[FileEntry, int | None]
"""What a file is, and when it was changed, if it is a local one."""

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


def looked_at(
    of: str, options: Options, files: Sequence[FileEntry]
) -> Iterator[tuple[FileEntry, Facts]]:
    """Each file of a format as it is now, and what it has. Close it. Raises of the next file
    Corrupt, OSError, InvalidArgument, OverflowError, and FailedPrecondition if it was changed
    meanwhile, or the library is not installed."""
    kind = format_of(of)
    is_far, in_parts = is_url(files[0].path), reads_ends(kind, options)
    here = not kind.native and len(files) < (_MANY_OBJECTS if is_far else _MANY)
    count = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)), -(-len(files) // _IN_A_ROW))
    upcoming, asked = iter(files), deque[tuple[_State | OSError, _Process, int]]()
    with contextlib.ExitStack() as closing:
        processes = [closing.enter_context(_Process(of, options)) for _ in range(count)]
        turns = itertools.cycle(p for p in processes for _ in range(_IN_A_ROW))
        for listed in files:
            while (
                len(asked) < (1 if here else AT_ONCE)
                and sum(size for *_, size in asked) < _MOST_BYTES
                and (following := next(upcoming, None))
            ):
                asked.append(_asked(following, next(turns), here=here, in_parts=in_parts))
            state, process, _ = asked.popleft()
            if isinstance(state, OSError):
                raise state
            try:
                facts = inspected(of, options, state[0]) if here else process.answer()
            except Damaged as error:
                _require_unchanged(listed, state)
                raise Corrupt(f"{listed.path} cannot be registered as {of}: {error}") from error
            _require_unchanged(listed, state)
            yield state[0], facts


def _asked(
    listed: FileEntry, process: _Process, *, here: bool, in_parts: bool
) -> tuple[_State | OSError, _Process, int]:
    """Begins to look at a file: what it is before, or why that is not known, who looks, and at how
    many bytes. Raises FailedPrecondition, OverflowError."""
    try:
        state = _state(listed)
        if not here:
            process.ask(state[0])
    except OSError as error:  # of those before it, there may be others
        return error, process, 0
    return state, process, 0 if in_parts else min(state[0].size, AHEAD_BYTES)


def _state(listed: FileEntry) -> _State:
    """What shows a change; an object's bytes are compared when they are read. Raises OSError."""
    if is_url(listed.path):
        return listed, 0
    with contextlib.closing(opened_now(listed.path, {})) as file:
        return file.entry, file.changed_ns


def _require_unchanged(listed: FileEntry, before: _State) -> None:
    """Raises FailedPrecondition, OSError."""
    if _state(listed) != before:
        raise FailedPrecondition(
            f"{listed.path} was changed while it was being registered: register again, when it is "
            "no longer written"
        )


class _Process:
    """Looks at files in a process of its own, which starts with the first one."""

    def __init__(self, of: str, options: Options) -> None:
        self._of, self._options = of, options
        self._asked: deque[FileEntry] = deque()  # without an answer yet
        self._kept = contextlib.ExitStack()
        self._channel: Connection | None = None
        self._control: socket.socket

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()

    def ask(self, entry: FileEntry) -> None:
        """Raises FailedPrecondition, OverflowError."""
        self._asked.append(entry)
        self._send(entry)

    def answer(self) -> Facts:
        """Of the file that was asked about first. Raises Damaged, OSError, InvalidArgument, and
        FailedPrecondition where the library is not installed."""
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


def _is_large(value: Any) -> bool:
    """Whether it is an integer that cannot be sent, and fits no column."""
    return isinstance(value, int) and not -(1 << 63) <= value < 1 << 64

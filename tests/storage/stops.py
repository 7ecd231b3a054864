"""Stopping a piece of code at any of its system calls, to let somebody else go first."""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SYSTEM_CALLS = (
    *("open", "close", "read", "write", "pwrite", "fsync", "fdatasync", "ftruncate", "truncate"),
    *("rename", "link", "unlink", "mkdir", "rmdir", "listdir", "scandir", "stat", "fstat", "utime"),
)


class Stop:
    """What came of a `stopped` block."""

    calls = 0
    fired = False  # within the block


@contextmanager
def stopped(number: int, interlude: Callable[[], None]) -> Iterator[Stop]:
    """Run `interlude` before the `number`-th system call of the block, or else behind the block."""
    stop = Stop()

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            if not stop.fired:
                stop.calls += 1
                if stop.calls == number:
                    stop.fired = True
                    interlude()
            return call(*args, **kwargs)

        return counting

    with pytest.MonkeyPatch.context() as patch:
        for name in SYSTEM_CALLS:
            patch.setattr(os, name, wrap(getattr(os, name)))
        patch.setattr(io, "open", wrap(io.open))  # pathlib's
        patch.setattr(fcntl, "flock", wrap(fcntl.flock))
        yield stop
    if not stop.fired:
        interlude()


def at_each_call(tmp_path: Path, run: Callable[[Path, int], Stop]) -> None:
    """`run` in a new directory each, for the first system call, the second, … and behind all."""
    number = 1
    while run(tmp_path / str(number), number).fired:
        number += 1
    assert number > 3

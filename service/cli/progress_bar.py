"""How far a long command is, for who watches it: on stderr, if that is a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from ..errors import ForebayError


class Show(Protocol):
    def __call__(self, done: float, of: float, what: str = "", /) -> None:
        """Told how much is done, of how much, and what the command is doing."""


@contextlib.contextmanager
def progress(unit: str) -> Iterator[Show]:
    """Yields a Show, which displays the time to go as well. It may be called often."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from .console import plain_console

    console = plain_console(stderr=True)
    what_for = TextColumn("{task.description}", markup=False)
    shown = Progress(
        what_for, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console,
        transient=True, speed_estimate_period=3600, refresh_per_second=2,
        disable=not console.is_terminal, redirect_stdout=sys.stdout.isatty(),
    )  # fmt: skip
    with shown:
        bar = shown.add_task(unit, total=None)

        def show(done: float, of: float, what: str = unit, /) -> None:
            begins = what != shown.tasks[0].description  # seen even if it ends at once
            shown.update(bar, completed=done, total=of, description=what, refresh=begins)

        yield show


@contextlib.contextmanager
def polled(
    unit: str, look: Callable[[], tuple[float, float] | None], *, every_s: float
) -> Iterator[None]:
    """Shows what `look` finds each `every_s`, in a thread; None: nothing yet."""
    if not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()

    def keep(show: Show) -> None:
        while not ended.wait(every_s):
            with contextlib.suppress(ForebayError, OSError):  # the command says what is wrong
                if (found := look()) is not None:
                    show(*found)

    with progress(unit) as show:
        thread = threading.Thread(target=keep, args=(show,), name="forebay-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

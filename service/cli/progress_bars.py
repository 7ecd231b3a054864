"""How far a long command is, for who watches it: on stderr, if that is a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

from ..errors import ForebayError

Show = Callable[[float, float], None]
"""Told how much is done, and of how much."""


@contextlib.contextmanager
def progress(unit: str) -> Iterator[Show]:
    """Yields a Show, which displays the rate and the time to go as well. It may be called often."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    from .console import plain_console

    class Rate(ProgressColumn):
        def render(self, task: object) -> Text:
            speed = getattr(task, "speed", None)
            return Text("" if speed is None else f"{speed:,.1f} {unit}/s")

    console = plain_console(stderr=True)
    columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    disable = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disable) as shown:
        bar = shown.add_task(unit, total=None)
        yield lambda done, of: shown.update(bar, completed=done, total=of)


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

"""How far a long command is, for who watches it: on stderr, if that is a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from ..errors import ForebayError
from ..finding import duration


class Show(Protocol):
    def __call__(self, done: float, of: float, what: str = "", /) -> None:
        """Told how much is done, of how much, and what the command is doing."""


class Pace:
    """How fast it goes, over all steps since the first look: one may take a second or an hour."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._first = self._last = (0.0, -1.0)  # when it was, and how much was done
        self._of = 0.0

    def look(self, now_s: float, done: float, of: float) -> None:
        self._of = of
        if done > self._last[1]:
            self._last = now_s, done
            if self._first[1] < 0:
                self._first = self._last

    def said(self, now_s: float) -> str:
        """The rate and the time to go; "" if nothing was done since the first look."""
        (from_s, before), (to_s, done) = self._first, self._last
        if done <= before:
            return ""
        each_s = max(to_s - from_s, 1e-9) / (done - before)
        to_go_s = (self._of - done) * each_s - min(now_s - to_s, each_s)
        rate = f"{1 / each_s:,.1f} {self._unit}/s" if each_s < 1 else f"{60 / each_s:.1f} a minute"
        return f"{rate}, {duration(max(0, round(to_go_s)))} to go"


@contextlib.contextmanager
def progress(unit: str) -> Iterator[Show]:
    """Yields a Show, which displays the rate and the time to go as well. It may be called often."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
    from rich.text import Text

    from .console import plain_console

    pace = Pace(unit)

    class Said(ProgressColumn):
        def render(self, task: object) -> Text:
            return Text(pace.said(time.monotonic()))

    console = plain_console(stderr=True)
    what_for = TextColumn("{task.description}", markup=False)
    shown = Progress(
        what_for, BarColumn(), MofNCompleteColumn(), Said(), console=console, transient=True,
        refresh_per_second=2, disable=not console.is_terminal, redirect_stdout=sys.stdout.isatty(),
    )  # fmt: skip
    with shown:
        bar = shown.add_task(unit, total=None)

        def show(done: float, of: float, what: str = unit, /) -> None:
            pace.look(time.monotonic(), done, of)
            shown.update(bar, completed=done, total=of, description=what)

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

"""The console for output that contains names of jobs, datasets and files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..http.families import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def plain(text: str) -> str:
    """Lines that may have texts of users, with escapes for control characters."""
    return "\n".join(map(printable, text.split("\n")))


def plain_console(**options: Any) -> Console:
    """A console that shows text unchanged, as rich's markup ([/x]) and emoji names (:tiger:) may
    be parts of users' names; with escapes for control characters.
    """
    from rich.console import Console

    class PlainConsole(Console):
        def render_str(self, text: str, **how: Any) -> Text:
            return super().render_str(plain(text), **how)

    return PlainConsole(markup=False, emoji=False, **options)

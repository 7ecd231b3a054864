"""The console for output that contains names of jobs, datasets and files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def plain_console(**options: Any) -> Console:
    """A console that shows text unchanged: rich's markup ([/x]) and emoji names (:tiger:) may be
    parts of users' names.
    """
    from rich.console import Console

    return Console(markup=False, emoji=False, **options)

"""Where tables and lines go that have names of jobs, datasets and files in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def plain_console(**options: Any) -> Console:
    """A console that shows text as it is: what rich would take for markup ([/x]), or for the name
    of an emoji (:tiger:), is a part of somebody's name.
    """
    from rich.console import Console

    return Console(markup=False, emoji=False, **options)

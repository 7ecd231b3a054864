"""Event sourcing: events in an append-only journal, with snapshots, on any storage.

The modules are imported when their names are first used: readers need the events alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .codec import FORMAT, decode, encode
    from .journal import Journal
    from .replaying import Replay, replay
    from .snapshots import Retention, RetentionPlan, plan_retention
    from .verification import Report, holds_anything, repair, verify

__all__ = [
    "FORMAT",
    "Journal",
    "Replay",
    "Report",
    "Retention",
    "RetentionPlan",
    "decode",
    "encode",
    "holds_anything",
    "plan_retention",
    "repair",
    "replay",
    "verify",
]

_HOMES = {
    ".codec": ("FORMAT", "decode", "encode"),
    ".journal": ("Journal",),
    ".replaying": ("Replay", "replay"),
    ".snapshots": ("Retention", "RetentionPlan", "plan_retention"),
    ".verification": ("Report", "holds_anything", "repair", "verify"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # else a misspelt name would have any type

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOME_OF[name], __name__), name)


def __dir__() -> list[str]:
    return __all__

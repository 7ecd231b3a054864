"""Loads what other packages bring by entry points: storages, and formats of files."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any


class Unusable(Exception):
    """It cannot be loaded; the message says why."""


def names_of(group: str) -> list[str]:
    return sorted({entry.name for entry in entry_points(group=group)})


def package_of(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.value


def find(group: str, name: str) -> EntryPoint | None:
    """None if no package has one of this name. Raises Unusable if several have."""
    found = {entry.value: entry for entry in entry_points(group=group, name=name)}
    if len(found) > 1:
        raise Unusable(
            f"several packages bring {name!r}: {', '.join(map(package_of, found.values()))}; "
            "remove all but one"
        )
    return next(iter(found.values()), None)


def load(entry: EntryPoint) -> Any:
    """What it names. Raises Unusable."""
    try:
        return entry.load()
    except Exception as error:
        raise Unusable(
            f"{entry.value} of the package {package_of(entry)} cannot be loaded "
            f"({type(error).__name__}: {error}); mend that package, or remove it"
        ) from error

"""Saved states of ordered reads: JSON that has a version and a checksum."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidArgument

VERSION = 2
"""In 1, a start_step of 0 was a step to begin at; in 2 it is none."""


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content with its version and checksum."""
    state = {"forebay": VERSION, **content}
    return {**state, "crc32": _checksum(_canonical(state))}


def opened(state: Any) -> dict[str, Any]:
    """What was sealed, as JSON has it. Raises InvalidArgument for anything else."""
    if not (isinstance(state, dict) and "forebay" in state):
        raise no_state(state)
    version = state["forebay"]
    if type(version) is not int or not 1 <= version <= VERSION:
        raise InvalidArgument(
            f"the state is of version {_shown(version)}, and this is version {VERSION}: read it "
            "with the Forebay that saved it"
        )
    try:
        canonical = _canonical({key: part for key, part in state.items() if key != "crc32"})
    except (TypeError, ValueError, RecursionError):
        raise no_state(state) from None
    if state.get("crc32") != (checksum := _checksum(canonical)):
        raise InvalidArgument(
            f"the state was edited or damaged: it says that its checksum is "
            f"{_shown(state.get('crc32'))}, and the rest of it has {checksum!r}. Give what "
            "state_dict() returned; to begin elsewhere, leave the state out, and give "
            "start_position= or start_step="
        )
    content: dict[str, Any] = json.loads(canonical)
    return content


def no_state(state: Any) -> InvalidArgument:
    """The error for what no state_dict() has returned."""
    return InvalidArgument(
        f"{_shown(state)} is no state of an ordered read: give what state_dict() returned"
    )


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _checksum(canonical: str) -> str:
    return f"{zlib.crc32(canonical.encode()):08x}"


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.200}"
    except (ValueError, RecursionError):  # an integer of thousands of digits, or nested too deeply
        return f"a value of type {type(value).__name__} that cannot be written"

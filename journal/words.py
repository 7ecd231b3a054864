"""Events in words, for people and programs that read a journal."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.json_format import MessageToDict

from .proto.events_pb2 import Event

MOST_BYTES = 1 << 14
"""Of an event that `brief` tells in full: one may name a million splits."""

_WIDTH = 60


def content(event: Event) -> dict[str, Any]:
    """The event's fields, JSON-ready, without what is secret."""
    found: dict[str, Any] = MessageToDict(
        getattr(event, event.WhichOneof("event") or ""), preserving_proto_field_name=True
    )
    found.pop("position_key", None)
    return found


def kind_of(event: Event) -> str:
    """Its kind: WorkerLost."""
    return "".join(part.capitalize() for part in (event.WhichOneof("event") or "").split("_"))


def fields(event: Event) -> str:
    """Its fields in a line, the long ones cut."""
    return " ".join(f"{key}={_short(value)}" for key, value in content(event).items())


def brief(event: Event) -> str:
    """The same, in a time that is bounded: of a large event only its numbers and short texts."""
    if (size := event.ByteSize()) <= MOST_BYTES:
        return fields(event)
    of = getattr(event, event.WhichOneof("event") or "")
    plain = [
        f"{field.name}={_short(value)}"
        for field, value in of.ListFields()
        if isinstance(value, int | str) and field.name != "position_key"
    ]
    return " ".join([*plain, f"… {size:,} bytes"])


def summary(sequence: int, event: Event) -> dict[str, Any]:
    """JSON-ready, in a time that is bounded."""
    return {
        "sequence": sequence, "time_ms": event.time_ms, "name": kind_of(event),
        "fields": brief(event),
    }  # fmt: skip


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if not text.isprintable():  # such as what steers a terminal
        text = ascii(text)[1:-1]
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}…"

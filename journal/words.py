"""Events in words, for people and programs that read a journal."""

from __future__ import annotations

import json
from collections.abc import MutableSequence
from typing import Any

from google.protobuf.json_format import MessageToDict

from .proto.events_pb2 import Event

MOST_BYTES = 1 << 14
"""Of an event that `brief` tells in full: one may name a million splits."""

QUIET = {
    *("SplitsLeased", "LeaseBegun", "LeaseReturned", "PassStarted", "SplitsFound"),
    *("BundlesClaimed", "ClaimsMoved", "BundlesChecked", "LengthsLearned", "ConsumersMoved"),
    *("DeliveryReported", "DatasetUsed", "RoundTargeted", "StreamAssigned", "StreamCompleted"),
    *("TaskProposed", "TaskCreated", "TaskStarted", "TaskCompleted", "TaskRemoved"),
    *("SaveSplitAssigned", "ChunkCommitted"),
}
"""Kinds of events that a healthy run has many of."""

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


def fold(told: MutableSequence[dict[str, Any]], sequence: int, event: Event) -> None:
    """Append the event's summary; if it is quiet, only its number and count, together with those of
    quiet ones right before it: first `sequence`, last one `to`, and how many of each kind."""
    if (kind := kind_of(event)) not in QUIET:
        told.append(summary(sequence, event))
    elif told and "quiet" in told[-1]:
        counts = told[-1]["quiet"]
        told[-1] |= {"to": sequence, "quiet": {**counts, kind: counts.get(kind, 0) + 1}}
    else:
        told.append({"sequence": sequence, "to": sequence, "quiet": {kind: 1}})


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if not text.isprintable():  # such as what steers a terminal
        text = ascii(text)[1:-1]
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}…"

"""Events to bytes and back."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from ..storage import Corrupt, NewerFormat
from .proto.events_pb2 import Event

FORMAT = 4
"""Of the events that this version writes; it reads this and every earlier one.

In format 1 a new journal id said by itself that nobody goes on, and where ids begin. Before format
3 no job was sharded statically, and nothing was saved. Before format 4 each dataset was a graph.
"""


def encode(event: Event) -> bytes:
    """The record of an event."""
    return event.SerializeToString()


def decode(sequence: int, data: bytes) -> Event:
    """The event that the record `sequence` holds.

    Raises NewerFormat when a later version of the program wrote it, and Corrupt.
    """
    try:
        event = Event.FromString(data)
    except DecodeError as error:
        raise Corrupt(f"record {sequence} holds no event: {error}") from None
    kind = event.WhichOneof("event")
    if kind is None:
        raise NewerFormat(
            f"record {sequence} holds an event of a kind that this version does not know; "
            "upgrade Forebay"
        )
    if kind == "leader_elected" and event.leader_elected.format > FORMAT:
        raise NewerFormat(
            f"record {sequence} begins events of format {event.leader_elected.format}, newer than "
            f"{FORMAT}, the newest that this version knows; upgrade Forebay"
        )
    return event

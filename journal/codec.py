"""Events to bytes and back."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from ..storage import Corrupt, NewerFormat
from .proto.events_pb2 import Event

FORMAT = 1
"""The format of the events that this version writes. It reads this and every earlier format."""


def encode(event: Event) -> bytes:
    """Encode an event as a record."""
    return event.SerializeToString()


def decode(sequence: int, data: bytes) -> Event:
    """Decode the event in record `sequence`.

    Raises NewerFormat if a later version of the program wrote it, and Corrupt.
    """
    try:
        event = Event.FromString(data)
    except DecodeError as error:
        raise Corrupt(f"record {sequence} holds no event: {error}") from None
    if (kind := event.WhichOneof("event")) is None:
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

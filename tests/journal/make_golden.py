"""Makes a golden journal: `python tests/journal/make_golden.py NAME`, into golden/NAME.

A golden journal is one that a version has written. From the first release on it is never made
again: every later version replays it to the same events, which lie beside it as JSON. When events
gain a kind or a field, add another one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from forebay.journal.codec import FORMAT, encode
from forebay.journal.proto.events_pb2 import Event
from forebay.journal.snapshots import encode_snapshot
from forebay.storage import FileStorage, Writer, blob_digest

GOLDEN = Path(__file__).parent / "golden"
GRAPH = b"the bytes of a GraphDef"
STATE = b"the bytes of a state"
SEGMENT_BYTES = 1500


def all_events() -> list[Event]:
    """Events of every kind and with every field set, once for each choice that it leaves."""
    events: list[Event] = []
    for kind in Event.DESCRIPTOR.oneofs_by_name["event"].fields:
        for variant in range(_variants(kind)):
            number = len(events) + 1
            event = Event(time_ms=1_700_000_000_000 + number)
            if number % 2:
                event.request.caller = f"caller {number}"
                event.request.number = number
            _fill(getattr(event, kind.name), variant, number)
            getattr(event, kind.name).SetInParent()
            events.append(event)
    return events


def _variants(kind: FieldDescriptor) -> int:
    """How many oneof choices the message of a field, or one in it, has at most."""
    count = 1
    for field in kind.message_type.fields:
        oneof = field.containing_oneof
        if oneof is not None:
            count = max(count, len(oneof.fields))
        if field.message_type is not None:
            count = max(count, _variants(field))
    return count


def _fill(message: Message, variant: int, number: int) -> None:
    for field in message.DESCRIPTOR.fields:
        oneof = field.containing_oneof
        if oneof is not None and oneof.fields[variant % len(oneof.fields)] is not field:
            continue
        repeated = field.is_repeated
        for i in range(2 if repeated else 1):
            if field.message_type is not None:
                values = getattr(message, field.name)
                inner = values.add() if repeated else values
                inner.SetInParent()
                _fill(inner, variant + i, number)
            elif repeated:
                getattr(message, field.name).append(_value(field, number + i))
            else:
                setattr(message, field.name, _value(field, number))


def _value(field: FieldDescriptor, number: int) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return blob_digest(GRAPH) if field.name == "blob" else f"{field.name} {number} é"
        case FieldDescriptor.TYPE_BYTES:
            return bytes([number, 0, 255])
        case FieldDescriptor.TYPE_BOOL:
            return True
        case FieldDescriptor.TYPE_ENUM:
            values = field.enum_type.values
            return values[number % len(values)].number
        case FieldDescriptor.TYPE_INT32 | FieldDescriptor.TYPE_INT64:
            return -number if number % 5 == 0 else number
        case _:
            return number


def make(path: Path) -> None:
    """Two terms, several segments, a snapshot, a blob. `path`.json says what is in it."""
    storage = FileStorage(path, SEGMENT_BYTES)
    events = all_events()
    half = len(events) // 2
    expected: list[dict[str, Any]] = []
    for term, of_term in ((1, events[:half]), (2, events[half:])):
        writer = storage.open_writer("make_golden")
        assert writer.term == term
        elected = Event(time_ms=1_700_000_000_000)
        elected.leader_elected.term = term
        elected.leader_elected.format = FORMAT
        elected.leader_elected.address = "127.0.0.1:5050"
        elected.leader_elected.version = "golden"
        elected.leader_elected.journal_id = "golden"
        others = [e for e in of_term if not e.HasField("leader_elected")]
        _append(writer, [elected], expected)
        while others:
            _append(writer, others[: 1 + len(others) % 3], expected)
            del others[: 1 + len(others) % 3]
        if term == 1:
            writer.write_blob(GRAPH)
            writer.write_snapshot(writer.last_sequence, encode_snapshot(STATE, 1_700_000_000_000))
        writer.close()
    (path / "LOCK").unlink()  # it has the number of this process
    text = json.dumps(expected, indent=1, ensure_ascii=False, sort_keys=True)
    path.with_suffix(".json").write_text(text + "\n")


def _append(writer: Writer, events: list[Event], expected: list[dict[str, Any]]) -> None:
    writer.append([encode(event) for event in events])
    expected += [describe(event, writer.term) for event in events]


def describe(event: Event, term: int) -> dict[str, Any]:
    """An event as JSON; numbers of 64 bits are strings there."""
    return {"term": term, "event": MessageToDict(event, preserving_proto_field_name=True)}


if __name__ == "__main__":
    target = GOLDEN / sys.argv[1]
    if target.exists():
        sys.exit(f"{target} exists, and stays as it is: choose another name")
    make(target)

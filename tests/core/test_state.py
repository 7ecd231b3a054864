"""States that earlier versions encoded must decode, to the same fields, or not at all."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.journal.codec import encode
from forebay.journal.proto import events_pb2 as ev
from forebay.journal.snapshots import encode_snapshot
from forebay.service.core.encoding import SCHEMA, decode_state, encode_state
from forebay.service.core.machine import TOPICS
from forebay.service.core.state import State
from forebay.service.dispatcher.recovery import recover
from forebay.storage import Corrupt, MemoryStorage, Writer

from .make_fold import FOLDS, LIVES, Cluster
from .make_golden import GOLDEN, described, filled

STATES = sorted(GOLDEN.glob("*.state"))
FOLDS_MADE = sorted(FOLDS.iterdir())


@pytest.mark.parametrize("path", STATES, ids=lambda path: path.stem)
def test_a_golden_state_decodes(path: Path) -> None:
    state = decode_state(path.read_bytes())
    expect_all(described(state), json.loads(path.with_suffix(".json").read_text()))
    assert decode_state(encode_state(state)) == state


def expect_all(found: Any, expected: Any) -> None:
    """Whatever was there is there; what was added since has its default."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            expect_all(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            expect_all(one, other)
    else:
        assert found == expected


def test_the_state_of_today_is_a_golden_one() -> None:
    assert SCHEMA in {path.stem for path in STATES}, (
        "the state's structs have changed: add another golden state with "
        "python -m tests.core.make_golden, and convert the states before in encoding.py"
    )


@pytest.mark.parametrize("path", FOLDS_MADE, ids=lambda path: path.stem)
@pytest.mark.parametrize("snapshot", [True, False], ids=["from the snapshot", "from the events"])
def test_a_golden_journal_leads_to_its_state(path: Path, snapshot: bool) -> None:
    fold = json.loads(path.read_text())
    storage = MemoryStorage()
    writer = storage.open_writer("the test")
    writer.append([bytes.fromhex(event) for event in fold["events"]])
    if snapshot:
        writer.write_snapshot(fold["snapshot_at"], bytes.fromhex(fold["snapshot"]))
    state, replayed = recover(storage)
    assert (replayed < state.sequence) == snapshot
    expect_all(described(state), fold["state"])


def test_each_kind_of_event_is_declared_once() -> None:
    kinds = [field.name for field in ev.Event.DESCRIPTOR.oneofs_by_name["event"].fields]
    assert sorted(kind for topic in TOPICS for kind in topic.EVENTS) == sorted(kinds)


def test_the_golden_journals_hold_what_a_cluster_decides() -> None:
    """Each kind of event is in the lives that they were made of."""
    kinds = {field.name for field in ev.Event.DESCRIPTOR.oneofs_by_name["event"].fields}
    lived = set()
    for life in LIVES.values():
        cluster = Cluster()
        life(cluster)
        lived |= {event.WhichOneof("event") for event in cluster.events}
    assert kinds == lived


STATE = filled(State, itertools.count(1))


def renamed(data: bytes, old: str, new: str) -> bytes:
    """As if a field had had another name when this was encoded."""
    return data.replace(msgspec.msgpack.encode(old), msgspec.msgpack.encode(new))


def expect_refused(data: bytes, field: str) -> None:
    other = renamed(data, field, f"{field}_before")
    assert other != data
    with pytest.raises(ValueError, match=f"{field}_before"):
        decode_state(other)


@pytest.mark.parametrize("field", ["journal_id", "next_id", "leases", "begun", "pass_number"])
def test_a_field_of_another_name_is_refused(field: str) -> None:
    expect_refused(encode_state(STATE), field)


def test_a_schema_that_is_not_known_is_refused() -> None:
    data = encode_state(STATE).replace(SCHEMA.encode(), b"0" * len(SCHEMA))
    with pytest.raises(ValueError, match=r"schema 0000.* not know"):
        decode_state(data)


@pytest.mark.parametrize("data", [b"", b"\x92", b"\x80\x80", b"no state", encode_state(STATE)[:-1]])
def test_bytes_that_are_no_state(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_state(data)


def five_events() -> tuple[MemoryStorage, Writer]:
    storage = MemoryStorage()
    writer = storage.open_writer("the test")
    for number in range(1, 6):
        leader = ev.LeaderElected(term=number, journal_id="j")
        writer.append([encode(ev.Event(time_ms=number, leader_elected=leader))])
    return storage, writer


def test_a_snapshot_under_another_number_is_passed_over() -> None:
    storage, writer = five_events()
    expected, _ = recover(storage)
    state = encode_state(recover(storage, 2)[0])
    writer.write_snapshot(4, encode_snapshot(state, 4))
    assert recover(storage) == (expected, 5)
    writer.write_snapshot(2, encode_snapshot(state, 2))
    assert recover(storage) == (expected, 3)


@pytest.mark.parametrize("trimmed", [False, True])
def test_a_dispatcher_begins_with_the_events_instead(trimmed: bool) -> None:
    storage, writer = five_events()
    expected, _ = recover(storage)
    data = renamed(encode_state(recover(storage, 4)[0]), "next_id", "other_id")
    writer.write_snapshot(4, encode_snapshot(data, 4))
    if trimmed:
        writer.trim(4)
        with pytest.raises(Corrupt, match=r"begins at record 4.*snapshot 4: .*other_id"):
            recover(storage)
    else:
        assert recover(storage) == (expected, 5)

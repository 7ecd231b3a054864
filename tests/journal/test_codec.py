from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.journal.codec import FORMAT, decode, encode
from forebay.journal.proto.events_pb2 import Event, LeaderElected, SplitsLeased
from forebay.storage import Corrupt, NewerFormat


@given(st.integers(0, 2**63), st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_an_event_comes_back(time_ms: int, first: int, count: int) -> None:
    event = Event(time_ms=time_ms, splits_leased=SplitsLeased(first=first, count=count))
    assert decode(7, encode(event)) == event


def test_an_event_with_no_fields_set_keeps_its_kind() -> None:
    event = Event(splits_leased=SplitsLeased())
    assert decode(1, encode(event)).WhichOneof("event") == "splits_leased"


def test_an_unknown_kind_is_of_a_newer_version() -> None:
    unknown = bytes([0xFA, 0x3E, 0])  # field 1007, an empty message
    with pytest.raises(NewerFormat, match=r"record 42 .* upgrade"):
        decode(42, encode(Event(time_ms=5)) + unknown)


def test_a_leader_of_a_newer_format() -> None:
    assert decode(1, encode(Event(leader_elected=LeaderElected(format=FORMAT))))
    newer = Event(leader_elected=LeaderElected(format=FORMAT + 1))
    with pytest.raises(NewerFormat, match=f"record 9 .*format {FORMAT + 1}.*upgrade"):
        decode(9, encode(newer))


def test_no_event_at_all() -> None:
    with pytest.raises(Corrupt, match="record 3 holds no event"):
        decode(3, b"\xff\xff\xff")

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from forebay.journal.codec import FORMAT, encode
from forebay.journal.proto.events_pb2 import Event, Snapshot, SplitsLeased
from forebay.journal.replaying import replay
from forebay.journal.snapshots import encode_snapshot
from forebay.storage import Corrupt, FileStorage, Missing, NewerFormat, Storage, Writer


def event(number: int) -> Event:
    return Event(time_ms=number, splits_leased=SplitsLeased(first=number, count=1))


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return FileStorage(tmp_path, segment_bytes=200)


@pytest.fixture
def writer(storage: Storage) -> Writer:
    writer = storage.open_writer("the test")
    for number in range(1, 31):
        writer.append([encode(event(number))])
    for sequence in (10, 20):
        writer.write_snapshot(sequence, encode_snapshot(b"state %d" % sequence, sequence))
    return writer


def numbers(storage: Storage, at: int | None = None) -> tuple[bytes | None, int, list[int]]:
    replayed = replay(storage, at)
    events = list(replayed.events)
    assert all(sequence == event.time_ms for sequence, event in events)
    return replayed.state, replayed.snapshot_sequence, [sequence for sequence, _ in events]


def damage(tmp_path: Path, sequence: int) -> None:
    path = tmp_path / "snapshots" / f"{sequence:020}.snapshot"
    path.write_bytes(path.read_bytes()[:-1])


def test_an_empty_journal(storage: Storage) -> None:
    assert numbers(storage) == (None, 0, [])


def test_the_newest_snapshot_and_what_follows(storage: Storage, writer: Writer) -> None:
    assert numbers(storage) == (b"state 20", 20, list(range(21, 31)))


def test_the_state_as_of_any_event(storage: Storage, writer: Writer) -> None:
    assert numbers(storage, at=0) == (None, 0, [])
    assert numbers(storage, at=9) == (None, 0, list(range(1, 10)))
    assert numbers(storage, at=10) == (b"state 10", 10, [])
    assert numbers(storage, at=19) == (b"state 10", 10, list(range(11, 20)))
    assert numbers(storage, at=21) == (b"state 20", 20, [21])
    assert numbers(storage, at=99) == (b"state 20", 20, list(range(21, 31)))


def test_a_damaged_snapshot_falls_back(
    storage: Storage, writer: Writer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(tmp_path, 20)
    with caplog.at_level(logging.WARNING):
        assert numbers(storage) == (b"state 10", 10, list(range(11, 31)))
    assert "snapshot 20 is passed over" in caplog.text
    writer.write_snapshot(10, b"\xff no state")
    assert numbers(storage) == (None, 0, list(range(1, 31)))


def test_no_snapshot_and_no_history_is_corrupt(
    storage: Storage, writer: Writer, tmp_path: Path
) -> None:
    writer.trim(21)
    first = storage.first_sequence()
    assert first > 11
    damage(tmp_path, 20)
    with pytest.raises(Corrupt, match=f"begins at record {first}, and no snapshot before it"):
        replay(storage)


def test_a_state_before_the_history_is_missing(storage: Storage, writer: Writer) -> None:
    writer.trim(21)
    writer.delete_snapshot(10)
    with pytest.raises(Missing, match="the state as of 12 is gone"):
        replay(storage, at=12)
    assert numbers(storage) == (b"state 20", 20, list(range(21, 31)))


def test_a_snapshot_of_a_newer_format(storage: Storage, writer: Writer) -> None:
    writer.write_snapshot(25, Snapshot(format=FORMAT + 1, state=b"?").SerializeToString())
    with pytest.raises(NewerFormat, match=f"snapshot 25 has format {FORMAT + 1}"):
        replay(storage)


def test_corruption_behind_the_snapshot_is_said(
    storage: Storage, writer: Writer, tmp_path: Path
) -> None:
    segment = sorted((tmp_path / "segments").iterdir())[-2]
    data = bytearray(segment.read_bytes())
    data[30] ^= 1
    segment.write_bytes(data)
    with pytest.raises(Corrupt, match=segment.name):
        list(replay(storage).events)


def test_a_state_that_this_version_cannot_decode(storage: Storage, writer: Writer) -> None:
    def decode_state(sequence: int, state: bytes) -> str:
        assert state == b"state %d" % sequence
        if sequence == 20:
            raise ValueError("not of this version")
        return state.decode()

    replayed = replay(storage, None, decode_state)
    assert (replayed.state, replayed.snapshot_sequence) == ("state 10", 10)
    assert [sequence for sequence, _ in replayed.events] == list(range(11, 31))

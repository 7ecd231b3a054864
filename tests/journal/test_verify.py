from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.journal.codec import decode, encode
from forebay.journal.proto.events_pb2 import (
    DatasetDefinition,
    DatasetRegistered,
    Event,
    LeaderElected,
    SplitsLeased,
    TfDataGraph,
    WorkerLost,
)
from forebay.journal.replaying import replay
from forebay.journal.snapshots import encode_snapshot
from forebay.journal.verification import holds_anything, repair, verify
from forebay.storage import Corrupt, FileStorage, Locked, MemoryStorage, NewerFormat
from forebay.storage.tfrecord import frame


def leader(term: int, journal_id: str = "j") -> Event:
    elected = LeaderElected(term=term, format=1, journal_id=journal_id)
    return Event(time_ms=1000 * term, leader_elected=elected)


def leased(first: int) -> Event:
    return Event(time_ms=5000 + first, splits_leased=SplitsLeased(first=first, count=1))


def registered(digest: str) -> Event:
    definition = DatasetDefinition(tf_data_graph=TfDataGraph(blob=digest))
    return Event(
        time_ms=4000, dataset_registered=DatasetRegistered(dataset_id="1", definition=definition)
    )


LOST = Event(time_ms=4000, worker_lost=WorkerLost(worker_id=1, for_good=True))


def fill(storage: FileStorage | MemoryStorage) -> str:
    """Two terms, a dataset, 40 leases, snapshots after the events 10 and 20. Sequences 1 … 43."""
    writer = storage.open_writer("the test")
    digest = writer.write_blob(b"graph")
    writer.append([encode(leader(writer.term)), encode(registered(digest))])
    for i in range(20):
        writer.append([encode(leased(i))])
    for sequence in (10, 20):
        writer.write_snapshot(sequence, encode_snapshot(b"state", 5000 + sequence))
    writer.close()
    writer = storage.open_writer("the test")
    writer.append([encode(leader(writer.term))])
    for i in range(20, 40):
        writer.append([encode(leased(i))])
    writer.close()
    return digest


@pytest.fixture
def storage(tmp_path: Path) -> FileStorage:
    return FileStorage(tmp_path / "storage", segment_bytes=200)


@pytest.fixture
def digest(storage: FileStorage) -> str:
    return fill(storage)


def segments(storage: FileStorage) -> list[Path]:
    return sorted((storage.path / "segments").iterdir())


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def messages(storage: FileStorage | MemoryStorage) -> str:
    return "\n".join(verify(storage).problems)


# -- verify ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [MemoryStorage, None])
def test_a_sound_journal(make: type[MemoryStorage] | None, tmp_path: Path) -> None:
    storage = make() if make else FileStorage(tmp_path)
    assert verify(storage).ok
    assert (verify(storage).first, verify(storage).last) == (1, 0)
    fill(storage)
    report = verify(storage)
    assert report.ok
    assert (report.first, report.last, report.snapshots, report.blobs) == (1, 43, 2, 1)
    assert report.torn_bytes == 0


def test_a_trimmed_journal_is_sound(storage: FileStorage, digest: str) -> None:
    writer = storage.open_writer("the test")
    writer.delete_snapshot(10)
    writer.trim(21)
    writer.close()
    report = verify(storage)
    assert report.ok
    assert 1 < report.first <= 21
    assert report.last == 43


def test_a_torn_tail_is_no_problem(storage: FileStorage, digest: str) -> None:
    with segments(storage)[-1].open("ab") as file:
        file.write(frame(b"x" * 50)[:12])
    report = verify(storage)
    assert report.ok
    assert report.torn_bytes == 12


def test_a_flipped_bit_is_named_with_file_and_byte(storage: FileStorage, digest: str) -> None:
    path = segments(storage)[3]
    flip(path, 20)
    (problem,) = verify(storage).problems
    assert problem.startswith(f"{path}: byte 0: ")


def test_a_damaged_snapshot(storage: FileStorage, digest: str) -> None:
    path = storage.path / "snapshots" / f"{10:020}.snapshot"
    flip(path, 14)
    (problem,) = verify(storage).problems
    assert problem.startswith(f"{path}: ")


def test_a_missing_and_a_damaged_blob(storage: FileStorage, digest: str) -> None:
    path = storage.path / "blobs" / digest
    path.write_bytes(b"graf")
    assert "does not match its name" in messages(storage)
    path.unlink()
    assert "there is no such file" in messages(storage)
    assert f"the dataset '1' needs the blob {digest}" in messages(storage)


def test_a_snapshot_behind_the_end(storage: FileStorage, digest: str) -> None:
    (storage.path / "snapshots" / f"{20:020}.snapshot").rename(
        storage.path / "snapshots" / f"{99:020}.snapshot"
    )
    assert "the log ends at record 43, before this snapshot" in messages(storage)


def test_a_snapshot_that_is_followed_by_nothing(storage: FileStorage, digest: str) -> None:
    for path in segments(storage):
        if int(path.name[:20]) < 15:
            path.unlink()
    assert re.search(r"begins at record 1\d, and there is a snapshot 10", messages(storage))


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (lambda term: [leased(1)], "record 44 of term 3 comes before any that elects its leader"),
        (lambda term: [LOST, leader(term)], ""),  # as after a repair
        (lambda term: [LOST, leased(1)], "record 45 of term 3 comes before any that elects"),
        (lambda term: [leader(7)], "record 44 elects term 7 in term 3"),
        (lambda term: [leader(term, "other")], "record 44 is of the journal 'other'"),
    ],
)
def test_terms_and_leaders_must_agree(
    storage: FileStorage, digest: str, events: Callable[[int], list[Event]], message: str
) -> None:
    writer = storage.open_writer("the test")
    writer.append(list(map(encode, events(writer.term))))
    writer.close()
    assert message in messages(storage) if message else verify(storage).ok


def test_a_record_that_is_no_event(storage: FileStorage, digest: str) -> None:
    writer = storage.open_writer("the test")
    writer.append([encode(leader(writer.term)), b"\xff\xff", encode(leased(7))])
    writer.close()
    report = verify(storage)
    assert report.problems == [
        "record 45 holds no event: Error parsing message with type 'forebay.journal.Event'"
    ]
    assert report.last == 46


def test_a_journal_of_a_newer_format_is_not_judged(storage: FileStorage, digest: str) -> None:
    writer = storage.open_writer("the test")
    newer = leader(writer.term)
    newer.leader_elected.format = 99
    writer.append([encode(newer)])
    writer.close()
    for look in (verify, repair):
        with pytest.raises(NewerFormat, match="format 99"):
            look(storage)


def test_a_condemned_journal_is_not_fine(storage: FileStorage, digest: str) -> None:
    writer = storage.open_writer("the test")
    writer.condemn("events are gone")
    writer.close()
    (problem,) = verify(storage).problems
    assert "events are gone" in problem
    assert repair(storage, truncate_corrupt=True)
    assert verify(storage).ok


# -- repair ----------------------------------------------------------------------------------------


def test_nothing_to_repair(storage: FileStorage, digest: str) -> None:
    assert repair(storage) == []


def test_no_repair_under_a_dispatcher(storage: FileStorage, digest: str, tmp_path: Path) -> None:
    writer = storage.open_writer("a dispatcher")
    for truncate in (False, True):
        with pytest.raises(Locked, match="a dispatcher"):
            repair(FileStorage(tmp_path / "storage"), truncate_corrupt=truncate)
    writer.close()


def test_a_torn_tail_is_removed(storage: FileStorage, digest: str) -> None:
    with segments(storage)[-1].open("ab") as file:
        file.write(frame(b"x" * 50)[:12])
    assert repair(storage) == [
        "removed 12 bytes of an append that a crash cut off behind record 43"
    ]
    assert storage.holdings().torn_bytes == 0


def test_a_corrupt_log_is_cut_only_when_asked(storage: FileStorage, digest: str) -> None:
    path = segments(storage)[-2]
    last_good = int(path.name[:20]) - 1
    flip(path, 20)
    before = {path: path.read_bytes() for path in segments(storage)}
    says = f"{path.name}.* --truncate-corrupt cuts the log behind record {last_good}, and moves"
    with pytest.raises(Corrupt, match=says):
        repair(storage)
    assert {path: path.read_bytes() for path in segments(storage)} == before
    done, _ = repair(storage, truncate_corrupt=True)
    assert f"the log ends at record {last_good} now" in done
    assert verify(storage).ok
    (added,) = storage.read(last_good)
    elected = decode(added.sequence, added.data).leader_elected
    assert elected.after_repair
    assert elected.journal_id != "j"
    aside = storage.path / "cut" / "1"
    assert {p.name: p.read_bytes() for p in aside.iterdir()} == {
        path.name: before[path],
        segments_after(before, path).name: before[segments_after(before, path)],
    }


def test_what_no_cut_mends_is_not_told_to_be_cut(storage: FileStorage, digest: str) -> None:
    for name in (10, 20):
        flip(next(storage.path.glob(f"snapshots/*{name}.snapshot")), 20)
    segments(storage)[0].unlink()
    with pytest.raises(Corrupt, match="restore the snapshots") as refused:
        repair(storage)
    assert "--truncate-corrupt" not in str(refused.value)


def segments_after(paths: dict[Path, bytes], path: Path) -> Path:
    return next(later for later in sorted(paths) if later > path)


def test_damage_that_no_dispatcher_needs_is_left(storage: FileStorage, digest: str) -> None:
    path = segments(storage)[1]
    flip(path, 20)
    assert repair(storage, truncate_corrupt=True) == []
    assert f"{path}: byte 0" in messages(storage)
    assert replay(storage).snapshot_sequence == 20
    assert len(list(replay(storage).events)) == 23


def test_a_log_that_lost_its_end_before_a_snapshot(storage: FileStorage, digest: str) -> None:
    for path in segments(storage):
        if int(path.name[:20]) > 15:
            path.unlink()
    last = storage.extent().last
    with pytest.raises(Corrupt, match="records were lost"):
        repair(storage)
    assert len(repair(storage, truncate_corrupt=True)) == 2
    assert storage.snapshots() == [10]
    assert storage.extent().last == last + 1
    assert verify(storage).ok


def test_a_log_of_which_only_snapshots_are_left(storage: FileStorage, digest: str) -> None:
    for path in segments(storage):
        path.unlink()
    assert holds_anything(storage)
    with pytest.raises(Corrupt, match="before this snapshot") as refused:
        storage.open_writer("a dispatcher")
    assert str(refused.value) in messages(storage)
    with pytest.raises(Corrupt, match="or repair the journal"):
        repair(storage)
    assert "ends at record 0 now" in repair(storage, truncate_corrupt=True)[0]
    assert verify(storage).ok
    assert (storage.extent(), storage.snapshots()) == ((1, 1), [])


def test_a_log_of_which_nothing_is_left_but_that_it_was_there(
    storage: FileStorage, digest: str
) -> None:
    for path in [*segments(storage), *(storage.path / "snapshots").iterdir()]:
        path.unlink()
    assert holds_anything(storage)
    assert re.search(r"held \d+ in term 2", messages(storage))
    assert repair(storage, truncate_corrupt=True)
    assert verify(storage).ok


def test_a_storage_that_holds_nothing_yet(storage: FileStorage) -> None:
    assert not holds_anything(storage)
    storage.open_writer("a dispatcher that was killed at once").close()
    assert not holds_anything(storage)


@pytest.mark.parametrize("damage", ["2\nanother line\n", "", "no number\n", "1\n"])
def test_a_term_that_is_not_the_latest(storage: FileStorage, digest: str, damage: str) -> None:
    (storage.path / "TERM").write_text(damage)
    with pytest.raises(Corrupt, match=r"at least 2; let its one line say '1002'") as refused:
        storage.open_writer("a dispatcher")
    assert messages(storage) == str(refused.value)
    (storage.path / "TERM").write_text("1002\n")
    storage.open_writer("a dispatcher").close()
    assert verify(storage).ok


def test_damage_that_ends_a_segment_before_others_is_cut_off(
    storage: FileStorage, digest: str
) -> None:
    path = segments(storage)[-2]
    with path.open("ab") as file:
        file.write(b"garbage behind the last batch")
    assert repair(storage, truncate_corrupt=True)
    assert verify(storage).ok

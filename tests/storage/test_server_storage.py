"""The journal on a server when nothing is away: damage, formats, terms, leases, cuts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from forebay.storage import (
    Corrupt,
    Extent,
    Fenced,
    Locked,
    Missing,
    NewerFormat,
    OutOfSequence,
    Record,
    Writer,
    blob_name,
)
from forebay.storage.proto.segment_pb2 import Batch
from forebay.storage.server_storage import ServerStorage
from forebay.storage.tfrecord import frame

from .journals import Journal, PostgresJournal, RedisJournal


@pytest.fixture(params=["redis", "postgres"])
def journal(request: pytest.FixtureRequest) -> Iterator[Journal]:
    url: str = request.getfixturevalue(f"{request.param}_storage_url")
    if request.param == "redis":
        in_redis = RedisJournal(url)
        yield in_redis
        in_redis.redis.close()
    else:
        yield PostgresJournal(request.getfixturevalue("postgres"), url)


# -- what is stored ----------------------------------------------------------------------------


def test_an_entry_is_a_batch_under_the_sequence_of_its_last_record(journal: Journal) -> None:
    writer = journal.write(batches=2)
    batch = Batch(format=1, term=writer.term, first_sequence=4, records=[b"4", b"5", b"6"])
    batches = journal.batches()
    assert [*batches] == [3, 6]
    assert batches[6] == frame(batch.SerializeToString())


def test_reading_goes_in_chunks(journal: Journal) -> None:
    writer = journal.write(batches=400, records=2)
    large = bytes(1 << 20)
    for _ in range(10):
        writer.append([large])
    records = list(journal.open().read())
    assert [record.sequence for record in records] == list(range(1, 811))
    assert [len(record.data) for record in records[800:]] == [1 << 20] * 10
    assert list(journal.open().read(after=333)) == records[333:]


def test_holdings_count_bytes(journal: Journal) -> None:
    writer = journal.write()
    writer.write_snapshot(3, bytes(1000))
    writer.write_blob(bytes(500))
    held = journal.open().holdings()
    assert held.segments == 1
    assert held.log_bytes > 4 * 16
    assert (held.snapshots, held.snapshot_bytes, held.blob_bytes) == (1, 1016, 500)


def test_reading_changes_nothing(journal: Journal) -> None:
    storage = journal.open()
    assert list(storage.read()) == []
    assert storage.snapshots() == []
    assert storage.blobs() == []
    storage.check()
    assert not journal.is_there()


# -- damage ------------------------------------------------------------------------------------


def test_a_damaged_entry_is_corrupt_and_named(journal: Journal) -> None:
    journal.write().close()
    journal.flip_a_bit(9)
    seen: list[Record] = []
    with pytest.raises(
        Corrupt, match=f"{journal.entry.format(9)}: the checksum does not match; re"
    ):
        seen.extend(journal.open().read())
    assert [record.sequence for record in journal.open().read(after=9)] == [10, 11, 12]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Batch(format=1, term=1, first_sequence=14, records=[b"x"]), "record 14"),
        (Batch(format=1, term=1, first_sequence=13, records=[]), "record 12"),
        (Batch(format=1, term=0, first_sequence=13, records=[b"x"]), "term 0 comes after term 1"),
        (Batch(format=0, term=1, first_sequence=13, records=[b"x"]), "format 0"),
    ],
)
def test_an_entry_that_does_not_follow_is_corrupt(
    journal: Journal, batch: Batch, message: str
) -> None:
    journal.write().close()
    journal.forge(13, frame(batch.SerializeToString()))
    with pytest.raises(Corrupt, match=f"{journal.entry.format(13)}: .*{message}"):
        list(journal.open().read())


def test_an_entry_that_is_no_batch_is_corrupt(journal: Journal) -> None:
    journal.write().close()
    journal.forge(13, frame(b"\xff\xff"))
    with pytest.raises(Corrupt, match=f"{journal.entry.format(13)}: holds no batch"):
        journal.open().open_writer("the test")


def test_a_removed_entry_is_noticed(journal: Journal) -> None:
    journal.write().close()
    journal.remove(6)
    with pytest.raises(Corrupt, match="where record 4 must follow"):
        list(journal.open().read())
    journal.remove(12)
    with pytest.raises(Corrupt, match="ends at record 9, and record 12 was appended"):
        list(journal.open().read(after=6))


def test_a_damaged_snapshot_or_blob_is_corrupt(journal: Journal) -> None:
    writer = journal.write()
    writer.write_snapshot(3, b"the state")
    digest = writer.write_blob(b"blob")
    journal.put_snapshot(3, frame(b"the state")[:-1])
    journal.put_blob(digest, b"blub")
    with pytest.raises(Corrupt, match="snapshots: 3: the snapshot's checksum"):
        journal.open().read_snapshot(3)
    with pytest.raises(Corrupt, match=f"blobs: {digest}: the blob's content"):
        journal.open().read_blob(digest)
    writer.write_blob(b"blob")
    assert journal.open().read_blob(digest) == b"blob"


def test_a_snapshot_behind_the_end_says_that_records_are_missing(journal: Journal) -> None:
    journal.write().close()
    journal.put_snapshot(13, frame(b"s"))
    with pytest.raises(Corrupt, match="ends at record 12, and there was a record 13"):
        journal.open().open_writer("the test")


def test_a_newer_format_is_refused(journal: Journal) -> None:
    journal.write().close()
    batch = Batch(format=2, term=1, first_sequence=13, records=[b"x"])
    journal.forge(13, frame(batch.SerializeToString()))
    with pytest.raises(NewerFormat, match=f"{journal.entry.format(13)}: format 2 is newer than 1"):
        list(journal.open().read())
    journal.set_format(2)
    for use in (
        lambda: journal.open().open_writer("the test"),
        lambda: list(journal.open().read()),
        lambda: journal.open().snapshots(),
        lambda: journal.open().extent(),
    ):
        with pytest.raises(NewerFormat, match="meta: format 2 is newer than 1"):
            use()


# -- trimming ----------------------------------------------------------------------------------


def test_trimming_while_it_is_read(journal: Journal) -> None:
    writer = journal.write(batches=100, records=1)
    records = journal.open().read()
    assert next(records).sequence == 1
    writer.write_snapshot(99, b"s")
    writer.trim(100)
    assert len(journal.batches()) == 1
    with pytest.raises(Missing, match="records before 100 were trimmed"):
        list(records)


def test_trimming_keeps_batches_whole(journal: Journal) -> None:
    writer = journal.write()
    with pytest.raises(OutOfSequence, match="the newest snapshot is at 0"):
        writer.trim(8)
    writer.write_snapshot(12, b"s")
    writer.trim(3)
    assert journal.open().first_sequence() == 1
    writer.trim(8)
    assert journal.open().extent() == Extent(7, 12)
    writer.trim(8)
    assert [record.sequence for record in journal.open().read(6)] == list(range(7, 13))


# -- the writer's place ------------------------------------------------------------------------


def test_a_silent_writer_is_displaced_after_its_own_lease(
    journal: Journal, clock: SimpleNamespace
) -> None:
    silent = journal.open().open_writer("the silent one", lease_ms=5000)
    silent.append([b"a"])
    challenger = journal.open()
    for now in (100.0, 102.0, 104.99):
        clock.now = now
        with pytest.raises(Locked, match="in use by the silent one"):
            challenger.open_writer("the challenger", lease_ms=1)
    with pytest.raises(Locked):  # another storage object has seen nothing yet
        journal.open().open_writer("another challenger")
    clock.now = 105.0
    writer = challenger.open_writer("the challenger")
    assert writer.term == silent.term + 1
    with pytest.raises(Fenced, match=r"taken over from term 1; this one must stop"):
        silent.append([b"b"])
    for use in (
        silent.renew,
        lambda: silent.trim(1),
        lambda: silent.write_blob(b"b"),
        lambda: silent.delete_blob(blob_name(b"b")),
        lambda: silent.write_snapshot(1, b"s"),
        lambda: silent.delete_snapshot(1),
        lambda: silent.condemn("no reason"),
    ):
        with pytest.raises(Fenced):
            use()
    silent.close()
    assert writer.append([b"c"]) == 2
    assert [record.data for record in journal.open().read()] == [b"a", b"c"]
    assert journal.open().condemned() == ""
    assert journal.open().blobs() == []
    assert journal.open().snapshots() == []


@pytest.mark.parametrize(
    "sign", [lambda writer: writer.renew(), lambda writer: writer.append([b"x"])]
)
def test_a_sign_of_life_keeps_the_place(
    journal: Journal, clock: SimpleNamespace, sign: Callable[[Writer], None]
) -> None:
    writer = journal.open().open_writer("the writer", lease_ms=1000)
    challenger = journal.open()
    for _ in range(3):
        with pytest.raises(Locked):
            challenger.open_writer("the challenger")
        clock.now += 0.9
        sign(writer)
    clock.now += 0.9
    with pytest.raises(Locked):  # sees the last sign
        challenger.open_writer("the challenger")
    clock.now += 1
    challenger.open_writer("the challenger")


def test_the_same_place_is_free_at_once(journal: Journal) -> None:
    journal.open().open_writer("the first", place="here")
    with pytest.raises(Locked):
        journal.open().open_writer("elsewhere", place="there")
    with pytest.raises(Locked):
        journal.open().open_writer("no place", place="")
    assert journal.open().open_writer("the second", place="here").term == 2
    journal.open().open_writer("the third", place="here").close()
    journal.open().open_writer("the fourth", place="there").close()
    journal.open().open_writer("no place", place="")
    with pytest.raises(Locked):
        journal.open().open_writer("no place either", place="")


def test_one_of_many_challengers_wins(journal: Journal, clock: SimpleNamespace) -> None:
    writers: list[Writer] = [journal.open().open_writer("the first", lease_ms=1000)]
    for _ in range(3):
        challengers = [journal.open() for _ in range(4)]
        for challenger in challengers:
            with pytest.raises(Locked):
                challenger.open_writer("a challenger", lease_ms=1000)
        clock.now += 1
        writers += race(challengers)
    assert [writer.term for writer in writers] == [1, 2, 3, 4]
    for writer in writers[:-1]:
        with pytest.raises(Fenced):
            writer.append([b"x"])
    assert writers[-1].append([b"x"]) == 1


def test_many_begin_a_journal_at_once(journal: Journal) -> None:
    (writer,) = race([journal.open() for _ in range(6)])
    assert writer.term == 1
    assert writer.append([b"x"]) == 1


def race(challengers: list[ServerStorage]) -> list[Writer]:
    """Let them become the writer at once, and return who has."""
    start = threading.Barrier(len(challengers))
    won: list[Writer] = []

    def challenge(storage: ServerStorage) -> None:
        start.wait(60)
        try:
            won.append(storage.open_writer("a challenger", lease_ms=1000))
        except Locked:
            pass

    threads = [
        threading.Thread(target=challenge, args=(storage,), name=f"challenger-{i}")
        for i, storage in enumerate(challengers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(won) == 1
    return won


# -- repair ------------------------------------------------------------------------------------


def test_cutting_moves_everything_behind_aside(journal: Journal) -> None:
    writer = journal.write(batches=300, records=2)
    writer.write_snapshot(100, b"early")
    writer.write_snapshot(600, b"late")
    before = journal.batches()
    with pytest.raises(Locked):
        journal.open().cut(401, "the repair")
    writer.close()
    storage = journal.open()
    records = list(storage.read())

    assert storage.cut(401, "the repair").startswith("the log ends at record 400 now; ")
    assert list(storage.read()) == records[:400]
    assert storage.extent() == Extent(1, 400)
    assert storage.snapshots() == [100]
    moved = [*range(journal.first_aside, 601, 2)]
    assert journal.batches(aside=1) == {last: before[last] for last in moved}
    assert journal.snapshots_aside() == {600: frame(b"late")}
    with pytest.raises(Fenced):
        writer.append([b"x"])
    following = storage.open_writer("the next")
    assert following.last_sequence == 400
    assert following.append([b"new"]) == 401
    following.close()
    storage.cut(0, "the repair")
    assert len(journal.batches(aside=2)) == 201
    assert storage.extent() == Extent(1, 0)
    assert storage.open_writer("the last").append([b"x"]) == 1


def test_cutting_a_corrupt_log(journal: Journal) -> None:
    journal.write().close()
    journal.flip_a_bit(9)
    storage = journal.open()
    storage.cut(6, "the repair")
    assert [record.sequence for record in storage.read()] == [1, 2, 3, 4, 5, 6]
    assert storage.open_writer("the next").append([b"x"]) == 7


def test_cutting_a_trimmed_log(journal: Journal) -> None:
    writer = journal.write()
    writer.write_snapshot(12, b"s")
    writer.trim(8)
    writer.close()
    storage = journal.open()
    storage.cut(9, "the repair")
    assert storage.extent() == Extent(7, 9)
    storage.cut(3, "the repair")
    assert storage.extent() == Extent(7, 6)
    assert storage.open_writer("the next").append([b"x"]) == 7


def test_cutting_a_log_without_its_meta(journal: Journal) -> None:
    writer = journal.write()
    writer.write_snapshot(12, b"s")
    writer.trim(8)
    writer.close()
    journal.delete_meta()
    storage = journal.open()
    with pytest.raises(Corrupt, match=r"meta: (is missing|has no row), and others .*; .*repair"):
        storage.open_writer("the test")
    with pytest.raises(Corrupt, match="there is a log, and no meta"):
        list(storage.read())
    storage.cut(12, "the repair")
    assert storage.extent() == Extent(7, 12)
    assert storage.snapshots() == [12]
    following = storage.open_writer("the next")
    assert following.term > writer.term
    assert following.append([b"x"]) == 13


def test_there_is_nothing_to_cut(journal: Journal) -> None:
    with pytest.raises(Missing, match="no log to cut"):
        journal.open().cut(0, "the repair")
    assert not journal.is_there()

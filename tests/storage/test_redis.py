"""The journal in Redis when nothing is away: damage, formats, terms, leases, cuts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from forebay.storage import (
    Corrupt,
    Extent,
    Fenced,
    Locked,
    Missing,
    NewerFormat,
    OutOfSequence,
    Record,
    StorageUnusable,
    Writer,
    blob_name,
    writer_watch,
)
from forebay.storage.proto.segment_pb2 import Batch
from forebay.storage.redis.log import Keys
from forebay.storage.redis.storage import RedisStorage
from forebay.storage.tfrecord import frame


class Journal:
    """A journal in Redis, and the keys behind its back."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.keys = Keys.of(url.partition("prefix=")[2])
        self.redis: Any = redis.Redis.from_url(url.partition("?")[0])

    def open(self) -> RedisStorage:
        return RedisStorage(self.url)

    def write(self, batches: int = 4, records: int = 3) -> Writer:
        """Open a writer that has appended so much."""
        writer = self.open().open_writer("the test")
        for i in range(batches):
            writer.append([b"%d" % (i * records + n + 1) for n in range(records)])
        return writer

    def forge(self, identity: int, data: bytes) -> None:
        """Append an entry as a writer would."""
        self.redis.xadd(self.keys.log, {"batch": data}, id=f"{identity}-0")
        self.redis.hset(self.keys.meta, "last", identity)
        self.redis.hincrby(self.keys.meta, "entries", 1)


@pytest.fixture
def journal(redis_storage_url: str) -> Iterator[Journal]:
    journal = Journal(redis_storage_url)
    yield journal
    journal.redis.close()


# -- what is stored ----------------------------------------------------------------------------


def test_an_entry_is_a_batch_under_the_sequence_of_its_last_record(journal: Journal) -> None:
    writer = journal.write(batches=2)
    entries = journal.redis.xrange(journal.keys.log)
    assert [identity for identity, _ in entries] == [b"3-0", b"6-0"]
    batch = Batch(format=1, term=writer.term, first_sequence=4, records=[b"4", b"5", b"6"])
    assert entries[1][1] == {b"batch": frame(batch.SerializeToString())}


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


# -- damage ------------------------------------------------------------------------------------


def damaged(journal: Journal) -> None:
    """Let the third entry have one bit changed."""
    entries = journal.redis.xrange(journal.keys.log)
    journal.redis.delete(journal.keys.log)
    for i, (identity, fields) in enumerate(entries):
        data = bytearray(fields[b"batch"])
        data[-6] ^= i == 2
        journal.redis.xadd(journal.keys.log, {"batch": bytes(data)}, id=identity)


def test_a_damaged_entry_is_corrupt_and_named(journal: Journal) -> None:
    journal.write().close()
    damaged(journal)
    seen: list[Record] = []
    with pytest.raises(Corrupt, match=r":log: entry 9-0: the checksum does not match; restore"):
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
    with pytest.raises(Corrupt, match=f"entry 13-0: .*{message}"):
        list(journal.open().read())


def test_an_entry_that_is_no_batch_is_corrupt(journal: Journal) -> None:
    journal.write().close()
    journal.forge(13, frame(b"\xff\xff"))
    with pytest.raises(Corrupt, match="entry 13-0: holds no batch"):
        journal.open().open_writer("the test")


def test_a_removed_entry_is_noticed(journal: Journal) -> None:
    journal.write().close()
    journal.redis.xdel(journal.keys.log, "6-0")
    with pytest.raises(Corrupt, match="where record 4 must follow"):
        list(journal.open().read())
    with pytest.raises(Corrupt, match="has 3 entries, and 4 were written"):
        journal.open().open_writer("the test")
    journal.redis.xdel(journal.keys.log, "12-0")
    with pytest.raises(Corrupt, match="ends at record 9, and record 12 was appended"):
        list(journal.open().read(after=6))


def test_a_damaged_snapshot_or_blob_is_corrupt(journal: Journal) -> None:
    writer = journal.write()
    writer.write_snapshot(3, b"the state")
    digest = writer.write_blob(b"blob")
    journal.redis.hset(journal.keys.snapshots, "3", frame(b"the state")[:-1])
    journal.redis.hset(journal.keys.blobs, digest, b"blub")
    with pytest.raises(Corrupt, match="snapshots: 3: the snapshot's checksum"):
        journal.open().read_snapshot(3)
    with pytest.raises(Corrupt, match=f"blobs: {digest}: the blob's content"):
        journal.open().read_blob(digest)
    writer.write_blob(b"blob")
    assert journal.open().read_blob(digest) == b"blob"


def test_a_snapshot_behind_the_end_says_that_records_are_missing(journal: Journal) -> None:
    journal.write().close()
    journal.redis.hset(journal.keys.snapshots, "13", frame(b"s"))
    with pytest.raises(Corrupt, match="ends at record 12, and there was a record 13"):
        journal.open().open_writer("the test")


@pytest.mark.parametrize("field", ["term", "last", "first"])
def test_a_meta_that_makes_no_sense_is_corrupt(journal: Journal, field: str) -> None:
    journal.write().close()
    for value in ("x", "-1"):
        journal.redis.hset(journal.keys.meta, field, value)
        with pytest.raises(Corrupt, match=":meta: "):
            journal.open().open_writer("the test")
    journal.redis.hdel(journal.keys.meta, field)
    with pytest.raises(Corrupt, match=f":meta: is no journal's meta .*{field}"):
        journal.open().extent()


def test_a_newer_format_is_refused(journal: Journal) -> None:
    journal.write().close()
    batch = Batch(format=2, term=1, first_sequence=13, records=[b"x"])
    journal.forge(13, frame(batch.SerializeToString()))
    with pytest.raises(NewerFormat, match="entry 13-0: format 2 is newer than 1"):
        list(journal.open().read())
    journal.redis.hset(journal.keys.meta, "format", 2)
    for use in (
        lambda: journal.open().open_writer("the test"),
        lambda: list(journal.open().read()),
        lambda: journal.open().snapshots(),
        lambda: journal.open().extent(),
    ):
        with pytest.raises(NewerFormat, match="meta: format 2 is newer than 1"):
            use()


def test_keys_of_somebody_else_are_not_touched(journal: Journal) -> None:
    journal.redis.set(journal.keys.meta, "theirs")
    with pytest.raises(StorageUnusable, match="a prefix of its own"):
        journal.open().open_writer("the test")
    assert journal.redis.get(journal.keys.meta) == b"theirs"


# -- trimming ----------------------------------------------------------------------------------


def test_trimming_while_it_is_read(journal: Journal) -> None:
    writer = journal.write(batches=100, records=1)
    records = journal.open().read()
    assert next(records).sequence == 1
    writer.write_snapshot(99, b"s")
    writer.trim(100)
    assert journal.redis.xlen(journal.keys.log) == 1
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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The storage's monotonic clock: `now`, in seconds."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(writer_watch, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


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


@pytest.mark.parametrize(
    "sign", [lambda writer: writer.renew(), lambda writer: writer.append([b"x"])]
)
def test_a_sign_of_life_keeps_the_place(
    journal: Journal, clock: SimpleNamespace, sign: Callable[[Writer], None]
) -> None:
    writer = journal.open().open_writer("the writer", lease_ms=1000)
    challenger = journal.open()
    for _ in range(5):
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
    journal.open().open_writer("the fourth", place="there")


def test_no_place_is_the_same_as_no_other(journal: Journal) -> None:
    journal.open().open_writer("the first", place="")
    with pytest.raises(Locked):
        journal.open().open_writer("the second", place="")


def test_one_of_many_challengers_wins(journal: Journal, clock: SimpleNamespace) -> None:
    writers: list[Writer] = [journal.open().open_writer("the first", lease_ms=1000)]
    for _ in range(5):
        challengers = [journal.open() for _ in range(4)]
        for challenger in challengers:
            with pytest.raises(Locked):
                challenger.open_writer("a challenger", lease_ms=1000)
        clock.now += 1
        start = threading.Barrier(len(challengers))
        won: list[Writer] = []

        def challenge(storage: RedisStorage, start: threading.Barrier, won: list[Writer]) -> None:
            start.wait(60)
            try:
                won.append(storage.open_writer("a challenger", lease_ms=1000))
            except Locked:
                pass

        threads = [
            threading.Thread(target=challenge, args=(storage, start, won), name=f"challenger-{i}")
            for i, storage in enumerate(challengers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(won) == 1
        writers += won
    assert [writer.term for writer in writers] == [1, 2, 3, 4, 5, 6]
    for writer in writers[:-1]:
        with pytest.raises(Fenced):
            writer.append([b"x"])
    assert writers[-1].append([b"x"]) == 1


# -- repair ------------------------------------------------------------------------------------


def test_cutting_moves_everything_behind_aside(journal: Journal) -> None:
    writer = journal.write(batches=300, records=2)
    writer.write_snapshot(100, b"early")
    writer.write_snapshot(600, b"late")
    before = journal.redis.xrange(journal.keys.log)
    with pytest.raises(Locked):
        journal.open().cut(401, "the repair")
    writer.close()
    storage = journal.open()
    records = list(storage.read())

    done = storage.cut(401, "the repair")

    prefix = journal.keys.meta.removesuffix(":meta")
    assert done == (
        "the log ends at record 400 now; the log as it was, and all later snapshots, were moved "
        f"to {prefix}:cut:1:…"
    )
    assert list(storage.read()) == records[:400]
    assert storage.extent() == Extent(1, 400)
    assert storage.snapshots() == [100]
    assert journal.redis.xrange(f"{prefix}:cut:1:log") == before
    assert journal.redis.hgetall(f"{prefix}:cut:1:snapshots") == {b"600": frame(b"late")}
    with pytest.raises(Fenced):
        writer.append([b"x"])
    following = storage.open_writer("the next")
    assert following.last_sequence == 400
    assert following.append([b"new"]) == 401
    following.close()
    storage.cut(0, "the repair")
    assert journal.redis.xlen(f"{prefix}:cut:2:log") == 201
    assert storage.extent() == Extent(1, 0)
    last = storage.open_writer("the last")
    assert last.append([b"x"]) == 1


def test_cutting_a_corrupt_log(journal: Journal) -> None:
    journal.write().close()
    damaged(journal)
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
    journal.redis.delete(journal.keys.meta)
    storage = journal.open()
    with pytest.raises(Corrupt, match=":meta: is missing, and others are not"):
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
    assert journal.redis.exists(journal.keys.meta) == 0

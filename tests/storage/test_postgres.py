"""The journal in PostgreSQL when nothing is away: damage, formats, terms, leases, cuts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from forebay.storage import (
    Away,
    Corrupt,
    Extent,
    Fenced,
    Locked,
    Missing,
    NewerFormat,
    OutOfSequence,
    StorageUnusable,
    Writer,
    blob_name,
    writer_watch,
)
from forebay.storage.postgres.storage import PostgresStorage
from forebay.storage.proto.segment_pb2 import Batch
from forebay.storage.tfrecord import frame

from ..postgres_server import PostgresServer, schema_of


class Journal:
    """A journal in PostgreSQL, and the tables behind its back."""

    def __init__(self, server: PostgresServer, url: str) -> None:
        self.url = url
        self.schema = schema_of(url)
        self._server = server

    def open(self) -> PostgresStorage:
        return PostgresStorage(self.url)

    def write(self, batches: int = 4, records: int = 3) -> Writer:
        """Open a writer that has appended so much."""
        writer = self.open().open_writer("the test")
        for i in range(batches):
            writer.append([b"%d" % (i * records + n + 1) for n in range(records)])
        return writer

    def execute(self, statement: str, *values: object) -> list[Any]:
        """Run a statement, in which {s} is the schema."""
        with self._server.client() as client:
            query = statement.format(s=f'"{self.schema}"').encode()
            cursor = client.execute(query, values)
            return cursor.fetchall() if cursor.description else []

    def forge(self, last: int, data: bytes) -> None:
        """Append a row as a writer would."""
        self.execute("INSERT INTO {s}.log VALUES (%s, %s)", last, data)
        self.execute("UPDATE {s}.meta SET last = %s", last)


@pytest.fixture
def journal(postgres: PostgresServer, postgres_storage_url: str) -> Journal:
    return Journal(postgres, postgres_storage_url)


# -- what is stored ----------------------------------------------------------------------------


def test_a_row_is_a_batch_under_the_sequence_of_its_last_record(journal: Journal) -> None:
    writer = journal.write(batches=2)
    rows = journal.execute("SELECT last, batch FROM {s}.log ORDER BY last")
    assert [last for last, _ in rows] == [3, 6]
    batch = Batch(format=1, term=writer.term, first_sequence=4, records=[b"4", b"5", b"6"])
    assert rows[1][1] == frame(batch.SerializeToString())


def test_reading_goes_in_chunks(journal: Journal) -> None:
    writer = journal.write(batches=400, records=2)
    large = bytes(1 << 20)
    for _ in range(10):
        writer.append([large])
    records = list(journal.open().read())
    assert [record.sequence for record in records] == list(range(1, 811))
    assert [len(record.data) for record in records[800:]] == [1 << 20] * 10
    assert list(journal.open().read(after=333)) == records[333:]


def test_reading_changes_nothing(journal: Journal) -> None:
    storage = journal.open()
    assert list(storage.read()) == []
    assert storage.snapshots() == []
    assert storage.blobs() == []
    storage.check()
    assert journal.execute("SELECT FROM pg_namespace WHERE nspname = %s", journal.schema) == []


# -- damage ------------------------------------------------------------------------------------


def damage(journal: Journal) -> None:
    """Let the third row have one bit changed."""
    changed = "set_bit(batch, length(batch) * 8 - 45, 1 - get_bit(batch, length(batch) * 8 - 45))"
    journal.execute(f"UPDATE {{s}}.log SET batch = {changed} WHERE last = 9")


def test_a_damaged_row_is_corrupt_and_named(journal: Journal) -> None:
    journal.write().close()
    damage(journal)
    with pytest.raises(Corrupt, match=r"\.log: row 9: the checksum does not match; restore"):
        list(journal.open().read())
    assert [record.sequence for record in journal.open().read(after=9)] == [10, 11, 12]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Batch(format=1, term=1, first_sequence=14, records=[b"x"]), "record 14"),
        (Batch(format=1, term=0, first_sequence=13, records=[b"x"]), "term 0 comes after term 1"),
        (Batch(format=0, term=1, first_sequence=13, records=[b"x"]), "format 0"),
    ],
)
def test_a_row_that_does_not_follow_is_corrupt(
    journal: Journal, batch: Batch, message: str
) -> None:
    journal.write().close()
    journal.forge(13, frame(batch.SerializeToString()))
    with pytest.raises(Corrupt, match=f"row 13: .*{message}"):
        list(journal.open().read())


def test_a_removed_row_is_noticed(journal: Journal) -> None:
    writer = journal.write()
    journal.execute("DELETE FROM {s}.log WHERE last = 6")
    with pytest.raises(Corrupt, match="where record 4 must follow"):
        list(journal.open().read())
    journal.execute("DELETE FROM {s}.log WHERE last = 12")
    with pytest.raises(Corrupt, match="ends at record 9, and record 12 was appended"):
        list(journal.open().read(after=6))
    with pytest.raises(Corrupt, match="the log ends at record 9, and record 12 was appended"):
        writer.renew()


def test_a_damaged_snapshot_or_blob_is_corrupt(journal: Journal) -> None:
    writer = journal.write()
    writer.write_snapshot(3, b"the state")
    digest = writer.write_blob(b"blob")
    journal.execute("UPDATE {s}.snapshots SET data = %s", frame(b"the state")[:-1])
    journal.execute("UPDATE {s}.blobs SET data = %s", b"blub")
    with pytest.raises(Corrupt, match="snapshots: 3: the snapshot's checksum"):
        journal.open().read_snapshot(3)
    with pytest.raises(Corrupt, match=f"blobs: {digest}: the blob's content"):
        journal.open().read_blob(digest)
    writer.write_blob(b"blob")
    assert journal.open().read_blob(digest) == b"blob"


def test_a_snapshot_behind_the_end_says_that_records_are_missing(journal: Journal) -> None:
    journal.write().close()
    journal.execute("INSERT INTO {s}.snapshots VALUES (13, %s)", frame(b"s"))
    with pytest.raises(Corrupt, match="ends at record 12, and there was a record 13"):
        journal.open().open_writer("the test")


def test_a_meta_that_makes_no_sense_is_corrupt(journal: Journal) -> None:
    journal.write().close()
    journal.execute("UPDATE {s}.meta SET first = 99")
    with pytest.raises(Corrupt, match=r"\.meta: term 1, first 99, last 12"):
        journal.open().open_writer("the test")


def test_a_newer_format_is_refused(journal: Journal) -> None:
    journal.write().close()
    journal.execute("UPDATE {s}.meta SET format = 2")
    for use in (
        lambda: journal.open().open_writer("the test"),
        lambda: list(journal.open().read()),
        lambda: journal.open().snapshots(),
        lambda: journal.open().extent(),
    ):
        with pytest.raises(NewerFormat, match="meta: format 2 is newer than 1"):
            use()


def test_tables_of_somebody_else_are_not_touched(journal: Journal) -> None:
    journal.execute("CREATE SCHEMA {s}")
    journal.execute("CREATE TABLE {s}.meta AS SELECT 'theirs' AS key")
    with pytest.raises(StorageUnusable, match="a prefix of its own"):
        journal.open().open_writer("the test")
    assert journal.execute("SELECT * FROM {s}.meta") == [("theirs",)]


@pytest.mark.parametrize("table", ["meta", "log", "snapshots", "blobs"])
def test_a_table_that_is_gone_is_named_and_repaired(journal: Journal, table: str) -> None:
    writer = journal.write()
    writer.write_snapshot(6, b"state")
    digest = writer.write_blob(b"blob")
    writer.close()
    journal.execute(f"DROP TABLE {{s}}.{table}")
    with pytest.raises(Corrupt, match=rf"\.{table}: is missing, and others are not; .*repair"):
        journal.open().open_writer("the test")
    with pytest.raises(Corrupt, match=f"{table}: is missing"):
        journal.open().check()
    storage = journal.open()
    kept = 0 if table == "log" else 12
    assert f"ends at record {kept} now" in storage.cut(12, "the repair")
    assert storage.extent() == Extent(1, kept)
    assert storage.snapshots() == ([] if table in ("log", "snapshots") else [6])
    assert storage.blobs() == ([] if table == "blobs" else [digest])
    following = storage.open_writer("the next")
    assert following.term > writer.term
    assert following.append([b"x"]) == kept + 1


# -- trimming ----------------------------------------------------------------------------------


def test_trimming_while_it_is_read(journal: Journal) -> None:
    writer = journal.write(batches=100, records=1)
    records = journal.open().read()
    assert next(records).sequence == 1
    writer.write_snapshot(99, b"s")
    writer.trim(100)
    assert journal.execute("SELECT count(*) FROM {s}.log") == [(1,)]
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


def test_beginning_a_journal_does_not_wait_for_long(journal: Journal) -> None:
    """Another one that makes the tables hangs, and holds their lock."""
    storage = PostgresStorage(f"{journal.url}&reply_s=0.2")
    with psycopg.connect(journal.url.partition("?")[0]) as other:
        other.execute("SELECT pg_advisory_xact_lock(hashtext('forebay'))")
        with pytest.raises(Away, match=r"it has not answered for 0\.2 s"):
            storage.open_writer("the test")
    assert storage.open_writer("the test").append([b"x"]) == 1


def race(challengers: list[PostgresStorage]) -> list[Writer]:
    """Let them become the writer at once, and return who has."""
    start = threading.Barrier(len(challengers))
    won: list[Writer] = []

    def challenge(storage: PostgresStorage) -> None:
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


def test_writers_that_displace_each_other_lose_nothing_that_was_acknowledged(
    journal: Journal,
) -> None:
    """Each takes over at once, while others are in the midst of an append."""
    acknowledged: dict[int, tuple[int, bytes]] = {}

    def work(name: str) -> None:
        storage = journal.open()
        for term in range(15):
            try:
                writer = storage.open_writer("a thief", place="the same")
                for number in range(4):
                    data = [f"{name}: {term}.{number}".encode()]
                    last = writer.append(data)
                    assert last not in acknowledged
                    acknowledged[last] = (writer.term, data[0])
            except (Fenced, Locked):
                pass

    threads = [threading.Thread(target=work, args=(name,), name=f"thief-{name}") for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    records = {record.sequence: (record.term, record.data) for record in journal.open().read()}
    assert acknowledged.items() <= records.items()
    assert len({data for _, data in records.values()}) == len(records)
    assert journal.open().condemned() == ""


def test_a_transaction_that_somebody_holds_open_hinders_nobody(journal: Journal) -> None:
    """Such as a backup's: it sees what was there when it began."""
    writer = journal.write(batches=1)
    with psycopg.connect(journal.url.partition("?")[0]) as backup:
        backup.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        seen = f'SELECT last FROM "{journal.schema}".meta'.encode()
        assert backup.execute(seen).fetchone() == (3,)
        for _ in range(50):
            writer.append([b"x"])
        writer.write_snapshot(53, b"s")
        writer.trim(54)
        writer.renew()
        assert backup.execute(seen).fetchone() == (3,)
    assert journal.open().extent() == Extent(54, 53)


def test_appends_do_not_wait_for_a_snapshot_and_the_next_term_does(
    journal: Journal, clock: SimpleNamespace
) -> None:
    """A statement of a snapshot that has found its row, and has not ended."""
    writer = journal.write(batches=1)
    lock = f'SELECT FROM "{journal.schema}".meta FOR KEY SHARE'.encode()
    challenger = journal.open()
    with pytest.raises(Locked):
        challenger.open_writer("the next")
    with psycopg.connect(journal.url.partition("?")[0]) as snapshot:
        snapshot.execute(lock)
        assert writer.append([b"x"]) == 4
        with pytest.raises(Locked):
            challenger.open_writer("the next")
        clock.now += 10
        won: list[Writer] = []
        thread = threading.Thread(target=lambda: won.append(challenger.open_writer("the next")))
        thread.start()
        thread.join(0.3)
        assert won == []
    thread.join(60)
    assert won[0].term == 2


# -- repair ------------------------------------------------------------------------------------


def test_cutting_moves_everything_behind_aside(journal: Journal) -> None:
    writer = journal.write(batches=300, records=2)
    writer.write_snapshot(100, b"early")
    writer.write_snapshot(600, b"late")
    with pytest.raises(Locked):
        journal.open().cut(401, "the repair")
    writer.close()
    storage = journal.open()
    records = list(storage.read())

    assert storage.cut(401, "the repair") == (
        "the log ends at record 400 now; all later records and snapshots were moved to the tables "
        f"{journal.schema}.cut_1_…"
    )
    assert list(storage.read()) == records[:400]
    assert storage.extent() == Extent(1, 400)
    assert storage.snapshots() == [100]
    assert journal.execute("SELECT min(last), max(last) FROM {s}.cut_1_log") == [(402, 600)]
    assert journal.execute("SELECT data FROM {s}.cut_1_snapshots") == [(frame(b"late"),)]
    assert journal.execute("SELECT last FROM {s}.cut_1_meta") == [(600,)]
    with pytest.raises(Fenced):
        writer.append([b"x"])
    following = storage.open_writer("the next")
    assert following.last_sequence == 400
    assert following.append([b"new"]) == 401
    following.close()
    storage.cut(0, "the repair")
    assert journal.execute("SELECT count(*) FROM {s}.cut_2_log") == [(201,)]
    assert storage.extent() == Extent(1, 0)
    assert storage.open_writer("the last").append([b"x"]) == 1


def test_cutting_a_corrupt_log(journal: Journal) -> None:
    journal.write().close()
    damage(journal)
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


def test_cutting_a_trimmed_log_without_its_meta(journal: Journal) -> None:
    writer = journal.write()
    writer.write_snapshot(12, b"s")
    writer.trim(8)
    writer.close()
    journal.execute("DELETE FROM {s}.meta")
    storage = journal.open()
    with pytest.raises(Corrupt, match=r"\.meta: has no row, and others have some; .*repair"):
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
    assert journal.execute("SELECT FROM pg_namespace WHERE nspname = %s", journal.schema) == []

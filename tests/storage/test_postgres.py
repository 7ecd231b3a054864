"""What is particular to the journal in PostgreSQL: test_server_storage.py has the rest."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import psycopg
import pytest

from forebay.storage import (
    Corrupt,
    Extent,
    Fenced,
    Locked,
    StorageUnavailable,
    StorageUnusable,
    Writer,
)
from forebay.storage.postgres.storage import PostgresStorage

from ..postgres_server import PostgresServer
from .journals import PostgresJournal


@pytest.fixture
def journal(postgres: PostgresServer, postgres_storage_url: str) -> PostgresJournal:
    return PostgresJournal(postgres, postgres_storage_url)


def test_a_writer_misses_its_last_row(journal: PostgresJournal) -> None:
    writer = journal.write()
    journal.remove(12)
    with pytest.raises(Corrupt, match="the log ends at record 9, and record 12 was appended"):
        writer.renew()


def test_a_meta_that_makes_no_sense_is_corrupt(journal: PostgresJournal) -> None:
    journal.write().close()
    journal.execute("UPDATE {s}.meta SET first = 99")
    with pytest.raises(Corrupt, match=r"\.meta: term 1, first 99, last 12"):
        journal.open().open_writer("the test")


def test_tables_of_somebody_else_are_not_touched(journal: PostgresJournal) -> None:
    journal.execute("CREATE SCHEMA {s}")
    journal.execute("CREATE TABLE {s}.meta AS SELECT 'theirs' AS key")
    with pytest.raises(StorageUnusable, match="a prefix of its own"):
        journal.open().open_writer("the test")
    assert journal.execute("SELECT * FROM {s}.meta") == [("theirs",)]


@pytest.mark.parametrize("table", ["meta", "log", "snapshots", "blobs"])
def test_a_table_that_is_gone_is_named_and_repaired(journal: PostgresJournal, table: str) -> None:
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


def test_beginning_a_journal_does_not_wait_for_long(journal: PostgresJournal) -> None:
    """Another one that makes the tables hangs, and holds their lock."""
    storage = PostgresStorage(f"{journal.url}&reply_s=0.2")
    with psycopg.connect(journal.url.partition("?")[0]) as other:
        other.execute("SELECT pg_advisory_xact_lock(hashtext('forebay'))")
        with pytest.raises(StorageUnavailable, match=r"it has not answered for 0\.2 s"):
            storage.open_writer("the test")
    assert storage.open_writer("the test").append([b"x"]) == 1


def test_writers_that_displace_each_other_lose_nothing_that_was_acknowledged(
    journal: PostgresJournal,
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


def test_a_transaction_that_somebody_holds_open_hinders_nobody(journal: PostgresJournal) -> None:
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
    journal: PostgresJournal, clock: SimpleNamespace
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


def test_a_cut_says_where_the_rest_was_moved(journal: PostgresJournal) -> None:
    journal.write().close()
    assert journal.open().cut(3, "the repair") == (
        "the log ends at record 3 now; all later records and snapshots were moved to the tables "
        f"{journal.schema}.cut_1_…"
    )
    assert journal.execute("SELECT last FROM {s}.cut_1_meta") == [(12,)]

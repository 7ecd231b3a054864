"""What is particular to the journal in Redis: test_server_storage.py has the rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.storage import Corrupt, StorageUnusable

from .journals import RedisJournal


@pytest.fixture
def journal(redis_storage_url: str) -> Iterator[RedisJournal]:
    journal = RedisJournal(redis_storage_url)
    yield journal
    journal.redis.close()


def test_entries_are_counted(journal: RedisJournal) -> None:
    journal.write().close()
    journal.remove(6)
    with pytest.raises(Corrupt, match="has 3 entries, and 4 were written"):
        journal.open().open_writer("the test")


@pytest.mark.parametrize("field", ["term", "last", "first"])
def test_a_meta_that_makes_no_sense_is_corrupt(journal: RedisJournal, field: str) -> None:
    journal.write().close()
    for value in ("x", "-1"):
        journal.redis.hset(journal.keys.meta, field, value)
        with pytest.raises(Corrupt, match=":meta: "):
            journal.open().open_writer("the test")
    journal.redis.hdel(journal.keys.meta, field)
    with pytest.raises(Corrupt, match=f":meta: is no journal's meta .*{field}"):
        journal.open().extent()


def test_keys_of_somebody_else_are_not_touched(journal: RedisJournal) -> None:
    journal.redis.set(journal.keys.meta, "theirs")
    with pytest.raises(StorageUnusable, match="a prefix of its own"):
        journal.open().open_writer("the test")
    assert journal.redis.get(journal.keys.meta) == b"theirs"


def test_a_cut_says_where_the_rest_was_moved(journal: RedisJournal) -> None:
    journal.write().close()
    assert journal.open().cut(3, "the repair") == (
        "the log ends at record 3 now; the log as it was, and all later snapshots, were moved to "
        f"{journal.prefix}:cut:1:…"
    )

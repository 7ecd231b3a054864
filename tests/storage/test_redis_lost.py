"""A Redis that has less than was acknowledged: noticed by whoever knows, and never continued."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from forebay.storage import Corrupt, Extent, Fenced, Locked, Record, Storage, Writer, open_storage
from forebay.storage.redis.address import parse_redis_url
from forebay.storage.redis.client import RedisClient
from forebay.storage.redis.storage import RedisStorage

from ..redis_server import RedisServer, running_redis

META, LOG = "forebay:meta", "forebay:log"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(tmp_path / "redis") as server:
        yield server


def open_writer(server: RedisServer, place: str = "here") -> Writer:
    return open_storage(server.url).open_writer("the test", place=place)


def restart_with_older_data(server: RedisServer, between: Callable[[], object]) -> None:
    """Do `between`, and let Redis forget it, as if it had been restored from a backup."""
    data, backup = server.directory / "appendonlydir", server.directory / "backup"
    server.kill()
    shutil.copytree(data, backup)
    server.start()
    between()
    server.kill()
    shutil.rmtree(data)
    backup.rename(data)
    server.start()


def expect_condemned(server: RedisServer, reason: str) -> None:
    """No writer begins any more, whoever asks, until a repair has cut the log."""
    for _ in range(2):
        with pytest.raises(Corrupt, match=f"acknowledged records are missing: .*{reason}.*repair"):
            open_writer(server)
    storage = open_storage(server.url)
    records: list[Record] = []
    try:
        records.extend(storage.read())
    except Corrupt:
        pass
    last = len(records)
    assert f"ends at record {last}" in storage.cut(last, "the repair")
    assert storage.extent() == Extent(1, last)
    writer = open_writer(server)
    assert writer.append([b"goes on"]) == last + 1
    writer.close()


def use_append(writer: Writer) -> None:
    writer.append([b"more"])


def use_renew(writer: Writer) -> None:
    writer.renew()


USES = pytest.mark.parametrize("use", [use_append, use_renew])


@USES
def test_older_data_of_the_same_term(server: RedisServer, use: Callable[[Writer], None]) -> None:
    writer = open_writer(server)
    writer.append([b"a"] * 5)
    restart_with_older_data(server, lambda: [writer.append([b"b"]) for _ in range(3)])
    with pytest.raises(
        Corrupt, match=r"record 8 was .* in term 1, and the log ends at record 5 of"
    ):
        use(writer)
    expect_condemned(server, "record 8 was acknowledged")


@USES
def test_older_data_of_an_earlier_term(server: RedisServer, use: Callable[[Writer], None]) -> None:
    first = open_writer(server)
    first.append([b"a"] * 5)
    writers: list[Writer] = []
    restart_with_older_data(server, lambda: writers.append(open_writer(server)))
    with pytest.raises(Corrupt, match="acknowledged in term 2, and the log ends at record 5 of te"):
        use(writers[0])
    expect_condemned(server, "acknowledged in term 2")
    with pytest.raises(Fenced):
        first.renew()


@USES
def test_older_data_with_a_new_writer_of_the_same_term(
    server: RedisServer, use: Callable[[Writer], None]
) -> None:
    open_writer(server).append([b"a"] * 5)
    writers: list[Writer] = []
    restart_with_older_data(server, lambda: writers.append(open_writer(server)))
    twin = open_writer(server)
    assert twin.term == writers[0].term == 2
    with pytest.raises(Corrupt, match="another writer has begun that term again"):
        use(writers[0])
    with pytest.raises(Corrupt, match="another writer has begun"):
        twin.append([b"x"])
    expect_condemned(server, "another writer has begun")


@USES
def test_a_later_term_that_began_on_older_data(
    server: RedisServer, use: Callable[[Writer], None]
) -> None:
    writer = open_writer(server)
    writer.append([b"a"] * 5)
    restart_with_older_data(server, lambda: writer.append([b"b"]))
    later = open_writer(server)
    later.append([b"x"] * 20)
    with pytest.raises(Corrupt, match=r"record 6 was .* and a later term began at record 5"):
        use(writer)
    with pytest.raises(Corrupt):
        later.append([b"x"])
    expect_condemned(server, "a later term began at record 5")


def flush_all(client: redis.Redis) -> None:
    client.flushall()


def delete_log(client: redis.Redis) -> None:
    client.delete(LOG)


def delete_meta(client: redis.Redis) -> None:
    client.delete(META)


def delete_first(client: redis.Redis) -> None:
    client.xtrim(LOG, maxlen=2, approximate=False)


def delete_last(client: redis.Redis) -> None:
    client.xdel(LOG, "6-0")


@USES
@pytest.mark.parametrize("lose", [flush_all, delete_log, delete_meta, delete_first, delete_last])
def test_deleted_keys(
    server: RedisServer, lose: Callable[[redis.Redis], None], use: Callable[[Writer], None]
) -> None:
    writer = open_writer(server)
    for _ in range(3):
        writer.append([b"a"] * 2)
    with server.client() as client:
        lose(client)
    with pytest.raises(Corrupt, match="acknowledged records are missing"):
        use(writer)
    with pytest.raises(Corrupt):
        writer.append([b"again"])
    expect_condemned(server, "")


def test_a_journal_that_was_begun_anew_after_a_flush(server: RedisServer) -> None:
    writer = open_writer(server)
    writer.append([b"a"])
    with server.client() as client:
        client.flushall()
    other = open_writer(server)  # knows nothing of it
    other.append([b"b"] * 7)
    with pytest.raises(Corrupt, match="another writer has begun that term again"):
        writer.renew()
    with pytest.raises(Corrupt, match="acknowledged records are missing"):
        other.append([b"c"])
    expect_condemned(server, "another writer")


def follow(storage: Storage) -> int:
    return len(list(storage.read()))


def test_a_standby_remembers_what_it_has_read(server: RedisServer) -> None:
    writer = open_writer(server)
    standby = open_storage(server.url)
    for i in range(4):
        writer.append([b"a"] * 2)
        assert follow(standby) == 2 * i + 2
    with server.client() as client:
        client.flushall()
    with pytest.raises(Corrupt, match="record 6 was read in term 1, and the log ends at record 0"):
        standby.open_writer("the standby")
    expect_condemned(server, "record 6 was read")


def test_a_server_that_lags_behind_has_lost_nothing(server: RedisServer) -> None:
    """The connection that polls the meta may have been cut, and made anew to a replica."""
    behind = f"{server.url}/1"
    open_storage(behind).open_writer("the test").append([b"a"])
    writer = open_writer(server)
    standby = RedisStorage(server.url)
    for i in range(4):
        writer.append([b"a"])
        assert follow(standby) == i + 1
    standby._watcher = RedisClient(parse_redis_url(behind))
    with pytest.raises(Locked):
        standby.open_writer("the standby", place="here")
    assert standby.condemned() == ""
    writer.append([b"a"])
    standby.close()


def test_an_unacknowledged_record_may_vanish(server: RedisServer) -> None:
    writer = open_writer(server)
    writer.append([b"a"] * 5)
    standby = open_storage(server.url)

    def append_and_follow() -> None:
        writer.append([b"b"])
        assert follow(standby) == 6  # and nobody but `writer` knows that it was acknowledged

    restart_with_older_data(server, append_and_follow)
    assert standby.open_writer("the standby", place="here").last_sequence == 5


def test_a_repair_takes_records_away_on_purpose(server: RedisServer) -> None:
    writer = open_writer(server)
    writer.append([b"a"] * 3)
    writer.append([b"a"] * 3)
    standby = open_storage(server.url)
    assert follow(standby) == 6
    displaced = writer
    later = open_writer(server)
    with pytest.raises(Locked):
        standby.cut(0, "the repair")
    later.close()
    open_storage(server.url).cut(2, "the repair")
    with pytest.raises(Fenced):
        displaced.append([b"x"])
    assert standby.open_writer("the standby").append([b"x"]) == 1


def test_condemned_by_who_knows_better(server: RedisServer) -> None:
    writer = open_writer(server)
    writer.append([b"a"])
    writer.condemn("acknowledged records are missing: workers know of a lease that is not here")
    with pytest.raises(Corrupt, match="workers know of a lease"):
        writer.renew()
    expect_condemned(server, "workers know of a lease")


def test_a_killed_redis_that_lost_nothing_is_fine(server: RedisServer) -> None:
    writer = open_writer(server)
    for i in range(5):
        assert writer.append([b"a"]) == i + 1
        server.kill()
        server.start()
        writer.renew()
    assert follow(open_storage(server.url)) == 5


def test_a_journal_of_which_only_snapshots_are_left(server: RedisServer) -> None:
    writer = open_writer(server)
    writer.append([b"a"])
    writer.write_snapshot(1, b"state")
    writer.close()
    with server.client() as client:
        client.delete(META, LOG)
    storage = open_storage(server.url)
    with pytest.raises(Corrupt, match=r"is missing, and others are not; .*repair"):
        open_writer(server)
    with pytest.raises(Corrupt, match="is missing, and others are not"):
        storage.check()
    assert "ends at record 0" in storage.cut(0, "the repair")
    assert storage.snapshots() == []
    assert open_writer(server).append([b"b"]) == 1

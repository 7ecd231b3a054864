"""A server that has less than was acknowledged: who knows notices, and nobody continues it."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.chaos.postgres import postgres_programs
from forebay.storage import Corrupt, Extent, Fenced, Locked, Record, Storage, Writer, open_storage
from forebay.storage.postgres.address import parse_postgres_url
from forebay.storage.postgres.client import PostgresClient
from forebay.storage.redis.address import parse_redis_url
from forebay.storage.redis.client import RedisClient

from ..postgres_server import schema_of
from ..redis_server import running_redis

META, LOG = "forebay:meta", "forebay:log"

LOSSES: dict[str, dict[str, Any]] = {
    "redis": {
        "all": ("FLUSHALL",),
        "the log": ("DEL", LOG),
        "the meta": ("DEL", META),
        "the first batch": ("XTRIM", LOG, "MAXLEN", 2),
        "the last batch": ("XDEL", LOG, "6-0"),
    },
    "postgres": {
        "all": "DROP SCHEMA {s} CASCADE",
        "the log": "DROP TABLE {s}.log",
        "all rows": "TRUNCATE {s}.log",
        "the meta": "DROP TABLE {s}.meta",
        "the meta's row": "DELETE FROM {s}.meta",
    },
}
"""What is deleted of three batches of two records."""


class Lossy:
    """A journal of which a backup can be made, and restored."""

    def __init__(self, server: Any, url: str) -> None:
        self.server = server  # a RedisServer or PostgresServer
        self.url = url
        self.opened: list[Storage | Writer] = []

    def open(self) -> Storage:
        self.opened.append(storage := open_storage(self.url))
        return storage

    def open_writer(self, place: str = "here") -> Writer:
        self.opened.append(writer := self.open().open_writer("the test", place=place))
        return writer

    @contextlib.contextmanager
    def forgotten(self) -> Iterator[None]:
        """What is done meanwhile is gone afterwards, as after the restoration of a backup."""
        data, backup = self.server.directory / "appendonlydir", self.server.directory / "backup"
        self.server.kill()
        shutil.copytree(data, backup)
        self.server.start()
        yield
        self.server.kill()
        shutil.rmtree(data)
        backup.rename(data)
        self.server.start()

    def lose(self, loss: str) -> None:
        with self.server.client() as client:
            client.execute_command(*LOSSES["redis"][loss])

    def behind(self) -> tuple[str, Any]:
        """The URL of a server that lags behind, and a client of it."""
        url = f"{self.url}/1"
        return url, RedisClient(parse_redis_url(url))


class LossyPostgres(Lossy):
    @contextlib.contextmanager
    def forgotten(self) -> Iterator[None]:
        backup = self._run("pg_dump", f"--schema={schema_of(self.url)}")
        yield
        self.lose("all")
        self._run("psql", "--quiet", "--set=ON_ERROR_STOP=1", said=backup)

    def _run(self, program: str, *arguments: str, said: str = "") -> str:
        folder = postgres_programs()
        assert folder is not None
        command = [str(Path(folder) / program), f"--dbname={self.server.url}", *arguments]
        return subprocess.run(
            command, input=said, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    def lose(self, loss: str) -> None:
        self.server.execute(LOSSES["postgres"][loss].format(s=f'"{schema_of(self.url)}"'))

    def behind(self) -> tuple[str, PostgresClient]:
        self.server.execute("CREATE DATABASE behind")
        url = self.url.replace("/postgres?", "/behind?")
        return url, PostgresClient(parse_postgres_url(url))


@pytest.fixture(params=LOSSES)
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lossy]:
    with contextlib.ExitStack() as stack:
        if request.param == "redis":
            server = stack.enter_context(running_redis(tmp_path / "redis"))
            journal = Lossy(server, server.url)
        else:
            url: str = request.getfixturevalue("postgres_storage_url")
            journal = LossyPostgres(request.getfixturevalue("postgres"), url)
        yield journal
        for opened in journal.opened:
            opened.close()


def expect_condemned(journal: Lossy, reason: str) -> None:
    """No writer begins any more, whoever asks, until a repair has cut the log."""
    for _ in range(2):
        with pytest.raises(Corrupt, match=f"acknowledged records are missing: .*{reason}.*repair"):
            journal.open_writer()
    storage = journal.open()
    records: list[Record] = []
    try:
        records.extend(storage.read())
    except Corrupt:
        pass
    last = len(records)
    assert f"ends at record {last}" in storage.cut(last, "the repair")
    assert storage.extent() == Extent(1, last)
    writer = journal.open_writer()
    assert writer.append([b"goes on"]) == last + 1
    writer.close()


def use_append(writer: Writer) -> None:
    writer.append([b"more"])


def use_renew(writer: Writer) -> None:
    writer.renew()


USES = pytest.mark.parametrize("use", [use_append, use_renew])


@USES
def test_older_data_of_the_same_term(journal: Lossy, use: Callable[[Writer], None]) -> None:
    writer = journal.open_writer()
    writer.append([b"a"] * 5)
    with journal.forgotten():
        for _ in range(3):
            writer.append([b"b"])
    with pytest.raises(
        Corrupt, match=r"record 8 was .* in term 1, and the log ends at record 5 of"
    ):
        use(writer)
    expect_condemned(journal, "record 8 was acknowledged")


@USES
def test_older_data_of_an_earlier_term(journal: Lossy, use: Callable[[Writer], None]) -> None:
    first = journal.open_writer()
    first.append([b"a"] * 5)
    with journal.forgotten():
        second = journal.open_writer()
    with pytest.raises(Corrupt, match="acknowledged in term 2, and the log ends at record 5 of te"):
        use(second)
    expect_condemned(journal, "acknowledged in term 2")
    with pytest.raises(Fenced):
        first.renew()


@USES
def test_older_data_with_a_new_writer_of_the_same_term(
    journal: Lossy, use: Callable[[Writer], None]
) -> None:
    journal.open_writer().append([b"a"] * 5)
    with journal.forgotten():
        second = journal.open_writer()
    twin = journal.open_writer()
    assert twin.term == second.term == 2
    with pytest.raises(Corrupt, match="another writer has begun that term again"):
        use(second)
    with pytest.raises(Corrupt, match="another writer has begun"):
        twin.append([b"x"])
    expect_condemned(journal, "another writer has begun")


@USES
def test_a_later_term_that_began_on_older_data(
    journal: Lossy, use: Callable[[Writer], None]
) -> None:
    writer = journal.open_writer()
    writer.append([b"a"] * 5)
    with journal.forgotten():
        writer.append([b"b"])
    later = journal.open_writer()
    later.append([b"x"] * 20)
    with pytest.raises(Corrupt, match=r"record 6 was .* and a later term began at record 5"):
        use(writer)
    with pytest.raises(Corrupt):
        later.append([b"x"])
    expect_condemned(journal, "a later term began at record 5")


@USES
@pytest.mark.parametrize(
    ("journal", "loss"),
    [(kind, loss) for kind, losses in LOSSES.items() for loss in losses],
    indirect=["journal"],
)
def test_what_is_deleted(journal: Lossy, loss: str, use: Callable[[Writer], None]) -> None:
    writer = journal.open_writer()
    for _ in range(3):
        writer.append([b"a"] * 2)
    journal.lose(loss)
    with pytest.raises(Corrupt):
        use(writer)
    with pytest.raises(Corrupt):
        writer.append([b"again"])
    expect_condemned(journal, "")


def test_a_journal_that_was_begun_anew(journal: Lossy) -> None:
    writer = journal.open_writer()
    writer.append([b"a"])
    journal.lose("all")
    other = journal.open_writer()  # knows nothing of it
    other.append([b"b"] * 7)
    with pytest.raises(Corrupt, match="another writer has begun that term again"):
        writer.renew()
    with pytest.raises(Corrupt, match="acknowledged records are missing"):
        other.append([b"c"])
    expect_condemned(journal, "another writer")


def follow(storage: Storage) -> int:
    return len(list(storage.read()))


def test_a_standby_remembers_what_it_has_read(journal: Lossy) -> None:
    writer = journal.open_writer()
    standby = journal.open()
    for i in range(4):
        writer.append([b"a"] * 2)
        assert follow(standby) == 2 * i + 2
    journal.lose("all")
    with pytest.raises(Corrupt, match="record 6 was read in term 1, and the log ends at record 0"):
        standby.open_writer("the standby")
    expect_condemned(journal, "record 6 was read")


def test_a_server_that_lags_behind_has_lost_nothing(journal: Lossy) -> None:
    """The connection that polls the meta may have been cut, and made anew to another server."""
    url, client = journal.behind()
    open_storage(url).open_writer("the test").append([b"a"])
    writer = journal.open_writer()
    standby: Any = journal.open()
    for i in range(4):
        writer.append([b"a"])
        assert follow(standby) == i + 1
    standby._watcher = client
    with pytest.raises(Locked):
        standby.open_writer("the standby", place="here")
    assert standby.condemned() == ""
    writer.append([b"a"])
    standby.close()


def test_an_unacknowledged_record_may_vanish(journal: Lossy) -> None:
    writer = journal.open_writer()
    writer.append([b"a"] * 5)
    standby = journal.open()
    with journal.forgotten():
        writer.append([b"b"])
        assert follow(standby) == 6  # and nobody but `writer` knows that it was acknowledged
    assert standby.open_writer("the standby", place="here").last_sequence == 5


def test_a_repair_takes_records_away_on_purpose(journal: Lossy) -> None:
    displaced = journal.open_writer()
    displaced.append([b"a"] * 3)
    displaced.append([b"a"] * 3)
    standby = journal.open()
    assert follow(standby) == 6
    later = journal.open_writer()
    with pytest.raises(Locked):
        standby.cut(0, "the repair")
    later.close()
    journal.open().cut(2, "the repair")
    with pytest.raises(Fenced):
        displaced.append([b"x"])
    assert standby.open_writer("the standby").append([b"x"]) == 1


def test_condemned_by_who_knows_better(journal: Lossy) -> None:
    writer = journal.open_writer()
    writer.append([b"a"])
    writer.condemn("acknowledged records are missing: workers know of a lease that is not here")
    with pytest.raises(Corrupt, match="workers know of a lease"):
        writer.renew()
    expect_condemned(journal, "workers know of a lease")


@pytest.mark.parametrize("journal", ["redis"], indirect=True)
def test_a_journal_of_which_only_snapshots_are_left(journal: Lossy) -> None:
    writer = journal.open_writer()
    writer.append([b"a"])
    writer.write_snapshot(1, b"state")
    writer.close()
    journal.lose("the meta")
    journal.lose("the log")
    storage = journal.open()
    with pytest.raises(Corrupt, match=r"is missing, and others are not; .*repair"):
        journal.open_writer()
    with pytest.raises(Corrupt, match="is missing, and others are not"):
        storage.check()
    assert "ends at record 0" in storage.cut(0, "the repair")
    assert storage.snapshots() == []
    assert journal.open_writer().append([b"b"]) == 1

"""URLs of PostgreSQL, and what is said of those that cannot keep a journal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.chaos.postgres import USER
from forebay.service.processes import free_port
from forebay.storage import StorageUnavailable, StorageUnusable, Volatile, open_storage
from forebay.storage.postgres import checks
from forebay.storage.postgres.address import parse_postgres_url
from forebay.storage.postgres.client import PostgresClient

from ..postgres_server import PASSWORD, PostgresServer, new_storage

HINT = r"write postgresql://user:password@host:port/database; what is special in a password"


# -- URLs ----------------------------------------------------------------------------------------


def test_a_url() -> None:
    address = parse_postgres_url(
        "postgres://forebay:p%40ss@[::1]:5433/db?prefix=training&retry_s=1.5&sslmode=require"
    )
    assert address.url == (
        "postgres://***@[::1]:5433/db?prefix=training&retry_s=1.5&sslmode=require"
    )
    assert address.options == {
        "user": "forebay",
        "password": "p@ss",
        "host": "::1",
        "port": "5433",
        "dbname": "db",
        "sslmode": "require",
    }
    assert (address.prefix, address.retry_s, address.reply_s) == ("training", 1.5, 5)
    assert not address.fails_over


def test_what_a_url_leaves_out_is_libpqs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_postgres_url("postgresql:///").options == {}
    assert parse_postgres_url("postgresql:///db?host=/run/postgresql").options == {
        "dbname": "db",
        "host": "/run/postgresql",
    }
    assert parse_postgres_url("postgresql://a,b:1/db").fails_over


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("postgresql://a/db", None),
        ("postgresql://a,b/db", "read-write"),
        ("postgresql:///db?host=a,b", "read-write"),
        ("postgresql://a,b/db?target_session_attrs=any", "any"),
    ],
)
def test_of_several_servers_the_one_that_can_be_written(url: str, wanted: str | None) -> None:
    client = PostgresClient(parse_postgres_url(url))
    assert client.options.get("target_session_attrs") == wanted


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://user:se@cret@host/db", HINT),
        ("postgresql://user:se/cret@host/db", HINT),
        ("postgresql://user:se?cret@host/db", HINT),
        ("postgresql://user:se#cret@host/db", HINT),
        ("postgresql://user:12#cret@host/db", HINT),
        ("postgresql://user:12/cret@host/db", HINT),
        ("postgresql://user:12?cret@host/db", HINT),
        ("postgresql://user:cret@host:port/db", HINT),
        ("postgresql://user:cret@ho st/db", HINT),
        ("postgresql://user:cret@host/db/x", HINT),
        ("postgresql:user:cret@host/db", HINT),
        ("postgresql://us/er:cret@host/db", HINT),
        ("postgres//user:cret@host/db", "lacks the colon of a scheme"),
        ("postgresql://user:cret@host/db?prefx=a", r"no parameter 'prefx'; there are prefix"),
        ("postgresql://user:cret@host/db?prefix=pg_a", "prefix='pg_a' is not 1 to 63 letters"),
        ("postgresql://user:cret@host/db?prefix=a.b", "prefix='a.b' is not 1 to 63 letters"),
        ("postgresql://user:cret@host/db?retry_s=x", "retry_s='x' is not a number of seconds"),
        ("postgresql://user:cret@host/db?reply_s=0", "reply_s=0 leaves no time"),
        ("postgresql://host/db?password=cret&prefix=", "prefix='' is not"),
    ],
)
def test_a_wrong_url_is_explained_without_its_password(url: str, message: str) -> None:
    with pytest.raises(StorageUnusable, match=message) as error:
        open_storage(url)
    assert "cret" not in str(error.value)
    assert error.value.__cause__ is None


# -- servers -------------------------------------------------------------------------------------


def with_user(server: PostgresServer, user: str, password: str, database: str = "postgres") -> str:
    return f"postgresql://{user}:{password}@127.0.0.1:{server.port}/{database}"


@pytest.fixture
def no_rights(postgres: PostgresServer) -> Iterator[str]:
    """The URL of a user who may connect, and no more."""
    postgres.execute("CREATE ROLE guest LOGIN PASSWORD 'guest'")
    yield with_user(postgres, "guest", "guest")
    postgres.execute("DROP OWNED BY guest")
    postgres.execute("DROP ROLE guest")


def refusal(url: str) -> str:
    """What is said of a PostgreSQL that cannot keep a journal; not that it may become usable."""
    with pytest.raises(StorageUnusable) as error:
        open_storage(url).open_writer("the test")
    assert not isinstance(error.value, StorageUnavailable)
    assert PASSWORD not in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_wrong_password(postgres: PostgresServer) -> None:
    said = refusal(with_user(postgres, USER, "wrong-secret"))
    assert "password authentication failed" in said
    assert "give the right user and password" in said
    assert "wrong-secret" not in said


def test_no_password(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"postgresql://{USER}@127.0.0.1:{postgres.port}/postgres"
    assert "no password supplied" in refusal(url)
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    assert open_storage(url).snapshots() == []


def test_a_password_file(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "passwords"
    file.write_text(f"127.0.0.1:{postgres.port}:*:{USER}:{PASSWORD}\n")
    file.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(file))
    url = f"postgresql://{USER}@127.0.0.1:{postgres.port}/postgres"
    assert open_storage(url).snapshots() == []


def test_a_database_that_does_not_exist(postgres: PostgresServer) -> None:
    said = refusal(with_user(postgres, USER, PASSWORD, "trainings"))
    assert 'database "trainings" does not exist; create it' in said


def test_no_right_to_make_the_schema(no_rights: str, postgres: PostgresServer) -> None:
    assert "permission denied for database postgres; GRANT CREATE ON DATABASE" in refusal(no_rights)
    postgres.execute("CREATE SCHEMA guests AUTHORIZATION guest")
    storage = open_storage(f"{no_rights}?prefix=guests")
    assert storage.open_writer("the test").append([b"x"]) == 1


def test_no_right_to_write(no_rights: str, postgres: PostgresServer) -> None:
    url = f"{postgres.url}?prefix=theirs"
    open_storage(url).open_writer("the test").close()
    assert "permission denied for schema theirs" in refusal(f"{no_rights}?prefix=theirs")
    postgres.execute("GRANT USAGE ON SCHEMA theirs TO guest")
    assert "permission denied for table" in refusal(f"{no_rights}?prefix=theirs")


def test_another_encoding(postgres: PostgresServer) -> None:
    postgres.execute("CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0")
    said = refusal(with_user(postgres, USER, PASSWORD, "latin"))
    assert "the database 'latin' has the encoding LATIN1; create one for the journal" in said


def test_a_version_that_is_too_old(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "OLDEST", 99)
    assert "this is PostgreSQL 1" in refusal(postgres.url)
    assert "use 99 or later" in refusal(postgres.url)


def test_a_read_only_user(no_rights: str, postgres: PostgresServer) -> None:
    postgres.execute("GRANT CREATE ON DATABASE postgres TO guest")
    postgres.execute("ALTER ROLE guest SET default_transaction_read_only = on")
    assert "is read-only: set default_transaction_read_only to off" in refusal(no_rights)


def test_another_isolation(no_rights: str, postgres: PostgresServer) -> None:
    postgres.execute("GRANT CREATE ON DATABASE postgres TO guest")
    postgres.execute("ALTER ROLE guest SET default_transaction_isolation = 'serializable'")
    assert "default_transaction_isolation is serializable; set it to" in refusal(no_rights)


def test_no_connections_left(no_rights: str, postgres: PostgresServer) -> None:
    postgres.execute("ALTER ROLE guest CONNECTION LIMIT 0")
    with pytest.raises(
        StorageUnavailable, match="it has no connections left; raise max_connections"
    ):
        open_storage(no_rights).open_writer("the test")


def test_nobody_listens() -> None:
    url = f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{free_port()}/postgres"
    with pytest.raises(
        StorageUnavailable, match="is PostgreSQL running, and reachable from here"
    ) as error:
        open_storage(url).open_writer("the test")
    assert PASSWORD not in str(error.value)


def test_settings_that_can_lose_records(
    no_rights: str, postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    postgres.execute("GRANT CREATE ON DATABASE postgres TO guest")
    postgres.execute("ALTER ROLE guest SET synchronous_commit = off")
    with pytest.raises(Volatile, match=r"synchronous_commit is off, so a crash .*--allow-volatile"):
        open_storage(no_rights).open_writer("the test")
    url = f"{no_rights}?prefix=volatile"
    assert open_storage(url, allow_volatile=True).open_writer("the test").append([b"x"]) == 1
    assert "can lose acknowledged records: synchronous_commit is off" in caplog.text


def test_several_servers_without_synchronous_standbys(postgres: PostgresServer) -> None:
    host = f"127.0.0.1:{postgres.port}"
    url = f"postgresql://{USER}:{PASSWORD}@{host},{host}/postgres?target_session_attrs=read-write"
    with pytest.raises(Volatile, match="several servers, and synchronous_standby_names is empty"):
        open_storage(url).open_writer("the test")


def test_no_password_in_what_a_storage_says(postgres: PostgresServer) -> None:
    url = new_storage(postgres)
    storage = open_storage(url)
    assert PASSWORD not in storage.url
    assert PASSWORD not in repr(storage.extent())

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from forebay.storage import FileStorage, MemoryStorage, Storage, StorageUnusable, open_storage
from forebay.storage.postgres.storage import PostgresStorage
from forebay.storage.redis.storage import RedisStorage


def test_memory() -> None:
    assert isinstance(open_storage("memory:"), MemoryStorage)
    writer = open_storage("memory:").open_writer("one")
    open_storage("memory:").open_writer("another storage").close()
    writer.close()


def test_file_urls_and_plain_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = tmp_path / "a b"
    for url in (f"file://{tmp_path}/a%20b", f"file://localhost{tmp_path}/a%20b", str(wanted)):
        storage = open_storage(url)
        assert isinstance(storage, FileStorage)
        assert storage.path == wanted
        assert storage.url == f"file://{tmp_path}/a%20b"
    relative = open_storage("./a b")
    assert isinstance(relative, FileStorage)
    assert relative.path == wanted
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("redis://host", RedisStorage),
        ("REDISS://host:1/2", RedisStorage),
        ("unix:///a/socket", RedisStorage),
        ("redis+sentinel://a,b:1/service", RedisStorage),
        ("postgresql://host/db", PostgresStorage),
        ("POSTGRES://host:1,other:2/db?prefix=a", PostgresStorage),
    ],
)
def test_urls_of_servers(url: str, kind: type[Storage]) -> None:
    storage = open_storage(url)
    assert isinstance(storage, kind)
    assert storage.url == url
    storage.close()


@pytest.mark.parametrize(
    "url",
    ["", "redis7://host", "s3://bucket", "file:", "file:relative", "file://host/dir", "memory:x"],
)
def test_others_are_refused_with_what_there_is(url: str) -> None:
    with pytest.raises(StorageUnusable, match=r"file:///dir") as error:
        open_storage(url)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("url", ["rediss//host:1", "redis//host", "file//dir", "memory//"])
def test_a_forgotten_colon_makes_no_directory(url: str) -> None:
    with pytest.raises(StorageUnusable, match="lacks the colon of a scheme"):
        open_storage(url)


def test_postgres_without_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith("forebay.storage.postgres"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StorageUnusable, match=r"psycopg .*: pip install 'forebay\[postgres\]'"):
        open_storage("postgresql://user:secret@host/db")


@pytest.mark.parametrize("url", ["s3://me:cret@host", "S3:m/e:cret@host", "redis//m:cret@host"])
def test_a_wrong_scheme_is_explained_without_the_password(url: str) -> None:
    with pytest.raises(StorageUnusable) as error:
        open_storage(url)
    assert "cret" not in str(error.value)


def test_a_misspelt_parameter() -> None:
    with pytest.raises(StorageUnusable, match=r"no parameter 'prefx'; there are prefix, retry_s"):
        open_storage("redis://localhost?prefx=a")

"""Each storage keeps the contract."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from forebay.chaos.postgres import USER
from forebay.storage import FileStorage, MemoryStorage, Storage, Writer
from forebay.storage.contract import StorageContract
from forebay.storage.postgres.storage import PostgresStorage
from forebay.storage.redis.storage import RedisStorage

from ..postgres_server import PASSWORD, PostgresServer, schema_of
from ..redis_server import opened_keys


class TestMemoryStorage(StorageContract):
    def make(self) -> Storage:
        return MemoryStorage()

    def reopen(self, storage: Storage) -> Storage:
        return storage

    def steal(self, storage: Storage) -> Writer:
        assert isinstance(storage, MemoryStorage)
        assert storage._writer is not None
        storage._writer.close()
        return storage.open_writer("a thief")


class TestFileStorage(StorageContract):
    segment_bytes = 64 << 20

    @pytest.fixture(autouse=True)
    def directories(self, tmp_path: Path) -> None:
        # Hypothesis makes many storages in one test.
        self.paths = (tmp_path / f"{number}" / "new" for number in itertools.count())

    def make(self) -> Storage:
        return FileStorage(next(self.paths), self.segment_bytes)

    def reopen(self, storage: Storage) -> Storage:
        assert isinstance(storage, FileStorage)
        return FileStorage(storage.path, self.segment_bytes)

    def steal(self, storage: Storage) -> Writer:
        assert isinstance(storage, FileStorage)
        (storage.path / "LOCK").unlink()
        return storage.open_writer("a thief")


class TestFileStorageOfSmallSegments(TestFileStorage):
    segment_bytes = 200


class TestRedisStorage(StorageContract):
    @pytest.fixture(autouse=True)
    def server(self, redis_storage_url: str) -> None:
        self.urls = (f"{redis_storage_url}:{number}" for number in itertools.count())

    def make(self) -> Storage:
        return RedisStorage(next(self.urls))

    def reopen(self, storage: Storage) -> Storage:
        return RedisStorage(storage.url)

    def steal(self, storage: Storage) -> Writer:
        with opened_keys(storage.url) as (client, keys):
            client.hset(keys.meta, "owner", "")
        return storage.open_writer("a thief")


class TestPostgresStorage(StorageContract):
    @pytest.fixture(autouse=True)
    def server(self, postgres: PostgresServer, postgres_storage_url: str) -> None:
        self.postgres = postgres
        self.urls = (f"{postgres_storage_url}-{number}" for number in itertools.count())

    def make(self) -> Storage:
        return PostgresStorage(next(self.urls))

    def reopen(self, storage: Storage) -> Storage:
        return PostgresStorage(storage.url.replace("***", f"{USER}:{PASSWORD}"))

    def steal(self, storage: Storage) -> Writer:
        self.postgres.execute(f"UPDATE \"{schema_of(storage.url)}\".meta SET owner = ''")
        return storage.open_writer("a thief")

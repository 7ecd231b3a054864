from __future__ import annotations

import itertools

import pytest

from forebay.chaos.postgres import USER
from forebay.storage import Storage, Writer
from forebay.storage.contract import StorageContract
from forebay.storage.postgres.storage import PostgresStorage

from ..postgres_server import PASSWORD, PostgresServer, schema_of


class TestPostgresStorage(StorageContract):
    @pytest.fixture(autouse=True)
    def server(self, postgres: PostgresServer, postgres_storage_url: str) -> None:
        self.postgres = postgres
        self.url = postgres_storage_url
        self.numbers = itertools.count()

    def make(self) -> Storage:
        # Hypothesis calls this many times in one test.
        return PostgresStorage(f"{self.url}-{next(self.numbers)}")

    def reopen(self, storage: Storage) -> Storage:
        return PostgresStorage(storage.url.replace("***", f"{USER}:{PASSWORD}"))

    def steal(self, storage: Storage) -> Writer:
        self.postgres.execute(f"UPDATE \"{schema_of(storage.url)}\".meta SET owner = ''")
        return storage.open_writer("a thief")

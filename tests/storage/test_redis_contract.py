from __future__ import annotations

import itertools

import pytest

from forebay.storage import Storage, Writer
from forebay.storage.contract import StorageContract
from forebay.storage.redis.storage import RedisStorage

from ..redis_server import opened_keys


class TestRedisStorage(StorageContract):
    @pytest.fixture(autouse=True)
    def server(self, redis_storage_url: str) -> None:
        self.url = redis_storage_url
        self.numbers = itertools.count()

    def make(self) -> Storage:
        # Hypothesis calls this many times in one test.
        return RedisStorage(f"{self.url}:{next(self.numbers)}")

    def reopen(self, storage: Storage) -> Storage:
        return RedisStorage(storage.url)

    def steal(self, storage: Storage) -> Writer:
        with opened_keys(storage.url) as (client, keys):
            client.hset(keys.meta, "owner", "")
        return storage.open_writer("a thief")

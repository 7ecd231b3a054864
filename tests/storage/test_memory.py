from __future__ import annotations

from forebay.storage import MemoryStorage, Storage, Writer
from forebay.storage.contract import StorageContract


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

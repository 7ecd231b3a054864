from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from forebay.storage import FileStorage, Storage, Writer
from forebay.storage.contract import StorageContract


class TestFileStorage(StorageContract):
    segment_bytes = 64 << 20

    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path

    def make(self) -> Storage:
        # Hypothesis calls this many times in one test.
        directory = tempfile.mkdtemp(dir=self.tmp_path)
        return FileStorage(Path(directory) / "new", self.segment_bytes)

    def reopen(self, storage: Storage) -> Storage:
        assert isinstance(storage, FileStorage)
        return FileStorage(storage.path, self.segment_bytes)

    def steal(self, storage: Storage) -> Writer:
        assert isinstance(storage, FileStorage)
        (storage.path / "LOCK").unlink()
        (storage.path / "LOCK").touch()  # another file, which nobody has locked
        return storage.open_writer("a thief")


class TestFileStorageOfSmallSegments(TestFileStorage):
    segment_bytes = 200

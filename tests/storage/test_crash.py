"""Failing disks, killed writers and lost page caches: what was acknowledged stays."""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forebay.storage import AppendFailed, Extent, FileStorage, StorageError, StorageUnusable, Writer
from forebay.storage.proto.segment_pb2 import Batch
from forebay.storage.tfrecord import frame


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "storage"


@pytest.fixture
def writer(path: Path) -> Iterator[Writer]:
    writer = FileStorage(path, segment_bytes=300).open_writer("the test")
    writer.append([b"one"])
    writer.append([b"two"])
    yield writer
    writer.close()


def segment_size(path: Path) -> int:
    return (path / "segments" / f"{1:020}.tfrecord").stat().st_size


def expect_poisoned_and_recovered(writer: Writer, path: Path, records: list[bytes]) -> None:
    with pytest.raises(AppendFailed, match="an earlier append failed"):
        writer.append([b"after"])
    assert [record.data for record in FileStorage(path).read()] == records
    writer.close()
    following = FileStorage(path).open_writer("the next")
    assert following.append([b"new"]) == len(records) + 1
    following.close()
    assert [record.data for record in FileStorage(path).read()] == [*records, b"new"]


@contextmanager
def full_disk_at(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes: the write that tries is cut short, then fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, 1, 11, 12, 30, 45])
def test_a_full_disk_leaves_no_partial_frame(writer: Writer, path: Path, room: int) -> None:
    size = segment_size(path)
    with full_disk_at(size + room), pytest.raises(AppendFailed, match="File too large; make room"):
        writer.append([b"three" * 10])
    assert segment_size(path) == size
    expect_poisoned_and_recovered(writer, path, [b"one", b"two"])


def fail(number: int) -> Callable[..., int]:
    def failing(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    return failing


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EIO, "mend the disk"),
        (errno.ENOSPC, "make room"),
        (errno.EROFS, "write access"),
        (errno.EMFILE, "limit of open files"),
    ],
)
def test_a_failed_sync_takes_the_batch_back(
    writer: Writer, path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail(number))
        with pytest.raises(AppendFailed, match=f"{os.strerror(number)}; .*{remedy}") as error:
            writer.append([b"three"])
    assert "\n" not in str(error.value)
    expect_poisoned_and_recovered(writer, path, [b"one", b"two"])


def test_a_full_disk_is_told_to_be_emptied_and_no_other_journal_to_be_begun(
    writer: Writer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.close()
    for where, told in (path, "the journal goes on where it was"), (path / "new", "choose another"):
        with monkeypatch.context() as patch:
            patch.setattr(os, "mkdir" if where != path else "fsync", fail(errno.ENOSPC))
            with pytest.raises(StorageUnusable, match="make room there, .*" + told):
                FileStorage(where).open_writer("the next dispatcher")


def test_a_partial_frame_that_cannot_be_taken_back_is_torn(
    writer: Writer, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", fail(errno.EIO))
        with full_disk_at(segment_size(path) + 20), pytest.raises(AppendFailed):
            writer.append([b"three" * 10])
    assert "could not be undone" in caplog.text
    assert FileStorage(path).holdings().torn_bytes == 20
    with caplog.at_level(logging.WARNING):
        expect_poisoned_and_recovered(writer, path, [b"one", b"two"])
    assert "removed 20 bytes of an append that a crash cut off" in caplog.text


def test_a_failure_to_begin_a_segment(
    writer: Writer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail(errno.ENOSPC))
        with pytest.raises(AppendFailed):
            writer.append([bytes(400)])
    expect_poisoned_and_recovered(writer, path, [b"one", b"two"])


def test_an_interrupted_append_poisons_the_writer(
    writer: Writer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(fd: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.append([b"three"])
    # Nobody knows whether it is durable, so it stays, unacknowledged.
    expect_poisoned_and_recovered(writer, path, [b"one", b"two", b"three"])


def test_a_failed_snapshot_or_blob_leaves_nothing_and_appends_go_on(
    writer: Writer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.write_snapshot(1, b"before")
    for write in (lambda: writer.write_snapshot(1, b"after"), lambda: writer.write_blob(b"x" * 99)):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail(errno.EIO))
            with pytest.raises(StorageError, match="Input/output error; mend the disk"):
                write()
        with full_disk_at(5), pytest.raises(StorageError, match="File too large"):
            write()
    assert not list(path.rglob(".tmp-*"))
    storage = FileStorage(path)
    assert storage.read_snapshot(1) == b"before"
    assert storage.holdings().blobs == 0
    assert writer.append([b"three"]) == 3


def test_short_writes_are_followed_up(
    writer: Writer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
        writer.append([b"three" * 10])
    assert [record.data for record in FileStorage(path).read()][-1] == b"three" * 10


# -- kill -9 ---------------------------------------------------------------------------------------

APPENDER = """
import sys
from forebay.storage import FileStorage
writer = FileStorage(sys.argv[1], segment_bytes=20_000).open_writer("the appender")
print(writer.last_sequence, flush=True)
while True:
    last = writer.append([b"%d" % (writer.last_sequence + i + 1) for i in range(7)])
    if last % 70 == 0:
        writer.write_snapshot(last, b"%d" % last)
    print(last, flush=True)
"""


def test_records_that_a_killed_writer_acknowledged_are_there(path: Path) -> None:
    acknowledged = 0
    for run in range(4):
        command = [sys.executable, "-c", APPENDER, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as appender:
            assert appender.stdout is not None
            try:
                for _ in range(60 + 23 * run):
                    acknowledged = int(appender.stdout.readline())
            finally:
                appender.send_signal(signal.SIGKILL)
            rest = appender.stdout.read()
        acknowledged = max([acknowledged, *map(int, rest.split(b"\n")[:-1])])
        storage = FileStorage(path)
        records = list(storage.read())
        assert [int(record.data) for record in records] == list(range(1, len(records) + 1))
        assert acknowledged <= len(records) <= acknowledged + 7
        assert all(int(storage.read_snapshot(s)) == s for s in storage.snapshots())
        assert {record.term for record in records} == set(range(1, run + 2))


# -- power failure -----------------------------------------------------------------------------


class Disk:
    """The directory tree after a power failure: only synced data is kept."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.on_sync: Callable[[], None] | None = None
        self._contents: dict[int, bytes] = {}  # by inode
        self._entries: dict[int, dict[str, int]] = {}  # name: inode, by the directory's inode
        self._held: dict[int, int] = {}  # descriptors, so that no inode is used again
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._synced)

    def _synced(self, fd: int) -> None:
        status = os.fstat(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if not path.is_relative_to(self.root):
            return
        self._hold(path)
        if stat.S_ISDIR(status.st_mode):
            self._entries[status.st_ino] = {p.name: self._hold(p) for p in path.iterdir()}
        else:
            self._contents[status.st_ino] = path.read_bytes()
        if self.on_sync is not None:
            self.on_sync()

    def _hold(self, path: Path) -> int:
        inode = path.stat().st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)
            if path.is_dir():
                self._entries[inode] = {}
        return inode

    def close(self) -> None:
        for fd in self._held.values():
            os.close(fd)

    def after_power_failure(self, target: Path) -> None:
        self._copy(self.root.stat().st_ino, target)

    def _copy(self, directory: int, target: Path) -> None:
        target.mkdir()
        for name, inode in self._entries.get(directory, {}).items():
            if inode in self._entries:
                self._copy(inode, target / name)
            else:
                (target / name).write_bytes(self._contents.get(inode, b""))


def leave(storage: FileStorage, batch: Batch) -> None:
    """Write a whole batch and the beginning of another one, as a writer killed before its sync."""
    with max(storage.path.glob("segments/*")).open("ab") as file:
        file.write(frame(batch.SerializeToString()) + b"torn")


def test_acknowledged_records_survive_a_power_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    disk = Disk(root, monkeypatch)
    images = 0
    records: list[bytes] = []
    in_flight: list[bytes] = []  # written, and neither synced nor acknowledged
    snapshots: dict[int, bytes] = {}
    digests: dict[str, bytes] = {}
    term = 0

    def check() -> None:
        nonlocal images
        images += 1
        image = tmp_path / f"image-{images}"
        disk.after_power_failure(image)
        storage = FileStorage(image / "a" / "storage", segment_bytes=150)
        first = storage.first_sequence()
        found = records[: first - 1] + [record.data for record in storage.read(first - 1)]
        assert found in (records, records + in_flight)
        assert {s: storage.read_snapshot(s) for s in storage.snapshots()}.items() >= (
            snapshots.items()
        )
        assert all(storage.read_blob(digest) == data for digest, data in digests.items())
        after = storage.open_writer("the image's")
        assert after.term > term
        assert after.append([b"more"]) == len(found) + 1
        after.close()

    def open_writer() -> Writer:
        disk.on_sync = check if records else None
        try:
            return storage.open_writer("the test")
        finally:
            disk.on_sync = None

    storage = FileStorage(root / "a" / "storage", segment_bytes=150)
    for _ in range(3):
        writer = open_writer()
        term = writer.term
        records += in_flight
        in_flight = []
        check()
        for i in range(9):
            batch = [b"%d" % i] * (i % 3 + 1)
            records += batch
            writer.append(batch)
            check()
        data = b"state %d" % len(records)
        writer.write_snapshot(len(records), data)
        snapshots[len(records)] = data
        check()
        digests[writer.write_blob(data)] = data
        check()
        writer.trim(len(records) // 2)
        check()
        writer.close()
        in_flight = [b"in flight"]
        leave(
            storage, Batch(format=1, term=term, first_sequence=len(records) + 1, records=in_flight)
        )
    storage.open_writer("the test").close()
    records += in_flight
    assert storage.extent() == Extent(storage.first_sequence(), len(records))
    assert storage.first_sequence() > 1
    disk.close()

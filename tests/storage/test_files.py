"""What is particular to a storage of files, short of crashes."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forebay.storage import (
    Corrupt,
    Extent,
    FileStorage,
    Locked,
    Missing,
    NewerFormat,
    Record,
    StorageUnusable,
)
from forebay.storage.proto.segment_pb2 import Batch
from forebay.storage.tfrecord import frame


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "storage"


def fill(path: Path, batches: int = 3, segment_bytes: int = 64 << 20) -> FileStorage:
    storage = FileStorage(path, segment_bytes)
    writer = storage.open_writer("the test")
    for i in range(batches):
        writer.append([b"record %d" % i])
    writer.close()
    return storage


def listing(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


# -- layout ----------------------------------------------------------------------------------------


def test_the_layout_of_the_directory(path: Path) -> None:
    storage = FileStorage(path)
    writer = storage.open_writer("the test")
    writer.append([b"a"])
    writer.write_snapshot(1, b"state")
    digest = writer.write_blob(b"blob")
    assert set(listing(path)) == {
        "FORMAT",
        "LOCK",
        "TERM",
        "segments/00000000000000000001.tfrecord",
        "snapshots/00000000000000000001.snapshot",
        f"blobs/{digest}",
    }
    assert (path / "FORMAT").read_text() == "forebay storage 1\n"
    assert (path / "TERM").read_text() == "1 00000000000000000001\n"
    assert f"process {os.getpid()}, the test" in (path / "LOCK").read_text()
    writer.close()


def test_segments_and_snapshots_are_tfrecord_files(path: Path) -> None:
    import tensorflow as tf

    fill(path, batches=50, segment_bytes=500)
    segments = sorted(map(str, (path / "segments").iterdir()))
    assert len(segments) > 2
    batches = map(Batch.FromString, tf.data.TFRecordDataset(segments).as_numpy_iterator())
    assert [r for b in batches for r in b.records] == [b"record %d" % i for i in range(50)]


def test_opening_and_reading_change_nothing(path: Path) -> None:
    storage = FileStorage(path)
    list(storage.read())
    assert storage.snapshots() == []
    assert storage.holdings().segments == 0
    assert not path.exists()
    fill(path)
    before = listing(path)
    other = FileStorage(path)
    assert other.extent() == Extent(1, 3)
    other.holdings()
    assert listing(path) == before


def test_a_reader_sees_a_storage_that_is_made_later(path: Path) -> None:
    reader = FileStorage(path)
    assert list(reader.read()) == []
    fill(path)
    assert [record.sequence for record in reader.read()] == [1, 2, 3]


def test_a_symbolic_link_and_a_relative_path(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path)
    (tmp_path / "link").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    for name in ("link", "./storage"):
        storage = FileStorage(name)
        monkeypatch.chdir("/")  # the path is taken as of when it was opened
        storage.open_writer("the test").close()
        assert storage.extent() == Extent(1, 3)
        monkeypatch.chdir(tmp_path)


def test_segments_are_rolled_by_size(path: Path) -> None:
    storage = fill(path, batches=100, segment_bytes=1000)
    sizes = [p.stat().st_size for p in (path / "segments").iterdir()]
    assert len(sizes) > 3
    assert max(sizes) <= 1000
    assert storage.holdings().segments == len(sizes)
    # A batch that is larger than a segment has one to itself.
    writer = storage.open_writer("the test")
    writer.append([bytes(5000)])
    writer.append([b"x"])
    writer.close()
    assert storage.extent() == Extent(1, 102)


def test_trimming_removes_whole_segments(path: Path) -> None:
    storage = fill(path, batches=100, segment_bytes=1000)
    firsts = [int(p.name[:20]) for p in sorted((path / "segments").iterdir())]
    writer = storage.open_writer("the test")
    writer.write_snapshot(100, b"s")
    writer.trim(firsts[2] - 1)
    assert storage.first_sequence() == firsts[1]
    writer.trim(firsts[2])
    assert storage.first_sequence() == firsts[2]
    writer.trim(101)
    assert storage.first_sequence() == firsts[-1]
    writer.close()


def test_a_snapshot_ends_a_large_segment(path: Path) -> None:
    # So that a recovery reads little more than what came after the snapshot.
    storage = FileStorage(path)
    writer = storage.open_writer("the test")
    writer.append([bytes(2 << 20)])
    writer.append([b"x"])
    writer.write_snapshot(2, b"s")
    writer.append([b"y"])
    writer.append([b"z"])
    writer.close()
    assert sorted(int(p.name[:20]) for p in (path / "segments").iterdir()) == [1, 3]


def test_a_reader_goes_on_where_it_stood(path: Path) -> None:
    storage = FileStorage(path, segment_bytes=400)
    follower = FileStorage(path)
    writer = storage.open_writer("the test")
    seen = 0
    for i in range(60):
        writer.append([b"%d" % i, b"%d again" % i])
        records = list(follower.read(after=seen))
        assert [record.sequence for record in records] == [seen + 1, seen + 2]
        seen = records[-1].sequence
        if i % 7 == 0:
            assert follower.extent() == Extent(1, seen)
            assert next(iter(follower.read())).sequence == 1
    writer.close()


def test_a_trim_under_a_reader_is_said(path: Path) -> None:
    storage = fill(path, batches=100, segment_bytes=1000)
    reader = storage.read()
    next(reader)
    writer = storage.open_writer("the test")
    writer.write_snapshot(100, b"s")
    writer.trim(101)
    with pytest.raises(Missing, match="trimmed while it was read"):
        list(reader)
    writer.close()


# -- who may use it ----------------------------------------------------------------------------


@contextmanager
def unprivileged() -> Iterator[None]:
    """Permissions bind, also for root."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that anybody can reach, unlike pytest's."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory / "storage"
    for path in [directory, *directory.rglob("*")]:
        path.chmod(path.stat().st_mode | stat.S_IRWXU)
    shutil.rmtree(directory)


def test_a_directory_that_is_not_writable_can_be_read(open_path: Path) -> None:
    fill(open_path)
    writer = FileStorage(open_path).open_writer("the owner")
    writer.append([b"more"])
    writer.write_snapshot(4, b"state")
    digest = writer.write_blob(b"blob")
    for path in [open_path, *open_path.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    with unprivileged():
        storage = FileStorage(open_path)
        assert storage.extent() == Extent(1, 4)
        assert len(list(storage.read())) == 4
        assert storage.read_snapshot(4) == b"state"
        assert storage.read_blob(digest) == b"blob"
        with pytest.raises(StorageUnusable, match="write access") as error:
            storage.open_writer("somebody")
    assert "\n" not in str(error.value)
    writer.close()


def test_a_directory_that_cannot_be_made(open_path: Path) -> None:
    open_path.mkdir(mode=0o555)
    with unprivileged(), pytest.raises(StorageUnusable, match="Permission denied; give"):
        FileStorage(open_path / "new").open_writer("somebody")
    assert list(open_path.iterdir()) == []


def test_a_storage_that_cannot_be_read(open_path: Path) -> None:
    fill(open_path)
    (open_path / "segments").chmod(0)
    with unprivileged(), pytest.raises(StorageUnusable, match="cannot be read"):
        list(FileStorage(open_path).read())


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(StorageUnusable, match="is not a directory"):
        FileStorage(tmp_path / "file")
    with pytest.raises(StorageUnusable, match="is not a directory"):
        FileStorage(tmp_path / "file" / "below").open_writer("somebody")
    assert (tmp_path / "file").read_text() == "precious"


# -- formats ---------------------------------------------------------------------------------------


def test_a_newer_format_is_left_untouched(path: Path) -> None:
    fill(path)
    storage = FileStorage(path)
    (path / "FORMAT").write_text("forebay storage 2\n")
    before = listing(path)
    with pytest.raises(NewerFormat, match=r"format 2, newer than 1.*upgrade Forebay"):
        FileStorage(path)
    with pytest.raises(NewerFormat):
        storage.open_writer("the test")
    with pytest.raises(NewerFormat):
        list(storage.read())
    with pytest.raises(NewerFormat):
        storage.cut(1, "the test")
    assert listing(path) == before


def test_a_batch_of_a_newer_format(path: Path) -> None:
    storage = fill(path)
    segment = path / "segments" / f"{1:020}.tfrecord"
    newer = Batch(format=2, term=1, first_sequence=4, records=[b"x"])
    with segment.open("ab") as file:
        file.write(frame(newer.SerializeToString()))
    before = listing(path)
    with pytest.raises(NewerFormat, match=f"{segment.name}: byte .*format 2"):
        list(storage.read())
    with pytest.raises(NewerFormat):
        storage.open_writer("the test")
    del before["LOCK"]
    assert listing(path).items() >= before.items()


@pytest.mark.parametrize("content", [b"", b"forebay storage 1", b"forebay storage x\n", bytes(18)])
def test_a_damaged_format_marker_is_corrupt(path: Path, content: bytes) -> None:
    fill(path)
    (path / "FORMAT").write_bytes(content)
    with pytest.raises(Corrupt, match="FORMAT: byte 0"):
        FileStorage(path)


def test_a_missing_format_marker_is_corrupt(path: Path) -> None:
    fill(path)
    (path / "FORMAT").unlink()
    with pytest.raises(Corrupt, match="FORMAT: is missing"):
        FileStorage(path)


@pytest.mark.parametrize("content", [None, b"", b"x\n", b"1", b"0\n"])
def test_a_lost_term_is_corrupt(path: Path, content: bytes | None) -> None:
    storage = fill(path)
    storage.open_writer("the test").close()
    if content is None:
        (path / "TERM").unlink()
    else:
        (path / "TERM").write_bytes(content)
    with pytest.raises(Corrupt, match=r"TERM: byte 0: .* let its one line say"):
        storage.open_writer("the test")
    (path / "TERM").write_text("7\n")
    writer = storage.open_writer("the test")
    assert writer.term == 8
    writer.close()


def test_foreign_files_are_no_hindrance(path: Path) -> None:
    path.mkdir()
    (path / "lost+found").mkdir()
    fill(path)
    (path / "segments" / "notes.txt").write_text("x")
    (path / "snapshots" / "1.snapshot").write_text("x")
    storage = fill(path)
    assert storage.extent() == Extent(1, 6)
    assert storage.snapshots() == []


# -- snapshots and blobs that are damaged ------------------------------------------------------


def test_a_damaged_snapshot_is_corrupt(path: Path) -> None:
    storage = fill(path)
    writer = storage.open_writer("the test")
    writer.write_snapshot(2, b"the state")
    snapshot = path / "snapshots" / f"{2:020}.snapshot"
    whole = snapshot.read_bytes()
    for i in range(len(whole)):
        for damaged in (whole[:i], whole[:i] + bytes([whole[i] ^ 4]) + whole[i + 1 :]):
            snapshot.write_bytes(damaged)
            with pytest.raises(Corrupt, match=f"{snapshot}: byte 0"):
                storage.read_snapshot(2)
    writer.close()


def test_a_damaged_blob_is_corrupt_and_writing_it_again_heals_it(path: Path) -> None:
    writer = FileStorage(path).open_writer("the test")
    digest = writer.write_blob(b"blob")
    (path / "blobs" / digest).write_bytes(b"blub")
    with pytest.raises(Corrupt, match=f"{digest}: byte 0"):
        FileStorage(path).read_blob(digest)
    assert writer.write_blob(b"blob") == digest
    assert FileStorage(path).read_blob(digest) == b"blob"
    writer.close()


def test_a_log_that_ends_before_its_snapshot_has_lost_records(path: Path) -> None:
    storage = fill(path)
    writer = storage.open_writer("the test")
    writer.write_snapshot(3, b"s")
    writer.close()
    segment = path / "segments" / f"{1:020}.tfrecord"
    os.truncate(segment, segment.stat().st_size - 1)
    with pytest.raises(Corrupt, match="the log ends at record 2, before this snapshot"):
        storage.open_writer("the test")


def test_half_written_files_of_a_crash_are_removed(path: Path) -> None:
    fill(path)
    for directory in (path, path / "segments", path / "snapshots", path / "blobs"):
        (directory / ".tmp-1-1").write_text("half")
    storage = fill(path)
    assert not list(path.rglob(".tmp-*"))
    assert storage.holdings().blobs == 0


# -- cutting -----------------------------------------------------------------------------------


def test_cutting_moves_what_is_behind_aside(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = fill(path, batches=100, segment_bytes=1000)
    writer = storage.open_writer("the test")
    writer.write_snapshot(10, b"early")
    writer.write_snapshot(60, b"late")
    with pytest.raises(Locked):
        storage.cut(30, "the repair")
    writer.close()
    before = listing(path)
    records = list(storage.read())
    log_before = b"".join(v for k, v in sorted(before.items()) if k.startswith("segments"))

    done = storage.cut(30, "the repair")

    assert str(path / "cut" / "1") in done
    assert "ends at record 30" in done
    assert list(storage.read()) == records[:30]
    assert storage.snapshots() == [10]
    after = listing(path)
    cut_off = b"".join(v for k, v in sorted(after.items()) if k.endswith("tfrecord") and "cut" in k)
    tail = b"".join(v for k, v in after.items() if ".from-byte-" in k)
    kept = b"".join(v for k, v in sorted(after.items()) if k.startswith("segments"))
    assert kept + tail + cut_off == log_before
    with caplog.at_level(logging.WARNING):
        writer = storage.open_writer("the next")
    assert writer.last_sequence == 30
    writer.append([b"new"])
    writer.close()
    storage.cut(30, "the repair")
    assert storage.extent() == Extent(1, 30)
    assert (path / "cut" / "2").is_dir()


def test_cutting_a_corrupt_log_and_inside_a_batch(path: Path) -> None:
    storage = FileStorage(path)
    writer = storage.open_writer("the test")
    writer.append([b"a", b"b"])
    writer.append([b"c", b"d"])
    writer.append([b"e"])
    writer.close()
    storage.cut(3, "the repair")
    assert storage.extent() == Extent(1, 2)
    fill(path)
    segment = path / "segments" / f"{1:020}.tfrecord"
    data = bytearray(segment.read_bytes())
    data[-60] ^= 1
    segment.write_bytes(data)
    with pytest.raises(Corrupt) as error:
        storage.extent()
    good: list[Record] = []
    with pytest.raises(Corrupt):
        good.extend(storage.read())
    storage.cut(good[-1].sequence, "the repair")
    assert list(storage.read()) == good
    assert f"{segment}: byte {segment.stat().st_size}: " in str(error.value)

"""Which writer may displace another one, when, and what it takes over."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest

from forebay.storage import Corrupt, Fenced, FileStorage, Locked, Writer
from forebay.storage.local import file_opening
from forebay.storage.local.durable import make_directory

from .scenes import Scene, content, storage_at


class Clock:
    """Stands in for the module `time`."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(file_opening, "time", clock)
    return clock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "storage"


def expect_locked(storage: FileStorage, place: str = "") -> None:
    with pytest.raises(Locked, match=f"in use by process {os.getpid()}, the holder; stop that"):
        storage.open_writer("the challenger", place=place)


def renew(writer: Writer, path: Path) -> None:
    """Renew, to a time that the file system can tell from the one before."""
    before = (path / "TERM").stat().st_mtime_ns
    while (path / "TERM").stat().st_mtime_ns == before:
        writer.renew()


def test_a_silent_writer_is_displaced_after_its_own_lease(
    path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    holder = storage_at(path).open_writer("the holder", lease_ms=2500)
    holder.append([b"a"])
    clock.now_s += 1000  # nobody looked
    challenger = storage_at(path)
    expect_locked(challenger)
    for _ in range(24):
        clock.now_s += 0.1
        expect_locked(challenger)
    clock.now_s += 0.2
    expect_locked(storage_at(path))  # which has only just come
    with caplog.at_level(logging.WARNING):
        writer = challenger.open_writer("the challenger")
    assert f"taking over from process {os.getpid()}, the holder, which gave no" in caplog.text
    assert "lease of 2500 ms" in caplog.text
    assert (writer.term, writer.last_sequence) == (2, 1)
    with pytest.raises(Fenced):
        holder.renew()
    holder.close()
    with pytest.raises(Locked, match="the challenger"):
        storage_at(path).open_writer("another")
    writer.close()


def test_a_writer_that_renews_its_lease_is_not_displaced(path: Path, clock: Clock) -> None:
    holder = storage_at(path).open_writer("the holder", lease_ms=1000)
    challenger = storage_at(path)
    for _ in range(10):
        expect_locked(challenger)
        clock.now_s += 0.9
        renew(holder, path)
        clock.now_s += 0.9
    expect_locked(challenger)
    clock.now_s += 1
    challenger.open_writer("the challenger").close()
    holder.close()


def test_a_place_that_this_process_has_is_nobody_elses(
    path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    holder = storage_at(path).open_writer("the holder", place="a host:5050")
    expect_locked(storage_at(path), place="a host:5051")
    expect_locked(storage_at(path))
    writer = storage_at(path).open_writer("the holder's next life", place="a host:5050")
    assert "as this process has its place 'a host:5050'" in caplog.text
    with pytest.raises(Fenced):
        holder.append([b"x"])
    holder.close()
    writer.close()


@pytest.mark.parametrize("term", ["1 0\n", "no term", None])
def test_a_writer_without_a_lease_is_not_displaced(
    path: Path, clock: Clock, term: str | None
) -> None:
    # A repair does not renew.
    holder = storage_at(path).open_writer("the holder")
    if term is None:
        (path / "TERM").unlink()
    else:
        (path / "TERM").write_text(term)
    challenger = storage_at(path)
    for _ in range(3):
        expect_locked(challenger, place="")
        clock.now_s += 1e6
    holder.close()


def test_a_repair_is_not_displaced(
    path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = storage_at(path)
    writer = storage.open_writer("the test")
    writer.append([b"a"])
    writer.append([b"b"])
    writer.close()
    challenger = storage_at(path)
    refused = 0

    def look(path: Path) -> None:
        nonlocal refused
        for _ in range(3):
            with pytest.raises(Locked, match="the repair"):
                challenger.open_writer("the challenger")
            clock.now_s += 1e6
            refused += 1
        make_directory(path)

    with monkeypatch.context() as patch:
        patch.setattr("forebay.storage.local.file_cut.make_directory", look)
        storage.cut(1, "the repair")
    assert refused
    challenger.open_writer("the challenger").close()


def test_the_error_names_a_process_that_hangs_while_it_opens(path: Path, clock: Clock) -> None:
    storage = storage_at(path)
    storage.open_writer("the test").close()
    with (
        file_opening.opening_alone(storage._layout),
        pytest.raises(Locked, match="is being opened by another process, which does not get on"),
    ):
        storage_at(path).open_writer("the next")
    storage_at(path).open_writer("the next").close()


# -- what is taken over --------------------------------------------------------------------------


def displaced(path: Path, clock: Clock) -> Writer:
    challenger = storage_at(path)
    with pytest.raises(Locked):
        challenger.open_writer("the challenger")
    clock.now_s += 10
    return challenger.open_writer("the challenger")


def test_a_storage_without_a_record(path: Path, clock: Clock) -> None:
    holder = storage_at(path).open_writer("the holder")
    writer = displaced(path, clock)
    writer.append([b"a"])
    assert [(r.term, r.data) for r in storage_at(path).read()] == [(2, b"a")]
    with pytest.raises(Fenced):
        holder.append([b"x"])


def test_a_file_system_without_links(
    path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    Scene(path)
    before = content(path)
    monkeypatch.setattr(os, "link", fail)
    displaced(path, clock)
    assert content(path) == before
    shutil.rmtree(path / "segments")
    assert content(path) == before


def test_a_torn_frame_is_left_out(
    path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(path)
    before = content(path)
    last = max((path / "segments").iterdir())
    size = last.stat().st_size
    with last.open("ab") as file:
        file.write(b"torn frame")
    writer = displaced(path, clock)
    said = f"{last}: byte {size}: left out 10 bytes of an append that was not done"
    assert said in caplog.text
    assert last.stat().st_size == size + 10, "the old writer may be at it"
    assert content(path) == before
    scene.old.close()
    writer.close()


def test_a_corrupt_log_is_named_where_it_lies(path: Path, clock: Clock) -> None:
    Scene(path)
    last = max((path / "segments").iterdir())
    data = bytearray(last.read_bytes())
    data[20] ^= 1
    last.write_bytes(data)
    with pytest.raises(Corrupt, match=f"{last}: byte 0") as error:
        displaced(path, clock)
    assert error.value.file == str(last)
    assert not list(path.rglob(".tmp-*"))
    assert not list(path.rglob("takeover-*"))


def test_superseded_logs_are_kept_until_something_is_trimmed(path: Path, clock: Clock) -> None:
    Scene(path)
    displaced(path, clock)
    third = displaced(path, clock)
    names = {p.name for p in path.iterdir()}
    assert {"segments", "snapshots", "LOCK", "takeover-2", "takeover-3"} <= names
    third.trim(3)  # less than a segment
    assert {p.name for p in path.iterdir()} == names
    third.trim(11)
    assert {p.name for p in path.iterdir()} == {"FORMAT", "OPENING", "TERM", "blobs", "takeover-3"}
    assert storage_at(path).first_sequence() > 1
    third.append([b"x"])
    third.close()
    (path / "FORMAT").unlink()
    with pytest.raises(Corrupt, match="FORMAT: is missing"):
        storage_at(path)

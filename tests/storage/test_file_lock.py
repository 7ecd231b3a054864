"""Who writes to a storage of files: who has its lock. And what TERM is for, should that be lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from forebay.storage import Corrupt, Fenced, FileStorage, Locked, StorageUnusable, Writer, blob_name

from .stops import Stop, at_each_call, stopped

WRITER = """
import os, sys, time
from forebay.storage import FileStorage, Locked
storage = FileStorage(sys.argv[1])
while True:
    try:
        writer = storage.open_writer("the other one")
        break
    except Locked:
        print("locked", flush=True)
        time.sleep(0.005)
if not os.fork():
    time.sleep(600)
    os._exit(0)
print("writer", writer.append([b"x"]), flush=True)
sys.stdin.read()
"""


@contextmanager
def writing(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that becomes the writer, and forks a child that outlives it."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def open_soon(storage: FileStorage) -> Writer:
    """As a standby does: a child of the killed writer may still be about to close its copy."""
    give_up_s = time.monotonic() + 20
    while True:
        try:
            return storage.open_writer("the test")
        except Locked:
            assert time.monotonic() < give_up_s
            time.sleep(0.01)


def test_a_paused_writer_keeps_the_lock_and_a_killed_one_makes_way_at_once(tmp_path: Path) -> None:
    with writing(tmp_path) as process:
        assert line(process) == ["writer", "1"]
        process.send_signal(signal.SIGSTOP)
        storage = FileStorage(tmp_path)
        for _ in range(3):
            with pytest.raises(Locked, match=f"process {process.pid}, the other one; stop that"):
                storage.open_writer("the test", lease_ms=1, place="here")
        assert [record.data for record in storage.read()] == [b"x"]
        process.kill()
        process.wait()
        writer = open_soon(storage)
        assert (writer.term, writer.last_sequence) == (2, 1)
        writer.close()


def test_one_of_several_challengers_wins(tmp_path: Path) -> None:
    holder = FileStorage(tmp_path).open_writer("the test")
    with ExitStack() as stack:
        everybody = [stack.enter_context(writing(tmp_path)) for _ in range(3)]
        assert [line(process) for process in everybody] == [["locked"]] * 3
        holder.close()
        for last in "123":
            while not (winners := [p for p in everybody if line(p) == ["writer", last]]):
                pass
            (winner,) = winners
            everybody.remove(winner)
            for process in everybody:
                # What it had said before the winner won is read as well.
                assert [line(process) for _ in range(100)] == [["locked"]] * 100
            winner.kill()
    assert [record.sequence for record in FileStorage(tmp_path).read()] == [1, 2, 3]


def test_a_forked_child_neither_keeps_nor_opens_the_lock(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    writer = storage.open_writer("the test")
    child = os.fork()
    if not child:
        writer.close()
        signal.pause()
    try:
        with pytest.raises(Locked):
            storage.open_writer("the next")
        writer.close()
        storage.open_writer("the next").close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# -- if the lock is lost -------------------------------------------------------------------------


def old_writer(path: Path) -> Writer:
    writer = FileStorage(path, segment_bytes=100).open_writer("the old one")
    for number in range(1, 12):
        writer.append([b"%d" % number])
    writer.write_snapshot(8, b"as of 8")
    return writer


def open_without_the_lock(path: Path) -> Writer:
    (path / "LOCK").unlink(missing_ok=True)
    return FileStorage(path, segment_bytes=100).open_writer("the new one")


def goes_on(path: Path, new: Writer) -> None:
    """What the new writer acknowledges can be read, whatever the old one has left."""
    at = new.last_sequence
    for number in range(3):
        new.append([b"new %d" % number])
    read = [*FileStorage(path).read(at)]
    assert [record.data for record in read] == [b"new 0", b"new 1", b"new 2"]


ACTS: dict[str, Callable[[Writer], object]] = {
    "append": lambda writer: writer.append([b"12"]),
    "append in a new segment": lambda writer: writer.append([b"12" * 100]),
    "snapshot": lambda writer: writer.write_snapshot(11, b"as of 11"),
    "trim": lambda writer: writer.trim(8),
    "blob": lambda writer: writer.write_blob(b"a blob"),
    "delete blob": lambda writer: writer.delete_blob(blob_name(b"a blob")),
}


@pytest.mark.parametrize("act", ACTS)
def test_a_writer_whose_lock_is_lost_acknowledges_nothing_more(tmp_path: Path, act: str) -> None:
    """It is stopped at each of its calls, and another one opens meanwhile."""

    def run(path: Path, number: int) -> Stop:
        old = old_writer(path)
        opened: list[Writer] = []
        with stopped(number, lambda: opened.append(open_without_the_lock(path))) as stop:
            try:
                ACTS[act](old)
            except Fenced:
                assert stop.fired
            else:
                assert not stop.fired, "it has acknowledged what the new one may not know of"
        assert opened[0].last_sequence >= old.last_sequence
        for each in ACTS.values():
            with pytest.raises(Fenced, match="another writer has taken over from term 1"):
                each(old)
        with pytest.raises(Fenced):
            old.renew()
        with pytest.raises(Fenced):
            old.condemn("no reason")
        goes_on(path, opened[0])
        old.close()
        opened[0].close()
        return stop

    at_each_call(tmp_path, run)


def test_an_opening_misses_nothing_of_a_writer_whose_lock_is_lost(tmp_path: Path) -> None:
    """It is stopped at each of its calls, and the old writer appends meanwhile."""

    def run(path: Path, number: int) -> Stop:
        old = old_writer(path)
        acknowledged = 11

        def append() -> None:
            nonlocal acknowledged
            try:
                acknowledged = old.append([b"12"])
            except Fenced:
                pass

        with stopped(number, append) as stop:
            try:
                new = open_without_the_lock(path)
            except Locked:
                assert stop.fired
                new = open_without_the_lock(path)
        assert new.last_sequence >= acknowledged
        with pytest.raises(Fenced):
            old.append([b"x"])
        goes_on(path, new)
        old.close()
        new.close()
        return stop

    at_each_call(tmp_path, run)


@pytest.mark.parametrize("what", ["removed", "older"])
def test_a_writer_whose_files_are_replaced_says_so(tmp_path: Path, what: str) -> None:
    path, older = tmp_path / "storage", tmp_path / "older"
    first = FileStorage(path).open_writer("the test")
    first.append([b"a"])
    first.close()
    shutil.copytree(path, older)
    writer = FileStorage(path).open_writer("the test")
    writer.append([b"b"])
    path.rename(tmp_path / "away")
    if what == "older":
        older.rename(path)
    else:
        path.mkdir()
    with pytest.raises(Corrupt, match="files were removed or replaced, and record 2 had been"):
        writer.append([b"c"])
    with pytest.raises(Corrupt, match="record 2 had been acknowledged"):
        FileStorage(path).open_writer("its successor")


def test_a_reader_notices_that_a_repair_has_made_its_segment_anew(tmp_path: Path) -> None:
    path = tmp_path / "storage"
    writer = FileStorage(path).open_writer("the test")
    for size in (10, 20, 30):
        writer.append([b"x" * size])
    writer.close()
    reader = FileStorage(path)
    assert len(list(reader.read())) == 3
    assert FileStorage(path).cut(1, "the repair")
    writer = FileStorage(path).open_writer("the test")
    for size in (1, 2, 3, 4):
        writer.append([b"y" * size])
    writer.close()
    assert list(reader.read()) == list(FileStorage(path).read())
    assert list(reader.read(2)) == list(FileStorage(path).read(2))
    assert reader.open_writer("the reader").last_sequence == 5


def test_a_directory_of_others_is_refused_before_its_lock_is_written(tmp_path: Path) -> None:
    """It may be a link to a file of ours."""
    victim, path = tmp_path / "victim", tmp_path / "storage"
    victim.write_text("precious")
    path.mkdir()
    path.chmod(0o777)
    (path / "LOCK").symlink_to(victim)
    with pytest.raises(StorageUnusable, match="that others may not write to"):
        FileStorage(path).open_writer("the test")
    assert victim.read_text() == "precious"

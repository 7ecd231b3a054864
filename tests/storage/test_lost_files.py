"""Files that somebody deleted or emptied are missed, whatever is left looks like."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.journal.codec import encode
from forebay.journal.proto.events_pb2 import Event, LeaderElected
from forebay.journal.verification import holds_anything, verify
from forebay.storage import Corrupt, FileStorage, Writer

from .. import forks
from .stops import stopped


def write(directory: Path, records: int, *, segment_bytes: int = 64 << 20) -> None:
    writer = FileStorage(directory, segment_bytes).open_writer("test")
    for number in range(records):
        writer.append([b"%d" % number])
    writer.close()


def listing(directory: Path) -> dict[str, bytes | None]:
    """All but what says who has looked at it last."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
        if path.name != "LOCK"
    }


def delete(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def halve(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def fill_with_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


DAMAGES = pytest.mark.parametrize("damage", [delete, empty, fill_with_zeros])


@pytest.mark.parametrize("damage", [delete, empty, halve, fill_with_zeros])
def test_a_log_that_is_shorter_than_when_the_last_term_began(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    write(tmp_path, 20)
    write(tmp_path, 1)
    (segment,) = (tmp_path / "segments").iterdir()
    damage(segment)
    with pytest.raises(Corrupt, match="held 21 in term 2"):
        FileStorage(tmp_path).open_writer("test")


@DAMAGES
@pytest.mark.parametrize("records", [1, 3, 20])
def test_the_last_segment_of_a_first_term(
    tmp_path: Path, records: int, damage: Callable[[Path], None]
) -> None:
    write(tmp_path, records, segment_bytes=100)  # three records
    damage(max((tmp_path / "segments").iterdir()))
    before = listing(tmp_path)
    storage = FileStorage(tmp_path)
    assert holds_anything(storage)
    with pytest.raises(Corrupt, match=r"held \d+ in term 1.*repair the journal") as refused:
        storage.open_writer("test")
    assert str(refused.value) in verify(storage).problems
    assert listing(tmp_path) == before, "nothing was touched"


@DAMAGES
def test_a_log_of_which_only_datasets_are_left(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """As a version left it that noted in TERM only what there was as the term began."""
    writer = FileStorage(tmp_path).open_writer("test")
    writer.append([b"a"])
    writer.write_blob(b"graph")
    writer.close()
    (tmp_path / "TERM").write_text("1 0 2000\n")
    damage(tmp_path / "segments" / f"{1:020}.tfrecord")
    storage = FileStorage(tmp_path)
    with pytest.raises(Corrupt, match="the log is empty, and there are blobs"):
        storage.open_writer("test")
    assert holds_anything(storage)
    storage.cut(0, "test")
    storage.open_writer("test").close()


def first_start(directory: Path) -> Writer:
    writer = FileStorage(directory).open_writer("test")
    elected = LeaderElected(term=writer.term, journal_id="j")
    writer.append([encode(Event(time_ms=1, leader_elected=elected))])
    return writer


def start_until_one_ends(parent: Path) -> None:
    """A first start in each of the directories 1, 2, …: a process that ends at its n-th system
    call, up to one that gets to its end. Forks, and so belongs into a process without threads."""
    number, killed = 0, True
    while killed:
        number += 1
        child = os.fork()
        if not child:
            with stopped(number, lambda: os._exit(1)) as stop:
                first_start(parent / str(number))
                stop.fired = True  # and does not count what follows
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def test_a_first_start_that_was_killed_at_any_moment_starts_again(tmp_path: Path) -> None:
    starts = f"import os, sys, pathlib; sys.path.insert(0, os.getcwd()); from {__name__} import *; "
    starts += f"start_until_one_ends(pathlib.Path({str(tmp_path)!r}))"
    ended = forks.run(["-c", starts], imports=forks.DISPATCHER)
    assert ended.returncode == 0, ended.stderr
    directories = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    for directory in directories:
        assert verify(FileStorage(directory)).ok
        writer = FileStorage(directory).open_writer("test")
        found = writer.last_sequence
        assert found == 1 if directory == directories[-1] else found in (0, 1)
        assert writer.append([b"b"]) == found + 1
        writer.close()
    assert len(directories) > 30


def test_a_start_that_is_to_find_a_journal_leaves_half_a_first_append_as_it_is(
    tmp_path: Path,
) -> None:
    first_start(tmp_path).close()
    (tmp_path / "TERM").write_text("1 0 2000\n")  # as it was until the append was done
    halve(tmp_path / "segments" / f"{1:020}.tfrecord")
    assert not holds_anything(FileStorage(tmp_path))


def test_an_empty_log_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 0)
    assert not caplog.messages
    write(tmp_path, 0)
    assert "a new journal begins" in caplog.text

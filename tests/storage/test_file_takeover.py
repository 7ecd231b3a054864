"""A writer that is displaced while it is alive, stopped at every one of its system calls."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.storage import (
    AppendFailed,
    Corrupt,
    Fenced,
    FileStorage,
    Locked,
    Missing,
    Writer,
    blob_name,
)
from forebay.storage.local import file_opening

from .scenes import Content, Scene, content, storage_at, take_over
from .stops import Stop, at_each_call, stopped


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    # In one thread, nobody lets go of OPENING while another waits for it.
    monkeypatch.setattr(file_opening, "_OPENING_SECONDS", 0)
    # Still called, and stopped at. test_crash.py is about what they do.
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)


# -- what the old writer is at, and what the new one does meanwhile ------------------------------


def fail_to_append(scene: Scene) -> None:
    """Take a batch back that was written whole."""
    fdatasync = os.fdatasync

    def fail(fd: int) -> None:
        fdatasync(fd)
        if f"{scene.path}/segments" in os.readlink(f"/proc/self/fd/{fd}"):  # not a new writer's
            raise OSError(errno.EIO, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises((AppendFailed, Fenced)):
            scene.append([b"never acknowledged"])


ACTS: dict[str, Callable[[Scene], object]] = {
    "append": lambda scene: scene.append([b"1", b"2"]),
    "append in a new segment": lambda scene: scene.append([b"long" * 100]),
    "failing append": fail_to_append,
    "snapshot": lambda scene: scene.old.write_snapshot(8, b"as of 8"),
    "delete snapshot": lambda scene: scene.old.delete_snapshot(3),
    "trim": lambda scene: scene.old.trim(11),
    "blob": lambda scene: scene.old.write_blob(b"a blob"),
    "delete blob": lambda scene: scene.old.delete_blob(blob_name(b"a blob")),
    "renew": lambda scene: scene.old.renew(),
}


def do_nothing(new: Writer, path: Path) -> Writer:
    return new


def go_on(new: Writer, path: Path) -> Writer:
    new.append([b"new 1", b"new 2"])
    new.append([b"new 3"])
    return new


def trim(new: Writer, path: Path) -> Writer:
    for number in range(8):
        new.append([b"new %d" % number])
    new.write_snapshot(new.last_sequence, b"as of the end")
    new.trim(new.last_sequence + 1)
    assert not (path / "segments").exists(), "what is superseded goes with what is trimmed"
    return new


def be_displaced(new: Writer, path: Path) -> Writer:
    third = take_over(path, "the third")
    with pytest.raises(Fenced):
        new.append([b"x"])
    fourth = take_over(path, "the fourth")
    fourth.append([b"fourth"])
    third.close()
    new.close()
    return fourth


def be_cut(new: Writer, path: Path) -> Writer:
    new.append([b"new"])
    new.close()
    storage_at(path).cut(10, "the repair")
    after = storage_at(path).open_writer("after the cut", lease_ms=1)
    after.append([b"after the cut"] * 3)
    return after


@pytest.mark.parametrize("sequel", [do_nothing, go_on, trim, be_displaced, be_cut])
@pytest.mark.parametrize("act", ACTS)
def test_a_displaced_writer_stopped_at_each_call(
    tmp_path: Path, act: str, sequel: Callable[[Writer, Path], Writer]
) -> None:
    def run(path: Path, number: int) -> Stop:
        scene = Scene(path)
        writers: list[Writer] = []
        contents: list[Content] = []

        def displace() -> None:
            scene.follow()
            new = take_over(path, "the new one")
            scene.check_inherited(path)
            writers.append(sequel(new, path))
            contents.append(content(path))

        refused = False
        with stopped(number, displace) as stop:
            try:
                ACTS[act](scene)
            except Fenced:
                refused = True
        assert refused == (stop.fired and act != "failing append")
        (new,), (before,) = writers, contents
        assert content(path) == before, "what the old writer still did is seen"
        assert {10} <= before[1].keys() <= {3, 8, 10, before[0][-1].sequence - 1, new.last_sequence}
        if not stop.fired:  # the old writer's act came first
            assert (8 in before[1]) == (act == "snapshot")
            assert (3 in before[1]) == (act != "delete snapshot")
            assert (before[0][0].sequence == 1) == (act != "trim" and sequel is not trim)
        if act == "blob" and not stop.fired:
            assert storage_at(path).holdings().blobs == 1
        scene.check_slow_pass()
        check_old_is_fenced(scene)
        assert content(path) == before
        if sequel is not be_cut:
            scene.follow()
            assert scene.followed.items() >= {r.sequence: r for r in before[0]}.items()
        check_life_goes_on(path, new, before)
        return stop

    at_each_call(tmp_path, run)


def check_old_is_fenced(scene: Scene) -> None:
    with pytest.raises(Fenced, match="another writer has taken over from term 1"):
        scene.old.append([b"x"])
    for act in ACTS.values():
        if act is not fail_to_append:
            with pytest.raises(Fenced):
                act(scene)
    scene.old.close()


def check_life_goes_on(path: Path, new: Writer, before: Content) -> None:
    assert new.last_sequence == before[0][-1].sequence
    new.renew()
    new.append([b"the new one goes on"])
    new.close()
    third = storage_at(path).open_writer("the next")
    third.append([b"and the next one"])
    third.close()
    records, snapshots = content(path)
    assert [r.data for r in records[-2:]] == [b"the new one goes on", b"and the next one"]
    assert (records[:-2], snapshots) == before
    assert not list(path.rglob(".tmp-*"))


def test_a_condemnation_stopped_at_each_call(tmp_path: Path) -> None:
    def run(path: Path, number: int) -> Stop:
        scene = Scene(path)
        outcomes: list[Writer | Corrupt] = []

        def displace() -> None:
            try:
                outcomes.append(take_over(path, "the new one"))
            except Corrupt as error:
                outcomes.append(error)

        with stopped(number, displace) as stop:
            try:
                scene.old.condemn("records 5 to 7 are gone")
            except Fenced:
                assert stop.fired
        scene.old.close()
        (outcome,) = outcomes
        if isinstance(outcome, Corrupt):  # it was said in time
            assert "CONDEMNED: records 5 to 7 are gone" in str(outcome)
            with pytest.raises(Corrupt, match="records 5 to 7 are gone"):
                storage_at(path).open_writer("the next")
            storage_at(path).cut(4, "the repair")
            outcome = storage_at(path).open_writer("the next")
            assert outcome.last_sequence == 4
            assert list((path / "cut" / "1").glob("CONDEMNED"))
        else:
            assert stop.fired
        outcome.append([b"new"])
        outcome.close()
        storage_at(path).open_writer("the last").close()
        return stop

    at_each_call(tmp_path, run)


# -- whoever opens may stall, too ----------------------------------------------------------------


@pytest.mark.parametrize("old_then", ["is not there", "has closed", "lives", "lives, then closes"])
def test_an_opening_stopped_at_each_call(tmp_path: Path, old_then: str) -> None:
    def run(path: Path, number: int) -> Stop:
        scene = Scene(path) if old_then != "is not there" else None
        opening = storage_at(path)
        if scene and old_then == "has closed":
            scene.old.close()
        elif scene:
            with pytest.raises(Locked):  # it sees the old one for the first time
                opening.open_writer("the stalled one", lease_ms=1)
            time.sleep(0.002)
        others: list[Writer] = []

        def intervene() -> None:
            if scene and old_then == "lives, then closes":
                scene.old.close()
            try:
                other = take_over(path, "the other one", attempts=20)
            except Locked:
                return  # while OPENING is held, or before anybody has a lease
            other.append([b"other"])
            others.append(other)

        stalled: Writer | None = None
        with stopped(number, intervene) as stop:
            try:
                stalled = opening.open_writer("the stalled one", lease_ms=1)
            except Locked:
                assert others, "nobody is in its way"
        assert stalled or stop.fired
        if stalled and not others:
            stalled.append([b"stalled"])
        before = content(path)
        expected = scene.acknowledged if scene else []
        assert [r.data for r in before[0]] == [*expected, b"other" if others else b"stalled"]
        losers = [scene.old if scene else None, stalled if others else None]
        for loser in filter(None, losers):
            with pytest.raises(Fenced):
                loser.append([b"x"])
            loser.close()
        survivor = others[0] if others else stalled
        assert survivor is not None
        check_life_goes_on(path, survivor, before)
        return stop

    at_each_call(tmp_path, run)


# -- the displaced writer may wake up while it is being displaced --------------------------------


def wake_up(scene: Scene, *acts: Callable[[], object]) -> None:
    """Each act has just looked whether it is still the writer, and found that it is."""
    held = scene.old._claim.held_term
    is_current = held.is_current
    stale: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held, "is_current", lambda: stale.pop() if stale else is_current())
        for act in acts:
            stale.append(True)
            try:
                act()
            except Fenced:
                pass


def test_an_opening_with_the_old_writer_awake_at_each_call(tmp_path: Path) -> None:
    def run(path: Path, number: int) -> Stop:
        scene = Scene(path)
        scene.old.write_snapshot(11, b"as of 11")
        opening = storage_at(path)
        with pytest.raises(Locked):
            opening.open_writer("the new one", lease_ms=1)
        time.sleep(0.002)

        def act() -> None:
            wake_up(
                scene,
                lambda: scene.append([b"long" * 100]),  # in a new segment
                lambda: scene.old.delete_snapshot(3),
                lambda: scene.old.trim(12),  # all the other ones
            )

        with stopped(number, act) as stop:
            try:
                new = opening.open_writer("the new one", lease_ms=1)
            except Locked:
                assert stop.fired, "a new segment is a sign of life"
                time.sleep(0.002)
                new = opening.open_writer("the new one", lease_ms=1)
        scene.check_inherited(path)
        before = content(path)
        assert {10, 11} <= before[1].keys() <= {3, 10, 11}
        scene.check_slow_pass()
        scene.follow()
        check_old_is_fenced(scene)
        check_life_goes_on(path, new, before)
        return stop

    at_each_call(tmp_path, run)


# -- and so may a reader -------------------------------------------------------------------------


LOOKS: dict[str, Callable[[FileStorage], object]] = {
    "read": lambda storage: list(storage.read(10)),
    "first sequence": FileStorage.first_sequence,
    "extent": FileStorage.extent,
    "snapshots": FileStorage.snapshots,
    "snapshot": lambda storage: storage.read_snapshot(10),
    "holdings": FileStorage.holdings,
}


@pytest.mark.parametrize("sequel", [go_on, trim])
@pytest.mark.parametrize("look", LOOKS)
def test_a_reader_stopped_at_each_call(
    tmp_path: Path, look: str, sequel: Callable[[Writer, Path], Writer]
) -> None:
    def see(storage: FileStorage) -> object:
        try:
            return LOOKS[look](storage)
        except Missing:
            return Missing

    def run(path: Path, number: int) -> Stop:
        Scene(path)
        before = see(storage_at(path))

        def displace() -> None:
            sequel(take_over(path, "the new one"), path)

        reader = storage_at(path)
        with stopped(number, displace) as stop:
            seen = see(reader)
        assert seen in (before, see(storage_at(path)))
        return stop

    at_each_call(tmp_path, run)


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


def test_a_removed_lock_does_not_let_two_write(tmp_path: Path) -> None:
    path = tmp_path / "storage"
    writer = FileStorage(path).open_writer("the first", lease_ms=200)
    writer.append([b"a"])
    (path / "LOCK").unlink()
    second = FileStorage(path)
    with pytest.raises(Locked):
        second.open_writer("the second")
    writer.append([b"b"])
    successor = take_over(path, "the second")
    with pytest.raises(Fenced):
        writer.append([b"c"])
    assert successor.append([b"d"]) == 3
    assert [record.data for record in second.read()] == [b"a", b"b", b"d"]


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

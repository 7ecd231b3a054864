"""Who else may read or replace what a journal on local files has."""

from __future__ import annotations

import os
import stat
from contextlib import closing
from pathlib import Path

import pytest

from forebay.storage import open_storage
from forebay.storage.errors import StorageUnusable
from forebay.storage.local import durable


def test_nobody_else_reads_it_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with closing(open_storage(str(tmp_path / "a" / "journal"))) as storage:
            writer = storage.open_writer("me")
            writer.append([b"an event"])
            writer.close()
    finally:
        os.umask(before)
    found = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
    wide = [str(path) for path in found if stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert len(found) > 4 and wide == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_what_root_writes_is_the_directorys_owners(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.mkdir()
    os.chown(path, 4711, 4712)
    writer = open_storage(str(path)).open_writer("root")
    writer.append([b"an event"])
    writer.close()
    files = [each for each in path.rglob("*") if each.is_file()]
    assert files and {(each.stat().st_uid, each.stat().st_gid) for each in files} == {(4711, 4712)}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_root_writes_to_nothing_that_the_owner_links_to(tmp_path: Path) -> None:
    path, precious = tmp_path / "journal", tmp_path / "precious"
    precious.write_text("precious")
    open_storage(str(path)).open_writer("me").close()
    for each in (path, *path.rglob("*")):
        os.chown(each, 4711, 4712)
    (path / "LOCK").unlink()
    (path / "LOCK").symlink_to(precious)
    with pytest.raises(StorageUnusable, match="LOCK: is not the directory's owner's"):
        open_storage(str(path)).open_writer("me")
    assert precious.read_text() == "precious" and precious.stat().st_uid == 0


def test_a_directory_that_others_may_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    path.mkdir()
    path.chmod(0o777)
    storage = open_storage(str(path))
    with closing(storage), pytest.raises(StorageUnusable, match=r"with mode 777: .*\(chmod o-w\)"):
        storage.open_writer("me")
    path.chmod(0o750)
    durable.check_is_ours(path)
    owner = path.stat().st_uid
    for user, refuses in ((0, False), (owner, False), (owner + 7, owner != 0)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        try:
            durable.check_is_ours(path)
        except StorageUnusable:
            assert refuses
        else:
            assert not refuses

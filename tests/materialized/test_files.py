"""Files in a store that only Beam knows, beside those of this machine."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import pytest

from forebay.service.errors import InvalidArgument, NotFound, Unavailable
from forebay.service.materialized import files
from forebay.service.materialized.layout import ShardFile, is_intact

from .store import FOLDER


@pytest.fixture(params=["here", "store"])
def directory(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return files.checked(tmp_path / "d" if request.param == "here" else "store://bucket/d/")


def test_a_file_is_there_whole_or_not(directory: str) -> None:
    assert files.listed(directory) == {}
    with pytest.raises(NotFound, match=r"there is no .*/d/a"):
        files.read(f"{directory}/a")
    files.make(directory)
    for data in (b"first", b"other one"):
        files.replace(f"{directory}/a", data)
        assert files.read(f"{directory}/a") == data
        assert files.listed(directory) == {"a": len(data)}
    with files.NewFile(directory) as new:
        new.write(b"never published")
        (name,) = files.listed(directory).keys() - {"a"}
        assert name.startswith(files.TEMPORARY)
        assert files.listed(directory, "a") == {"a": 9}
    files.delete([f"{directory}/a", f"{directory}/a"])
    assert files.listed(directory) == {}


def test_a_name_is_no_pattern(tmp_path: Path) -> None:
    directories = [files.checked(f"file://{tmp_path}/{name}") for name in ("a1", "a2", "a*", "[b]")]
    for directory in directories:
        files.make(directory)
        for _ in range(2):
            files.write(f"{directory}/x", b"x")
    files.delete(f"{directory}/x" for directory in directories[2:])
    assert [len(files.listed(directory)) for directory in directories] == [1, 1, 0, 0]
    with pytest.raises(InvalidArgument, match=r"'store://b/a\*' has one of \* \? \[ in it"):
        files.checked("store://b/a*")


def test_the_first_to_have_a_name_keeps_it(directory: str) -> None:
    files.make(directory)
    with contextlib.ExitStack() as all_new:
        first, late, deleted = (all_new.enter_context(files.NewFile(directory)) for _ in range(3))
        for new, data in ((first, b"first"), (late, b"late"), (deleted, b"deleted")):
            new.write(data)
        names = [f"{directory}/{name}" for name in files.listed(directory, files.TEMPORARY)]
        first.publish("a")
        late.publish("a")
        files.delete(names)  # what another run may do that was faster
        deleted.publish("a")
    assert files.read(f"{directory}/a") == b"first"
    assert files.listed(directory) == {"a": 5}
    with files.NewFile(directory) as lost:
        files.delete(f"{directory}/{name}" for name in files.listed(directory, files.TEMPORARY))
        with pytest.raises(Unavailable, match="the file system of"):
            lost.publish("b")


def test_nothing_is_left_where_no_space_is(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(Unavailable, match="File too large"):
            files.write(f"{tmp_path}/a", bytes(100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files.listed(str(tmp_path)) == {}


def test_a_file_that_cannot_be_read_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("/proc/self/mem")  # whose first byte nobody can read
    with pytest.raises(Unavailable, match="/a failed: "):
        files.read(f"{tmp_path}/a")
    with pytest.raises(Unavailable, match="/a failed: "):
        is_intact(str(tmp_path), ShardFile(0, "a", 1, 1, "00000000"))


def test_names() -> None:
    assert files.checked("gs://bucket/a/") == "gs://bucket/a"
    for name in ("", "/"):
        with pytest.raises(InvalidArgument, match="is no directory"):
            files.checked(name)
    with pytest.raises(Unavailable, match="the file system of nobody://a"):
        files.listed("nobody://a")

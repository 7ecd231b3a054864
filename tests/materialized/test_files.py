"""Files in a store that only Beam knows, beside those of this machine."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from apache_beam.io.filesystem import FileMetadata
from apache_beam.io.localfilesystem import LocalFileSystem

from forebay.service.errors import InvalidArgument, NotFound, Unavailable
from forebay.service.materialized import files

STORE: dict[str, str] = {}  # where its files really are


class Store(LocalFileSystem):  # type: ignore[misc]
    """store://…, which has no directories, and refuses to rename to what is there."""

    @classmethod
    def scheme(cls) -> str:
        return "store"

    def has_dirs(self) -> bool:
        return False

    def join(self, base: str, *paths: str) -> str:
        return "/".join([base, *paths])

    def split(self, path: str) -> Any:
        return tuple(path.rsplit("/", 1))

    def _list(self, prefix: str) -> Iterator[Any]:
        folder = pathlib.Path(STORE["folder"])
        for path in folder.iterdir():
            yield FileMetadata(f"store://{path.name.replace('|', '/')}", path.stat().st_size, 0.0)

    def create(self, path: str, *args: Any, **kwargs: Any) -> Any:
        return super().create(_real(path), *args, **kwargs)

    def open(self, path: str, *args: Any, **kwargs: Any) -> Any:
        return super().open(_real(path), *args, **kwargs)

    def exists(self, path: str) -> bool:
        return bool(super().exists(_real(path)))

    def rename(self, sources: list[str], targets: list[str]) -> None:
        assert not any(map(self.exists, targets))
        super().rename([*map(_real, sources)], [*map(_real, targets)])

    def delete(self, paths: list[str]) -> None:
        for path in paths:
            pathlib.Path(_real(path)).unlink()


def _real(path: str) -> str:
    return f"{STORE['folder']}/{path.removeprefix('store://').replace('/', '|')}"


@pytest.fixture(params=["here", "store"])
def directory(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    STORE["folder"] = str(tmp_path)
    return files.checked(tmp_path / "d" if request.param == "here" else "store://bucket/d/")


def test_a_file_is_there_whole_or_not(directory: str) -> None:
    assert files.listed(directory) == {}
    with pytest.raises(NotFound, match=r"there is no .*/d/a"):
        files.read(f"{directory}/a")
    files.make(directory)
    for data in (b"first", b"other one"):
        files.write(f"{directory}/a", data)
        assert files.read(f"{directory}/a") == data
        assert files.listed(directory) == {"a": len(data)}
    new = files.NewFile(directory)
    new.file.write(b"never published")
    (name,) = files.listed(directory).keys() - {"a"}
    assert name.startswith(files.TEMPORARY)
    new.discard()
    files.delete([f"{directory}/a", f"{directory}/a"])
    assert files.listed(directory) == {}


def test_names() -> None:
    assert files.checked("gs://bucket/a/") == "gs://bucket/a"
    for name in ("", "/"):
        with pytest.raises(InvalidArgument, match="is no directory"):
            files.checked(name)
    with pytest.raises(Unavailable, match="the file system of nobody://a"):
        files.listed("nobody://a")

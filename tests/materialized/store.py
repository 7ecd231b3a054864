"""A store that only Beam knows, and only where this was imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from apache_beam.io.filesystem import FileMetadata
from apache_beam.io.localfilesystem import LocalFileSystem

FOLDER = "TESTS_STORE"
"""The environment variable that says where its files really are."""


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
        folder = Path(os.environ[FOLDER])
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
            Path(_real(path)).unlink()


def _real(path: str) -> str:
    return f"{os.environ[FOLDER]}/{path.removeprefix('store://').replace('/', '|')}"

"""Files of a directory, here or in a store that Beam knows (`gs://`, `s3://`, `hdfs://` …).

Writing is Beam's. Local files are read without it, so that who reads need not have it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, TypeVar

from ..errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable

TEMPORARY = ".tmp-"

T = TypeVar("T")


def checked(directory: str | os.PathLike[str]) -> str:
    """A directory's name as it is said to other processes. Raises InvalidArgument."""
    name = os.fspath(directory)
    if not isinstance(name, str) or not name.strip("/"):
        raise InvalidArgument(f"{directory!r} is no directory for a materialized dataset")
    return name.rstrip("/") if is_remote(name) else os.path.abspath(name)


def is_remote(path: str) -> bool:
    return "://" in path


def read(path: str) -> bytes:
    """Raises NotFound, Unavailable."""
    with open_file(path) as file:
        return file.read()


def open_file(path: str) -> BinaryIO:
    """Raises NotFound, Unavailable."""
    try:
        if not is_remote(path):
            return open(path, "rb")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"there is no {path}") from error
    except OSError as error:
        raise Unavailable(f"{path} cannot be read: {error}") from error
    if not _asked(lambda: _beam().exists(path), path):  # to open it says so in as many ways
        raise NotFound(f"there is no {path}")
    opened: BinaryIO = _asked(lambda: _beam().open(path, compression_type=_uncompressed()), path)
    return opened


def listed(directory: str) -> dict[str, int]:
    """The names of the files in it, with their sizes in bytes; none if it is not there."""
    if is_remote(directory):
        (found,) = _asked(lambda: _beam().match([f"{directory}/*"]), directory)
        return {m.path.rpartition("/")[2]: m.size_in_bytes for m in found.metadata_list}
    sizes = {}
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                try:
                    sizes[entry.name] = entry.stat().st_size
                except FileNotFoundError:  # it was renamed meanwhile
                    continue
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise Unavailable(f"{directory} cannot be read: {error}") from error
    return sizes


def make(directory: str) -> None:
    """The directory, where stores have such. Raises FailedPrecondition."""
    try:
        if not is_remote(directory):
            os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise FailedPrecondition(
            f"{directory} cannot be made: {error.strerror}; give --output a directory that can be "
            "written here and by all of the runner's workers, under this name"
        ) from error


def write(path: str, data: bytes) -> None:
    """A whole file, under this name once it is whole."""
    new = NewFile(path.rpartition("/")[0])
    new.file.write(data)
    new.publish(path.rpartition("/")[2])


class NewFile:
    """A file that is being written to `file`, under another name until it is published."""

    def __init__(self, directory: str) -> None:
        """Raises Unavailable."""
        self._directory = directory
        self._path = f"{directory}/{TEMPORARY}{uuid.uuid4().hex}"
        self.file: BinaryIO = _asked(
            lambda: _beam().create(self._path, compression_type=_uncompressed()), directory
        )

    def publish(self, name: str) -> None:
        """It is complete, and has this name, for which whatever had it goes. Raises Unavailable."""
        path = f"{self._directory}/{name}"
        if not is_remote(path):
            self.file.flush()
            os.fsync(self.file.fileno())
        self.file.close()

        def rename() -> None:
            if is_remote(path) and _beam().exists(path):  # some refuse to replace it
                _beam().delete([path])
            _beam().rename([self._path], [path])

        _asked(rename, path)

    def discard(self) -> None:
        """Idempotent."""
        self.file.close()
        delete([self._path])


def delete(paths: Iterable[str]) -> None:
    """Those of them that are there. Raises Unavailable."""
    for path in paths:

        def remove(path: str = path) -> None:
            if _beam().exists(path):
                _beam().delete([path])

        _asked(remove, path)


def _asked(ask: Callable[[], T], path: str) -> T:
    try:
        return ask()
    except (OSError, ValueError) as error:  # ValueError: a scheme that it does not know
        raise Unavailable(f"the file system of {path} failed: {error}") from error


def _beam() -> Any:
    try:
        from apache_beam.io.filesystems import FileSystems
    except ImportError as error:
        raise FailedPrecondition(
            "this needs Beam, which is not installed here: pip install 'forebay[beam]'"
        ) from error
    return FileSystems


def _uncompressed() -> Any:
    from apache_beam.io.filesystem import CompressionTypes

    return CompressionTypes.UNCOMPRESSED

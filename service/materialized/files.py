"""Files of a directory, local or in a store that Beam knows (`gs://`, `s3://`, `hdfs://` …).

Beam writes all files. Local files are read without Beam, so that readers need not install it.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, Self, TypeVar

from ..errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from ..extras import imported

TEMPORARY = ".tmp-"
READ_BYTES = 8 << 20

T = TypeVar("T")


def checked(directory: str | os.PathLike[str]) -> str:
    """Check a directory's name, and make it valid in other processes. Raises InvalidArgument."""
    name = os.fspath(directory)
    if not isinstance(name, str) or not name.strip("/"):
        raise InvalidArgument(
            f"{directory!r} is no directory for a materialized dataset: give one's path, or the "
            "address of a store's, such as gs://bucket/name"
        )
    if not is_remote(name := name.removeprefix("file://")):
        return os.path.abspath(name)
    if {*name} & {*"*?["}:
        raise InvalidArgument(
            f"{directory!r} has one of * ? [ in it, which make a pattern of a store's address: "
            "give --output another directory"
        )
    return name.rstrip("/")


def is_remote(path: str) -> bool:
    return "://" in path


def read(path: str) -> bytes:
    """Raises NotFound, Unavailable."""
    return b"".join(chunks(path))


def chunks(path: str) -> Iterator[bytes]:
    """A file's content, in parts. Raises NotFound, Unavailable."""
    with _open(path) as file:
        while data := _asked(lambda: file.read(READ_BYTES), path):
            yield data


def _open(path: str) -> BinaryIO:
    try:
        if not is_remote(path):
            return open(path, "rb")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"there is no {path}") from error
    except OSError as error:
        raise Unavailable(f"{path} cannot be read: {error}") from error
    if not _asked(lambda: _beam().exists(path), path):  # each store's open raises another error
        raise NotFound(f"there is no {path}")
    opened: BinaryIO = _asked(lambda: _beam().open(path, compression_type=_uncompressed()), path)
    return opened


def listed(directory: str, prefix: str = "") -> dict[str, int]:
    """The directory's files with this prefix, and their sizes in bytes; empty if it does not
    exist."""
    if is_remote(directory):
        (found,) = _asked(lambda: _beam().match([f"{directory}/{prefix}*"]), directory)
        return {m.path.rpartition("/")[2]: m.size_in_bytes for m in found.metadata_list}
    sizes = {}
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.startswith(prefix):
                    with contextlib.suppress(FileNotFoundError):  # it was renamed meanwhile
                        sizes[entry.name] = entry.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise Unavailable(f"{directory} cannot be read: {error}") from error
    return sizes


def make(directory: str) -> None:
    """Create a local directory; stores need none. Raises FailedPrecondition."""
    try:
        if not is_remote(directory):
            os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise FailedPrecondition(
            f"{directory} cannot be made: {error.strerror}; give --output a directory that can be "
            "written here and by all of the runner's workers, under this name"
        ) from error


def write(path: str, data: bytes) -> None:
    """Write a file as `NewFile.publish` does. Raises Unavailable."""
    directory, _, name = path.rpartition("/")
    with NewFile(directory) as new:
        new.write(data)
        new.publish(name)


def replace(path: str, data: bytes) -> None:
    """Write the file, unless it has this content. Raises Unavailable."""
    with contextlib.suppress(NotFound):
        if read(path) == data:
            return
        delete([path])
    write(path, data)


class NewFile:
    """A file that is being written, under a temporary name until `publish`. A context manager: it
    deletes what was not published, if possible; else the next run does."""

    def __init__(self, directory: str, owner: str = "") -> None:
        """Its temporary name begins with TEMPORARY and `owner`. Raises Unavailable."""
        self._directory = directory
        self._path = f"{directory}/{TEMPORARY}{owner}{uuid.uuid4().hex}"
        self._file: BinaryIO = _asked(
            lambda: _beam().create(self._path, compression_type=_uncompressed()), directory
        )

    def write(self, data: bytes) -> None:
        """Raises Unavailable."""
        _asked(lambda: self._file.write(data), self._directory)

    def publish(self, name: str) -> None:
        """Rename the complete file to `name`. An existing file stays, and this one is discarded:
        that is atomic between concurrent writers only on local file systems with links. Raises
        Unavailable."""
        path = f"{self._directory}/{name}"
        _asked(self._close, self._directory)
        try:
            _asked(lambda: self._claim(path), path)
        except Unavailable:
            # A faster run may have deleted our temporary file as a leftover.
            if not _asked(lambda: _exists(path), path):
                raise

    def _close(self) -> None:
        if not is_remote(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()

    def _claim(self, path: str) -> None:
        if not is_remote(path):
            with contextlib.suppress(OSError):  # there are file systems without links
                with contextlib.suppress(FileExistsError):
                    os.link(self._path, path)
                return
        if _exists(path):
            return
        if is_remote(path):
            _beam().rename([self._path], [path])
        else:
            os.replace(self._path, path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, ValueError):  # flushing its buffer may find no space
            self._file.close()
        with contextlib.suppress(Unavailable):
            delete([self._path])


def delete(paths: Iterable[str]) -> None:
    """Delete those files that exist. Raises Unavailable."""
    for path in paths:
        _asked(lambda path=path: _delete(path), path)  # type: ignore[misc]


def _exists(path: str) -> bool:
    return bool(_beam().exists(path)) if is_remote(path) else os.path.exists(path)


def _delete(path: str) -> None:
    if is_remote(path):
        if _beam().exists(path):
            _beam().delete([path])
        return
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)  # Beam would take the name as a pattern


def _asked(ask: Callable[[], T], path: str) -> T:
    try:
        return ask()
    except (OSError, ValueError) as error:  # ValueError: an unknown scheme
        raise Unavailable(f"the file system of {path} failed: {error}") from error


def _beam() -> Any:
    return imported("apache_beam.io.filesystems", "beam", "this").FileSystems


def _uncompressed() -> Any:
    from apache_beam.io.filesystem import CompressionTypes

    return CompressionTypes.UNCOMPRESSED

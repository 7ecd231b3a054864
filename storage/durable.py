"""Small durable acts on a directory: replace a file, sync an entry, hold a lock."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from .errors import Locked

TEMPORARY = ".tmp-"
"""What the names of files begin with that a crash may leave half written."""


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`; a short write is followed up until it is done or fails."""
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, data[written:])


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Make a directory and the missing ones above it, durably."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def write_atomically(path: Path, data: bytes) -> None:
    """Make `path` hold `data`, durably; after a crash it holds that, or what it held before."""
    temporary = path.parent / f"{TEMPORARY}{os.getpid()}-{threading.get_native_id()}"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


class FileLock:
    """An exclusive lock on a file, which ends with its holder. The file says who holds it."""

    def __init__(self, path: Path, owner: str) -> None:
        """Take the lock. Raises Locked, OSError."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"process {os.getpid()}, {owner}\n".encode(), 0)
        except BlockingIOError:
            holder = os.pread(self._fd, 1000, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise Locked(
                f"{path.parent} is in use by {holder or 'another process'}; stop that first, "
                "or choose another storage"
            ) from None
        except OSError:
            os.close(self._fd)
            raise

    def release(self) -> None:
        # Not by closing alone: a forked child may share the descriptor.
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)

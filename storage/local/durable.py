"""Small durable operations on a directory: replace a file, sync an entry, hold a lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import weakref
from collections.abc import Callable
from pathlib import Path

from ..errors import Corrupt, StorageError, StorageUnusable

TEMPORARY = ".tmp-"
"""The prefix of unfinished files and directories, which a crash may leave behind."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_TOO_MANY_OPEN = {errno.EMFILE, errno.ENFILE}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_MOVE_AWAY = "move it away, and then verify the journal: what follows from that is said there"
_KINDS = (stat.S_ISDIR, "a directory"), (stat.S_ISREG, "a file")


def remedy(error: OSError, path: Path) -> str:
    """What the operator can do about a file system error at `path`."""
    if error.errno in _FULL:
        return "make room there"
    if error.errno in _TOO_MANY_OPEN:
        return "raise the limit of open files (ulimit -n, LimitNOFILE= of a service)"
    if error.errno in _FORBIDDEN:
        return f"give the dispatcher's user write access to {path}"
    if error.errno == errno.ENOENT:
        return "see whether that path is right, and can be made"
    return "mend the disk"


def unreadable(path: Path, error: OSError) -> StorageError:
    """The error for a file that cannot be read: Corrupt, or StorageUnusable."""
    what = f"{path} cannot be read: {error.strerror}"
    if error.errno == errno.EIO:
        return Corrupt(f"{what}; {_MOVE_AWAY}")
    return StorageUnusable(f"{what}; {remedy(error, path)}")


def check_is_file(path: Path) -> None:
    """Raise Corrupt if `path` exists and is not a regular file."""
    _check_kind(path, stat.S_ISREG, "file")


def check_is_directory(path: Path) -> None:
    """Raise Corrupt if `path` exists and is not a directory."""
    _check_kind(path, stat.S_ISDIR, "directory")


def _check_kind(path: Path, fits: Callable[[int], bool], wanted: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except PermissionError as error:
        raise unreadable(path, error) from None
    except OSError:
        if not path.is_symlink():
            return  # nothing is there, or the reader reports the error
        raise Corrupt(
            f"{path} is a symbolic link to nothing that can be read; bring back what it points "
            f"to, or {_MOVE_AWAY}"
        ) from None
    if not fits(mode):
        found = next((what for test, what in _KINDS if test(mode)), "something else")
        raise Corrupt(f"{path} is {found}, where a {wanted} belongs; {_MOVE_AWAY}")


def check_is_ours(path: Path) -> None:
    """Raises StorageUnusable for a directory in which another user may replace files."""
    status = path.stat()
    trusted = {0, os.geteuid()} if os.geteuid() else {status.st_uid}  # root may be given any
    if status.st_mode & stat.S_IWOTH or status.st_uid not in trusted:
        raise StorageUnusable(
            f"{path} is of user {status.st_uid}, with mode {stat.S_IMODE(status.st_mode):o}: who "
            "else may write there could change the journal; give a directory of this user's, "
            f"{os.geteuid()}, that others may not write to (chmod o-w), or one below it, which is "
            "then made"
        )


def temporary(directory: Path) -> Path:
    """A new name for an unfinished file. It is unique, even across containers."""
    return directory / f"{TEMPORARY}{os.urandom(8).hex()}"


def create(path: Path, flags: int) -> int:
    """Open a file, which nobody else may read if it is new. Root's belong to the directory's owner,
    who goes on with what root has repaired."""
    flags |= os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if flags & os.O_EXCL:
            raise
        fd = os.open(path, flags)
        owner = _whose(path.parent)
        if owner is not None and os.fstat(fd).st_uid != owner.st_uid:  # by a link of the owner's
            os.close(fd)
            raise PermissionError(
                errno.EPERM, "is not the directory's owner's", str(path)
            ) from None
        return fd
    _give(fd, path.parent)
    return fd


def make_one(path: Path) -> None:
    """Make a directory as `create` does a file. Raises FileExistsError."""
    path.mkdir(0o700)
    _give(path, path.parent)


def _give(made: int | Path, directory: Path) -> None:
    if (owner := _whose(directory)) is not None:
        os.chown(made, owner.st_uid, owner.st_gid, follow_symlinks=isinstance(made, int))


def _whose(directory: Path) -> os.stat_result | None:
    """If this is root, and the directory another user's: that one's."""
    owner = os.stat(directory) if os.geteuid() == 0 else None
    return owner if owner is not None and owner.st_uid != 0 else None


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`, continuing after short writes."""
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
    there = path.is_dir()
    if not there:
        make_directory(path.parent)
        check_is_directory(path)
        with contextlib.suppress(FileExistsError):
            make_one(path)
    try:
        sync_directory(path.parent)  # always: its creator may have crashed before the sync
    except PermissionError:
        if not there:
            raise


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the content of `path` durably; after a crash it has the new or the old content."""
    unfinished = temporary(path.parent)
    try:
        fd = create(unfinished, os.O_WRONLY | os.O_EXCL)
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


class FileLock:
    """An exclusive lock on a file; it ends with the holder's process."""

    def __init__(self, path: Path, holder: str) -> None:
        """Take the lock, and write the holder's name into the file.

        Raises BlockingIOError while another holds it, OSError, Corrupt.
        """
        check_is_file(path)
        self._fd = create(path, os.O_RDWR)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{holder}\n".encode(), 0)
        except OSError:
            os.close(self._fd)
            raise
        self._status = os.fstat(self._fd)
        _locks.add(self)

    def release(self) -> None:
        if self._fd >= 0:
            # Closing alone does not unlock: a child that is being forked may share the descriptor.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1

    def leave_to_parent(self) -> None:
        """Close a forked child's copy of the descriptor, which would keep the lock for as long as
        the child lives."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._fd), self._status):
                os.close(self._fd)
        self._fd = -1


_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _after_fork() -> None:
    while _locks:
        _locks.pop().leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)

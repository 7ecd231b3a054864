"""TERM, the file that names the writer of a storage in a directory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from .durable import check_is_file, unreadable, write_atomically

_LAST_DIGITS = 20

# An earlier version wrote the writer's lease and its place behind these.
_TERM = re.compile(rb"(\d+)(?: (\d+)(?: \d+(?: \S+)?)?)?\n")


class Term(NamedTuple):
    """The content of TERM: the latest writer."""

    number: int
    last: int = 0  # a record that the log has; raised by each writer's and segment's first append

    @classmethod
    def read(cls, path: Path) -> Term | None:
        """Read TERM; None if it is missing or garbled. Raises Corrupt, StorageUnusable."""
        check_is_file(path)
        try:
            while (content := path.read_bytes()) != path.read_bytes():
                pass  # `HeldTerm.raise_last` is writing it
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unreadable(path, error) from error
        found = _TERM.fullmatch(content)
        return cls(int(found[1]), int(found[2] or 0)) if found else None

    def write(self, path: Path) -> None:
        write_atomically(path, f"{self.number} {self.last:0{_LAST_DIGITS}}\n".encode())


class HeldTerm:
    """The TERM that a writer wrote. It stays open, so that no later file can have its inode."""

    def __init__(self, path: Path, number: int) -> None:
        """Raises OSError."""
        self._path = path
        self._number = number
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._status = os.fstat(self._fd)

    def is_current(self) -> bool:
        """Whether TERM is still this file: another writer replaces it. Raises OSError."""
        try:
            return os.path.samestat(os.stat(self._path), self._status)
        except FileNotFoundError:
            return False

    def raise_last(self, last: int) -> None:
        """Durably note that the log has record `last`. In place: a new file would mean a new
        writer. Raises OSError."""
        os.pwrite(self._fd, f"{last:0{_LAST_DIGITS}}".encode(), len(f"{self._number} "))
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

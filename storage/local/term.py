"""TERM, the file that names the writer of a storage in a directory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from .durable import HeldFile, check_is_file, unreadable, write_atomically

_LAST_DIGITS = 20

_TERM = re.compile(rb"(\d+)(?: (\d+)(?: (\d+)(?: (\S+))?)?)?\n")


class Term(NamedTuple):
    """The content of TERM: the latest writer."""

    number: int
    last: int = 0  # a record that the log has; raised by each writer's and segment's first append
    lease_ms: int | None = None  # None: never displaced while its process lives
    place: str = ""

    @classmethod
    def read(cls, path: Path) -> Term | None:
        """Read TERM; None if it is missing or garbled. Raises Corrupt, StorageUnusable."""
        check_is_file(path)
        try:
            while (content := path.read_bytes()) != path.read_bytes():
                pass  # `raise_last` is writing it
            found = _TERM.fullmatch(content)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unreadable(path, error) from error
        if found is None:
            return None
        lease_ms = None if found[3] is None else int(found[3])
        return cls(int(found[1]), int(found[2] or 0), lease_ms, unquote((found[4] or b"").decode()))

    def write(self, path: Path) -> None:
        words = [str(self.number), f"{self.last:0{_LAST_DIGITS}}"]
        if self.lease_ms is not None:
            words += [str(self.lease_ms), quote(self.place)]
        write_atomically(path, f"{' '.join(words).strip()}\n".encode())


def raise_last(held: HeldFile, number: int, last: int) -> None:
    """Durably note in TERM that the log has record `last`, if TERM is still the held file.

    Overwrites in place: a new file would mean a takeover.
    """
    held.overwrite(len(f"{number} "), f"{last:0{_LAST_DIGITS}}".encode())

"""Which files of records a dataset has, as it is registered. The dispatcher compares two of them.

A file is known by its path, its size, and a fingerprint: the CRC-32C of its first and last bytes,
which have the header and the footer. A worker checks both when it opens the file. An object of a
store is known by its URL, its size, and what the store says (stores.py).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from google_crc32c import value as crc32c

from ...errors import FailedPrecondition

FINGERPRINT_BYTES = 4 << 10
"""At each end of a file."""

MANY = 5  # files, or columns, that a message names


class FileEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file as it was registered."""

    path: str
    size: int
    fingerprint: str
    """Of an object of a store, its ETag, version or time, with the word."""

    records: int
    values: dict[str, Any] = {}
    """Of columns that its directory's name has (partitions.py)."""
    cuts: list[int] = []
    """Before which records its groups begin, where rows of these are left out."""

    packed: str | None = None
    """How it is compressed, if it is read as a stream (streams.py); None: nobody has looked."""
    beside: tuple[int, str] | None = None
    """Size and fingerprint of a file beside it, which its format has by another name."""

    def __str__(self) -> str:
        what = "" if " " in self.fingerprint else "fingerprint "
        return f"{self.size} bytes with {what}{self.fingerprint}"

    def require_same(self, now: FileEntry) -> None:
        """Raises FailedPrecondition."""
        if (now.size, now.fingerprint) != (self.size, self.fingerprint):
            raise self.fault(f"has {now}")

    def fault(self, what: str) -> FailedPrecondition:
        """What is with it now."""
        return FailedPrecondition(
            f"{self.path} {what}, and had {self} when it was registered: bring it back, or "
            "register the files anew"
        )


class Counts(msgspec.Struct, gc=False):
    """Of a file. 100,000 are decoded in a twelfth of the time of their entries."""

    records: int
    size: int


class Files:
    """Entries as they are stored: each is decoded when it is asked for. So a process that opens a
    few of 100,000 files has 1 MB of them, where all decoded are 44 MB."""

    def __init__(self, stored: msgspec.Raw) -> None:
        """Of their list. Raises MsgspecError."""
        self._stored = memoryview(stored)
        entries = msgspec.msgpack.decode(stored, type=list[msgspec.Raw])
        sizes = np.fromiter((memoryview(one).nbytes for one in entries), np.int64, len(entries))
        self._ends = self._stored.nbytes - sizes.sum() + np.append(0, np.cumsum(sizes))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[FileEntry]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> FileEntry:
        """Raises MsgspecError, IndexError."""
        if number < 0:
            raise IndexError(f"there is no file {number}")
        begin, end = self._ends[number], self._ends[number + 1]
        return _ENTRY.decode(self._stored[begin:end])

    def counts(self) -> list[Counts]:
        """Raises MsgspecError."""
        return msgspec.msgpack.decode(self._stored, type=list[Counts])


_ENTRY = msgspec.msgpack.Decoder(FileEntry)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a dataset, whose records are numbered through, and how they are read."""

    format: str
    files: list[FileEntry] | Files
    cuts: list[int]
    """Split n has the records from cuts[n] up to cuts[n + 1]; shuffled, those of these ranks."""
    structure: str  # of a record (structure.py)
    shuffled: bool = False
    seed: int = 0  # of the shuffle, where a read has none
    options: dict[str, Any] = {}  # of the format

    @property
    def is_counted(self) -> bool:
        """Whether it is known how many records files have."""
        return self.options.get("count") is not False

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self, enc_hook=list)  # of Files


class _Stored(Manifest, frozen=True):
    files: msgspec.Raw  # type: ignore[assignment]


def decode(stored: bytes | memoryview) -> Manifest:
    """Files refer to what is stored. Raises MsgspecError, and of a file's entry when it is used."""
    found = msgspec.msgpack.decode(stored, type=_Stored)
    return Manifest(**msgspec.structs.asdict(found) | {"files": Files(found.files)})


def opened_now(path: str) -> tuple[int, FileEntry]:
    """A descriptor of a local file, and what it is now, without records. Raises OSError, also for a
    pipe, which may wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", path)
        os.set_blocking(descriptor, True)
        ends = os.pread(descriptor, FINGERPRINT_BYTES, 0)
        ends += os.pread(descriptor, FINGERPRINT_BYTES, max(0, about.st_size - FINGERPRINT_BYTES))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, FileEntry(path, about.st_size, f"{crc32c(ends):08x}", 0)


def opened(entry: FileEntry) -> int:
    """A descriptor. Raises FailedPrecondition if the file is not there, or is another one than was
    registered; OSError without a descriptor for it."""
    try:
        descriptor, now = opened_now(entry.path)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise entry.fault(f"cannot be read ({error.strerror or error})") from error
    try:
        entry.require_same(now)
    except FailedPrecondition:
        os.close(descriptor)
        raise
    return descriptor


def index_of(path: str) -> str:
    """The file beside one of tokens (`FileEntry.beside`)."""
    return os.path.splitext(path)[0] + ".idx"


def _beside(entry: FileEntry) -> str:
    return str(FileEntry("", *entry.beside, 0)) if entry.beside else "nothing that is known"


def difference(stored: bytes, others: bytes) -> str:
    """Which files two datasets do not have in common, in words."""
    try:
        registered, given = decode(stored).files, decode(others).files
        before = {entry.path: number for number, entry in enumerate(registered)}
        after = {entry.path: number for number, entry in enumerate(given)}
    except msgspec.MsgspecError:
        return "files"
    found = []
    for path in sorted(before.keys() | after.keys()):
        old = registered[before[path]] if path in before else None
        new = given[after[path]] if path in after else None
        if old is None:
            found.append(f"{path} was added, with {new}")
        elif new is None:
            found.append(f"{path} was removed, with {old}")
        else:  # where none differs, it is read in another way
            beside = index_of(path), _beside(new), _beside(old)
            for name, now, had in ((path, str(new), str(old)), beside):
                found += [f"{name} has {now}, and had {had}"] * (now != had)
    if not found:
        return "way of reading the same files"
    more = f" and {len(found) - MANY} more" if len(found) > MANY else ""
    return f"list of files ({'; '.join(found[:MANY])}{more})"

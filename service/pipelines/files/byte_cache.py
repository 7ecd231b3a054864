"""Ranges of objects on the worker's disk (`--cache-directory`).

    <directory>/<hash of URL, size, ETag and server>/<begin>-<end>-<CRC-32C>    the bytes of it

A name says all of its content, so there is no index: processes and workers share a directory
without a lock. A range appears by a rename, and is compared with its checksum when a process first
reads it. Ranges that were used longest ago are removed where all together have too many bytes. A
disk that is full or read-only costs hits, and no read.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

from google_crc32c import value as crc32c

from ...fetched import fetched
from .manifest import FileEntry

log = logging.getLogger(__name__)

_FOLDER = re.compile(r"[0-9a-f]{32}")
_RANGE = re.compile(r"(\d+)-(\d+)-[0-9a-f]{8}")

_CHECKS = 64
"""So many times, while as much as the cache may have is written, are its sizes added up."""

Fetch = Callable[[int, int], bytes]

_MAX_VERIFIED = 1 << 16

LOOK_S = 30.0  # how often a worker adds up what all have written
_UNFINISHED_S = 3600.0  # a file that is being written is not this old

_MANY, _SMALL_BYTES = 1000, 64 << 10
"""Of an object with so many ranges, no smaller ones are kept: each read lists them."""

_lock = threading.Lock()  # guards the counts


class _Held(NamedTuple):
    begin: int
    end: int
    name: str


class ByteCache:
    """Of a directory, which others use as well. Thread-safe."""

    def __init__(self, directory: str, most_bytes: int) -> None:
        self._directory, self._most_bytes = directory, most_bytes
        self._unchecked_bytes = most_bytes  # written since all were added up
        self._verified: set[str] = set()
        self._is_broken = False  # it has been said

    def read(self, key: str, start: int, stop: int, fetch: Fetch) -> bytes:
        """Raises what `fetch` raises."""
        folder = os.path.join(self._directory, key)
        held = _held(folder)
        pieces: list[bytes] = []
        at = start
        while at < stop:
            here = [one for one in held if one.begin <= at < one.end]
            if here:
                longest = max(here, key=lambda one: one.end)
                end = min(stop, longest.end)
                if (piece := self._loaded(folder, longest, at, end)) is not None:
                    pieces.append(piece)
                    at = end
                else:
                    held.remove(longest)
                continue
            end = min([one.begin for one in held if at < one.begin] + [stop])
            pieces.append(bytes(fetch(at, end)))
            if len(held) < _MANY or end - at >= _SMALL_BYTES:
                self._store(folder, at, end, pieces[-1])
            at = end
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _loaded(self, folder: str, held: _Held, start: int, stop: int) -> bytes | None:
        """None if it is gone or damaged."""
        path = os.path.join(folder, held.name)
        try:
            with open(path, "rb") as file:
                if path not in self._verified:
                    whole = file.read()
                    if len(whole) != held.end - held.begin or _crc(whole) != held.name[-8:]:
                        log.warning("the cache's %s is damaged, and is removed", path)
                        os.unlink(path)
                        return None
                    if len(self._verified) >= _MAX_VERIFIED:
                        self._verified.clear()
                    self._verified.add(path)
                    data = whole[start - held.begin : stop - held.begin]
                else:
                    data = os.pread(file.fileno(), stop - start, start - held.begin)
                if len(data) != stop - start:
                    return None
                os.utime(file.fileno())
                return data
        except OSError:
            return None

    def _store(self, folder: str, start: int, stop: int, data: bytes) -> None:
        name = f"{start}-{stop}-{_crc(data)}"
        new = os.path.join(folder, f".{secrets.token_hex(8)}")
        try:
            os.makedirs(self._directory, 0o700, exist_ok=True)
            os.makedirs(folder, 0o700, exist_ok=True)
            with published(new, os.path.join(folder, name), 0o600) as file:
                file.write(data)
        except OSError as error:
            if not self._is_broken:
                self._is_broken = True
                log.warning(
                    "the cache %s cannot be written (%s): objects are fetched each time",
                    self._directory, error.strerror,
                )  # fmt: skip
            return
        self._unchecked_bytes += stop - start
        if self._unchecked_bytes >= self._most_bytes // _CHECKS:
            self._unchecked_bytes = 0
            self.evict()

    def evict(self) -> int:
        """Remove what was used longest ago, if there is too much. Returns the bytes of the rest."""
        files = sorted(files_of(self._directory))
        held = sum(size for _, size, _ in files)
        for _, size, path in files:
            if held <= self._most_bytes:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
                os.rmdir(os.path.dirname(path))
            held -= size
        return held


@contextlib.contextmanager
def published(new: str, path: str, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file, under the name `new` until it has been written. Raises OSError."""
    try:
        with open(new, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


def files_of(directory: str) -> Iterator[tuple[int, int, str]]:
    """Its ranges: when each was last used, in nanoseconds, its bytes, and its path. Files that are
    no cache's are left out."""
    for folder, _, names in os.walk(directory):
        for name in names if _FOLDER.fullmatch(os.path.basename(folder)) else ():
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                about = os.stat(path)
                if name[0] == "." and time.time() - about.st_mtime < _UNFINISHED_S:
                    continue
                yield about.st_mtime_ns, about.st_size, path


def _held(folder: str) -> list[_Held]:
    try:
        parts = [found for name in os.listdir(folder) if (found := _RANGE.fullmatch(name))]
    except OSError:
        return []
    return [_Held(int(found[1]), int(found[2]), found[0]) for found in parts]


def _crc(data: bytes) -> str:
    return f"{crc32c(data):08x}"


_used: ByteCache | None = None  # of this process
_counts: memoryview | list[int] = [0, 0]  # bytes fetched, and found in the cache


def use(directory: str, most_bytes: int) -> None:
    """From now on, in this process."""
    global _used
    _used = ByteCache(directory, most_bytes) if directory else None


def watch(directory: str, most_bytes: int, stopping: threading.Event) -> None:
    """Evict now and then, and tell what the directory holds, until `stopping` is set."""
    while not stopping.is_set():
        fetched.held_bytes = ByteCache(directory, most_bytes).evict()
        stopping.wait(LOOK_S)


def count_into(counts: memoryview) -> None:
    """From now on, count bytes that were fetched, and those that were found in the cache, into
    these two numbers."""
    global _counts
    _counts = counts


def key_of(entry: FileEntry, options: dict[str, Any]) -> str:
    """`options` are storage_options: another server may have other bytes, or be asked by another
    right."""
    server = sorted(options.items()), os.environ.get("AWS_ENDPOINT_URL")
    about = f"{entry.path}\0{entry.size}\0{entry.fingerprint}\0{server}"
    return hashlib.sha256(about.encode()).hexdigest()[:32]


def read(key: str, start: int, stop: int, fetch: Fetch) -> bytes:
    """The range, from the cache where it has it. Raises what `fetch` raises."""
    fetched = 0

    def counted(begin: int, end: int) -> bytes:
        nonlocal fetched
        fetched += end - begin
        return fetch(begin, end)

    data = counted(start, stop) if _used is None else _used.read(key, start, stop, counted)
    with _lock:
        _counts[0] += fetched
        _counts[1] += stop - start - fetched
    return data

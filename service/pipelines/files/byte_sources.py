"""The one door to the bytes of files: local ones, objects of a store, and what fsspec knows.

Formats read ranges of a ByteSource, and never know where the bytes come from. Objects of s3://,
gs://, az:// and http(s):// are read by obstore, and other URLs by fsspec. Credentials are those
that the environment of the process has; a dataset has none.

An object is known by its size and its ETag (or by its version, or the time of its last change), and
each answer is compared with them. A local file is known by its size and fingerprint.

A reader that knows what it will read says so (`plan`). Then the next ranges are asked for while one
is decoded, so that a store's latency is hidden.
"""

from __future__ import annotations

import functools
import io
import os
import tempfile
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from ....storage.thread_pool import ThreadPool
from . import byte_cache, manifest, stores

PART_BYTES = 8 << 20
"""Of one request. Larger ranges are several."""

AHEAD_BYTES = 16 << 20
"""Asked for and not read yet, of the file that a thread reads, and of the next one."""

SMALL_BYTES = 128 << 10
"""An object of no more is asked for as a whole, and has no index (record_index.py). Never less."""

Range = tuple[int, int]  # begin and end


class ByteSource(ABC):
    """An open file. For one thread."""

    is_whole = False
    """Whether all of it is in memory, or will be with the first range."""

    def __init__(self, entry: manifest.FileEntry) -> None:
        self.entry, self.path, self.size = entry, entry.path, entry.size
        self._local = ""

    @property
    def changed_ns(self) -> int | None:
        """When it was changed, of a local file: more changes than its entry shows."""
        return None

    @abstractmethod
    def read(self, start: int, size: int) -> bytes | memoryview:
        """Fewer bytes only at the file's end. Raises OSError, and FailedPrecondition if it is
        another file now."""

    def reaches(self, end: int) -> bool:
        """Whether it has so many bytes; a stream, whose `size` it has at its end, reads them."""
        return end <= self.size

    def plan(self, ranges: Iterable[Range]) -> None:
        """What will be read next, each byte once and in this order; it takes the place of an
        earlier plan."""
        return

    def local_path(self) -> str:
        """Of a local file with these bytes, for a library that opens files itself. It is there
        until `close`. Raises what `read` raises."""
        if not self._local:
            with tempfile.NamedTemporaryFile(prefix="forebay-", delete=False) as file:
                self._local = file.name
                self.plan([(0, self.size)])
                for start in range(0, self.size, PART_BYTES):
                    file.write(self.read(start, PART_BYTES))
        return self._local

    def view(self) -> Any:
        """A path, or a file object that gives bytes without copies, for Arrow."""
        return _View(self)

    def file(self) -> io.BufferedReader:
        """A buffered file object, to be closed by whoever asked for it."""
        return io.BufferedReader(_View(self), 1 << 20)

    def close(self) -> None:
        if self._local:
            os.unlink(self._local)
            self._local = ""


class LocalFile(ByteSource):
    def __init__(self, entry: manifest.FileEntry, descriptor: int) -> None:
        """The descriptor is this object's from then on."""
        super().__init__(entry)
        self._descriptor = descriptor

    @property
    def changed_ns(self) -> int:
        return os.fstat(self._descriptor).st_mtime_ns

    def read(self, start: int, size: int) -> bytes:
        data = os.pread(self._descriptor, size, start)
        while len(data) < size:
            more = os.pread(self._descriptor, size - len(data), start + len(data))
            if not more:
                break
            data += more
        return data

    def local_path(self) -> str:
        return self.path

    def view(self) -> Any:
        return self.path

    def file(self) -> io.BufferedReader:
        file = os.fdopen(os.dup(self._descriptor), "rb")
        file.seek(0)  # the position is the descriptor's
        return file

    def close(self) -> None:
        os.close(self._descriptor)


class Buffer(ByteSource):
    """Bytes in memory."""

    def __init__(self, entry: manifest.FileEntry, data: bytes | memoryview) -> None:
        super().__init__(entry)
        self._data, self.size = data, len(data)

    def read(self, start: int, size: int) -> bytes | memoryview:
        return self._data[start : start + size]


_planning = threading.local()  # `file`: the last one that a thread has planned to read


class RemoteFile(ByteSource):
    """An object of a store."""

    def __init__(
        self, entry: manifest.FileEntry, options: dict[str, Any], *, in_parts: bool = False
    ) -> None:
        """`options` are storage_options; `in_parts`: not all of it will be read, also if it is
        small. Nothing is asked for here."""
        super().__init__(entry)
        self._fetch = functools.partial(stores.fetch, entry, options)
        self._key = byte_cache.key_of(entry, options)
        self._planned: deque[Range] = deque()
        self._asked: deque[tuple[Range, Future[bytes]]] = deque()
        self._asked_bytes = 0
        self.is_whole = not in_parts and self.size <= SMALL_BYTES
        self._whole = b""

    def read(self, start: int, size: int) -> bytes | memoryview:
        stop = min(start + size, self.size)
        if start >= stop:
            return b""
        if self.is_whole:
            self._whole = self._whole or self._got(0, self.size)
            return memoryview(self._whole)[start:stop]
        found: list[bytes | memoryview] = []
        while start < stop:
            planned = self._of_plan(start, stop)
            piece = self._got(start, stop) if planned is None else planned
            found.append(piece)
            start += len(piece)
        return found[0] if len(found) == 1 else b"".join(found)

    def _of_plan(self, start: int, stop: int) -> memoryview | None:
        """Bytes from `start` on of what was asked for ahead; None if it is not planned."""
        self._ask()
        for at, ((begin, end), future) in enumerate(self._asked):
            if begin <= start < end:
                piece = memoryview(future.result())[start - begin : min(stop, end) - begin]
                if stop >= end:
                    for _ in range(at + 1):
                        (first, last), _ = self._asked.popleft()
                        self._asked_bytes -= last - first
                    self._ask()
                return piece
        return None

    def _ask(self) -> None:
        while self._planned and (self._asked_bytes < AHEAD_BYTES):
            begin, end = self._planned.popleft()
            self._asked_bytes += end - begin
            self._asked.append(((begin, end), _pool().submit(self._got, begin, end)))

    def _got(self, start: int, stop: int) -> bytes:
        return byte_cache.read(self._key, start, stop, self._fetch)

    def plan(self, ranges: Iterable[Range]) -> None:
        before: RemoteFile = getattr(_planning, "file", self)
        _planning.file = self
        if before is not self:  # or each open file might keep what nobody reads
            before._forget()
        planned = deque(
            (begin, min(begin + PART_BYTES, stop))
            for start, stop in ranges
            for begin in range(start, stop, PART_BYTES)
            if not self.is_whole
        )
        if planned != deque([*(asked for asked, _ in self._asked), *self._planned]):
            self._forget()
            self._planned = planned
        self._ask()

    def _forget(self) -> None:
        for _, future in self._asked:
            future.cancel()
        self._asked.clear()
        self._planned.clear()
        self._asked_bytes = 0

    def close(self) -> None:
        self._forget()
        self._whole = b""
        super().close()


class _View(io.RawIOBase):
    """A file object. `read` copies nothing where it can."""

    def __init__(self, source: ByteSource) -> None:
        self._source, self._at = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._source.size}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> Any:
        data = self._source.read(self._at, self._source.size if size < 0 else size)
        self._at += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        data = self._source.read(self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def opened(
    entry: manifest.FileEntry, options: dict[str, Any], *, in_parts: bool = False
) -> ByteSource:
    """Arguments are those of RemoteFile. Raises FailedPrecondition if a local file is not there, or
    is another one than was registered (an object is compared when it is read); OSError."""
    if stores.is_url(entry.path):
        return RemoteFile(entry, options, in_parts=in_parts)
    return LocalFile(entry, manifest.opened(entry))


def opened_now(path: str, options: dict[str, Any]) -> ByteSource:
    """A file, whatever it is now. Raises OSError."""
    if stores.is_url(path):
        return RemoteFile(stores.head(path, options), options)
    descriptor, entry = manifest.opened_now(path)
    return LocalFile(entry, descriptor)


@functools.cache
def _pool() -> ThreadPool:
    """Of this process, whose forks ask for nothing before they read."""
    return ThreadPool(16, "forebay-fetch")


def ahead(work: Callable[..., Any], *args: Any) -> Future[Any]:
    """Open a file that is read next, and plan, in another thread."""

    def apart() -> Any:
        _planning.__dict__.clear()  # what this thread opened before is read by another one
        return work(*args)

    return _pool().submit(apart)

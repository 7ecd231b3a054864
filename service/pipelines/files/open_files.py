"""The open files of a dataset: each is checked as it is opened, and the one that was used longest
ago is closed where the process may have no more descriptors."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from ....storage.errors import Corrupt
from ...errors import FailedPrecondition
from . import byte_sources, manifest
from .formats import Damaged, Format, RecordFile
from .known_formats import format_of
from .row_groups import RowGroups
from .stores import is_url

MOST_OPEN = 4096
"""Files that are open at a time, if the process may have so many descriptors. To open one anew for
each few records took ten times as long as to read them."""

FEW_OPEN = 64
"""Of so many files that one which was read is hardly read again while it is open, and of small
objects, which are held in memory: eight times as many of shuffled records. An open Parquet file
takes 20 KB, in each process."""

FILES_AHEAD = 16
"""Small objects that are opened while one is decoded."""

MOST_HELD_BYTES = 1 << 30
"""That open files have in memory: compressed shards of MDS."""

OTHER_DESCRIPTORS = 256
"""For what else the process has open. A file costs two descriptors, if it has an index."""


class OpenFiles:
    """The files of a manifest, by their numbers. For one thread."""

    def __init__(self, of: manifest.Manifest) -> None:
        self._manifest = of
        self._open: OrderedDict[int, RecordFile] = OrderedDict()  # used last: at the end
        self._ahead: dict[int, Future[RecordFile]] = {}
        self.used: memoryview | list[int] = [-1]  # its number, if the process ends of it
        self._limit()

    @property
    def format(self) -> Format:
        """Raises FailedPrecondition."""
        return format_of(self._manifest.format, self._manifest.options.get("package", ""))

    def raise_limit(self) -> None:
        """Of the process's descriptors, as far as it may."""
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 2 * MOST_OPEN + OTHER_DESCRIPTORS
        if soft != resource.RLIM_INFINITY and soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            self._limit()

    def _limit(self) -> None:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = (soft - min(OTHER_DESCRIPTORS, soft // 4)) // 2
        hardly = (4 if self._manifest.shuffled else 1) * MOST_OPEN
        most = MOST_OPEN if len(self._manifest.files) <= hardly else min(MOST_OPEN, FEW_OPEN)
        self._most = most if soft == resource.RLIM_INFINITY else max(1, min(most, room))

    def __getitem__(self, number: int) -> RecordFile:
        """Checked as it is opened. Raises FailedPrecondition, Corrupt."""
        self.used[0] = number
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        entry = self._manifest.files[number]
        few = FEW_OPEN * (8 if self._manifest.shuffled else 1)
        self.close_all_but(min(self._most, few if self._is_small(entry) else MOST_OPEN) - 1)
        ahead = self._ahead.pop(number, None)
        file = self._open[number] = ahead.result() if ahead else self._opened(entry)
        held = [getattr(one, "held_bytes", 0) for one in self._open.values()]
        self.close_all_but(max(1, sum(np.cumsum(held[::-1]) <= MOST_HELD_BYTES)))
        return file

    def plan(self, numbers: Sequence[int], records: int = 0) -> None:
        """Files that will be opened next. Small objects among the first ones are opened meanwhile,
        and the second one, if it has row groups and its first `records` will be read."""
        numbers = numbers[:FILES_AHEAD]
        for other in self._ahead.keys() - {*numbers}:
            (dropped := self._ahead.pop(other)).cancel()
            dropped.add_done_callback(_close)
        for at, number in enumerate(numbers):
            if number in self._ahead or number in self._open:
                continue
            entry, wanted = self._manifest.files[number], records if at == 1 else 0
            if not self._is_small(entry):
                if at == 0:  # it is opened now
                    continue
                if not (wanted and is_url(entry.path) and self.format.row_groups):
                    return
            self._ahead[number] = byte_sources.ahead(self._opened, entry, wanted)

    def _is_small(self, entry: manifest.FileEntry) -> bool:
        """An object that is asked for as a whole, even for one of its records."""
        return entry.size <= byte_sources.SMALL_BYTES and is_url(entry.path)

    def _opened(self, entry: manifest.FileEntry, records: int = 0) -> RecordFile:
        """The first `records` are asked for. Raises FailedPrecondition, Corrupt."""
        try:
            options = self._manifest.options | {"structure": self._manifest.structure}
            source = byte_sources.opened(entry, options.get("storage", {}))
            try:
                file = self.format.open(source, options)
                if records and isinstance(file, RowGroups):
                    file.expect(0, records)
            except BaseException:
                source.close()
                raise
            return file
        except (OSError, Damaged) as error:
            kind = FailedPrecondition if of_the_system(error) else Corrupt
            lacks = os.strerror(errno.EMFILE) in str(error)
            advice = "; raise `ulimit -n` of the process" if lacks else ""
            raise kind(f"{entry.path} cannot be opened: {error}{advice}") from error

    def require_same(self, number: int) -> None:
        """Raises FailedPrecondition if a local file, or the one beside it, is not as it was
        registered. Of an object each answer is compared."""
        entry = self._manifest.files[number]
        several = [entry]
        if entry.beside is not None:
            index = manifest.index_of(entry.path)
            several.append(manifest.FileEntry(index, *entry.beside, 0))
        for one in several:
            if not is_url(one.path):
                with contextlib.suppress(OSError):  # no descriptor is left
                    os.close(manifest.opened(one))

    def pop(self, number: int) -> RecordFile:
        """An open file, which the caller closes."""
        return self._open.pop(number)

    def close(self) -> None:
        self.plan(())
        self.close_all_but(0)

    def close_all_but(self, last: int) -> None:
        while len(self._open) > last:
            self._open.popitem(last=False)[1].close()


def _close(opening: Future[RecordFile]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


_OF_THE_SYSTEM = [
    os.strerror(code) for code in (errno.EIO, errno.ENOMEM, errno.ESTALE, errno.EMFILE)
]
"""As a library that has its own errors says it."""


def of_the_system(error: BaseException) -> bool:
    """Whether the machine, and not what is in the file, is at fault: no record is to blame."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno):
        return True
    return any(said in str(error) for said in _OF_THE_SYSTEM)

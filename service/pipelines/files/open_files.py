"""The open files of a dataset: each is checked as it is opened, and the one that was used longest
ago is closed where the process may have no more descriptors."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict

import numpy as np

from ....storage.errors import Corrupt
from ...errors import FailedPrecondition
from . import byte_sources, manifest
from .formats import Damaged, Format, RecordFile
from .known_formats import format_of
from .partitions import Partitioned

MOST_OPEN = 4096
"""Files that are open at a time, if the process may have so many descriptors. To open one anew for
each few records took ten times as long as to read them."""

MOST_HELD_BYTES = 1 << 30
"""That open files have in memory: compressed shards of MDS."""

OTHER_DESCRIPTORS = 256
"""For what else the process has open. A file costs two descriptors, if it has an index."""


class OpenFiles:
    """The files of a manifest, by their numbers. For one thread."""

    def __init__(self, of: manifest.Manifest) -> None:
        self._manifest = of
        self._open: OrderedDict[int, RecordFile] = OrderedDict()  # used last: at the end
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
        self._most = MOST_OPEN if soft == resource.RLIM_INFINITY else max(1, min(MOST_OPEN, room))

    def __getitem__(self, number: int) -> RecordFile:
        """Checked as it is opened. Raises FailedPrecondition, Corrupt."""
        self.used[0] = number
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        self.close_all_but(self._most - 1)
        file = self._open[number] = self._opened(self._manifest.files[number])
        held = [getattr(one, "held_bytes", 0) for one in self._open.values()]
        self.close_all_but(max(1, sum(np.cumsum(held[::-1]) <= MOST_HELD_BYTES)))
        return file

    def _opened(self, entry: manifest.FileEntry) -> RecordFile:
        """Raises FailedPrecondition, Corrupt."""
        try:
            options = self._manifest.options | {"structure": self._manifest.structure}
            source = byte_sources.opened(entry, options.get("storage", {}))
            try:
                file = self.format.open(source, options)
            except BaseException:
                source.close()
                raise
            if entry.values:
                return Partitioned(file, self._manifest.structure, entry.values)
            return file
        except (OSError, Damaged) as error:
            kind = FailedPrecondition if of_the_system(error) else Corrupt
            lacks = os.strerror(errno.EMFILE) in str(error)
            advice = "; raise `ulimit -n` of the process" if lacks else ""
            raise kind(f"{entry.path} cannot be opened: {error}{advice}") from error

    def pop(self, number: int) -> RecordFile:
        """An open file, which the caller closes."""
        return self._open.pop(number)

    def close_all_but(self, last: int) -> None:
        while len(self._open) > last:
            self._open.popitem(last=False)[1].close()


_OF_THE_SYSTEM = [
    os.strerror(code) for code in (errno.EIO, errno.ENOMEM, errno.ESTALE, errno.EMFILE)
]
"""As a library that has its own errors says it."""


def of_the_system(error: BaseException) -> bool:
    """Whether the machine, and not what is in the file, is at fault: no record is to blame."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno):
        return True
    return any(said in str(error) for said in _OF_THE_SYSTEM)

"""In a child: the records of a split of files, and the elements that a function makes of them.

Shuffled, the seed is the read's, and each epoch has another one. A read without a seed, one that is
not in bundles, has the registered one, and its iteration's number (record_ranges.py).

A function that is mapped over the records draws by seed, bundle, split and *page*, so that a bundle
can begin at any record: at most one page is computed again. Where records may be left out, or give
several elements, a bundle is read from its begin.
"""

from __future__ import annotations

import bisect
import errno
import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy import random as numpys_random

from ... import generators
from ...blocks import Block, Component, Strings, joined, part
from ...errors import ForebayError, InvalidArgument
from ...proto.python_pb2 import SKIP, PythonDataset
from ...structure import assemble
from . import manifest
from .record_ranges import Numbered, RecordRanges

PAGE = 64
"""Records after which a mapped function's random numbers begin anew."""

BATCH = 256
"""Records that `map_batch` is called with at once: those from a multiple of it in a split on."""

_ABOUT_A_PATH = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENAMETOOLONG}

SMALL_BYTES = 64 << 10  # up to which blocks of small files are joined, as each costs time

LeaveOut = Callable[[int, int, int, str], bool]
"""Whether records may be left out: their split, the first one's number there, how many, and why."""


class FileRecords:
    """The records of a PythonDataset of files."""

    def __init__(
        self,
        dataset: PythonDataset,
        leave_out: LeaveOut = lambda *_: False,
        files: memoryview | None = None,
    ) -> None:
        """`leave_out` is asked where on_error is SKIP. It names a record by the split that has it
        if records are not shuffled. `files` are the dataset's, if it does not have them itself.
        Raises what unpickling the mapped function raises."""
        self._manifest = manifest.decode(dataset.files if files is None else files)
        self._function: Callable[[Any], Any] | None = None
        if dataset.function:
            self._function, self._generators = generators.loads(dataset.function)
        self._assemble = assemble(self._manifest.structure)
        self._iteration = dataset.iteration
        self._ranges = RecordRanges(self._manifest, self._may_leave_out)
        self._leave_out, self._skips = leave_out, dataset.on_error == SKIP
        self._varies, self.batched = dataset.varies, dataset.batched
        self._seed: str | None = None  # of the bundle
        self._sought = 0
        self._at = (-1, 0, 0)  # the record that the function has: split, number, elements before
        self._uneven: dict[int, list[tuple[int, int]]] = {}  # by split: `_record_of`
        self.fault: ForebayError | None = None  # that `blocks` has raised
        self.seed_generators(None)

    def tell_files(self, to: memoryview) -> None:
        """Write the number of the file that is used into these 8 bytes."""
        self._ranges.files.used = to

    @property
    def maps(self) -> bool:
        """Whether a function is mapped over single records."""
        return self._function is not None and not self.batched

    @property
    def splits(self) -> range:
        return range(len(self._manifest.cuts) - 1)

    def setup(self) -> None:
        """Of the process, which is this object's alone."""
        self._ranges.files.raise_limit()
        self.set_up_function()

    def set_up_function(self) -> None:
        getattr(self._function, "setup", _nothing)()

    def teardown(self) -> None:
        getattr(self._function, "teardown", _nothing)()

    def seed_generators(self, seed: str | None) -> None:
        """Of a bundle it is "seed number epoch"."""
        self._seed = seed
        self._uneven.clear()
        self._at = (-1, 0, 0)
        if seed is None:
            self._order = self._manifest.seed, self._iteration
        else:
            of_read, _, epoch = map(int, seed.split())
            self._order = of_read, epoch

    def count(self, split: int) -> int:
        """The number of records of a split."""
        return self._manifest.cuts[split + 1] - self._manifest.cuts[split]

    def place(self, split: int, element: int) -> str:
        """Where the record of an element is, for messages."""
        number, record = self._home(split, self._record_of(split, element))
        return f"record {record} of {self._manifest.files[number].path}"

    def _record_of(self, split: int, element: int) -> int:
        """The record of an element. Behind a record that had not one, `_uneven` says which follows
        with which element."""
        current, record, before = self._at
        if current == split and element >= before:
            return record
        uneven = self._uneven.get(split, [])
        behind = bisect.bisect(uneven, (element, math.inf)) - 1
        first, record = uneven[behind] if behind >= 0 else (0, 0)
        return record + element - first

    def _home(self, split: int, number: int) -> tuple[int, int]:
        """The file of a record of a split, and its number there."""
        record = self._manifest.cuts[split] + min(number, self.count(split) - 1)
        return self._ranges.home(record, self._order)

    def seek(self, split: int, start: int) -> int:
        """The next call begins at a record of its split from which on `start` can be reached;
        returns its number there."""
        start = min(max(0, start), self.count(split))
        if self._skips or self._varies or not self._manifest.is_counted:
            start = 0
        if self.batched:
            return start - start % BATCH
        paged = self._seed is not None and start < self.count(split) and self.maps
        self._sought = start - start % PAGE if paged else start
        return self._sought

    def __call__(self, split: int) -> Iterator[Any]:
        """The elements that the function makes of a split's records."""
        assert self._function is not None
        given = first = self._sought
        self._sought, page = 0, -1
        for numbers, block in self._numbered(split, first):
            columns = [component.elements() for component in block.components]
            places = (numbers - self._manifest.cuts[split]).tolist()
            for at, record in zip(places, self._assemble(columns, block.count), strict=True):
                if self._seed is not None and at // PAGE != page:
                    page = at // PAGE
                    self._seed_page(f"{self._seed} {split} {page * PAGE}")
                self._at = split, at, given
                try:
                    for element in self._made(record):
                        given += 1
                        yield element
                except (Exception, SystemExit) as error:
                    if not _is_of_record(error) or not self.leave_out_record(repr(error)):
                        raise
                if given - self._at[2] != 1:
                    self._uneven.setdefault(split, []).append((given, at + 1))

    def batches(self, split: int, start: int) -> Iterator[tuple[int, Any]]:
        """What `map_batch` makes of a split's records from the begin of a batch on: how many
        records, and what it returned of all. Raises what `blocks` raises, and what it raises."""
        assert self._function is not None
        for block in _in_parts(self.blocks(split, start), BATCH):
            if self._seed is not None:
                self._seed_page(f"{self._seed} {split} {start}")
            columns = [[_as_batch(component)] for component in block.components]
            (records,) = self._assemble(columns, 1)
            yield block.count, self._function(records)
            start += block.count

    def _seed_page(self, page: str) -> None:
        random.seed(page)
        numpys_random.seed(random.getrandbits(32))
        self._generators.seed(page)

    def _made(self, record: Any) -> Iterable[Any]:
        """The elements of a record. Raises what the function raises."""
        assert self._function is not None
        made = self._function(record)
        if not (made is None or isinstance(made, list | Iterator)):
            return (made,)
        if not self._varies:
            raise InvalidArgument(
                f"`map` returned {made!r:.80}, and is registered to make one element of each "
                "record: with one_to_one=False it may return None for none, or a list of several; "
                "a list that is one tensor be np.array(…)"
            )
        return () if made is None else made

    def leave_out_record(self, why: str) -> bool:
        """Whether the record that the function has may be left out."""
        split, at, _ = self._at
        return self._may_leave_out(*self._home(split, at), 1, why)

    def _may_leave_out(self, number: int, first: int, records: int, why: str) -> bool:
        if not self._skips:
            return False
        named = f"record {first}" if records == 1 else f"records {first} to {first + records - 1}"
        record = int(self._ranges.starts[number]) + first
        split = int(np.searchsorted(self._manifest.cuts, record, "right")) - 1
        reason = f"{named} of {self._manifest.files[number].path}: {why}"
        return self._leave_out(split, record - self._manifest.cuts[split], records, reason)

    def blocks(self, split: int, start: int = 0) -> Iterator[Block]:
        """The records of a split, without the first `start`. Raises FailedPrecondition for a file
        that was changed, and Corrupt."""
        return _together(block for _, block in self._numbered(split, start))

    def _numbered(self, split: int, start: int) -> Iterator[Numbered]:
        first, stop = self._manifest.cuts[split] + start, self._manifest.cuts[split + 1]
        if first >= stop:
            return
        try:
            yield from self._ranges.read(first, stop, self._order)
        except ForebayError as error:
            self.fault = error
            raise

    def close(self) -> None:
        self._ranges.files.close()


def _in_parts(blocks: Iterable[Block], count: int) -> Iterator[Block]:
    """The same records in blocks of so many, and the rest."""
    kept: list[Block] = []
    missing = count
    for block in blocks:
        at = 0
        while block.count - at >= missing:
            yield joined([*kept, part(block, at, missing)])
            kept, at, missing = [], at + missing, count
        if at < block.count:
            kept.append(part(block, at, block.count - at))
            missing -= block.count - at
    if kept:
        yield joined(kept)


def _together(blocks: Iterable[Block]) -> Iterator[Block]:
    """With fewer small ones: the first comes at once, and an error behind all before it."""
    kept, size, enough = list[Block](), 0, 0
    try:
        for block in blocks:
            kept.append(block)
            size += block.payload_bytes
            if size >= enough:
                yield joined(kept)
                kept, size, enough = [], 0, SMALL_BYTES
    except Exception:
        if kept:
            yield joined(kept)
        raise
    if kept:
        yield joined(kept)


def _is_of_record(error: BaseException) -> bool:
    """Whether a mapped function fails for what is in a record, rather than for the machine."""
    if isinstance(error, OSError) and error.errno:
        return error.errno in _ABOUT_A_PATH
    return not isinstance(error, MemoryError)


def _as_batch(component: Component) -> Any:
    """A column of a batch: an array of all, or a list of each where they are no numbers of one
    shape."""
    values = component.values
    if component.shapes is None and not isinstance(values, Strings):
        return values
    return [*component.elements()]


def _nothing() -> None: ...

"""In a child: reads ranges of the records of a dataset's files.

Records are numbered through all files. Shuffled, a split has ranks of a permutation of all records,
which needs no memory (service/order.py). Its seed is the read's, and each epoch has another one. A
read without a seed, one that is not in bundles, has the registered one, and its iteration's number.

A function that is mapped over the records draws by seed, bundle, split and *page*, so that a bundle
can begin at any record: at most one page is computed again. Where records may be left out, or give
several elements, a bundle is read from its begin.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy import random as numpys_random

from ... import generators
from ...blocks import Block, Strings, merged, part
from ...errors import ForebayError, InvalidArgument, PipelineError
from ...order import permuted_many
from ...proto.python_pb2 import SKIP, PythonDataset
from ...structure import assemble, leaves
from . import manifest
from .damage import Damage, damage, is_of_record
from .formats import LARGE_BYTES, Ints, steps
from .known_formats import FORMATS
from .open_files import OpenFiles

PAGE = 64
"""Records after which a mapped function's random numbers begin anew."""

LeaveOut = Callable[[int, int, int, str], bool]
"""Whether records may be left out: their split, the first one's number there, how many, and why."""

Numbered = tuple[Ints, Block]
"""Records, and each one's number in the order of all splits."""


class FileRecords:
    """The records of a PythonDataset of files."""

    def __init__(self, dataset: PythonDataset, leave_out: LeaveOut = lambda *_: False) -> None:
        """`leave_out` is asked where on_error is SKIP. It names a record by the split that has it
        if records are not shuffled. Raises what unpickling the mapped function raises."""
        self._manifest = manifest.decode(dataset.files)
        self._by_groups = FORMATS[self._manifest.format].by_groups
        self._function: Callable[[Any], Any] | None = None
        if dataset.function:
            self._function, self._generators = generators.loads(dataset.function)
        self._assemble = assemble(self._manifest.structure)
        self._fields = [
            (path, node["tensor"], len(node["shape"]))
            for path, node in leaves(self._manifest.structure)
        ]
        counts = [entry.records for entry in self._manifest.files]
        self._starts = np.cumsum([0, *counts])  # each file's first record, and all records
        size = sum(entry.size for entry in self._manifest.files)
        self._record_bytes = size / max(1, int(self._starts[-1]))
        self._iteration = dataset.iteration
        self._files = OpenFiles(self._manifest)
        self._leave_out, self._skips = leave_out, dataset.on_error == SKIP
        self._varies = dataset.varies
        self._seed: str | None = None  # of the bundle
        self._sought = 0
        self._at = (-1, 0, 0)  # the record that the function has: split, number, elements before
        self._uneven: dict[int, list[tuple[int, int]]] = {}  # by split: `_record_of`
        self.fault: ForebayError | None = None  # that `blocks` has raised
        self.seed_generators(None)

    @property
    def maps(self) -> bool:
        """Whether a function is mapped over the records."""
        return self._function is not None

    @property
    def splits(self) -> range:
        return range(len(self._manifest.cuts) - 1)

    def setup(self) -> None:
        """Of the process, which is this object's alone."""
        self._files.raise_limit()
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
        if self._manifest.shuffled:
            record = int(permuted_many(np.array([record]), int(self._starts[-1]), *self._order)[0])
        file = int(np.searchsorted(self._starts, record, "right")) - 1
        return file, record - int(self._starts[file])

    def seek(self, split: int, start: int) -> int:
        """The next call begins at a record of its split from which on `start` can be reached;
        returns its number there."""
        start = min(max(0, start), self.count(split))
        if self._skips or self._varies:
            start = 0
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
                    if not is_of_record(error) or not self.leave_out_record(repr(error)):
                        raise
                if given - self._at[2] != 1:
                    self._uneven.setdefault(split, []).append((given, at + 1))

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
        record = int(self._starts[number]) + first
        split = int(np.searchsorted(self._manifest.cuts, record, "right")) - 1
        reason = f"{named} of {self._manifest.files[number].path}: {why}"
        return self._leave_out(split, record - self._manifest.cuts[split], records, reason)

    def blocks(self, split: int, start: int = 0) -> Iterator[Block]:
        """The records of a split, without the first `start`. Raises FailedPrecondition for a file
        that was changed, and Corrupt."""
        return (block for _, block in self._numbered(split, start))

    def _numbered(self, split: int, start: int) -> Iterator[Numbered]:
        first, stop = self._manifest.cuts[split] + start, self._manifest.cuts[split + 1]
        if first >= stop:
            return
        read = self._shuffled if self._manifest.shuffled else self._in_order
        try:
            yield from read(first, stop)
        except ForebayError as error:
            self.fault = error
            raise

    def _in_order(self, first: int, stop: int) -> Iterator[Numbered]:
        number = int(np.searchsorted(self._starts, first, "right")) - 1
        while first < stop:
            begin, end = int(self._starts[number]), min(stop, int(self._starts[number + 1]))
            if first < end:
                for at, block in self._read(number, first - begin, end - begin):
                    yield np.arange(begin + at, begin + at + block.count), block
            first, number = max(first, end), number + 1

    def _read(self, number: int, first: int, stop: int) -> Iterator[tuple[int, Block]]:
        """Blocks of consecutive records, each with its first one's number."""
        blocks = self._files[number].read(first, stop)
        while first < stop:
            try:
                block = next(blocks)
            except ForebayError:
                raise
            except Exception as error:  # noqa: BLE001 - a library's reader may raise anything
                found = self._damage(number, np.arange(first, stop), error)
                yield from self._read(number, first, int(found.records.min()))
                first = int(found.records.max()) + 1
                blocks = self._files[number].read(first, stop)
                continue
            self._require_registered(number, block)
            yield first, block
            first += block.count

    def _shuffled(self, first: int, stop: int) -> Iterator[Numbered]:
        total, (seed, epoch) = int(self._starts[-1]), self._order
        parts = steps(first, stop, self._record_bytes, LARGE_BYTES)
        if self._by_groups:
            parts = iter([(first, stop)])
        permuted = permuted_many(np.arange(first, stop), total, seed, epoch)
        for begin, end in parts:
            records = permuted[begin - first : end - first]
            files = np.searchsorted(self._starts, records, "right") - 1
            by_file = np.argsort(files, kind="stable")
            numbers, begins = np.unique(files[by_file], return_index=True)
            found = [
                self._take(int(number), records[places] - self._starts[number], places)
                for number, places in zip(numbers, np.split(by_file, begins[1:]), strict=True)
            ]
            if there := [(block, places) for block, places in found if len(places)]:
                kept = np.sort(np.concatenate([places for _, places in there]))
                dense = [(block, np.searchsorted(kept, places)) for block, places in there]
                at = 0
                for block in _in_blocks(dense, len(kept)):
                    yield begin + kept[at : at + block.count], block
                    at += block.count

    def _take(self, number: int, records: Ints, places: Ints) -> tuple[Block, Ints]:
        """Records of a file, and the places of those that are not left out."""
        while len(records):
            try:
                block = self._files[number].take(records)
            except ForebayError:
                raise
            except Exception as error:  # noqa: BLE001 - a library's reader may raise anything
                found = self._damage(number, records, error)
                good = ~np.isin(records, found.records)
                records, places = records[good], places[good]
                continue
            self._require_registered(number, block)  # merged, it would be cast
            return block, places
        return Block(0, ()), places

    def _damage(self, number: int, records: Ints, error: Exception) -> Damage:
        """Records that are left out, as they cannot be read. Raises ForebayError if they may not
        be, which names the first one."""
        path, file = self._manifest.files[number].path, self._files.pop(number)
        try:
            found = damage(path, file, records, error, by_groups=self._by_groups)
            if found.whole and self._may_leave_out(number, *found.whole, found.why):
                return found
        finally:
            file.close()  # a library may give nothing more of it
        raise found.fault from error

    def _require_registered(self, number: int, block: Block) -> None:
        """Raises PipelineError if records of a file are of other types than were registered."""
        for (path, dtype, dimensions), component in zip(
            self._fields, block.components, strict=True
        ):
            values = component.values
            found = "string" if isinstance(values, Strings) else values.dtype.name
            if (found, component.rank) != (dtype, dimensions):
                raise PipelineError(
                    "INVALID_ARGUMENT",
                    f"{self._manifest.files[number].path} has records with "
                    f"{path or 'elements'} of {found} in {component.rank} dimensions, and they "
                    f"were registered with {dtype} in {dimensions}: write files of one schema",
                )

    def close(self) -> None:
        self._files.close_all_but(0)


def _in_blocks(parts: list[tuple[Block, Ints]], count: int) -> Iterator[Block]:
    """Merged, in blocks of about LARGE_BYTES. The places of each part ascend."""
    size = sum(block.payload_bytes for block, _ in parts)
    blocks = min(count, -(-size // LARGE_BYTES))
    if blocks < 2:
        yield merged(parts)
        return
    for begin, end in itertools.pairwise(np.linspace(0, count, blocks + 1, dtype=int).tolist()):
        cut = []
        for block, places in parts:
            low, high = np.searchsorted(places, [begin, end]).tolist()
            if low < high:
                cut.append((part(block, low, high - low), places[low:high] - begin))
        yield merged(cut)


def _nothing() -> None: ...

"""In a child: reads ranges of the records of a dataset's files.

Records are numbered through all files. Shuffled, a split has ranks of a permutation of all records,
which needs no memory (service/order.py). Its seed is the read's, and each epoch has another one. A
read without a seed, one that is not in bundles, has the registered one, and its iteration's number.

A function that is mapped over the records draws by seed, bundle, split and *page*, so that a bundle
can begin at any record: at most one page is computed again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy import random as numpys_random

from ....storage.errors import Corrupt
from ... import generators
from ...blocks import Block, Strings, merged, part
from ...errors import FailedPrecondition, ForebayError, PipelineError
from ...order import permuted_many
from ...proto.python_pb2 import PythonDataset
from ...structure import assemble, leaves
from . import manifest
from .formats import LARGE_BYTES, Ints, RecordFile, steps
from .known_formats import FORMATS
from .open_files import OpenFiles, of_the_system

PAGE = 64
"""Records after which a mapped function's random numbers begin anew."""

MOST_TRIES = 1 << 12
"""Parts of a file in which a damaged record is sought."""


class FileRecords:
    """The records of a PythonDataset of files."""

    def __init__(self, dataset: PythonDataset) -> None:
        """Raises what unpickling the mapped function raises."""
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
        self._seed: str | None = None  # of the bundle
        self._sought = 0
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
        if seed is None:
            self._order = self._manifest.seed, self._iteration
        else:
            of_read, _, epoch = map(int, seed.split())
            self._order = of_read, epoch

    def count(self, split: int) -> int:
        """The number of records of a split."""
        return self._manifest.cuts[split + 1] - self._manifest.cuts[split]

    def place(self, split: int, element: int) -> str:
        """Where a record of a split is, for messages."""
        record = self._manifest.cuts[split] + min(element, self.count(split) - 1)
        if self._manifest.shuffled:
            record = int(permuted_many(np.array([record]), int(self._starts[-1]), *self._order)[0])
        file = int(np.searchsorted(self._starts, record, "right")) - 1
        return f"record {record - self._starts[file]} of {self._manifest.files[file].path}"

    def seek(self, split: int, start: int) -> int:
        """The next call begins at a record of its split from which on `start` can be reached;
        returns its number there."""
        start = min(max(0, start), self.count(split))
        paged = self._seed is not None and start < self.count(split)
        self._sought = start - start % PAGE if paged else start
        return self._sought

    def __call__(self, split: int) -> Iterator[Any]:
        """The elements that the function makes of a split's records."""
        assert self._function is not None
        at, self._sought = self._sought, 0
        for block in self.blocks(split, at):
            columns = [component.elements() for component in block.components]
            for record in self._assemble(columns, block.count):
                if self._seed is not None and at % PAGE == 0:
                    page = f"{self._seed} {split} {at}"
                    random.seed(page)
                    numpys_random.seed(random.getrandbits(32))
                    self._generators.seed(page)
                yield self._function(record)
                at += 1

    def blocks(self, split: int, start: int = 0) -> Iterator[Block]:
        """The records of a split, without the first `start`. Raises FailedPrecondition for a file
        that was changed, and Corrupt."""
        first, stop = self._manifest.cuts[split] + start, self._manifest.cuts[split + 1]
        if first >= stop:
            return
        read = self._shuffled if self._manifest.shuffled else self._in_order
        try:
            yield from read(first, stop)
        except ForebayError as error:
            self.fault = error
            raise

    def _in_order(self, first: int, stop: int) -> Iterator[Block]:
        number = int(np.searchsorted(self._starts, first, "right")) - 1
        while first < stop:
            begin, end = int(self._starts[number]), min(stop, int(self._starts[number + 1]))
            if first < end:
                yield from self._read(number, first - begin, end - begin)
            first, number = max(first, end), number + 1

    def _read(self, number: int, first: int, stop: int) -> Iterator[Block]:
        file = self._files[number]
        blocks = file.read(first, stop)
        while first < stop:
            try:
                block = next(blocks)
            except ForebayError:
                raise
            except Exception as error:
                raise self._damaged(number, np.arange(first, stop), error) from error
            self._require_registered(number, block)
            first += block.count
            yield block

    def _shuffled(self, first: int, stop: int) -> Iterator[Block]:
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
                (self._take(int(number), records[places] - self._starts[number]), places)
                for number, places in zip(numbers, np.split(by_file, begins[1:]), strict=True)
            ]
            yield from _in_blocks(found, end - begin)

    def _take(self, number: int, records: Ints) -> Block:
        file = self._files[number]
        try:
            block = file.take(records)
        except ForebayError:
            raise
        except Exception as error:
            raise self._damaged(number, records, error) from error
        self._require_registered(number, block)  # merged, it would be cast
        return block

    def _damaged(self, number: int, records: Ints, error: Exception) -> ForebayError:
        """Names the first record that cannot be read, or the records that are read with it."""
        entry, file = self._manifest.files[number], self._files.pop(number)
        try:
            bad = None if of_the_system(error) else self._first_bad(file, records)
        finally:
            file.close()  # a library may give nothing more of it
        found, error = bad or (records, error)
        first, last = int(found.min()), int(found.max())
        if of_the_system(error):
            return FailedPrecondition(f"{entry.path} cannot be read: {_said(error)}")
        if bad is None:
            return FailedPrecondition(
                f"records {first} to {last} of {entry.path} cannot be read at once: "
                f"{_said(error)}. Register the files with smaller split_records, or write the file "
                "again"
            )
        said = f"record {first}" if first == last else f"a record from {first} to {last}"
        return Corrupt(
            f"{said} of {entry.path} cannot be read: {_said(error)}. Write the file "
            "again, or register the others without it",
            entry.path,
        )

    def _first_bad(self, file: RecordFile, records: Ints) -> tuple[Ints, Exception] | None:
        for group in itertools.islice(file.parts(records), MOST_TRIES):
            one_is_all = self._by_groups
            if (error := _failure(file, group[:1] if one_is_all else group)) is None:
                continue
            for record in () if one_is_all else group:
                if (alone := _failure(file, np.array([record]))) is not None:
                    return np.array([record]), alone
            return group, error
        return None

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


def _failure(file: RecordFile, records: Ints) -> Exception | None:
    try:
        file.take(records)
    except Exception as error:  # noqa: BLE001 - a library's reader may raise anything
        return error
    return None


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _nothing() -> None: ...

"""Reads ranges of the records of a dataset's files, in their order or shuffled. Finds the record
that cannot be read, and says what is wrong with it.

Records are numbered through all files. Shuffled, a range has ranks of a permutation of all records,
which needs no memory (service/order.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from ....storage.errors import Corrupt
from ...blocks import Block, Component, Strings, merged, part
from ...errors import FailedPrecondition, ForebayError, PipelineError
from ...order import permuted_many
from ...structure import leaves
from .formats import LARGE_BYTES, Ints, RecordFile, grouped, steps
from .manifest import Files, Manifest
from .open_files import FILES_AHEAD, OpenFiles, of_the_system
from .partitions import repeated

Numbered = tuple[Ints, Block]
"""Records, and each one's number in the order of all splits."""

MayLeaveOut = Callable[[int, int, int, str], bool]
"""Whether records that cannot be read may be left out: their file, the first one's number there,
how many, and why."""

Order = tuple[int, int]
"""Of shuffled records: the seed and the epoch."""


PART_RECORDS, MOST_TRIES = 64, 1 << 12
"""A damaged record is sought in so many parts of a file, of so many records."""


class RecordRanges:
    """The records of a manifest's files. For one thread."""

    def __init__(self, manifest: Manifest, may_leave_out: MayLeaveOut) -> None:
        self._manifest, self._may_leave_out = manifest, may_leave_out
        self._is_counted = manifest.is_counted
        package = manifest.options.get("package", "forebay")
        self._format = f"the format {manifest.format!r} of the package {package}"
        self._fields: list[tuple[str, str, list[int | None]]] = []  # of components
        for path, node in leaves(self._manifest.structure):
            splits, shape = node.get("ragged_rank", 0), node["shape"]
            dtype = node["ragged"] if splits else node["tensor"]
            self._fields += [(path, dtype, [None] * (len(shape) - splits) if splits else shape)]
            self._fields += [(path, "int64", [None])] * splits
        files = self._manifest.files
        assert isinstance(files, Files)  # as decoded
        about = ((of.records, of.size) for of in files.counts())
        counts, sizes = np.fromiter(about, np.dtype((np.int64, 2)), len(files)).T
        self.starts = np.append(0, np.cumsum(counts))  # each file's first record, and all records
        size = int(sizes.sum())
        self._record_bytes = size / max(1, int(self.starts[-1]))
        self.files = OpenFiles(self._manifest)

    def home(self, record: int, order: Order) -> tuple[int, int]:
        """The file of a record, and its number there."""
        if self._manifest.shuffled:
            record = int(permuted_many(np.array([record]), int(self.starts[-1]), *order)[0])
        file = int(np.searchsorted(self.starts, record, "right")) - 1
        return file, record - int(self.starts[file])

    def read(self, first: int, stop: int, order: Order) -> Iterator[Numbered]:
        """Raises FailedPrecondition for a file that was changed, and Corrupt."""
        if self._manifest.shuffled:
            return self._shuffled(first, stop, order)
        return self._in_order(first, stop)

    def _in_order(self, first: int, stop: int) -> Iterator[Numbered]:
        number = int(np.searchsorted(self.starts, first, "right")) - 1
        behind = int(np.searchsorted(self.starts, stop))
        while first < stop:
            begin, end, *then = np.minimum(stop, self.starts[number : number + 3]).tolist()
            self.files.plan(range(number, behind), then[0] - end if then else 0)
            if first < end:
                for at, block in self._read(number, first - begin, end - begin):
                    yield np.arange(begin + at, begin + at + block.count), block
            first, number = max(first, end), number + 1

    def _read(self, number: int, first: int, stop: int) -> Iterator[tuple[int, Block]]:
        """Blocks of consecutive records, each with its first one's number."""
        blocks = self.files[number].read(first, stop)
        while first < stop:
            try:
                block = self._completed(number, next(blocks))
            except ForebayError:
                raise
            except Exception as error:  # noqa: BLE001 - a library's reader may raise anything
                if isinstance(error, StopIteration) and not self._is_counted:
                    return
                most = stop if self._is_counted else first + MOST_TRIES * PART_RECORDS
                left = self._left_out(number, np.arange(first, min(stop, most)), error)
                yield from self._read(number, first, int(left.min()))
                first = int(left.max()) + 1
                blocks = self.files[number].read(first, stop)
                continue
            self._require_registered(number, block, first, range(stop - first + 1))
            yield first, block
            first += block.count

    def _shuffled(self, first: int, stop: int, order: Order) -> Iterator[Numbered]:
        total, (seed, epoch) = int(self.starts[-1]), order
        parts = steps(first, stop, self._record_bytes, LARGE_BYTES)
        if self.files.format.row_groups:
            parts = iter([(first, stop)])
        permuted = permuted_many(np.arange(first, stop), total, seed, epoch)
        for begin, end in parts:
            records = permuted[begin - first : end - first]
            by_file = grouped(self.starts, records)
            numbers, found = [number for number, _ in by_file], list[tuple[Block, Ints]]()
            for at, (number, places) in enumerate(by_file):
                self.files.plan(numbers[at : at + FILES_AHEAD])
                found.append(self._take(number, records[places] - self.starts[number], places))
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
                block = self._completed(number, self.files[number].take(records))
            except ForebayError:
                raise
            except Exception as error:  # noqa: BLE001 - a library's reader may raise anything
                good = ~np.isin(records, self._left_out(number, records, error))
                records, places = records[good], places[good]
                continue
            there = range(len(records), len(records) + 1)
            self._require_registered(number, block, int(records[0]), there)  # merged, it is cast
            return block, places
        return Block(0, ()), places

    def _completed(self, number: int, block: Block) -> Block:
        """With the columns that the name of the file's directory has."""
        values = self._manifest.files[number].values
        if not values:
            return block
        there, rest = {f"[{name!r}]": values[name] for name in values}, iter(block.components)
        return Block(
            block.count,
            tuple(
                repeated(dtype, there[path], block.count) if path in there else next(rest)
                for path, dtype, _ in self._fields
            ),
        )

    def _left_out(self, number: int, records: Ints, error: Exception) -> Ints:
        """Those of the records that are left out, as they cannot be read: the first one, or what is
        read with it. Raises ForebayError if they may not be, which names the first one."""
        path, file = self._manifest.files[number].path, self.files[number]
        self.files.require_same(number)  # else it is no record's fault
        row_groups = self.files.format.row_groups
        try:
            bad = None if of_the_system(error) else _first_bad(file, records, row_groups)
            found, error = bad or (records, error)
            first, last = int(found.min()), int(found.max())
            why = " ".join(str(error).split())[:300] or type(error).__name__
            if of_the_system(error):
                raise FailedPrecondition(f"{path} cannot be read: {why}") from error
            if bad is None:
                raise FailedPrecondition(
                    f"records {first} to {last} of {path} cannot be read at once: {why}. Register "
                    "the files with smaller split_records, or write the file again"
                ) from error
            whole = file.group_of(first) if row_groups else range(first, last + 1)
            is_whole = row_groups or first == last  # else other reasons cannot be excluded
            if is_whole and self._may_leave_out(number, whole.start, len(whole), why):
                return found
            which = f"record {first}" if first == last else f"a record from {first} to {last}"
            raise Corrupt(
                f"{which} of {path} cannot be read: {why}. Write the file again, register the "
                'others without it, or leave out what cannot be read with on_error="skip"'
            ) from error
        finally:
            if self.files.format.native:  # it may give nothing more of it
                self.files.pop(number).close()

    def _require_registered(self, number: int, block: Block, first: int, counts: range) -> None:
        """Raises PipelineError if records of a file, from this one on, are of other types than were
        registered, or not as many as these."""
        path, columns = self._manifest.files[number].path, [*map(column_facts, block.components)]
        rows = [count for _, count, _ in columns]
        if block.count not in counts or rows != [block.count] * len(self._fields):
            raise PipelineError(
                "INTERNAL",
                f"{self._format} gave {block.count} records from record {first} of {path} on, in "
                f"{len(rows)} columns of {rows}, where {counts[0]} to {counts[-1]} were to come in "
                f"{len(self._fields)}: mend it",
            )
        for (name, dtype, shape), (found, _, shapes) in zip(self._fields, columns, strict=True):
            if (found, shapes.shape[1]) != (dtype, len(shape)) or any(
                size is not None and (sizes != size).any()
                for size, sizes in zip(shape, shapes.T, strict=True)
            ):
                raise PipelineError(
                    "INVALID_ARGUMENT",
                    f"{self._format} gave records from record {first} of {path} on, with "
                    f"{name or 'elements'} of {found} in shapes {shapes[:3].tolist()}, and they "
                    f"were registered with {dtype} in {shape}: write files of one schema, or mend "
                    "the format",
                )


def column_facts(component: Component) -> tuple[str, int, Ints]:
    """Its dtype, how many rows it has, and their shapes, or the one of all."""
    values, shapes = component.values, component.shapes
    array = values.lengths if isinstance(values, Strings) else values
    found = "string" if isinstance(values, Strings) else values.dtype.name
    if shapes is None:
        return found, len(array), np.array([array.shape[1:]], np.int64)
    return found, len(shapes), shapes


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


def _first_bad(file: RecordFile, records: Ints, row_groups: bool) -> tuple[Ints, Exception] | None:
    for group in itertools.islice(_groups(file, records, row_groups), MOST_TRIES):
        if (error := _failure(file, group[:1] if row_groups else group)) is None:
            continue
        for record in () if row_groups else group:
            if (alone := _failure(file, np.array([record]))) is not None:
                return np.array([record]), alone
        return group, error
    return None


def _groups(file: RecordFile, records: Ints, row_groups: bool) -> Iterator[Ints]:
    """The records, in parts that are read at once."""
    if not row_groups:
        yield from (records[at : at + PART_RECORDS] for at in range(0, len(records), PART_RECORDS))
        return
    while len(records):
        is_in = records < file.group_of(int(records.min())).stop
        yield records[is_in]
        records = records[~is_in]


def _failure(file: RecordFile, records: Ints) -> Exception | None:
    try:
        file.take(records)
    except Exception as error:  # noqa: BLE001 - a library's reader may raise anything
        return error
    return None

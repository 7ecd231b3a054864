"""What a format of files is to the rest of Forebay, and what formats have in common."""

from __future__ import annotations

import itertools
import json
import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ...blocks import Array, Block, Component, Strings
from ...errors import InvalidArgument
from .manifest import MANY

if TYPE_CHECKING:
    from .byte_sources import ByteSource

Ints = npt.NDArray[np.int64]
Node = dict[str, Any]
"""Of a structure (structure.py, docs/api/formats.md)."""
Options = dict[str, Any]
"""A format's options (`Format.options`) by name, as far as they were given; and "structure", in
JSON, of what all registered files have together, for `open`."""

FIRST_BYTES, LATER_BYTES, LARGE_BYTES = 256 << 10, 2 << 20, 8 << 20
"""About the size of a range's first block, and of later ones. Blocks are large where a block costs
much: of shuffled records, of which each file gives a few, and of many columns."""

TEXT: Node = {"tensor": "string", "shape": []}


class Damaged(ValueError):
    """A record, or a file, is not what its format says; the message says what is wrong."""


WRONG = (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error, EOFError)
"""What wrong bytes make of what is computed of them."""


class Facts(NamedTuple):
    """What a file has. Formats of other packages give the first two or three."""

    records: int
    structure: Node  # of a record
    cuts: Sequence[int] = ()
    """Before which records a split may begin, if not before any: with 0 and `records`."""
    times: Mapping[str, str] = {}  # columns of time, and what they are
    warning: str = ""  # what may not be meant so
    left_out: int = 0  # records that lack a column, and do not count
    absent: Collection[str] | None = None  # columns that no record has; None: it is not known
    packed: str = ""  # how the file is compressed, of a stream
    beside: tuple[int, str] | None = None  # of FileEntry


class RecordFile(Protocol):
    """An open file. Records are numbered from 0. One thread uses it.

    A block has a component for each column of the structure, sorted by name. Methods raise Damaged
    for wrong bytes, OSError of the system, or whatever a library raises.
    """

    def read(self, first: int, stop: int) -> Iterator[Block]:
        """Records `first` to `stop - 1` in order, in blocks of LATER_BYTES to LARGE_BYTES."""

    def take(self, records: Ints) -> Block:
        """The records of these numbers, in this order. `records` is int64 of shape (n,), n >= 1,
        in any order; the block has n records."""

    def group_of(self, record: int) -> range:
        """The records that are decoded together with this one, and damaged with it."""

    def close(self) -> None:
        """It, and its source."""


class Format(NamedTuple):
    """A format of files, as an entry point of the group `forebay.formats` names it."""

    suffixes: tuple[str, ...]
    """In lower case, with the dot: of files that are sought in a directory."""
    matches: Callable[[bytes], bool]
    """Whether a file that begins with these up to 512 bytes is of this format."""
    inspect: Callable[[ByteSource, Options], Facts]
    """Its number of records and their types; whoever calls closes the source. Raises Damaged,
    InvalidArgument, OSError."""
    open: Callable[[ByteSource, Options], RecordFile]
    """The open file, which closes the source. Where it raises (as `inspect`), it has not."""
    native: bool = False
    """A library in C++ reads it, which damaged bytes may crash: `inspect` runs in a process of its
    own, and a file is opened again after an error."""
    row_groups: bool = False
    """Records are decoded in groups, so that a single one costs its whole group (`group_of`)."""
    options: tuple[str, ...] = ()
    """Which of these arguments of `register_files` it has, as others are refused: "columns" (with
    "alternatives" also a dict of them), "partitioning", "fill", "nulls", "missing", "index_dir",
    "tokens", "count".

    Each is in Options by its name, where it is not the default, but for two. "partitioning" never
    is: its columns are put beside those that the format reads. With missing="skip", what would be
    "columns" is "whole" instead, for `inspect` [] where none were given."""
    reads_ends: bool = False
    """`inspect` reads a part of the file, such as its end, so that many are looked at at once."""
    ambiguous: bool = False
    """Suffixes are those of other files, too, and count only where `format` names this one."""


class RandomAccessFile(ABC):
    """A RecordFile that reads any record as fast as the next one. Subclasses implement `take`."""

    held_bytes = 0
    """In memory or a temporary file while it is open. Files with many are closed early."""

    def __init__(self, source: ByteSource, record_bytes: float) -> None:
        """`record_bytes` are a record's in the mean, by which `read` cuts blocks."""
        self.source, self._record_bytes = source, record_bytes

    @abstractmethod
    def take(self, records: Ints) -> Block: ...

    def offsets(self, first: int, stop: int) -> Sequence[int] | Ints:
        """Where records `first` to `stop - 1` begin, in bytes. What would follow the last record
        begins where that ends. Empty if it is not known: then nothing is read ahead."""
        return ()

    def pieces(self, records: Ints) -> Iterator[bytes | memoryview]:
        """The bytes of each record, by `offsets`. Raises Damaged."""
        return pieces(self.source, self.offsets, records)

    def plan(self, first: int, stop: int) -> None:
        """Records `first` to `stop - 1` will be read."""
        if ends := [*self.offsets(first, first + 1), *self.offsets(stop, stop + 1)]:
            self.source.plan([(int(ends[0]), int(ends[1]))])

    def read(self, first: int, stop: int) -> Iterator[Block]:
        self.plan(first, stop)
        for begin, end in self.steps(first, stop):
            yield self.take(np.arange(begin, end))

    def steps(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Parts of a range that are a block each."""
        return steps(first, stop, self._record_bytes)

    def group_of(self, record: int) -> range:
        return range(record, record + 1)

    def close(self) -> None:
        self.source.close()


def steps(
    first: int, stop: int, record_bytes: float, most_bytes: int = LATER_BYTES
) -> Iterator[tuple[int, int]]:
    """Parts of a range, of about FIRST_BYTES and up to `most_bytes`: (begin, end)."""
    size = FIRST_BYTES
    while first < stop:
        end = min(stop, first + max(1, int(size / max(1.0, record_bytes))))
        yield first, end
        first, size = end, min(2 * size, most_bytes)


def pieces(
    source: ByteSource, offsets: Callable[[int, int], Sequence[int] | Ints], records: Ints
) -> Iterator[bytes | memoryview]:
    """The bytes from offset n up to offset n + 1, for each n. `offsets` has those of a range.
    Raises Damaged, and what `offsets` raises."""
    for places in runs(source, offsets, records):
        start = places[0]
        data = read_at(source, start, places[-1] - start)
        for a, b in itertools.pairwise(places):
            if not start <= a <= b:
                raise Damaged(f"it ends at byte {b}, before its begin, {a}: its index is wrong")
            yield data[a - start : b - start]


def runs(source: ByteSource, offsets: Callable[[int, int], Any], records: Ints) -> list[Any]:
    """The offsets of consecutive records, for each such run. Several runs are planned."""
    ends = [0, *(np.flatnonzero(np.diff(records) != 1) + 1).tolist(), len(records)]
    found = [
        offsets(int(records[begin]), int(records[end - 1]) + 2)
        for begin, end in itertools.pairwise(ends)
    ]
    if len(found) > 1:
        source.plan((int(places[0]), int(places[-1])) for places in found)
    return found


def grouped(starts: Ints, records: Ints) -> list[tuple[int, Ints]]:
    """The groups that have these records, each with the places of its own among them. Group n has
    the records from `starts[n]` on."""
    groups = np.searchsorted(starts, records, "right") - 1
    by_group = np.argsort(groups, kind="stable")
    numbers, begins = np.unique(groups[by_group], return_index=True)
    return [*zip(numbers.tolist(), np.split(by_group, begins[1:]), strict=True)]


def read_at(source: ByteSource, start: int, size: int) -> bytes | memoryview:
    """Raises Damaged if the file ends before."""
    if size < 0:
        raise Damaged(f"it has {size} bytes from byte {start} on: what says so is wrong")
    data = source.read(start, size) if size <= source.size - start else b""
    if len(data) < size:  # also if it was cut since
        there = len(data) or min(size, source.size - start)  # a stream knows its size at its end
        raise Damaged(f"the file ends {size - there} bytes before it")
    return data


def named(structure: Node, above: str = "") -> dict[str, Node]:
    """The tensors of dicts in dicts, by dotted names."""
    found: dict[str, Node] = {}
    for name, node in structure.get("dict", ()):
        found |= named(node, f"{above}{name}.") if "dict" in node else {above + name: node}
    return found


def dict_of(columns: dict[str, Node]) -> Node:
    return {"dict": [[name, columns[name]] for name in sorted(columns)]}


def texts(values: Sequence[bytes]) -> Component:
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    return Component(Strings(lengths, np.frombuffer(b"".join(values), np.uint8)))


def of_rows(values: Array | Strings, counts: Ints, inner: list[int]) -> Component:
    """Of each row so many values, or arrays of these inner dimensions."""
    if (counts != counts[:1]).any():
        shapes = [counts, *(np.full(len(counts), size) for size in inner)]
        return Component(values, np.column_stack(shapes))
    shape = (len(counts), *counts[:1].tolist(), *inner)
    if isinstance(values, Strings):
        return Component(Strings(values.lengths.reshape(shape), values.data))
    return Component(values.reshape(shape))


def chosen(path: str, there: Sequence[str], options: Options) -> list[str]:
    """The columns to read, of those that are there, sorted; others are "outside", in the names of
    directories. Raises InvalidArgument."""
    names, outside = options.get("columns"), options.get("outside", ())
    names = {*there, *outside} if names is None else {*names}
    if missing := [name for name in names if name not in there and name not in outside]:
        raise InvalidArgument(
            f"{path} has no columns {few(missing)}: give some of {few(sorted({*there, *outside}))}"
        )
    top = {*there, *(name.partition(".")[0] for name in there)}
    if both := [name for name in outside if name in names and name in top]:
        raise InvalidArgument(
            f"{path} has columns {few(both)}, and so has its directory's name: give "
            "partitioning=None for the file's, or `columns` without them"
        )
    if twice := [name for name, count in Counter(there).items() if count > 1 and name in names]:
        raise InvalidArgument(
            f"{path} has several columns of one name, {few(twice)}: read others by `columns`, or "
            "rename them"
        )
    return sorted(names - {*outside})


def is_utf8(text: str) -> bool:
    """Whether it can be written: names of files and members may have other bytes."""
    return text == text.encode(errors="ignore").decode()


def few(names: Sequence[str]) -> str:
    """A list for messages, which names the first ones."""
    more = f" and {len(names) - MANY} more" if len(names) > MANY else ""
    return "[" + ", ".join(f"{name!r:.50}" for name in names[:MANY]) + f"]{more}"


def written(structure: Node) -> str:
    return json.dumps(structure, separators=(",", ":"))

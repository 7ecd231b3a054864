"""What a format of files is to the rest of Forebay, and what formats have in common."""

from __future__ import annotations

import itertools
import json
import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
"""Of a structure (structure.py)."""
Options = dict[str, Any]

FIRST_BYTES, LATER_BYTES, LARGE_BYTES = 256 << 10, 2 << 20, 8 << 20
"""About the size of a range's first block, and of later ones. Blocks are large where a block costs
much: of shuffled records, of which each file gives a few, and of many columns."""

PART_RECORDS = 64

TEXT: Node = {"tensor": "string", "shape": []}


class Damaged(ValueError):
    """A record, or a file, is not what its format says; the message says what is wrong."""


WRONG = (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error, EOFError)
"""What wrong bytes make of what is computed of them."""


class Facts(NamedTuple):
    """What a file has."""

    records: int
    structure: Node  # of a record
    cuts: Sequence[int] = ()
    """Before which records a split may begin, if not before any."""
    times: Mapping[str, str] = {}  # columns of time, and what they are
    warning: str = ""  # what may not be meant so
    left_out: int = 0  # records that lack a column, and do not count
    absent: Collection[str] | None = None  # columns that no record has; None: it is not known
    packed: str = ""  # how the file is compressed, of a stream


class RecordFile(Protocol):
    """An open file. Records count from 0. For one thread. Damage raises any Exception."""

    def read(self, first: int, stop: int) -> Iterator[Block]:
        """These records, in blocks of LATER_BYTES to LARGE_BYTES."""

    def take(self, records: Ints) -> Block:
        """Records in this order, which may be any; at least one."""

    def parts(self, records: Ints) -> Iterable[Ints]:
        """These records, in groups that are read at once."""

    def read_with(self, record: int) -> range:
        """The records that cannot be read if this one cannot."""

    def close(self) -> None: ...


class Format(NamedTuple):
    """A format."""

    suffixes: tuple[str, ...]  # of the files that are looked for in a directory
    is_it: Callable[[bytes], bool]  # by a file's first 512 bytes
    inspect: Callable[[ByteSource, Options], Facts]
    """Raises Damaged, OSError."""
    open: Callable[[ByteSource, Options], RecordFile]
    """It closes the source."""
    is_native: bool = False  # a library in C++ reads it
    by_groups: bool = False  # a record costs the reading of many around it
    takes: tuple[str, ...] = ()
    """Of register_files: "columns", "fill", "index_dir", "nulls", "tokens", "count"."""
    only_by_name: bool = False  # suffixes tell it only if `format` is given


class NumberedFile(ABC):
    """A file that gives any record as fast as the next one."""

    def __init__(self, record_bytes: float) -> None:
        self._record_bytes = record_bytes  # in the mean

    @abstractmethod
    def take(self, records: Ints) -> Block: ...

    @abstractmethod
    def close(self) -> None: ...

    def plan(self, first: int, stop: int) -> None:
        """These records will be read."""
        return

    def read(self, first: int, stop: int) -> Iterator[Block]:
        self.plan(first, stop)
        for begin, end in self.steps(first, stop):
            yield self.take(np.arange(begin, end))

    def steps(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Parts of a range that are a block each."""
        return steps(first, stop, self._record_bytes)

    def parts(self, records: Ints) -> Iterator[Ints]:
        return (records[at : at + PART_RECORDS] for at in range(0, len(records), PART_RECORDS))

    def read_with(self, record: int) -> range:
        return range(record, record + 1)


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
    source: ByteSource, offsets: Callable[[int, int], list[int]], records: Ints
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
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def few(names: Sequence[str]) -> str:
    """A list for messages, which names the first ones."""
    more = f" and {len(names) - MANY} more" if len(names) > MANY else ""
    return "[" + ", ".join(f"{name!r:.50}" for name in names[:MANY]) + f"]{more}"


def written(structure: Node) -> str:
    return json.dumps(structure, separators=(",", ":"))

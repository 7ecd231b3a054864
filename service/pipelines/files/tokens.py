"""Files of tokens, or of other numbers: a record is an array.

- An array that NumPy saved: a row, or a number.
- Megatron's `.bin`, with an `.idx` beside it that says where its sequences are: a sequence.
- Numbers alone, whose dtype is registered.

Of each with one dimension, a record may be a window of so many tokens, which follow one another, or
a document up to its last token, of which an index is made (record_index.py).
"""

from __future__ import annotations

import functools
import math
import struct
from array import array
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...block_limits import DTYPES
from ...blocks import Block, Component
from ...errors import FailedPrecondition, InvalidArgument
from . import record_index
from .byte_sources import ByteSource, opened, opened_now
from .formats import Damaged, Facts, Format, Ints, Options, RandomAccessFile, of_rows, read_at, runs
from .manifest import FileEntry, index_of

_NUMPY, _INDEX = b"\x93NUMPY", b"MMIDIDX\0\0"
_INDEX_HEAD = struct.Struct("<9sQBQQ")  # also version, dtype, and numbers of sequences, documents
_DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"]  # from 1
_CHUNK = 1 << 20  # tokens, or sequences, that are looked at at a time


class _Records(NamedTuple):
    """Of an open file."""

    number: int
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]
    places: Callable[[int, int], Ints]
    """Where records from the first one up to another begin; behind the last one is the end."""
    close: Callable[[], None]
    left_out: int = 0  # tokens
    beside: tuple[int, str] | None = None  # of FileEntry: the .idx file


def tokens_of(given: Any) -> dict[str, Any]:
    """Checked options: "dtype", and "window" or "eod". Raises InvalidArgument."""
    found = {**given} if isinstance(given, Mapping) else {}
    try:
        if {"dtype", "eod"} <= {*found}:
            np.array([found["eod"]], found["dtype"])
        if "dtype" in found:
            found["dtype"] = np.dtype(found["dtype"]).newbyteorder("=").name
        for name in {"window", "eod"} & {*found}:
            found[name] = int(found[name].__index__())
    except (TypeError, AttributeError, OverflowError):
        found = {}
    size = found.get("window", 1)
    odd = {*found} - {"dtype", "window", "eod"} or {"window", "eod"} <= {*found}
    if odd or not found or found.get("dtype", "int64") not in DTYPES or size < 1:
        raise InvalidArgument(
            f'tokens={given!r:.100}: give {{"dtype": "uint16"}} of numbers alone, and "window", of '
            'how many of them a record is, or "eod", the token that ends a document'
        )
    return found


def _opened(source: ByteSource, options: Options) -> _Records:
    """`close` leaves the source open. Raises Damaged, InvalidArgument, OSError."""
    given = options.get("tokens", {})
    begin = bytes(source.read(0, len(_INDEX)))
    if begin == _INDEX:
        raise InvalidArgument(f"{source.path} is an index: give the .bin files")
    if begin.startswith(_NUMPY):
        found = _of_numpy(source)
    elif "dtype" in given:
        dtype = np.dtype(given["dtype"])
        if source.size % dtype.itemsize:
            raise Damaged(f"it has {source.size} bytes, which are no numbers of {dtype}: it is cut")
        found = _even(source.size // dtype.itemsize, dtype, (), 0)
        if not {"window", "eod"} & {*given}:
            raise InvalidArgument(
                f'{source.path} does not say what a record is: give tokens={{…, "window": …}} or '
                '"eod"'
            )
    else:
        found = _of_megatron(source, options)
    if "window" not in given and "eod" not in given:
        return found
    if found.shape not in ((), (None,)):
        raise InvalidArgument(f"{source.path} has rows of {found.shape}: leave out `tokens`")
    (start,), end = found.places(0, 1), source.size
    total = (end - int(start)) // found.dtype.itemsize
    if window := given.get("window"):
        even = _even(total // window, found.dtype, (window,), int(start))
        return even._replace(close=found.close, left_out=total % window, beside=found.beside)
    found.close()
    documents = _of_documents(source, options, found.dtype, int(start))
    return documents._replace(beside=found.beside)


def _even(count: int, dtype: np.dtype[Any], shape: tuple[int, ...], start: int) -> _Records:
    size = math.prod(shape) * dtype.itemsize
    return _Records(count, dtype, shape, lambda a, b: start + size * np.arange(a, b), _nothing)


def _nothing() -> None: ...


def _of_numpy(source: ByteSource) -> _Records:
    with source.file() as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise InvalidArgument(f"{source.path} has no plain numbers: write it otherwise")
        of_2 = version == (2, 0)
        read = np.lib.format.read_array_header_2_0 if of_2 else np.lib.format.read_array_header_1_0
        shape, is_fortran, dtype = read(file)
        start = file.tell()
    if dtype.name not in DTYPES or not shape or (is_fortran and len(shape) > 1):
        raise InvalidArgument(
            f"{source.path} has an array of {dtype} and shape {shape}"
            f"{' in columns' if is_fortran else ''}: write numbers in rows"
        )
    if (lacking := start + math.prod(shape) * dtype.itemsize - source.size) > 0:
        raise Damaged(f"it lacks {lacking} bytes of its array of {shape}: it is cut")
    return _even(shape[0], dtype, shape[1:], start)


def _of_megatron(source: ByteSource, options: Options) -> _Records:
    path = index_of(source.path)
    registered, storage = source.entry.beside, options.get("storage", {})
    try:
        index = (
            opened(FileEntry(path, *registered, 0), storage)
            if registered
            else opened_now(path, storage)
        )
    except FileNotFoundError as error:
        raise InvalidArgument(
            f'{source.path} has no {path} beside it: give tokens={{"dtype": …, "window": …}}, or '
            '"eod"'
        ) from error
    try:
        magic, version, code, count, _ = _INDEX_HEAD.unpack(read_at(index, 0, _INDEX_HEAD.size))
        if (magic, version) != (_INDEX, 1) or not 1 <= code <= len(_DTYPES):
            raise Damaged(f"its index {path} is none of Megatron's, version 1")
        dtype = np.dtype(_DTYPES[code - 1])
        pointers = _INDEX_HEAD.size + 4 * count

        def places(first: int, stop: int) -> Ints:
            there = min(stop, count) - first
            found = np.frombuffer(read_at(index, pointers + 8 * first, 8 * there), "<i8")
            return np.append(found, np.full(stop - first - there, source.size))

        for first in range(0, count, _CHUNK) if not source.entry.records else ():
            stop = min(count, first + _CHUNK)
            sizes = read_at(index, _INDEX_HEAD.size + 4 * first, 4 * (stop - first))
            wanted = np.frombuffer(sizes, "<i4") * np.int64(dtype.itemsize)
            if (np.diff(places(first, stop + 1)) != wanted).any():
                raise Damaged(
                    f"its sequences {first} to {stop} do not follow one another to its end, as "
                    f"{path} has them: one of the two is cut, or of another one"
                )
        beside = index.entry.size, index.entry.fingerprint
        return _Records(count, dtype, (None,), places, index.close, beside=beside)
    except BaseException:
        index.close()
        raise


def _of_documents(
    source: ByteSource, options: Options, dtype: np.dtype[Any], start: int
) -> _Records:
    walk = functools.partial(_documents, dtype=dtype, start=start, eod=options["tokens"]["eod"])
    if not source.entry.records:  # it is being registered
        record_index.made(source, options, walk)
    index = record_index.indexed(source, options, walk)

    def places(first: int, stop: int) -> Ints:
        return np.array(index.offsets(first, stop), np.int64)

    return _Records(index.records, dtype, (None,), places, index.close)


def _documents(
    source: ByteSource, *, dtype: np.dtype[Any], start: int, eod: int
) -> tuple[array[int], bytes]:
    offsets, end = array("Q", [start]), source.size
    for at in range(start, end, _CHUNK * dtype.itemsize):
        data = read_at(source, at, min(_CHUNK * dtype.itemsize, end - at))
        ends = 1 + np.flatnonzero(np.frombuffer(data, dtype) == eod)
        offsets.frombytes((at + dtype.itemsize * ends).astype(np.uint64).tobytes())
    if offsets[-1] != end:  # the last one lacks its end
        offsets.append(end)
    return offsets, b""


def _inspect(source: ByteSource, options: Options) -> Facts:
    found = _opened(source, options)
    found.close()
    node = {"tensor": found.dtype.name, "shape": [*found.shape]}
    return Facts(found.number, node, left_out=found.left_out, beside=found.beside)


class TokenFile(RandomAccessFile):
    def __init__(self, source: ByteSource, options: Options) -> None:
        self._records, had = _opened(source, options), source.entry.records
        if self._records.number != had:  # an index is not compared if registered without `beside`
            self._records.close()
            raise FailedPrecondition(
                f"{source.path} has {self._records.number} records, and had {had} when it was "
                "registered: bring its index back, or register the files anew"
            )
        super().__init__(source, source.size / max(1, self._records.number))

    def offsets(self, first: int, stop: int) -> Ints:
        return self._records.places(first, stop)

    def take(self, records: Ints) -> Block:
        dtype, found, sizes = self._records.dtype, [], []
        for places in runs(self.source, self.offsets, records):
            found.append(read_at(self.source, int(places[0]), int(places[-1] - places[0])))
            sizes.append(np.diff(places))
        size = np.concatenate(sizes)
        if (size < 0).any() or (size % dtype.itemsize).any():
            raise Damaged("its index says that it ends within a token, or before its begin")
        values = np.frombuffer(b"".join(found), dtype)
        values = values.astype(dtype.newbyteorder("="), copy=False)
        if self._records.shape == (None,):
            return Block(len(records), (of_rows(values, size // dtype.itemsize, []),))
        return Block(len(records), (Component(values.reshape(len(records), *self._records.shape)),))

    def close(self) -> None:
        self._records.close()
        super().close()


FORMAT = Format(
    suffixes=(".bin", ".npy"),
    matches=lambda begin: begin.startswith((_NUMPY, _INDEX)),
    inspect=_inspect,
    open=TokenFile,
    options=("index_dir", "tokens"),
    ambiguous=True,
)

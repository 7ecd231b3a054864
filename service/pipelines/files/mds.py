"""Shards of MosaicML's MDS, in the layout of mosaicml-streaming 0.13. Compressed ones are
decompressed in memory as a whole.

A shard begins with the number of its samples and where each begins (u32), and says its columns in
JSON behind that. A sample has the sizes (u32) of the columns that have no fixed one, and then all
columns. It is a dict: numbers and arrays are decoded, everything else is bytes as they are written,
such as the bytes of a JPEG file.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...block_limits import MAX_RANK
from ...blocks import Array, Block, Component
from ...errors import ForebayError, InvalidArgument
from .byte_sources import Buffer, ByteSource, opened_now
from .formats import (
    TEXT,
    WRONG,
    Damaged,
    Facts,
    Format,
    Ints,
    Node,
    Options,
    RandomAccessFile,
    chosen,
    dict_of,
    few,
    read_at,
    texts,
)
from .streams import UnpackedFile, compression

INDEX = "index.json"

MOST_SHARD_BYTES = 4 << 30
"""That a compressed shard has, decompressed."""

MOST_HEADER_BYTES, MOST_INDEX_BYTES = 16 << 20, 256 << 20
"""Of JSON, in a shard and in an index. Parsed, it is several times as large."""

_BYTES = {"bytes", "str", "pil", "jpeg", "png", "json", "str_int", "str_float", "str_decimal"}
_SCALARS = {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)} | {
    f"float{bits}" for bits in (16, 32, 64)
}
_DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32",
    34: "float32", 64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
"""By the number that is written before an array."""


_ABOUT_COLUMNS = ("names", "encodings", "sizes")

_BAD = "cut or damaged. Write it again, or leave it out"


class MdsColumn(NamedTuple):
    """A column, of which an array may say dtype and shape itself."""

    name: str
    size: int | None  # of a value in bytes, if all have the same
    dtype: str | None  # None: an array says it; "string": bytes
    shape: tuple[int, ...] | None  # None: an array says it


def _column(path: str, name: str, encoding: str, size: int | None) -> MdsColumn:
    kind, _, how = encoding.partition(":")
    if encoding in _BYTES:
        return MdsColumn(name, size, "string", ())
    if encoding == "int":
        return MdsColumn(name, size, "int64", ())
    if encoding in _SCALARS:
        return MdsColumn(name, size, encoding, ())
    if kind == "ndarray":
        dtype, _, shape = how.partition(":")
        sizes = tuple(map(int, shape.split(","))) if shape else None
        if sizes and (len(sizes) >= MAX_RANK or not all(0 <= one < 1 << 32 for one in sizes)):
            raise Damaged(f"its column {name!r} is an array of shape {shape!r:.100}")
        if dtype not in {"", *_DTYPES.values()}:
            raise Damaged(f"its column {name!r} is an array of {dtype!r}")
        return MdsColumn(name, size, dtype or None, sizes)
    raise InvalidArgument(
        f"{path} has column {name!r} in encoding {encoding!r}, which cannot be read: read others "
        f"by `columns`, or write it as one of {sorted(_BYTES | _SCALARS)}, int or ndarray"
    )


@contextlib.contextmanager
def _wrong_means_damaged() -> Iterator[None]:
    """Whatever wrong bytes make of what is computed of them is Damaged."""
    try:
        yield
    except (Damaged, ForebayError):
        raise
    except WRONG as error:
        raise Damaged(f"it is no MDS shard ({error!r:.100}): it is {_BAD}") from error


class MdsShard(RandomAccessFile):
    def __init__(self, source: ByteSource, options: Options) -> None:
        """Raises Damaged, InvalidArgument and OSError."""
        self._opened, packed = source, source.entry.packed
        if packed is None:
            is_plain = source.path.endswith(".mds")  # its number of samples may look otherwise
            packed = "" if is_plain else compression(bytes(source.read(0, 4)))
        if packed:
            stream = UnpackedFile(source, packed)
            stream.kept_from = 0
            if stream.reaches(MOST_SHARD_BYTES + 1):
                raise Damaged(f"it decompresses to more than {MOST_SHARD_BYTES} bytes: split it")
            source = Buffer(source.entry, stream.read(0, stream.size))
            self.held_bytes = source.size
        self.source, self.packed = source, packed
        with _wrong_means_damaged():
            begin, size = self._read_header(source.path, options)
        super().__init__(source, (size - begin) / max(1, self.samples))

    def _read_header(self, path: str, options: Options) -> tuple[int, int]:
        """Returns where the samples begin, and end. Raises what it meets."""
        size = self.source.size
        self.samples = int.from_bytes(read_at(self.source, 0, 4), "little")
        head = 4 * (self.samples + 2)
        if head > size:
            raise Damaged(f"it has {size} bytes, and says {self.samples} samples: it is {_BAD}")
        self._offsets = np.frombuffer(read_at(self.source, 4, head - 4), "<u4")
        begin, end = int(self._offsets[0]), int(self._offsets[-1])
        if end != size or not head <= begin <= size:
            raise Damaged(f"it has {size} bytes, and says {end}: it is {_BAD}")
        if (self._offsets[:-1] > self._offsets[1:]).any():
            raise Damaged(f"its samples do not follow one another: it is {_BAD}")
        if begin - head > MOST_HEADER_BYTES:
            raise Damaged(f"its columns take {begin - head} bytes: it is {_BAD}")
        about = json.loads(bytes(read_at(self.source, head, begin - head)))
        columns = [*zip(*(about[f"column_{what}"] for what in _ABOUT_COLUMNS), strict=True)]
        names = [name for name, _, _ in columns]
        wanted = chosen(path, names, options)
        for name, _, length in columns:
            if not isinstance(name, str) or not (length is None or operator.index(length) >= 0):
                raise Damaged(f"it has a column {name!r} of {length!r} bytes: it is {_BAD}")
        self.columns = [
            _column(path, *of) if of[0] in wanted else MdsColumn(of[0], of[2], "string", ())
            for of in columns
        ]
        self.wanted = [names.index(name) for name in wanted]
        self._sizes = struct.Struct(f"<{sum(column.size is None for column in self.columns)}I")
        return begin, size

    def offsets(self, first: int, stop: int) -> list[int]:
        found: list[int] = self._offsets[first:stop].tolist()
        return found

    def take(self, records: Ints) -> Block:
        samples = [*map(self._values, self.pieces(records))]
        return Block(
            len(records),
            tuple(
                _component(self.columns[number], [values[number] for values in samples])
                for number in self.wanted
            ),
        )

    def _values(self, sample: bytes | memoryview) -> list[bytes]:
        """The sample's values, by column."""
        sample = bytes(sample)
        sizes = iter(self._sizes.unpack_from(sample))
        at, values = self._sizes.size, []
        for column in self.columns:
            stop = at + (next(sizes) if column.size is None else column.size)
            values.append(sample[at:stop])
            at = stop
        if at != len(sample):
            raise Damaged(f"its columns have {at} bytes, and it has {len(sample)}")
        return values

    def node(self, column: MdsColumn) -> Node:
        """The structure; what an array says itself is taken from the first sample."""
        if column.dtype == "string":
            return TEXT
        dtype, shape = column.dtype, column.shape
        if (dtype is None or shape is None) and self.samples:
            (sample,) = self.pieces(np.arange(1))
            array = _array(column, self._values(sample)[self.columns.index(column)])
            dtype = array.dtype.name
            if shape is None:
                return {"tensor": dtype, "shape": [None] * array.ndim}
        return {"tensor": dtype or "float32", "shape": [*(shape or ())]}

    def close(self) -> None:
        self._opened.close()


def _component(column: MdsColumn, values: Sequence[bytes]) -> Component:
    if column.dtype == "string":
        return texts(values)
    if column.dtype is not None and column.shape is not None:
        flat = np.frombuffer(b"".join(values), column.dtype)
        return Component(flat.reshape(len(values), *column.shape))
    arrays = [_array(column, value) for value in values]
    first = arrays[0]
    for array in arrays:
        if (array.dtype, array.ndim) != (first.dtype, first.ndim):
            raise Damaged(
                f"its column {column.name!r} is {array.dtype.name} in {array.ndim} dimensions, and "
                f"others are {first.dtype.name} in {first.ndim}: write arrays of one dtype and rank"
            )
    if all(array.shape == first.shape for array in arrays):
        return Component(np.stack(arrays))
    shapes = np.array([array.shape for array in arrays], np.int64)
    return Component(np.concatenate([array.ravel() for array in arrays]), shapes)


def _array(column: MdsColumn, data: bytes) -> Array:
    at, dtype, shape = 0, column.dtype, column.shape
    if dtype is None:
        dtype, at = _DTYPES[data[0]], 1
    if shape is None:
        dimensions, width = data[at] >> 2, 1 << (data[at] & 3)
        begin, at = at + 1, at + 1 + dimensions * width
        shape = tuple(np.frombuffer(data[begin:at], f"<u{width}").tolist())
    if (len(data) - at) != math.prod(shape) * np.dtype(dtype).itemsize:
        raise Damaged(f"its column {column.name!r} has {len(data) - at} bytes for {shape}")
    return np.frombuffer(data, dtype, offset=at).reshape(shape)


def _inspect(source: ByteSource, options: Options) -> Facts:
    shard = MdsShard(source, options)
    columns = [shard.columns[number] for number in shard.wanted]
    with _wrong_means_damaged():
        return Facts(
            shard.samples,
            dict_of({one.name: shard.node(one) for one in columns}),
            cuts=(0, shard.samples) if shard.packed else (),
            packed=shard.packed,
        )


def shards_of(index: str, options: Options | None = None) -> list[str]:
    """The shards' files that an index.json lists. Raises OSError."""
    with contextlib.closing(opened_now(index, options or {})) as file:
        if file.size > MOST_INDEX_BYTES:
            raise InvalidArgument(
                f"{index} has {file.size} bytes, above {MOST_INDEX_BYTES}: give the shards "
                "themselves"
            )
        try:
            shards = json.loads(bytes(file.read(0, file.size)))["shards"]
            kinds = {(shard["format"], shard["version"]) for shard in shards}
            packed = {str(shard["compression"] or "").partition(":")[0] for shard in shards}
            there = [shard["zip_data"] or shard["raw_data"] for shard in shards]
            names = [os.path.normpath(shard["basename"]) for shard in there]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidArgument(
                f"{index} is no index of MDS shards ({error!r:.100}): give `format`, if its "
                "directory has files of another one"
            ) from error
    if others := packed - {"", "gz", "zstd"}:
        raise InvalidArgument(
            f"{index} has shards compressed by {sorted(others)}: write them with "
            "compression='zstd', 'gz' or None"
        )
    if kinds - {("mds", 2)}:
        raise InvalidArgument(f"{index} has shards of {sorted(kinds)}: write MDS, version 2")
    if outside := [name for name in names if "\0" in name or name.split("/")[0] in ("", "..")]:
        raise InvalidArgument(
            f"{index} has shards {few(outside)}, which are not below its directory: list the files "
            "themselves, if they are meant"
        )
    return [os.path.join(os.path.dirname(index), name) for name in names]


FORMAT = Format(
    suffixes=(".mds",),
    matches=lambda begin: False,  # it has no mark: an index.json says that it is one
    inspect=_inspect,
    open=MdsShard,
    options=("columns",),
)

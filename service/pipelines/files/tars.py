"""WebDataset's tar files, uncompressed: members whose names differ in extensions are a sample.

A sample is a dict of bytes: a key for each extension, in lower case, and "__key__", the name before
the first dot of the file's name. Every sample of a dataset has the same keys. Where samples begin
is in an index (record_index.py).
"""

from __future__ import annotations

import functools
import io
import os
import re
import tarfile
from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from ...blocks import Block
from ...errors import InvalidArgument
from . import record_index
from .formats import (
    TEXT,
    Damaged,
    Facts,
    Format,
    Ints,
    NumberedFile,
    Options,
    chosen,
    dict_of,
    pieces,
    texts,
)

KEY = "__key__"
_WINDOW_BYTES = 1 << 20
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
_META = re.compile(r"__[^/]*__($|/)")  # webdataset leaves such members out, too


def _inspect(path: str, options: Options) -> Facts:
    offsets = record_index.made(path, options, functools.partial(_walk, path))
    if len(offsets) < 2:
        return Facts(0, dict_of({}))
    with open(path, "rb") as file:
        ((_, first),) = _samples(pieces(file.fileno(), offsets, np.arange(1)))
    return Facts(
        len(offsets) - 1, dict_of(dict.fromkeys(chosen(path, [KEY, *first], options), TEXT))
    )


def _walk(path: str, descriptor: int, size: int) -> array[int]:
    """Where samples begin. Raises Damaged for a cut file, for samples that have other extensions
    than the first one, and for two members of one name."""
    offsets = array("Q")
    end = 0
    last: str | None = None
    sample: list[str] = []
    first: tuple[str, list[str]] | None = None

    def require_equal() -> None:
        nonlocal first
        if last is None:
            return
        if len({*sample}) < len(sample):
            raise InvalidArgument(
                f"{path}: sample {last!r} has two members of one extension, of {sample}: leave "
                "one out, or rename it"
            )
        if first is None:
            first = last, sorted(sample)
        elif sorted(sample) != first[1]:
            raise InvalidArgument(
                f"{path}: sample {last!r} has {sorted(sample)}, and sample {first[0]!r} has "
                f"{first[1]}: write samples with the same extensions"
            )

    try:
        with (
            os.fdopen(os.dup(descriptor), "rb") as file,
            tarfile.open(fileobj=file, mode="r:") as tar,
        ):
            for member in _members(tar):
                if member.issparse():
                    raise InvalidArgument(
                        f"{path}: member {member.name!r} is sparse, so its bytes are not in one "
                        "piece: write the file again without --sparse"
                    )
                begin, end = end, member.offset_data + -(-member.size // 512) * 512
                if end > size:
                    raise Damaged(
                        f"its member {member.name!r} is cut: it ends at byte {end}, and the file "
                        f"at {size}. Write it again, or leave it out"
                    )
                if (named := _named(member)) is None:
                    continue
                key, extension = named
                if key != last:
                    require_equal()
                    last, sample = key, []
                    offsets.append(begin)
                sample.append(extension)
            require_equal()
        if os.pread(descriptor, 512, end).strip(b"\0"):  # tarfile takes it for the end
            raise tarfile.ReadError("no header of a member")
        for at in range(end, size, _WINDOW_BYTES):
            if os.pread(descriptor, _WINDOW_BYTES, at).strip(b"\0"):
                raise Damaged(
                    f"it goes on behind the end of the archive, byte {end}, perhaps with another "
                    "archive: write each into a file of its own"
                )
    except tarfile.TarError as error:
        raise Damaged(
            f"behind byte {end} it is no tar file ({error}): it is cut, damaged or compressed. "
            "Write it again uncompressed, or leave it out"
        ) from error
    offsets.append(end)
    return offsets


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Raises TarError."""
    for member in tar:
        if member.size < 0:  # tarfile would go back, and never end (CVE-2025-8194)
            raise tarfile.ReadError(f"member {member.name!r} has {member.size} bytes")
        tar.members = []  # type: ignore[attr-defined] # tarfile would keep all
        yield member


def _named(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """A member's key and extension; None if it belongs to no sample."""
    if not member.isreg() or _META.match(member.name):
        return None
    found = _NAME.fullmatch(member.name)
    return None if found is None else (found[1], found[2].lower())


def _samples(parts: Iterator[bytes]) -> Iterator[tuple[str, dict[str, bytes]]]:
    for part in parts:
        key, sample = "", dict[str, bytes]()
        try:
            with tarfile.open(fileobj=io.BytesIO(part), mode="r:") as tar:
                for member in _members(tar):
                    if (named := _named(member)) is not None:
                        if sample and named[0] != key:
                            raise Damaged(
                                f"it has samples {key!r} and {named[0]!r}: the index is of another "
                                "file. Remove the index, and register the files again"
                            )
                        key, extension = named
                        begin = member.offset_data
                        sample[extension] = part[begin : begin + member.size]
        except tarfile.TarError as error:
            raise Damaged(f"it is no part of a tar file ({error})") from error
        yield key, sample


class TarShard(NumberedFile):
    def __init__(self, path: str, options: Options) -> None:
        self._offsets = record_index.opened(path, options)
        self._columns: Sequence[str] = options["columns"]
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        super().__init__(int(self._offsets[-1]) / max(1, len(self._offsets) - 1))

    def take(self, records: Ints) -> Block:
        samples = [*_samples(pieces(self._descriptor, self._offsets, records))]
        columns = []
        wanted = {*self._columns} - {KEY}
        for _, sample in samples:
            if missing := wanted - sample.keys():
                raise Damaged(f"it lacks {sorted(missing)}: the header of a member is damaged")
        for name in self._columns:
            if name == KEY:
                columns.append(texts([key.encode(errors="surrogateescape") for key, _ in samples]))
            else:
                columns.append(texts([sample[name] for _, sample in samples]))
        return Block(len(samples), tuple(columns))

    def close(self) -> None:
        os.close(self._descriptor)


FORMAT = Format(
    suffixes=(".tar",),
    is_it=lambda begin: begin[257:262] == b"ustar",
    inspect=_inspect,
    open=TarShard,
)

"""WebDataset's tar files, uncompressed: members whose names differ in extensions are a sample.

A sample is a dict of bytes: a key for each extension, in lower case, and "__key__", the name before
the first dot of the file's name. A column may be the first of several extensions that a sample has.
Where samples begin is in an index (record_index.py), with which extensions they have.
"""

from __future__ import annotations

import functools
import io
import os
import re
import tarfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ...blocks import Array, Block
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
    dict_of,
    few,
    pieces,
    texts,
)

KEY = "__key__"
_OF_A_SAMPLE = {KEY, "__url__"}
"""What webdataset puts into each sample itself, and refuses as an extension."""

MOST_KINDS = 4096
"""Different sets of extensions that the samples of a file may have."""

_WINDOW_BYTES = 1 << 20
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
_META = re.compile(r"__[^/]*__($|/)")  # webdataset leaves such members out, too

_ADVICE = (
    "An extension is all that is behind the first dot of a name: name members like 000007.jpg and "
    "000007.seg.png"
)


class SampleKind(msgspec.Struct):
    """The samples that have the same extensions."""

    extensions: list[bytes]  # sorted, in UTF-8 or as they are
    first: int  # the number of one of them
    samples: int = 0

    def names(self) -> list[str]:
        return [os.fsdecode(extension) for extension in self.extensions]


class SampleKinds(msgspec.Struct):
    """What an index says of a file's samples."""

    kinds: list[SampleKind]
    of_each: bytes = b""  # the number of its kind (u16), by sample, if there are several
    left_out: int = 0  # members that are hidden files, or links, which have no bytes

    def lacking(
        self, columns: Mapping[str, Sequence[str]], fill: Mapping[str, Any]
    ) -> list[str | None]:
        """By kind, a column that its samples have neither an extension nor a value for."""
        needed = {name: {*extensions} for name, extensions in columns.items() if name not in fill}
        return [
            next((name for name, of in needed.items() if not of & {KEY, *kind.names()}), None)
            for kind in self.kinds
        ]


def sources(columns: Sequence[str] | Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """The extensions that a column may have, the first one first."""
    if isinstance(columns, Mapping):
        return {name: columns[name] for name in sorted(columns)}
    return {name: [name] for name in sorted(columns)}


def _inspect(path: str, options: Options) -> Facts:
    """Raises InvalidArgument for columns that samples lack."""
    walk = functools.partial(_walk, path)
    offsets, said = record_index.made(path, options, walk, says=True)
    if len(offsets) < 2:
        return Facts(0, dict_of({}))
    samples = msgspec.msgpack.decode(said, type=SampleKinds)
    there = sorted({KEY, *(name for kind in samples.kinds for name in kind.names())})
    columns = sources(options.get("columns") or options.get("whole") or there)
    fill = options.get("fill") or {}
    absent = {name for name, extensions in columns.items() if not {*extensions} & {*there}}
    for name, extensions in columns.items():
        if name in absent and name not in fill and "whole" not in options:
            raise InvalidArgument(
                f"{path} has no columns {few(extensions)}: give some of {few(there)}"
            )
    left_out = 0
    for kind, lack in zip(samples.kinds, samples.lacking(columns, fill), strict=True):
        if lack is not None and "whole" in options:
            left_out += kind.samples
        elif lack is not None:
            _refuse(path, offsets, samples.kinds, kind, columns[lack])
    return Facts(
        len(offsets) - 1 - left_out,
        dict_of(dict.fromkeys(columns, TEXT)),
        warning=_warning(path, offsets, samples),
        left_out=left_out,
        absent=absent,
    )


def _refuse(
    path: str,
    offsets: Array,
    kinds: Sequence[SampleKind],
    kind: SampleKind,
    extensions: Sequence[str],
) -> None:
    """Raises InvalidArgument: these samples have none of the extensions."""
    other = next(one for one in kinds if {*extensions} & {*one.names()})
    dots = f". {_ADVICE}" if any("." in name for name in extensions) else ""
    raise InvalidArgument(
        f"{path}: sample {_key(path, offsets, kind.first)!r:.100} has {few(kind.names())}, and "
        f"sample {_key(path, offsets, other.first)!r:.100} has {few(other.names())}: write samples "
        "with the same extensions, or give columns that all have, such as {'image': ['jpg', "
        f"'png']}}, `fill`, or missing=\"skip\"{dots}"
    )


def _warning(path: str, offsets: Array, samples: SampleKinds) -> str:
    """If names have numbers behind their first dot, or members are links."""
    extensions = samples.kinds[0].names()
    dotted = [name for name in extensions if "." in name]
    if len({re.sub(r"\d+", "0", name) for name in dotted}) < len(dotted):
        members = sum(kind.samples * len(kind.extensions) for kind in samples.kinds)
        return (
            f"{path}: {members} members make {len(offsets) - 1} records, as {few(dotted)} are "
            f"extensions of {_key(path, offsets, samples.kinds[0].first)!r:.100}. {_ADVICE}"
        )
    if samples.left_out:
        return (
            f"{path}: {samples.left_out} members are hidden files, or links, whose bytes are "
            "elsewhere, and are left out: write without them, with --dereference and "
            "--hard-dereference"
        )
    return ""


def _key(path: str, offsets: Array, number: int) -> str:
    """Of a sample."""
    with open(path, "rb") as file:
        ((key, _),) = _samples(pieces(file.fileno(), offsets, np.array([number])))
    return key


class _Grouping:
    """Groups members to samples."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._kinds: dict[tuple[str, ...], SampleKind] = {}
        self._of_keys: dict[str, SampleKind] = {}
        self._of_each = array("H")
        self._numbers: dict[tuple[str, ...], int] = {}  # of kinds
        self._key: str | None = None
        self._extensions: set[str] = set()
        self.offsets = array("Q")
        self.left_out = 0

    def add(self, key: str, extension: str, begin: int) -> None:
        """A member, which begins there. Raises InvalidArgument."""
        if key != self._key:
            self.end()
            self._key, self._extensions = key, set()
            self.offsets.append(begin)
        if extension in self._extensions:
            raise InvalidArgument(
                f"{self._path}: sample {key!r:.100} has two members of one extension, "
                f"{extension!r:.100}: leave one out, or rename it"
            )
        if extension in _OF_A_SAMPLE:
            raise InvalidArgument(
                f"{self._path}: sample {key!r:.100} has a member with the extension {extension!r}, "
                "which WebDataset has for itself (a duplicate file name): rename it"
            )
        self._extensions.add(extension)

    def end(self) -> None:
        """Of a sample. Raises InvalidArgument for members that are not sorted."""
        if self._key is None:
            return
        extensions = tuple(sorted(self._extensions))
        kind = self._kinds.get(extensions)
        if kind is None:
            if len(self._kinds) == MOST_KINDS:
                raise InvalidArgument(
                    f"{self._path} has samples of more than {MOST_KINDS} different sets of "
                    f"extensions, such as {few(extensions)}. {_ADVICE}"
                )
            kind = SampleKind([*map(os.fsencode, extensions)], len(self.offsets) - 1)
            self._numbers[extensions] = len(self._kinds)
            self._kinds[extensions] = kind
        kind.samples += 1
        self._of_each.append(self._numbers[extensions])
        if self._of_keys.setdefault(self._key, kind) is not kind:
            raise InvalidArgument(
                f"{self._path} is in the wrong order: members of sample {self._key!r:.100} do not "
                "follow one another. Write it again in the order of names, as `tar --sort=name` "
                "does"
            )

    def said(self) -> bytes:
        of_each = self._of_each.tobytes() if len(self._kinds) > 1 else b""
        return msgspec.msgpack.encode(SampleKinds([*self._kinds.values()], of_each, self.left_out))


def _walk(path: str, descriptor: int, size: int) -> tuple[array[int], bytes]:
    """Where samples begin, and which there are. Raises Damaged for a cut file, and InvalidArgument
    for members that make no samples."""
    found = _Grouping(path)
    end = 0
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
                if (named := _named(member)) is not None:
                    found.add(*named, begin)
                elif _NAME.fullmatch(member.name) and not member.isdir():
                    found.left_out += not _META.match(member.name)
            found.end()
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
    found.offsets.append(end)
    return found.offsets, found.said()


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
    if found is None or found[1].endswith("/"):  # a hidden file, such as d/._0.jpg of macOS
        return None
    return found[1], found[2].lower()


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
        self._offsets, said = record_index.opened(path, options)
        self._columns = sources(options.get("whole") or options["columns"])
        self._samples: Ints | None = None  # the records, if some samples are left out
        self._fill = {
            name: value.encode() if isinstance(value, str) else value
            for name, value in (options.get("fill") or {}).items()
        }
        if "whole" in options:
            samples = msgspec.msgpack.decode(said, type=SampleKinds)
            whole = [lack is None for lack in samples.lacking(self._columns, self._fill)]
            if not all(whole):
                self._samples = np.flatnonzero(
                    np.array(whole)[np.frombuffer(samples.of_each, "<u2")]
                )
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        super().__init__(int(self._offsets[-1]) / max(1, len(self._offsets) - 1))

    def take(self, records: Ints) -> Block:
        columns: dict[str, list[bytes]] = {name: [] for name in self._columns}
        samples = records if self._samples is None else self._samples[records]
        for key, sample in _samples(pieces(self._descriptor, self._offsets, samples)):
            sample[KEY] = os.fsencode(key)
            for name, extensions in self._columns.items():
                found = next((one for one in extensions if one in sample), None)
                if found is None and name not in self._fill:
                    raise Damaged(f"it lacks {few(extensions)}: the header of a member is damaged")
                columns[name].append(self._fill[name] if found is None else sample[found])
        return Block(len(records), tuple(map(texts, columns.values())))

    def close(self) -> None:
        os.close(self._descriptor)


FORMAT = Format(
    suffixes=(".tar",),
    is_it=lambda begin: begin[257:262] == b"ustar",
    inspect=_inspect,
    open=TarShard,
)

"""WebDataset's tar files, also compressed: members whose names differ in extensions are a sample.

A sample is a dict of bytes: a key for each extension, in lower case, and "__key__", the name before
the first dot of the file's name. A column may be the first of several extensions that a sample has.
Where samples begin is in an index (record_index.py), with which extensions they have.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tarfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ...block_limits import MAX_COMPONENTS
from ...blocks import Block
from ...errors import InvalidArgument
from . import record_index
from .byte_sources import ByteSource
from .formats import TEXT, WRONG, Damaged, Facts, Format, Ints, Options, dict_of, few, pieces, texts
from .streams import UnpackedFile, Walk, unpacked

KEY = "__key__"
_OF_A_SAMPLE = {KEY, "__url__"}
"""What webdataset puts into each sample itself, and refuses as an extension."""

MOST_KINDS = 4096
"""Different sets of extensions that the samples of a file may have."""

MOST_HEADER_BYTES, MOST_SHARED_BYTES = 64 << 10, 4 << 10
"""Of the long names and the pax headers before a member, and of the pax headers for all members."""

_WINDOW_BYTES = 1 << 20
_OF_NEXT = {
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
}
_DIGITS = re.compile(rb"\d{256}")
_RECORD = re.compile(rb"(\d{1,5}) [^=\n]+=")  # of a pax header, its begin
_META = re.compile(r"__[^/]*__($|/)")  # webdataset leaves such members out, too

_NO_KINDS = "its index says nothing of its samples: remove it, and register the files again"
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
        there = ({KEY, *kind.names()} for kind in self.kinds)
        return [
            next((name for name, of in needed.items() if of.isdisjoint(has)), None) for has in there
        ]


def _kinds(said: bytes, records: int) -> SampleKinds:
    try:
        found = msgspec.msgpack.decode(said, type=SampleKinds)
    except msgspec.MsgspecError as error:
        raise Damaged(_NO_KINDS) from error
    of_each = np.frombuffer(found.of_each, "<u2") if len(found.of_each) % 2 == 0 else np.empty(0)
    if not found.kinds or (
        len(found.kinds) > 1 and (len(of_each) != records or of_each.max() >= len(found.kinds))
    ):
        raise Damaged(_NO_KINDS)
    return found


def sources(columns: Sequence[str] | Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """The extensions that a column may have, the first one first."""
    if isinstance(columns, Mapping):
        return {name: columns[name] for name in sorted(columns)}
    return {name: [name] for name in sorted(columns)}


def _inspect(source: ByteSource, options: Options) -> Facts:
    """Raises InvalidArgument for columns that samples lack."""
    path, walk = source.path, _Grouping(source.path)
    source = unpacked(source, options, walk)
    if "whole" in options and isinstance(source, UnpackedFile):
        raise InvalidArgument(
            f"{path} is read as a stream, and missing='skip' needs an index of it: give `fill`, "
            "or write it uncompressed, and leave `count` out"
        )
    records, said = record_index.counted(source, options, walk)
    if not records:
        return Facts(0, dict_of({}))
    samples = _kinds(said, records if options.get("count", True) else walk.samples)
    there = {KEY, *(name for kind in samples.kinds for name in kind.names())}
    columns = sources(options.get("columns") or options.get("whole") or sorted(there))
    fill = options.get("fill") or {}
    absent = {name for name, extensions in columns.items() if there.isdisjoint(extensions)}
    for name, extensions in columns.items():
        if name in absent and name not in fill and "whole" not in options:
            raise InvalidArgument(
                f"{path} has no columns {few(extensions)}: give some of {few(sorted(there))}"
            )
    left_out = 0
    for kind, lack in zip(samples.kinds, samples.lacking(columns, fill), strict=True):
        if lack is not None and "whole" in options:
            left_out += kind.samples
        elif lack is not None:
            _refuse(source, options, samples.kinds, kind, columns[lack])
    return record_index.facts(
        source,
        records - left_out,
        dict_of(dict.fromkeys(columns, TEXT)),
        warning=_warning(source, options, records, samples),
        left_out=left_out,
        absent=absent,
    )


def _refuse(
    source: ByteSource,
    options: Options,
    kinds: Sequence[SampleKind],
    kind: SampleKind,
    extensions: Sequence[str],
) -> None:
    other = next(one for one in kinds if {*extensions} & {*one.names()})
    dots = f". {_ADVICE}" if any("." in name for name in extensions) else ""
    raise InvalidArgument(
        f"{source.path}: sample {_key(source, options, kind.first)!r:.100} has "
        f"{few(kind.names())}, and sample {_key(source, options, other.first)!r:.100} has "
        f"{few(other.names())}: write samples with the same extensions, or give columns that all "
        f"have, such as {{'image': ['jpg', 'png']}}, `fill`, or missing=\"skip\"{dots}"
    )


def _warning(source: ByteSource, options: Options, records: int, samples: SampleKinds) -> str:
    """If names have numbers behind their first dot, or members are links."""
    extensions = samples.kinds[0].names()
    dotted = [name for name in extensions if "." in name]
    if len({re.sub(r"\d+", "0", name) for name in dotted}) < len(dotted):
        members = sum(kind.samples * len(kind.extensions) for kind in samples.kinds)
        return (
            f"{source.path}: {members} members make {records} records, as {few(dotted)} are "
            f"extensions of {_key(source, options, samples.kinds[0].first)!r:.100}. {_ADVICE}"
        )
    if samples.left_out:
        return (
            f"{source.path}: {samples.left_out} members are hidden files, or links, whose bytes "
            "are elsewhere, and are left out: write without them, with --dereference and "
            "--hard-dereference"
        )
    return ""


def _key(source: ByteSource, options: Options, number: int) -> str:
    """Of a sample."""
    file = record_index.opened(source, options, _Grouping(source.path))
    with contextlib.ExitStack() as closing:
        closing.callback(file.close)
        ((key, _),) = _samples(pieces(source, file.offsets, np.array([number])))
    return key


class _Grouping(Walk):
    """Groups members to samples."""

    says = True

    def __init__(self, path: str) -> None:
        self._path = path

    def _begin(self) -> None:
        self._kinds: list[SampleKind] = []
        self._of_keys: dict[str, SampleKind] = {}
        self._of_each = array("H")
        self._numbers: dict[tuple[str, ...], int] = {}  # of kinds
        self._key: str | None = None
        self._extensions: set[str] = set()
        self._left_out = 0

    @property
    def samples(self) -> int:
        return len(self._of_each)

    def _add(self, key: str, extension: str) -> bool:
        """Whether a member begins a sample. Raises InvalidArgument."""
        if is_first := key != self._key:
            self._end()
            self._key, self._extensions = key, set()
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
        if len(self._extensions) > MAX_COMPONENTS:
            raise InvalidArgument(
                f"{self._path}: sample {key!r:.100} has more than {MAX_COMPONENTS} members, such "
                f"as {few(sorted(self._extensions))}, and no element has so many tensors. {_ADVICE}"
            )
        return is_first

    def _end(self) -> None:
        """Of a sample. Raises InvalidArgument for members that are not sorted."""
        if self._key is None:
            return
        extensions = tuple(sorted(self._extensions))
        number = self._numbers.setdefault(extensions, len(self._kinds))
        if number == len(self._kinds):
            if number == MOST_KINDS:
                raise InvalidArgument(
                    f"{self._path} has samples of more than {MOST_KINDS} different sets of "
                    f"extensions, such as {few(extensions)}. {_ADVICE}"
                )
            self._kinds.append(SampleKind([*map(os.fsencode, extensions)], self.samples))
        kind = self._kinds[number]
        kind.samples += 1
        self._of_each.append(number)
        if self._of_keys.setdefault(self._key, kind) is not kind:
            raise InvalidArgument(
                f"{self._path} is in the wrong order: members of sample {self._key!r:.100} do not "
                "follow one another. Write it again in the order of names, as `tar --sort=name` "
                "does"
            )

    def boundaries(self, source: ByteSource) -> Iterator[int]:
        """Raises Damaged for a cut file, and InvalidArgument for members that make no samples."""
        self._begin()
        path, end = self._path, 0
        try:
            with source.file() as file, _Archive.open(fileobj=file, mode="r:") as tar:
                for member in _members(tar):
                    if member.issparse():
                        raise InvalidArgument(
                            f"{path}: member {member.name!r} is sparse, so its bytes are not in "
                            "one piece: write the file again without --sparse"
                        )
                    begin, end = end, member.offset_data + -(-member.size // 512) * 512
                    if not source.reaches(end):
                        raise Damaged(
                            f"its member {member.name!r} is cut: it ends at byte {end}, and the "
                            f"file at {source.size}. Write it again, or leave it out"
                        )
                    if (named := _named(member)) is not None:
                        if self._add(*named):
                            yield begin
                    elif not member.isdir():
                        self._left_out += _is_hidden_or_link(member.name)
                self._end()
            if bytes(source.read(end, 512)).strip(b"\0"):  # tarfile takes it for the end
                raise tarfile.ReadError("no header of a member")
            at = end
            while window := bytes(source.read(at, _WINDOW_BYTES)):
                at += len(window)
                if window.strip(b"\0"):
                    raise Damaged(
                        f"it goes on behind the end of the archive, byte {end}, perhaps with "
                        "another archive: write each into a file of its own"
                    )
        except (Damaged, InvalidArgument):
            raise
        except (tarfile.TarError, *WRONG) as error:
            raise Damaged(
                f"behind byte {end} it is no tar file ({error}): it is cut or damaged. Write it "
                "again, or leave it out"
            ) from error
        yield end

    def said(self) -> bytes:
        of_each = self._of_each.tobytes() if len(self._kinds) > 1 else b""
        return msgspec.msgpack.encode(SampleKinds(self._kinds, of_each, self._left_out))


class _Member(tarfile.TarInfo):
    """Refuses what tarfile would take much memory or time for, before it has read it."""

    def _proc_member(self, tar: _Archive) -> tarfile.TarInfo:
        """As tarfile has subclasses override it. Raises TarError."""
        if self.type not in _OF_NEXT:
            tar.header_bytes = 0
        else:
            is_shared = self.type == tarfile.XGLTYPE
            tar.header_bytes += tarfile.BLOCKSIZE + self.size
            tar.shared_bytes += self.size * is_shared
            if (
                self.size < 0
                or tar.header_bytes > MOST_HEADER_BYTES
                or tar.shared_bytes > MOST_SHARED_BYTES
            ):
                raise tarfile.ReadError(
                    f"long names and pax headers have more than {MOST_HEADER_BYTES} bytes before a "
                    f"member, or {MOST_SHARED_BYTES} for all"
                )
            if self.type not in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
                _require_records(tar.fileobj.read(self.size))
                tar.fileobj.seek(self.offset + tarfile.BLOCKSIZE)
        return super()._proc_member(tar)  # type: ignore[misc,no-any-return] # not in its stubs


class _Archive(tarfile.TarFile):
    tarinfo = _Member
    header_bytes = shared_bytes = 0  # of headers for the next member, and for all


def _require_records(header: bytes) -> None:
    """As later versions of tarfile. Raises ReadError for what is no pax header, or of which tarfile
    would take a time or memory that grows with the square of its size."""
    if _DIGITS.search(header):
        raise tarfile.ReadError("a pax header has a number of very many digits")
    at = 0
    while at < len(header) and header[at]:
        begin = _RECORD.match(header, at)
        end = at + int(begin[1]) if begin else 0
        if begin is None or end <= begin.end() or header[end - 1 : end] != b"\n":
            raise tarfile.ReadError("a pax header is damaged")
        at = end


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        if member.size < 0:  # tarfile would go back, and never end (CVE-2025-8194)
            raise tarfile.ReadError(f"member {member.name!r:.100} has {member.size} bytes")
        tar.members = []  # type: ignore[attr-defined] # tarfile would keep all
        yield member


def _parts(name: str) -> tuple[str, str, str]:
    """Of a name: up to the last slash, then up to the first dot, and behind it."""
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash, stem, extension


def _is_hidden_or_link(name: str) -> bool:
    """Whether a member that belongs to no sample would by its name."""
    folder, stem, _ = _parts(name)
    return "." in name[len(folder) :] and bool(folder or stem) and not _META.match(name)


def _named(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """A member's key and extension; None if it belongs to no sample."""
    folder, stem, extension = _parts(member.name)
    if not member.isreg() or not stem or "." not in member.name[len(folder) :]:
        return None  # it may be a hidden file, such as d/._0.jpg of macOS
    return None if _META.match(member.name) else (folder + stem, extension.lower())


def _samples(parts: Iterator[bytes | memoryview]) -> Iterator[tuple[str, dict[str, bytes]]]:
    for piece in parts:
        part = bytes(piece)
        key, sample = "", dict[str, bytes]()
        try:
            with _Archive.open(fileobj=io.BytesIO(part), mode="r:") as tar:
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
        except Damaged:
            raise
        except (tarfile.TarError, *WRONG) as error:
            raise Damaged(f"it is no part of a tar file ({error})") from error
        yield key, sample


class TarShard(record_index.FileOfRecords):
    def __init__(self, source: ByteSource, options: Options) -> None:
        self._columns = sources(options.get("whole") or options["columns"])
        self._samples: Ints | None = None  # the records, if some samples are left out
        self._fill = {
            name: value.encode() if isinstance(value, str) else value
            for name, value in (options.get("fill") or {}).items()
        }
        super().__init__(source, options, _Grouping(source.path))
        if isinstance(self._file, record_index.RecordIndex) and "whole" in options:
            samples = _kinds(self._file.said(), self._file.records)
            whole = [lack is None for lack in samples.lacking(self._columns, self._fill)]
            if not all(whole):
                of_each = np.frombuffer(samples.of_each, "<u2")
                self._samples = np.flatnonzero(np.array(whole)[of_each])

    def take(self, records: Ints) -> Block:
        columns: dict[str, list[bytes]] = {name: [] for name in self._columns}
        samples = records if self._samples is None else self._samples[records]
        for key, sample in _samples(self.pieces(samples)):
            sample[KEY] = os.fsencode(key)
            for name, extensions in self._columns.items():
                found = next((one for one in extensions if one in sample), None)
                if found is None and name not in self._fill:
                    raise Damaged(
                        f"it lacks {few(extensions)}, which others have, or the header of a member "
                        "is damaged"
                    )
                columns[name].append(self._fill[name] if found is None else sample[found])
        return Block(len(records), tuple(map(texts, columns.values())))

    def plan(self, first: int, stop: int) -> None:
        if self._samples is not None:
            first, stop = int(self._samples[first]), int(self._samples[stop - 1]) + 1
        super().plan(first, stop)


FORMAT = Format(
    suffixes=(".tar", ".tgz"),
    matches=lambda begin: begin[257:262] == b"ustar",
    inspect=_inspect,
    open=TarShard,
    options=("columns", "alternatives", "fill", "missing", "index_dir", "count"),
)

"""Which files a pattern, a directory or a list of them are, and of which format."""

from __future__ import annotations

import collections
import glob
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ...errors import InvalidArgument, NotFound
from ..files import manifest, mds, record_index
from ..files.formats import is_utf8
from ..files.known_formats import format_names, guessed, in_directory, suffixes_of
from ..files.manifest import FileEntry
from ..files.stores import is_url
from . import remote_files
from .patterns import errors_named, expanded, fixed, unmatched
from .tables import TABLES

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class FilesFound(NamedTuple):
    """Files to register."""

    entries: list[FileEntry]  # of local files only their absolute paths
    places: list[str]
    """Where each is below what was given; as PyArrow has it, of a list of files their whole
    paths."""
    format: str


def resolved(files: Paths, named: str | None, options: dict[str, Any]) -> FilesFound:
    """The files, whose format may be `named`. `options` are storage_options. Raises
    InvalidArgument, NotFound, FailedPrecondition."""
    if named is not None and named not in format_names():
        raise InvalidArgument(
            f"format={named!r} must be one of {sorted({*format_names(), *TABLES})}, or install the "
            "package that brings it"
        )
    given = _given(files)
    is_list = not isinstance(files, str | os.PathLike)
    entries: list[FileEntry] = []
    places: list[str] = []
    for path in given:
        there = os.path.exists(path)
        root = os.path.dirname(path) if there else fixed(path)
        if not there and is_url(path):
            found, root = remote_files.resolved(path, named, options)
            entries += found
            root = "" if is_list else root
            places += [one.path.removeprefix(root).lstrip("/") for one in found]
            continue
        paths: list[str] = []
        for one in [path] if there else _matching(path):
            index = os.path.join(one, mds.INDEX)
            with errors_named(one):
                if os.path.basename(one) == mds.INDEX:
                    paths += mds.shards_of(one)
                elif named in (None, "mds") and os.path.isfile(index):
                    paths += mds.shards_of(index)
                elif os.path.isdir(one):
                    paths += in_directory(one, named)
                    root = one if there else root
                elif not one.endswith(record_index.SUFFIX):
                    paths.append(one)
                    root = "" if there and is_list else root
        for one in paths:
            require_utf8(one)
            if os.path.exists(one) and not os.path.isfile(one):  # such as a pipe, which may wait
                raise InvalidArgument(f"{one!r} is no file and no directory: leave it out")
        entries += [FileEntry(os.path.abspath(one), 0, "", 0) for one in paths]
        places += [os.path.relpath(one, root) if root else one for one in paths]
    if not entries:
        raise NotFound(
            f"{given} has no files here whose names end in {[*suffixes_of(named)]}: give a pattern"
        )
    with errors_named(entries[0].path):  # or the one that an error names
        real = [one.path if is_url(one.path) else os.stat(one.path)[1:3] for one in entries]
    same = collections.Counter(real)
    if twice := [one.path for one, of in zip(entries, real, strict=True) if same[of] > 1]:
        raise InvalidArgument(f"{twice[: manifest.MANY]} are given more than once: leave one out")
    format_ = named
    for entry in entries:
        with errors_named(entry.path):
            format_ = format_ or guessed(entry, options)
    if format_ is None:
        raise InvalidArgument(
            f"{entries[0].path} is of no format that its first bytes or its name tell: it may be "
            f"compressed; or give format, one of {format_names()}"
        )
    return FilesFound(entries, places, format_)


def _matching(pattern: str) -> list[str]:
    """Sorted; of braces in their order. Raises NotFound, also for one choice of braces."""
    found: dict[str, None] = {}
    for one in expanded(pattern):
        matching = sorted(glob.glob(one, recursive=True))
        if not matching:
            raise unmatched("file", one, glob.glob("*", root_dir=fixed(one) or None))
        found |= dict.fromkeys(matching)
    return [*found]


def _given(files: Any) -> list[str]:
    """Raises InvalidArgument."""
    if isinstance(files, str | os.PathLike):
        files = [files]
    advice = "give a pattern, a file, a directory, or a list of them"
    if isinstance(files, bytes | Mapping) or not isinstance(files, Iterable):
        raise InvalidArgument(f"files={files!r:.100}: {advice}")
    found = [os.fspath(one) if isinstance(one, os.PathLike) else one for one in files]
    for one in found:
        if not isinstance(one, str):
            raise InvalidArgument(f"files has {one!r:.100}, which is no path: {advice}")
    return [one.removeprefix("file://") for one in found]


def require_utf8(path: str) -> None:
    """Raises InvalidArgument."""
    if not is_utf8(os.path.abspath(path)):
        raise InvalidArgument(
            f"{path!r} has bytes that are no UTF-8 in its name or its directory's: rename it"
        )

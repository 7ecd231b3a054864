"""Which files a pattern, a directory or a list of them are, and of which format."""

from __future__ import annotations

import collections
import contextlib
import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import FailedPrecondition, InvalidArgument, NotFound
from ..pipelines.files import manifest, mds, record_index
from ..pipelines.files.known_formats import FORMATS, guessed, in_directory, suffixes_of

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def resolved(files: Paths, named: str | None) -> tuple[list[str], str]:
    """The files, and their format, which may be `named`. Raises InvalidArgument, NotFound."""
    if named is not None and named not in [*FORMATS]:
        raise InvalidArgument(f"format={named!r} must be one of {[*FORMATS]}")
    given = _given(files)
    paths: list[str] = []
    for path in given:
        matching = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
        if not matching and re.match(r"[A-Za-z][\w+.-]*://", path):
            raise InvalidArgument(
                f"{path!r} is a URL, and workers read files of a file system: give a path where "
                "they see it, mounted or copied"
            )
        if not matching:
            raise NotFound(f"no file matches {path!r} here")
        for one in matching:
            index = os.path.join(one, mds.INDEX)
            with errors_named(one):
                if os.path.basename(one) == mds.INDEX:
                    paths += mds.shards_of(one)
                elif named in (None, "mds") and os.path.isfile(index):
                    paths += mds.shards_of(index)
                elif os.path.isdir(one):
                    paths += in_directory(one, named)
                elif not one.endswith(record_index.SUFFIX):
                    paths.append(one)
    if not paths:
        raise NotFound(
            f"{given} has no files here whose names end in {[*suffixes_of(named)]}: give a pattern"
        )
    for path in paths:
        require_utf8(path)
        if os.path.exists(path) and not os.path.isfile(path):  # such as a pipe, which may wait
            raise InvalidArgument(f"{path!r} is no file and no directory: leave it out")
    same = collections.Counter(map(os.path.realpath, paths))
    if twice := [path for path in paths if same[os.path.realpath(path)] > 1]:
        raise InvalidArgument(f"{twice[: manifest.MANY]} are given more than once: leave one out")
    found = named
    for path in paths:
        with errors_named(path):
            found = found or guessed(path)
    if found is None:
        raise InvalidArgument(
            f"{paths[0]} is of no format that its first bytes or its name tell: it may be "
            f"compressed; or give format, one of {[*FORMATS]}"
        )
    return paths, found


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
    return found


def require_utf8(path: str) -> None:
    """Raises InvalidArgument."""
    try:
        os.path.abspath(path).encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{path!r} has bytes that are no UTF-8 in its name or its directory's: rename it"
        ) from error


@contextlib.contextmanager
def errors_named(path: str) -> Iterator[None]:
    """Raises NotFound or FailedPrecondition for an OSError."""
    try:
        yield
    except OSError as error:
        kind = NotFound if isinstance(error, FileNotFoundError) else FailedPrecondition
        raise kind(
            f"{error.filename or path} cannot be read: {error.strerror or error}. Make it "
            "readable, or leave it out"
        ) from error

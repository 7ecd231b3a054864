"""Which files a pattern, a directory or a list of them are, and of which format."""

from __future__ import annotations

import collections
import contextlib
import glob
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...errors import FailedPrecondition, InvalidArgument, NotFound
from ..files import manifest, mds, record_index
from ..files.known_formats import FORMATS, guessed, in_directory, suffixes_of

MOST_EXPANDED = 1 << 18
"""Names that braces stand for."""

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


_FIXED = re.compile(r"(?:[^*?\[{]*/)?")
"""The directories of a pattern that are the same for all that matches."""


def resolved(files: Paths, named: str | None) -> tuple[list[str], list[str], str]:
    """The files, where each is below what was given (as PyArrow has it, of a list of files their
    whole paths), and their format, which may be `named`. Raises InvalidArgument, NotFound."""
    if named is not None and named not in [*FORMATS]:
        raise InvalidArgument(f"format={named!r} must be one of {[*FORMATS]}")
    given = _given(files)
    is_list = not isinstance(files, str | os.PathLike)
    paths: list[str] = []
    places: list[str] = []
    for path in given:
        there = os.path.exists(path)
        root = os.path.dirname(path) if there else _FIXED.match(path)[0]  # type: ignore[index]
        if not there and re.match(r"[A-Za-z][\w+.-]*://", path):
            raise InvalidArgument(
                f"{path!r} is a URL, and workers read files of a file system: give a path where "
                "they see it, mounted or copied"
            )
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
            new = paths[len(places) :]
            places += [os.path.relpath(path, root) if root else path for path in new]
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
    return paths, places, found


def _matching(pattern: str) -> list[str]:
    """Sorted; of braces in their order. Raises NotFound, also for one choice of braces."""
    found: dict[str, None] = {}
    for one in expanded(pattern):
        matching = sorted(glob.glob(one, recursive=True))
        if not matching:
            raise NotFound(f"no file matches {one!r} here")
        found |= dict.fromkeys(matching)
    return [*found]


def expanded(pattern: str) -> list[str]:
    """With braces as in bash and WebDataset: `{a,b}` and `{000..127}`, also within others."""
    for opening in re.finditer(r"{", pattern):
        depth, commas = 0, [opening.start()]
        for at in range(opening.start(), len(pattern)):
            depth += {"{": 1, "}": -1}.get(pattern[at], 0)
            if not depth:
                commas.append(at)
                break
            if pattern[at] == "," and depth == 1:
                commas.append(at)
        else:
            continue  # it is not closed
        within = [pattern[a + 1 : b] for a, b in itertools.pairwise(commas)]
        choices = within if len(within) > 1 else _range(within[0])
        if choices:
            before, behind = pattern[: opening.start()], pattern[commas[-1] + 1 :]
            found: list[str] = []
            for choice in choices:
                found += [before + one for one in expanded(choice + behind)]
                _require_few(pattern, len(found))
            return found
    return [pattern]


def _require_few(pattern: str, names: int) -> None:
    """Raises InvalidArgument."""
    if names > MOST_EXPANDED:
        raise InvalidArgument(
            f"{pattern!r:.100} is more than {MOST_EXPANDED} names: give a pattern with *"
        )


def _range(text: str) -> list[str]:
    """Of `000..127`, also `0..9..3`; none of another text."""
    if (found := re.fullmatch(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?", text)) is None:
        return []
    first, last, step = int(found[1]), int(found[2]), abs(int(found[3] or 1)) or 1
    _require_few(f"{{{text}}}", abs(last - first) // step)
    digits = found[1].removeprefix("-"), found[2].removeprefix("-")
    padded = any(len(one) > 1 and one[0] == "0" for one in digits)
    width = max(len(found[1]), len(found[2])) if padded else 0
    step, end = (step, last + 1) if first <= last else (-step, last - 1)
    return [f"{number:0{width}}" for number in range(first, end, step)]


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

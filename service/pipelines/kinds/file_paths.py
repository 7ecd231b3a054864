"""Which files, or objects of a store, a pattern, a directory or a list of them are, and of which
format. Patterns have braces, as in bash, and `*`, as in glob."""

from __future__ import annotations

import collections
import contextlib
import difflib
import fnmatch
import glob
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ....storage.thread_pool import ThreadPool
from ...errors import FailedPrecondition, InvalidArgument, NotFound
from ..files import manifest, mds, record_index, stores
from ..files.formats import is_utf8
from ..files.known_formats import (
    TABLES,
    ends_in,
    format_names,
    guessed,
    in_directory,
    require_no_table,
    suffixes_of,
)
from ..files.manifest import FileEntry
from ..files.stores import is_url

_GLOB = re.compile(r"[*?\[]")
_AT_ONCE = 32  # requests

MOST_EXPANDED = 1 << 18
"""Names that braces stand for."""

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def resolved(
    files: Paths, named: str | None, options: dict[str, Any]
) -> tuple[list[FileEntry], list[str], str]:
    """The files, of local ones only their absolute paths; where each is below what was given, of a
    list their whole paths, as PyArrow has it; and their format, which may be `named`. `options` are
    storage_options. Raises InvalidArgument, NotFound, FailedPrecondition."""
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
            found, root = _objects(path, named, options)
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
    return entries, places, format_


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


def _objects(url: str, named: str | None, options: dict[str, Any]) -> tuple[list[FileEntry], str]:
    """Objects, sorted, and the directory that they were sought in. A directory and a pattern cost
    one LIST. Raises NotFound, InvalidArgument, FailedPrecondition."""
    stores.require_plain(url)
    with errors_named(url):
        url = stores.pinned(url)
    names = expanded(url)
    if any(map(_GLOB.search, names)):
        with contextlib.suppress(OSError):  # a name may have brackets
            if "[" in url:
                return [stores.head(url, options)], ""
        return matching(url, options), fixed(url)
    with errors_named(url):
        if len(names) > 1:
            return heads(names, options), fixed(url)
        if not url.endswith("/"):
            try:
                entry = stores.head(url, options)
            except FileNotFoundError:
                pass
            else:
                if os.path.basename(url) == mds.INDEX:
                    return heads(mds.shards_of(url, options), options), os.path.dirname(url)
                return [entry], ""
        url = url.rstrip("/")
        return _objects_below(url, named, options), url


def heads(
    urls: Sequence[str],
    options: dict[str, Any],
    known: Mapping[str, FileEntry] = MappingProxyType({}),
) -> list[FileEntry]:
    """The store is asked for those that are not `known`. Raises OSError."""
    with ThreadPool(_AT_ONCE, "forebay-heads") as pool:
        return [*pool.map(lambda url: known.get(url) or stores.head(url, options), urls)]


def matching(url: str, options: dict[str, Any]) -> list[FileEntry]:
    """Objects of a pattern. Raises NotFound, InvalidArgument, FailedPrecondition."""
    stores.require_plain(url)
    with errors_named(url):
        url = stores.pinned(url)
    found: dict[str, FileEntry] = {}
    lists: dict[str, list[FileEntry]] = {}
    for name in expanded(url):
        root = fixed(name)
        if root not in lists:
            with errors_named(url):
                lists[root] = stores.listed(root, options)
        pattern = name[len(root) :].split("/")
        objects = [
            entry
            for entry in lists[root]
            if entry.size
            and not entry.path.endswith(record_index.SUFFIX)
            and matches(entry.path[len(root) :].split("/"), pattern)
        ]
        if not objects:
            raise unmatched("object", name, (one.path.removeprefix(root) for one in lists[root]))
        found |= {entry.path: entry for entry in objects}
    return [*found.values()]


def _objects_below(folder: str, named: str | None, options: dict[str, Any]) -> list[FileEntry]:
    """The files of a format, or of any; names that begin with `.` or `_` are left out."""
    there = stores.listed(folder, options)
    by_path = {entry.path: entry for entry in there}
    if not there:
        raise NotFound(f"{folder} is no object, and has none below it")
    for entry in there:
        require_no_table(folder, entry.path[len(folder) + 1 :].split("/"))
    if named in (None, "mds") and (index := f"{folder}/{mds.INDEX}") in by_path:
        return heads(mds.shards_of(index, options), options, by_path)
    suffixes = suffixes_of(named)
    return [
        entry
        for entry in there
        if ends_in(entry.path, suffixes)
        and not re.search(r"/[._]", entry.path[len(folder) :])
        and entry.size
    ]


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


def fixed(pattern: str) -> str:
    """The directory, with its slash, of all that matches a pattern, which may be a URL."""
    return re.match(r"(\w[\w+.-]*://)?([^*?\[{]*/)?", pattern)[0]  # type: ignore[index]


def _require_few(pattern: str, names: int) -> None:
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


def matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a path are those of a pattern, by the rules of glob: `**` is any
    directories, and hidden names match only where the pattern has their dot."""
    if not pattern:
        return not path
    first, *rest = pattern
    if first == "**":
        shown = sum(1 for _ in itertools.takewhile(lambda name: name[:1] != ".", path))
        if not rest:
            return bool(path) and shown == len(path)
        return any(matches(path[at:], rest) for at in range(shown + 1))
    if not path or not fnmatch.fnmatchcase(path[0], first):
        return False
    return (path[0][:1] != "." or first[:1] == ".") and matches(path[1:], rest)


@contextlib.contextmanager
def errors_named(path: str) -> Iterator[None]:
    """Raises NotFound or FailedPrecondition for an OSError."""
    try:
        yield
    except OSError as error:
        kind = NotFound if isinstance(error, FileNotFoundError) else FailedPrecondition
        advice = "" if is_url(path) else ". Make it readable, or leave it out"
        raise kind(
            f"{error.filename or path} cannot be read: {error.strerror or error}{advice}"
        ) from error


def unmatched(what: str, pattern: str, there: Iterable[str]) -> NotFound:
    """For a pattern that none of the names that are `there`, below its directory, matches."""
    root, names = fixed(pattern), sorted(there)
    names = difflib.get_close_matches(pattern[len(root) :], names, 3) or names[:3]
    deeper = ". `**/` stands for directories of any depth" if names and "*" in pattern else ""
    return NotFound(f"no {what} matches {pattern!r}: {root or '.'} has {names}{deeper}")

"""Which objects of a store a URL is: an object, all below a directory, or those of a pattern."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ....storage.thread_pool import ThreadPool
from ...errors import NotFound
from ..files import mds, record_index, stores
from ..files.known_formats import ends_in, require_no_table, suffixes_of
from ..files.manifest import FileEntry
from .patterns import errors_named, expanded, fixed, matches, unmatched

_GLOB = re.compile(r"[*?\[]")
_AT_ONCE = 32  # requests


def resolved(url: str, named: str | None, options: dict[str, Any]) -> tuple[list[FileEntry], str]:
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
        return _below(url, named, options), url


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


def _below(folder: str, named: str | None, options: dict[str, Any]) -> list[FileEntry]:
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

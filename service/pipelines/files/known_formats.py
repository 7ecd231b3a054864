"""All formats, by the names that `register_files` takes."""

from __future__ import annotations

import os
from collections.abc import Iterator

from . import array_records, mds, parquet, tars, tfrecords
from .formats import Format

FORMATS: dict[str, Format] = {
    "arrayrecord": array_records.FORMAT,
    "parquet": parquet.FORMAT,
    "tfrecord": tfrecords.FORMAT,
    "webdataset": tars.FORMAT,
    "mds": mds.FORMAT,
}


def guessed(path: str) -> str | None:
    """The format of a file, by its first bytes, or else by its name. Raises OSError."""
    with open(path, "rb") as file:
        begin = file.read(512)
    for name, format_ in FORMATS.items():
        if format_.is_it(begin):
            return name
    return next((name for name, one in FORMATS.items() if path.endswith(one.suffixes)), None)


def in_directory(path: str, format: str | None) -> list[str]:  # noqa: A002
    """The files of a format, or of any, below a directory, sorted; hidden ones are left out, and
    each directory is read once, under one of the names that links give it. Raises OSError."""
    formats = [FORMATS[format]] if format else FORMATS.values()
    suffixes = tuple(suffix for one in formats for suffix in one.suffixes)
    return sorted(_below(path, suffixes, set()))


def _below(folder: str, suffixes: tuple[str, ...], seen: set[tuple[int, int]]) -> Iterator[str]:
    about = os.stat(folder)
    if (about.st_dev, about.st_ino) in seen:
        return
    seen.add((about.st_dev, about.st_ino))
    with os.scandir(folder) as entries:
        shown = [entry for entry in entries if not entry.name.startswith((".", "_"))]
    for entry in sorted(shown, key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _below(entry.path, suffixes, seen)
        elif entry.name.endswith(suffixes):
            yield entry.path

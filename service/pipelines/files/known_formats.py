"""All formats, by the names that `register_files` takes."""

from __future__ import annotations

import os

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
    """The files of a format, or of any, below a directory, sorted; hidden ones are left out."""
    formats = [FORMATS[format]] if format else FORMATS.values()
    suffixes = tuple(suffix for one in formats for suffix in one.suffixes)
    found = []
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
        found += [
            os.path.join(folder, name)
            for name in files
            if name.endswith(suffixes) and not name.startswith((".", "_"))
        ]
    return sorted(found)

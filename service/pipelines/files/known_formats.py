"""All formats, by the names that `register_files` takes: ours, and those of other packages."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from ....storage import other_packages
from ...errors import FailedPrecondition, InvalidArgument
from . import array_records, arrow_files, lance_tables, lines, mds, parquet, tars, tfrecords, tokens
from .byte_sources import RemoteFile, opened_now
from .formats import Damaged, Format, few
from .manifest import FileEntry
from .stores import is_url
from .streams import UnpackedFile, compression

log = logging.getLogger(__name__)

FORMATS: dict[str, Format] = {
    "arrayrecord": array_records.FORMAT,
    "parquet": parquet.FORMAT,
    "arrow": arrow_files.FORMAT,
    "tfrecord": tfrecords.FORMAT,
    "tokens": tokens.FORMAT,
    "webdataset": tars.FORMAT,
    "mds": mds.FORMAT,
    "lance": lance_tables.FORMAT,
    "jsonl": lines.JSON_FORMAT,
    "lines": lines.LINES_FORMAT,
}

GROUP = "forebay.formats"
"""The group of entry points by which other packages bring formats (docs/formats.md). An entry
point's name is the format's; it names a Format. Ours cannot be replaced."""


def format_names() -> list[str]:
    return [*dict.fromkeys([*FORMATS, *other_packages.names_of(GROUP)])]


def format_of(name: str, package: str = "") -> Format:
    """`package` is the one that brought it where the files were registered. Raises
    FailedPrecondition."""
    return FORMATS.get(name) or _of_other_package(name, package)


def package_of(name: str) -> str:
    """That brings the format; empty of ours."""
    entry = None if name in FORMATS else other_packages.find(GROUP, name)
    return other_packages.package_of(entry) if entry else ""


@functools.cache
def _of_other_package(name: str, package: str) -> Format:
    try:
        if (entry := other_packages.find(GROUP, name)) is None:
            raise FailedPrecondition(
                f"files of the format {name!r} are read by {package or 'a newer Forebay'}, which "
                "is not installed here: install it"
            )
        found = other_packages.load(entry)
    except other_packages.Unusable as error:
        raise FailedPrecondition(f"format {name!r}: {error}") from error
    if not isinstance(found, Format):
        raise FailedPrecondition(
            f"format {name!r}: {entry.value} of the package {other_packages.package_of(entry)} is "
            f"a {type(found).__name__}, and no Format; mend that package, or remove it"
        )
    known = {option for ours in FORMATS.values() for option in ours.options}
    no_suffixes = [one for one in found.suffixes if not one.startswith(".")]
    if wrong := [*sorted({*found.options} - known), *no_suffixes]:
        raise FailedPrecondition(
            f"format {name!r} of the package {other_packages.package_of(entry)} has {few(wrong)}, "
            "which are no options that a format may have, or suffixes without their dot: mend that "
            "package, or install the Forebay that it is for"
        )
    return found


def _all(format: str | None = None) -> dict[str, Format]:  # noqa: A002
    """Or the one of this name alone. Raises FailedPrecondition for that one; others that cannot be
    loaded are left out."""
    if format:
        return {format: format_of(format)}
    found = dict(FORMATS)
    for name in format_names()[len(FORMATS) :]:
        try:
            found[name] = format_of(name)
        except FailedPrecondition as error:
            log.warning("%s; files are not looked at for this format", error)
    return found


TABLE_SIGNS = {
    "_delta_log": ("Delta Lake", "delta"),
    "_versions": ("Lance", "lance"),
    ".hoodie": ("Apache Hudi", ""),
}
"""Which directory says that the files beside it are a table's, also former ones: its name, and
`format`. (Iceberg has none that others have not.)"""


TABLES = ("delta", "iceberg", "lance")
"""Names of `format` that are of a table."""


def guessed(entry: FileEntry, options: dict[str, Any]) -> str | None:
    """The format of a file, by its first bytes, or else by its name. `options` are storage_options.
    Raises OSError."""
    path = entry.path
    with contextlib.closing(
        RemoteFile(entry, options) if is_url(path) else opened_now(path, {})
    ) as file:
        begins = [bytes(file.read(0, 512))]
        if kind := compression(begins[0]):
            with contextlib.suppress(Damaged):  # it may be something else
                begins.append(UnpackedFile(file, kind).read(0, 512))

    def matching(some: dict[str, Format]) -> str | None:
        return next((name for b in begins for name, one in some.items() if one.matches(b)), None)

    if name := matching(FORMATS):  # others' packages are loaded if none of ours is it
        return name
    formats = _all()
    if name := matching(formats):
        return name
    named = {name: one.suffixes for name, one in formats.items() if not one.ambiguous}
    return next((name for name, suffixes in named.items() if ends_in(path, suffixes)), None)


def in_directory(path: str, format: str | None) -> list[str]:  # noqa: A002
    """The files of a format, or of any, below a directory, sorted; hidden ones are left out, and
    each directory is read once, under one of the names that links give it. Raises OSError, and
    InvalidArgument for a table, whose files are not all to be read."""
    return sorted(_below(path, suffixes_of(format), set()))


def suffixes_of(format: str | None) -> tuple[str, ...]:  # noqa: A002
    """Of the files of a format, or of any."""
    formats = [one for one in _all(format).values() if format or not one.ambiguous]
    return tuple(suffix for one in formats for suffix in one.suffixes)


def require_no_table(folder: str, names: Iterable[str]) -> None:
    """Raises InvalidArgument if some of the files there may be former ones."""
    if found := next((TABLE_SIGNS[name] for name in names if name in TABLE_SIGNS), None):
        name, kind = found
        alone = f"it alone, by format={kind!r}, or " if kind else ""
        raise InvalidArgument(
            f"{folder} is a table of {name}, whose log says which files it has now: register "
            f"{alone}{folder}/**/*.parquet for all that are there"
        )
    if "dataset_dict.json" in names:
        raise InvalidArgument(
            f"{folder} has several datasets of Hugging Face's, such as train and test: give the "
            "directory of one of them"
        )


def ends_in(name: str, suffixes: tuple[str, ...]) -> bool:
    """Also of a shard, data.tfrecord-00003-of-00010, and if it is compressed. Not caches of Hugging
    Face's datasets."""
    if re.search(r"(^|/)cache-[^/]*\.arrow$", name):
        return False
    packed = r"(\.(gz|zstd?))?"
    return re.sub(rf"{packed}(-\d+-of-\d+)?{packed}$", "", name.lower()).endswith(suffixes)


def _below(folder: str, suffixes: tuple[str, ...], seen: set[tuple[int, int]]) -> Iterator[str]:
    about = os.stat(folder)
    if (about.st_dev, about.st_ino) in seen:
        return
    seen.add((about.st_dev, about.st_ino))
    index = os.path.join(folder, mds.INDEX)
    if ".mds" in suffixes and os.path.isfile(index):
        yield from mds.shards_of(index)
        suffixes = tuple(suffix for suffix in suffixes if suffix != ".mds")
    with os.scandir(folder) as entries:
        there = [*entries]
    require_no_table(folder, [one.name for one in there])
    shown = [entry for entry in there if not entry.name.startswith((".", "_"))]
    for entry in sorted(shown, key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _below(entry.path, suffixes, seen)
        elif ends_in(entry.name, suffixes):
            yield entry.path
        elif entry.is_symlink():
            os.stat(entry.path)  # raises if it leads nowhere: a directory may have been meant

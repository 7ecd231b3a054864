"""Looks at files of records, one by one, and finds what they have together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ...errors import InvalidArgument
from ...structure import describe
from ..files import manifest, partitions
from ..files.formats import Facts, dict_of, few, is_utf8, named, written
from ..files.manifest import FileEntry
from .file_inspector import looked_at
from .patterns import errors_named

log = logging.getLogger(__name__)

_FILLS = {"b": bool, "i": int, "u": int, "f": int | float, "O": str | bytes}
"""What stands for a null, by the kind of dtype."""


def _require_fill(path: str, facts: Facts, fill: dict[str, Any]) -> None:
    """Raises InvalidArgument for a value that would be converted to another one, or is of a column
    that is not read."""
    nodes = named(facts.structure)
    for name, value in fill.items() if facts.records else ():
        if (node := nodes.get(name)) is None:
            raise InvalidArgument(
                f"fill has column {name!r}, and of {path} are read {few(sorted(nodes))}: leave it "
                "out, or read that column. A Parquet file has it: `fill` stands for nulls of it"
            )
        dtype = node.get("tensor") or node["ragged"]
        kind = "O" if dtype == "string" else np.dtype(dtype).kind
        if not isinstance(value, _FILLS[kind]) or (isinstance(value, bool) and kind != "b"):
            raise InvalidArgument(
                f"fill={{{name!r}: {value!r:.50}}} is no {dtype}, which that column of "
                f"{path} is: give one"
            )


def _require_names(path: str, structure: Any) -> None:
    """Raises InvalidArgument."""
    if odd := [name for name in named(structure) if not is_utf8(name)]:
        raise InvalidArgument(
            f"{path} has columns {few(odd)}, whose names are no UTF-8: rename them, or read others "
            "by `columns`"
        )


def inspected(
    files: Sequence[FileEntry], of: str, options: dict[str, Any], outside: partitions.Partitions
) -> tuple[list[FileEntry], Facts]:
    """The files, of which only objects of stores are looked at already, and what they have
    together. Raises InvalidArgument, Corrupt, NotFound."""
    if outside.nodes:
        options = options | {"outside": [*outside.nodes]}
    with contextlib.closing(looked_at(of, options, files)) as looked:
        return _together(files, of, options, outside, looked)


def _together(
    files: Sequence[FileEntry],
    of: str,
    options: dict[str, Any],
    outside: partitions.Partitions,
    looked: Iterator[tuple[FileEntry, Facts]],
) -> tuple[list[FileEntry], Facts]:
    entries: list[FileEntry] = []
    cuts: list[int] = []
    of_first: tuple[str, Any] | None = None
    times: Mapping[str, str] = {}
    fill = options.get("fill", {})
    wanted = options.get("columns", outside.nodes)
    nodes = {name: node for name, node in outside.nodes.items() if name in wanted}
    of_read = {name: fill[name] for name in fill if name in nodes or name not in outside.nodes}
    left_out = 0
    absent: set[str] | None = None  # columns that no file has
    is_cut = False  # of some files, a split cannot begin anywhere
    named = [entry.path for entry in files[: manifest.MANY]]
    for number, listed in enumerate(files):
        path = listed.path
        with errors_named(path):
            try:
                entry, facts = next(looked)
                of_file = nodes if facts.records else {}
                if of_file:
                    structure = dict_of({**dict(facts.structure["dict"]), **of_file})
                    facts = facts._replace(structure=structure)
                _require_names(path, facts.structure)
                _require_fill(path, facts, of_read)
                values = outside.values_of(number, path, of_file, fill)
            except OverflowError as error:
                raise InvalidArgument(
                    f"fill={fill!r:.100} does not fit the columns of {path}: {error}"
                ) from error
            cuts_of = [*facts.cuts] if options.get("nulls") == "drop" else []
            now = {"packed": facts.packed, "beside": facts.beside, "cuts": cuts_of}
            entries.append(
                msgspec.structs.replace(entry, records=facts.records, values=values, **now)
            )
        left_out += facts.left_out
        if facts.absent is not None:
            absent = {*facts.absent} if absent is None else absent & {*facts.absent}
        of_earlier = sum(cuts[-1:])
        cuts += [of_earlier + cut for cut in facts.cuts or (0, facts.records)]
        is_cut |= bool(facts.cuts)
        if not facts.records:
            continue
        if of_first is None:
            of_first, times = (path, facts.structure), facts.times
            if facts.warning:
                log.warning("%s", facts.warning)
        both: Any = of_first[1]
        if facts.structure != both:
            both = _common(facts.structure, both, widens=of == "jsonl")
        if both is None:
            ours, others = _differing(facts.structure, of_first[1])
            raise InvalidArgument(
                f"{path} has records {ours:.300}, and {of_first[0]} {others:.300}: register files "
                "of one schema together, or `columns` that they have in common"
            )
        of_first = of_first[0], both
        if facts.times != times:
            raise InvalidArgument(
                f"{path} has columns of time {facts.times}, and {of_first[0]} {times}: write one "
                "type, or read others by `columns`"
            )
    if absent:
        raise InvalidArgument(
            f"no sample of {named} has an extension of columns "
            f"{few(sorted(absent))}: correct `columns`"
        )
    if of_first is None:
        raise InvalidArgument(f"{named} have no records: give files that have some")
    total = sum(entry.records for entry in entries)
    if left_out and of == "tokens":
        log.warning("%d tokens are behind the last whole windows of their files", left_out)
    elif left_out:
        log.warning(
            "%d of %d %s lack a column, and are no records",
            left_out, left_out + total, "samples" if of == "webdataset" else "rows",
        )  # fmt: skip
    return entries, Facts(total, of_first[1], cuts if is_cut else ())


def _common(one: Any, other: Any, *, widens: bool) -> Any:
    """What two structures have in common, where sizes that differ are unknown, and integers may
    be floats; or None."""
    if "dict" in one and "dict" in other:
        columns, others = dict(one["dict"]), dict(other["dict"])
        if columns.keys() != others.keys():
            return None
        both = {n: _common(node, others[n], widens=widens) for n, node in columns.items()}
        return None if None in both.values() else dict_of(both)
    if widens and {one.get("tensor"), other.get("tensor")} == {"int64", "float64"}:
        one, other = one | {"tensor": "float64"}, other | {"tensor": "float64"}
    shapes = one.get("shape", ()), other.get("shape", ())
    if one | {"shape": ()} != other | {"shape": ()} or len({*map(len, shapes)}) > 1:
        return None
    return one | {"shape": [a if a == b else None for a, b in zip(*shapes, strict=True)]}


def _differing(one: Any, other: Any) -> tuple[str, str]:
    """Two structures in words, of which only the columns that differ."""
    if "dict" not in one or "dict" not in other:
        return f"of {describe(written(one))}", f"of {describe(written(other))}"
    mine, others = named(one), named(other)
    return _those(mine, others), _those(others, mine)


def _those(columns: dict[str, Any], others: dict[str, Any]) -> str:
    differ = {name: node for name, node in columns.items() if node != others.get(name)}
    lacks = sorted(others.keys() - columns.keys())
    said = [f"of {describe(written(dict_of(differ)))}"] if differ else []
    return " ".join([*said, f"without {few(lacks)}"] if lacks else said)

"""What is registered of files of records that can be read at any place, without TensorFlow."""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import InvalidArgument
from ...proto import forebay_pb2 as pb
from ...proto import python_pb2
from ..definitions import UNKNOWN_CARDINALITY, encode_metadata
from ..files import partitions
from ..files.formats import Facts, few, is_utf8, named, written
from ..files.known_formats import FORMATS, format_of, package_of
from ..files.manifest import Manifest
from ..files.reading import FileRecords
from ..files.stores import is_url, require_options
from ..files.streams import UNCOUNTED
from ..files.tokens import tokens_of
from ..python.element_structures import element_spec_of, inferred
from . import tables
from .file_inspector import inspected_together
from .file_paths import Paths, require_utf8, resolved
from .functions import (
    LOOKED_AT,
    ON_ERROR,
    PythonDataset,
    package_names,
    require_expressible,
    require_failure_rules,
    stored_of,
    structure_of,
)

log = logging.getLogger(__name__)

MOST_SPLITS = 1024
"""So many splits are a bundle each, if a read does not say `bundle_splits`."""

FEW_SPLITS, SPLIT_BYTES = 64, 8 << 20
"""A split has about so many bytes, unless there were too few or too many splits. Each costs a
worker some milliseconds."""


def definition(
    files: Paths,
    *,
    format: str | None = None,  # noqa: A002
    columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
    partitioning: Any = "hive",
    fill: dict[str, Any] | None = None,
    nulls: str = "raise",
    missing: str = "raise",
    map: Callable[[Any], Any] | None = None,  # noqa: A002
    map_batch: Callable[[Any], Any] | None = None,
    element_spec: Any = None,
    packages: Iterable[str] = (),
    one_to_one: bool | None = None,
    on_error: str = "raise",
    limit: int = 100,
    shuffle_records: bool = False,
    seed: int = 0,
    split_records: int | None = None,
    index_dir: str | os.PathLike[str] | None = None,
    storage_options: dict[str, Any] | None = None,
    tokens: dict[str, Any] | None = None,
    count: bool = True,
) -> pb.RegisterDatasetRequest:
    """What is registered of files of records. Arguments and errors are those of `register_files`
    (client/files.py)."""
    if split_records is not None and not (isinstance(split_records, int) and split_records > 0):
        raise InvalidArgument(f"split_records={split_records!r}: give an integer, at least 1")
    if not (isinstance(seed, int) and -(1 << 63) <= seed < 1 << 63):
        raise InvalidArgument(f"seed={seed!r}: give an integer of 64 bits")
    if map is not None and not callable(map):
        raise InvalidArgument(f"map={map!r:.100}: give a function of a record")
    require_failure_rules(on_error, limit)
    if not isinstance(one_to_one, bool | None):
        raise InvalidArgument(f"one_to_one={one_to_one!r} must be True, False or None")
    if batched := map_batch is not None:
        if map is not None or not callable(map_batch) or on_error != "raise" or one_to_one is False:
            raise InvalidArgument(
                f"map_batch={map_batch!r:.100}: give a function of many records, which makes one "
                "element of each, and neither `map` nor on_error: a batch fails as a whole"
            )
        map = map_batch  # noqa: A001
    if one_to_one is None:
        one_to_one = map is None or batched or (shuffle_records and on_error != "skip")
    elif map is None:
        raise InvalidArgument(f"one_to_one={one_to_one} is about `map`, which is not given")
    if element_spec is not None and map is None:
        raise InvalidArgument(
            f"element_spec={element_spec!r:.80} is about `map`, which is not given: without it, "
            "the files say their types"
        )
    storage = require_options(storage_options)
    if tokens is not None:
        tokens, format = tokens_of(tokens), format or "tokens"  # noqa: A001
    if table := tables.found(files, format, storage):
        listed, places, found_format = table.files, list[str](), table.format
        columns = table.chosen(columns)
    else:
        listed, places, found_format = resolved(files, format, storage)
    options = _options(found_format, columns, fill, index_dir, missing, nulls, tokens, count)
    if storage:
        options["storage"] = storage
    outside = partitions.Partitions()
    if table:
        options |= {"snapshot": table.snapshot}
        outside = table.outside
    elif "partitioning" in format_of(found_format).options:
        outside = partitions.found(listed[0].path, places, partitioning)
    elif not isinstance(partitioning, str | None):
        _require_option(found_format, "partitioning", partitioning)
    entries, found = inspected_together(
        listed, found_format, options | {"skips": on_error == "skip"}, outside
    )
    if shuffle_records and found.cuts and "count" in format_of(found_format).options:
        raise InvalidArgument(
            f"shuffle_records of {entries[0].path} and others: a file that is compressed, or not "
            "counted, is read from its begin. Shuffle splits, or write the files uncompressed"
        )
    if "dict" in found.structure and not isinstance(columns, Mapping):
        read = [name for name in named(found.structure) if name not in outside.nodes]
        options["whole" if "whole" in options else "columns"] = read
    of_files = Manifest(
        format=found_format,
        files=entries,
        cuts=_cuts(
            found,
            sum(entry.size for entry in entries),
            split_records if count else UNCOUNTED,
            whole=bool(found.cuts) and not shuffle_records,
        ),
        structure=written(found.structure),
        shuffled=shuffle_records,
        seed=seed,
        options=options,
    )
    if shuffle_records and found.cuts:
        times = min(len(of_files.cuts) - 1, int(np.diff(found.cuts).max()))
        log.warning(
            "an epoch of shuffled records decodes each row group up to %d times, and so each "
            "compressed shard of MDS: shuffle splits only, or write smaller ones", times,
        )  # fmt: skip
    stored = _stored(of_files, map, packages)
    stored.batched = batched
    stored.far = is_url(listed[0].path)
    stored.varies, stored.inferred = not one_to_one, map is not None and element_spec is None
    if on_error != "raise":
        stored.on_error, stored.limit = ON_ERROR[on_error], limit
    request = pb.RegisterDatasetRequest(python=stored.SerializeToString(deterministic=True))
    request.sources.add(count=len(of_files.cuts) - 1)
    if map is None:
        structure = of_files.structure
        require_expressible(structure)
    else:
        structure = structure_of(request, element_spec, map, lambda: _mapped_structure(stored))
    if one_to_one and on_error != "skip" and count:
        request.lengths.extend(np.diff(of_files.cuts).tolist())
    request.structure = structure
    request.metadata = encode_metadata(element_spec_of(structure), UNKNOWN_CARDINALITY)
    return request


def _require_option(of: str, name: str, value: Any) -> None:
    if name not in format_of(of).options:
        formats = [one for one, about in FORMATS.items() if name in about.options]
        raise InvalidArgument(f"{name}={value!r:.100} is for {formats}, and this is {of!r}")


def _options(
    of: str,
    columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None,
    fill: dict[str, Any] | None,
    index_dir: str | os.PathLike[str] | None,
    missing: str,
    nulls: str,
    tokens: dict[str, Any] | None,
    count: bool,
) -> dict[str, Any]:
    takes = format_of(of).options
    if isinstance(columns, Mapping):
        if "alternatives" not in takes:
            raise InvalidArgument(f"columns={columns!r:.100} must be a list, as this is {of!r}")
        given = [*columns.items()]
        columns = {name: _names([some] if isinstance(some, str) else some) for name, some in given}
        if not _names(columns) or not all(columns.values()):
            raise InvalidArgument(
                f"columns={dict(given)!r:.100} must have an extension or a list of them by name"
            )
        columns = dict(sorted(columns.items()))
    elif columns is not None:
        if not (names := _names(columns)):
            raise InvalidArgument(
                f"columns={columns!r:.100} must be a list of different names, one or more"
            )
        columns = sorted(names)
    if fill is not None and not (
        isinstance(fill, Mapping) and all(isinstance(name, str) for name in fill)
    ):
        raise InvalidArgument(f"fill={fill!r:.100} must be a dict of values by a column's name")
    if index_dir is not None:
        if not isinstance(index_dir, str | os.PathLike):
            raise InvalidArgument(f"index_dir={index_dir!r:.100}: give the path of a directory")
        index_dir = os.fspath(index_dir)
        if not is_url(index_dir):
            index_dir = os.path.abspath(index_dir)
            require_utf8(index_dir)
    options: dict[str, Any] = {}
    for name, value in (
        ("columns", columns),
        ("fill", fill and dict(sorted(fill.items()))),
        ("index_dir", index_dir),
        ("nulls", None if nulls == "raise" else nulls),
        ("missing", None if missing == "raise" else missing),
        ("tokens", tokens),
        ("count", None if count else False),
    ):
        if value is not None:
            options[name] = value
            _require_option(of, name, value)
    if of == "lines":  # blank lines are records, and no records of JSON lines
        options["index"] = ".lines"
    if package := package_of(of):
        options["package"] = package
    if missing not in ("raise", "skip"):
        raise InvalidArgument(f"missing={missing!r} must be 'raise' or 'skip'")
    if nulls not in ("raise", "drop", "mask"):
        raise InvalidArgument(f"nulls={nulls!r} must be 'raise', 'drop' or 'mask'")
    if options.pop("missing", None):
        # by another name, so that no worker of before reads all samples
        options["whole"] = options.pop("columns", [])
    texts = [*(columns or ()), *(fill or ()), *(fill or {}).values()]
    if isinstance(columns, Mapping):
        texts += itertools.chain(*columns.values())
    if odd := [text for text in texts if isinstance(text, str) and not is_utf8(text)]:
        raise InvalidArgument(f"{few(odd)} of `columns` or `fill` is no UTF-8: give others")
    for name, value in options.get("fill", {}).items():
        plain = options["fill"][name] = value.item() if isinstance(value, np.generic) else value
        if not isinstance(plain, int | float | str | bytes):  # a bool is an int
            raise InvalidArgument(
                f"fill={{{name!r}: {value!r:.50}}} is a {type(value).__name__}: give an int, "
                "float, bool, str or bytes. Of times and dates it is an int in the column's unit"
            )
    return options


def _names(given: Any) -> list[str]:
    """The list of different names that is given; empty if it is none."""
    names = [] if isinstance(given, str) or not isinstance(given, Iterable) else [*given]
    is_one = all(isinstance(one, str) for one in names) and len({*names}) == len(names)
    return names if is_one else []


def _cuts(found: Facts, size_bytes: int, split_records: int | None, *, whole: bool) -> list[int]:
    """The first record of each split, and their number; `whole`: of splits that begin where the
    format would have it."""
    total = found.records
    wanted = math.ceil(SPLIT_BYTES * total / max(1, size_bytes))
    size = split_records or max(-(-total // MOST_SPLITS), min(-(-total // FEW_SPLITS), wanted))
    if not whole:
        return [*range(0, total, size), total]
    cuts = [0]
    for cut in found.cuts:
        if cut - cuts[-1] >= size or (cut == total and cut > cuts[-1]):
            cuts.append(cut)
    return cuts


def _stored(
    of_files: Manifest, function: Callable[[Any], Any] | None, packages: Iterable[str]
) -> python_pb2.PythonDataset:
    stored, needed = python_pb2.PythonDataset(), package_names(packages)
    if function is not None:
        stored = stored_of(PythonDataset(function, None, packages=needed))
    elif needed:
        raise InvalidArgument(f"packages={[*needed]} are for `map`, which is not given")
    stored.files = of_files.encode()
    return stored


def _rows(made: Any, count: int) -> Iterator[Any]:
    """The elements of a batch. Raises InvalidArgument."""
    if isinstance(made, Mapping) and made:
        members = [_rows(one, count) for one in made.values()]
        return (dict(zip(made, row, strict=True)) for row in zip(*members, strict=True))
    if isinstance(made, tuple) and made:
        return zip(*[_rows(one, count) for one in made], strict=True)
    rows = getattr(made, "shape", None) or ((len(made),) if isinstance(made, list) else ())
    if not isinstance(made, np.ndarray | list) or rows[0:1] != (count,):
        raise InvalidArgument(
            f"`map_batch` returned {made!r:.80} for {count} records: return an array or a list "
            "with a row for each, or a dict or a tuple of these"
        )
    return iter(made)


def _mapped_structure(stored: python_pb2.PythonDataset) -> str:
    """Of the elements that the function makes of the first records, which it is called with."""
    left: list[str] = []

    def leave_out(_split: int, _first: int, records: int, why: str) -> bool:
        left.extend([why] * records)
        return len(left) <= stored.limit

    records = FileRecords(stored, leave_out)
    records.set_up_function()

    found: list[Any] = []
    try:
        for split in records.splits[:LOOKED_AT]:
            if stored.batched:
                count, made = next(records.batches(split, 0))
                found += itertools.islice(_rows(made, count), LOOKED_AT)
                return inferred(found)
            try:
                found.extend(itertools.islice(records(split), LOOKED_AT))
            except Exception as error:
                error.add_note(f"`map` was called with {records.place(split, len(found))}")
                raise
            if found:
                return inferred(found)
        raise InvalidArgument(
            "`map` makes no element of the records that were tried, so it is not known what "
            f"elements are: give element_spec{f' ({left[-1]})' if left else ''}"
        )
    finally:
        records.teardown()
        records.close()

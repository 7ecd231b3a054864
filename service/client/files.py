"""Registers files of records that can be read at any place, without TensorFlow."""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InvalidArgument
from ..pipelines.definitions import UNKNOWN_CARDINALITY
from ..pipelines.files import partitions
from ..pipelines.files.formats import Facts, few, is_utf8, written
from ..pipelines.files.manifest import Manifest
from ..pipelines.files.reading import FileRecords
from ..pipelines.python.given_specs import structure_of_spec
from ..pipelines.python.inferred import element_spec_of, inferred
from ..proto import forebay_pb2 as pb
from ..proto import python_pb2
from . import functions
from .file_paths import Paths, require_utf8, resolved
from .functions import LOOKED_AT, PythonDataset
from .inspected_files import inspected
from .other_splits import widened
from .registration import Service, check_compression, registered, require_expressible, send_function

log = logging.getLogger(__name__)

MOST_SPLITS = 1024
"""So many splits are a bundle each, if a read does not say `bundle_splits`."""

FEW_SPLITS, SPLIT_BYTES = 64, 8 << 20
"""A split has about so many bytes, unless there were too few or too many splits. Each costs a
worker some milliseconds."""


def register_files(
    service: Service,
    files: Paths,
    *,
    format: str | None = None,  # noqa: A002
    columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
    partitioning: Any = "hive",
    fill: dict[str, Any] | None = None,
    missing: str = "raise",
    map: Callable[[Any], Any] | None = None,  # noqa: A002
    element_spec: Any = None,
    packages: Iterable[str] = (),
    one_to_one: bool | None = None,
    on_error: str = "raise",
    limit: int = 100,
    shuffle_records: bool = False,
    seed: int = 0,
    split_records: int | None = None,
    index_dir: str | os.PathLike[str] | None = None,
    compression: str | None = "AUTO",
    dataset_id: str | None = None,
) -> str:
    """Register files of records, and return the dataset's id.

    Workers read them in place, under the same paths. They need the format's library, and neither
    TensorFlow nor `--allow-python`, unless a function is mapped.

    Args:
      service: as in `register_dataset`.
      files: a pattern, a file, a directory, or a list of them. Files of a pattern and of a
        directory, with those below it, are sorted; a list keeps its order. A directory with an
        index.json is MosaicML's MDS. What matches later is not read: register again.
      format: "arrayrecord", "parquet", "tfrecord", "webdataset" or "mds"; by default the files say.
        A record of ArrayRecord and TFRecord is bytes, and a dict of others.
      columns: which ones to read, of Parquet, WebDataset (extensions, and "__key__") and MDS. By
        default all. Of WebDataset, it may be a dict of the extensions that a column may have, of
        which the first one that a sample has is read: {"image": ["jpg", "png"], "label": "cls"}.
      partitioning: which columns the names of directories have, of Parquet, as in pyarrow.parquet's
        read_table: "hive" for year=2020/…; None for no columns; a list of their names; or one of
        pyarrow.dataset. Of a directory, the names below it count, of a pattern, those from its
        first `*`, of files in a list their whole paths, and of a single file none.
      fill: of WebDataset, bytes or text by column, of samples that have none. Of Parquet, a value
        by column, in the place of nulls, which are refused otherwise: an
        int, float, bool, str or bytes. Of a column of lists, it stands for nulls within the lists,
        and a list that is null is empty, or of a fixed size full of it.
      missing: of WebDataset, what becomes of samples that lack a column without a `fill`. "raise":
        they are an error here. "skip": they are no records, and a warning says how many.
      map: called with each record, on the workers; returns an element, as of `python_dataset`. It
        is code, so workers need --allow-python. It may have `setup` and `teardown`. It may return
        None for no element, or a list or an iterator of several (`one_to_one`).
      element_spec: of what `map` makes, as of `python_dataset`. Without `map`, the files say it.
      packages: as of `python_dataset`, for `map`.
      one_to_one: whether `map` makes exactly one element of each record. If so, a read begins at
        any position without running it for what is before, and another result is an error. By
        default only with `shuffle_records`: where it is False, an ordered read of shuffled records
        is refused.
      on_error: what happens if a record cannot be read, if `map` raises, or if what it returns does
        not fit. "raise": the read ends with an error. "skip": the record alone is left out: in an
        ordered read its place stays empty, in each epoch. `forebay status` and `forebay audit`
        name file and record. Files that are gone or were changed, and errors of the machine, are
        errors in any case. If `map` ends its process, the rest of the split is skipped, or the
        ordered read ends. "retry": the split runs again; see `python_dataset`.
      limit: how many records all workers may skip in an epoch, or in an ordered job altogether; or
        how often a worker retries a split. Of a Parquet file, a row group counts with all records.
      shuffle_records: each epoch is another permutation of all records, by the read's seed. Without
        it, records are in the files' order within a split, and an ordered read permutes splits. Of
        Parquet, a split reads all row groups that it has a record of.
      seed: of the shuffle, for reads that have no seed: those that are neither ordered nor at least
        once.
      split_records: about how many records a split has. By default there are up to 1024 splits. An
        ordered read of more needs `bundle_splits=1`.
      index_dir: where indices of TFRecord and WebDataset files are, if not beside them: a directory
        that workers see under the same path.
      compression, dataset_id: as in `register_dataset`.

    The dispatcher is told how many records each split has, unless `one_to_one` is False or
    `on_error` is "skip". So an ordered read begins at any position without counting.

    Raises ValueError for what cannot be read, NotFound if no file matches, FailedPrecondition
    without the format's library, Corrupt for a damaged file, and Unavailable.
    """
    check_compression(compression)
    if split_records is not None and not (isinstance(split_records, int) and split_records > 0):
        raise InvalidArgument(f"split_records={split_records!r}: give an integer, at least 1")
    if not (isinstance(seed, int) and -(1 << 63) <= seed < 1 << 63):
        raise InvalidArgument(f"seed={seed!r}: give an integer of 64 bits")
    if map is not None and not callable(map):
        raise InvalidArgument(f"map={map!r:.100}: give a function of a record")
    functions.require_failure_rules(on_error, limit)
    if not isinstance(one_to_one, bool | None):
        raise InvalidArgument(f"one_to_one={one_to_one!r} must be True, False or None")
    if one_to_one is None:
        one_to_one = map is None or (shuffle_records and on_error != "skip")
    elif map is None:
        raise InvalidArgument(f"one_to_one={one_to_one} is about `map`, which is not given")
    if element_spec is not None and map is None:
        raise InvalidArgument(
            f"element_spec={element_spec!r:.80} is about `map`, which is not given: without it, "
            "the files say their types"
        )
    paths, places, found_format = resolved(files, format)
    options = _options(found_format, columns, fill, index_dir, missing)
    outside = partitions.Partitions()
    if found_format == "parquet":
        outside = partitions.found(paths, places, partitioning)
    elif not isinstance(partitioning, str | None):
        raise InvalidArgument(
            f"partitioning={partitioning!r:.100} is for ['parquet'], and this is {found_format!r}"
        )
    entries, found = inspected(paths, found_format, options, outside)
    if "dict" in found.structure and not isinstance(columns, Mapping):
        names = [name for name, _ in found.structure["dict"]]
        names = [name for name in names if name not in outside.nodes]
        options["whole" if "whole" in options else "columns"] = names
    of_files = Manifest(
        format=found_format,
        files=entries,
        cuts=_cuts(
            found,
            sum(entry.size for entry in entries),
            split_records,
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
            "an epoch of shuffled records decodes each row group up to %d times: shuffle splits "
            "only, or write smaller row groups", times,
        )  # fmt: skip
    stored = _stored(of_files, map, packages)
    stored.varies, stored.inferred = not one_to_one, map is not None and element_spec is None
    if on_error != "raise":
        stored.on_error, stored.limit = functions.ON_ERROR[on_error], limit
    request = pb.RegisterDatasetRequest(python=stored.SerializeToString(deterministic=True))
    request.sources.add(count=len(of_files.cuts) - 1)
    if map is None:
        structure = of_files.structure
    elif element_spec is None:
        structure = _mapped_structure(stored)
        require_expressible(structure)
        structure = widened(request, structure, map)
    else:
        structure = structure_of_spec(element_spec)
    require_expressible(structure)
    if one_to_one and on_error != "skip":
        request.lengths.extend(np.diff(of_files.cuts).tolist())
    return send_function(
        service, request, structure, element_spec_of(structure),
        compression=compression, dataset_id=dataset_id, cardinality=UNKNOWN_CARDINALITY,
        send=registered,
    )  # fmt: skip


def _options(
    of: str,
    columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None,
    fill: dict[str, Any] | None,
    index_dir: str | os.PathLike[str] | None,
    missing: str,
) -> dict[str, Any]:
    """Raises InvalidArgument for an option that the format does not have."""
    if isinstance(columns, Mapping):
        if of != "webdataset":
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
        index_dir = os.path.abspath(index_dir)
        require_utf8(index_dir)
    options: dict[str, Any] = {}
    for name, value, formats in (
        ("columns", columns, ("parquet", "webdataset", "mds")),
        ("fill", fill and dict(sorted(fill.items())), ("parquet", "webdataset")),
        ("index_dir", index_dir, ("tfrecord", "webdataset")),
    ):
        if value is not None:
            options[name] = value
            if of not in formats:
                raise InvalidArgument(f"{name}={value!r} is for {[*formats]}, and this is {of!r}")
    if missing not in ("raise", "skip") or (missing == "skip" and of != "webdataset"):
        raise InvalidArgument(
            f"missing={missing!r} must be 'raise', or of webdataset 'skip', and this is {of!r}"
        )
    if missing == "skip":  # by another name, so that no worker of before reads all samples
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
    """Raises InvalidArgument."""
    stored, needed = python_pb2.PythonDataset(), functions.package_names(packages)
    if function is not None:
        made = functions.request_of(PythonDataset(function, None, packages=needed), None)
        stored.ParseFromString(made.python)
    elif needed:
        raise InvalidArgument(f"packages={[*needed]} are for `map`, which is not given")
    stored.files = of_files.encode()
    return stored


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
